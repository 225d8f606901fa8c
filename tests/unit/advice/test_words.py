"""How a report is written."""

from __future__ import annotations

from support.doctor_facts import machine, speed, step, timed

from lightning_amp.advice import Convolution, DoctorReport, details, summary, title


def test_the_title_and_the_summary() -> None:
    assert title(machine(), None) == "a CPU, 2 threads"
    assert title(machine(), step()) == "AmpPrecision('bf16') on a CPU, 2 threads"
    assert summary(step()) == (
        "A step in bf16 takes 100 ms without its data, and 250 ms in fp32 (2.50x as fast (2.50 to 2.50)); its"
        " peak of memory is 140 MiB, and 220 MiB in fp32."
    )


def test_modules_beyond_the_first_ones_are_one_row() -> None:
    flops = {f"block.{i}": {"bfloat16": 10**9} for i in range(9)} | {"": {"float32": 10**9}}
    text = "\n".join(map(str, details(machine(), step(module_flops=flops))))
    assert "| `block.5` | 1 | bfloat16 |" in text
    assert "| 4 more | 4 | bfloat16, float32 |" in text
    outside = details(machine(), step(module_flops={"": {"float32": 10**9}}))
    assert "| outside of modules |" in "\n".join(map(str, outside))


def test_what_the_machine_could_not_measure_is_said() -> None:
    text = DoctorReport(machine(notes=("bf16 products of 512 were not measured: no kernel",))).to_markdown()
    assert "- bf16 products of 512 were not measured: no kernel" in text


def test_parts_that_do_not_add_up_to_the_step_of_the_race_are_explained() -> None:
    assert "Without data" not in "\n".join(map(str, details(machine(), step())))
    busy = step(parts={"data": 0.5, "forward": 0.4, "backward": 0.9}, num_timed=6)
    text = "\n".join(map(str, details(machine(), busy)))
    assert "Without data, the parts add up to 1.3 s, the mean of 6 steps." in text
    assert "their median is 100 ms" in text
    assert "takes 100 ms without its data" in summary(busy)


def test_a_ratio_below_one_is_written_as_slow() -> None:
    slow = step(variants=(timed("as it is", 0.4), timed("fp32", 0.1)))
    text = "\n".join([summary(slow), *map(str, details(machine(), slow))])
    assert "100 ms in fp32 (4.00x as slow (4.00 to 4.00))" in text
    assert "| in fp32 | 100 ms | 4.00x as fast (4.00 to 4.00) |" in text


def test_convolutions_have_a_table() -> None:
    probed = (Convolution("fp16", "forward", 1, speed(1.0)), Convolution("fp16", "backward", 1, speed(0.01)))
    text = "\n".join(map(str, details(machine(convolutions=probed), None)))
    assert "| 3x3 convolution | forward | backward |" in text
    assert "| fp16, stride 1 | as fast as in fp32, within 5 % | 100x as slow" in text
