"""Products whose sizes are not multiples of 8: which are timed with padding, and the advice."""

from __future__ import annotations

from dataclasses import replace

from support.doctor_facts import only, product, recorded, said, speed, step

from lightning_amp.advice._record import Recording, Unaligned
from lightning_amp.advice.findings import unaligned
from lightning_amp.measure import BACKWARD

SIZES = (64, 33, 100)


def test_padding_is_timed_for_sizes_that_are_not_aligned() -> None:
    asked: list[tuple[object, ...]] = []

    def timed(*arguments: object) -> tuple[list[float], list[float]]:
        asked.append(arguments)
        return [0.02, 0.02], [0.01, 0.01]

    found = unaligned(
        Recording(
            (
                product("a", sizes=(64, 64, 64), flops=10),
                product("b", sizes=SIZES, flops=10),
                product("b", sizes=SIZES, part=BACKWARD, flops=10),
                product("c", sizes=(64, 64, 10), flops=10),  # a head of ten classes is not worth it
                product("d", sizes=(64, 33, 64), dtype="float32"),
                product("e", sizes=(64, 33, 100), dtype="float8_e4m3fn", flops=1),
            )
        ),
        8,
        timed,
        budget_s=0.02,
    )
    padded = (64, 40, 104)
    assert asked[0] == ("bf16", SIZES, padded, 0.005)
    assert [(one.sizes, one.padded, one.module, one.flops) for one in found] == [
        (SIZES, padded, "b", 20),
        (SIZES, padded, "e", 1),
    ]
    assert (found[0].seconds, found[0].padded_seconds) == (0.04, 0.02)
    assert found[0].padded_speed is not None
    assert found[0].padded_speed.claim == "faster"
    (not_timed,) = unaligned(recorded(product(sizes=SIZES)), 8, timed, budget_s=0.0)
    assert not_timed.padded_speed is None


def head(padded_seconds: float, flops: int = 10**9) -> tuple[Unaligned, ...]:
    return (
        Unaligned((64, 33, 4001), (64, 40, 4008), "head", flops, 0.03, padded_seconds, speed(0.03 / padded_seconds)),
    )


def test_sizes_that_are_not_multiples() -> None:
    found = only(step(unaligned=head(0.01)))
    assert (found.severity, found.code) == ("warning", "sizes-not-aligned")
    assert "`head` (64 x 33 x 4001); padded, they save 20 % of a step" in found.message
    assert "(33 to 40, 4001 to 4008)" in found.action
    nothing = only(step(unaligned=head(0.03)))
    assert (nothing.severity, nothing.action) == ("note", "Leave them as they are: padding gains nothing here.")
    assert "padded to 64 x 40 x 4008, measured here: as fast within 5 %" in nothing.message
    assert only(step(unaligned=head(0.05))).severity == "note"
    unsure = only(step(unaligned=tuple(replace(one, padded_speed=speed(2.0, noise=0.8)) for one in head(0.01))))
    assert unsure.severity == "note"
    assert "undecided" in unsure.message
    much = step(unaligned=head(0.001), product_s=0.01)
    assert "they save 10 % of a step" in only(much).message  # no more than its products take
    assert not said(step(unaligned=head(0.01, 10**7)))
