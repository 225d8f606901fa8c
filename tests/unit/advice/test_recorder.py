"""The record of each operation of a step: its caller, its FLOPs and casts; and the parts of a peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.advice._recorder import Recorder
from lightning_amp.advice._step import BACKWARD, FORWARD, OPTIMIZER, Loss, Memory, Operation, Recording
from lightning_amp.casting import Fp32Modules

CPU = torch.device("cpu")


class Step:
    """A training step that tells the recorder which part is running."""

    def __init__(self, net: nn.Module, fp32: tuple[nn.Module, ...] = ()) -> None:
        self.part = FORWARD
        self.net = net
        kept = [m for f in fp32 for m in f.modules()]
        self.recorder = Recorder(net, CPU, kept, lambda: self.part, "nobody.py")

    def run(self, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None) -> Recording:
        with self.recorder:
            with torch.autocast("cpu", torch.bfloat16):
                value = loss()
            self.part = BACKWARD
            value.backward()
            self.part = OPTIMIZER
            if optimizer is not None:
                optimizer.step()
        return self.recorder.close()


def named(recorded: Recording, name: str, part: str = FORWARD) -> list[Operation]:
    return [o for o in recorded.operations if o.name == name and o.part == part]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_products_have_flops_sizes_dtype_and_module() -> None:
    model = net()
    recorded = Step(model).run(lambda: model(torch.ones(3, 8)).sum())
    first, second = named(recorded, "addmm")
    assert (first.module, first.sizes, first.dtype, first.flops) == ("0", (3, 8, 16), "bfloat16", 2 * 3 * 8 * 16)
    assert (second.module, second.sizes) == ("2", (3, 16, 4))
    assert first.autocast
    assert first.asked.endswith("linear")
    assert len(named(recorded, "mm", BACKWARD)) == 3  # the first layer has no gradient of its input
    assert all(operation.seconds > 0 for operation in recorded.operations)


def test_where_autocast_is_off_is_seen_with_its_line() -> None:
    model = net()

    def loss() -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return model[0](torch.ones(3, 8)).sum()

    (product,) = named(Step(model).run(loss), "addmm")
    assert (product.dtype, product.autocast) == ("float32", False)
    assert "model[0](torch.ones(3, 8)).sum()" in str(product.place)


def test_modules_in_fp32_are_told_apart() -> None:
    model = net()
    recorded = Step(model, (model[2],)).run(lambda: model(torch.ones(3, 8)).sum())
    assert [o.in_fp32_module for o in named(recorded, "addmm")] == [False, True]


def test_casts_have_the_function_that_asked_for_them() -> None:
    model = net()

    def loss() -> Tensor:
        h = model[0](torch.ones(3, 8))
        return model[2](h.float()).sum()

    casts = [o for o in Step(model).run(loss).operations if o.cast_bytes and o.part == FORWARD]
    weights = [o for o in casts if o.cast_of]
    assert {o.cast_bytes for o in weights} == {2 * n for n in (8 * 16, 16, 16 * 4, 4)}
    (explicit,) = [o for o in casts if o.asked == "torch.Tensor.float"]
    assert explicit.cast_bytes == 3 * 16 * 4
    assert "h.float()" in str(explicit.place)


def test_casts_of_this_package_are_not_the_users() -> None:
    """We cast the inputs of a module that is kept in fp32, and the user's line that calls it asked for no cast."""
    model = net()
    Fp32Modules(model, ["2"], "cpu", active=True)

    def loss() -> Tensor:
        return model(torch.ones(3, 8)).double().sum()

    recorded = Step(model).run(loss)
    casts = [o for o in recorded.operations if o.cast_bytes and o.part == FORWARD and not o.cast_of]
    (into,) = [o for o in casts if o.cast_bytes == 3 * 16 * 4]
    assert into.asked in ("torch.Tensor.float", "torch.Tensor.to")
    assert into.place is None
    (explicit,) = [o for o in casts if o.asked == "torch.Tensor.double"]
    assert ".double().sum()" in str(explicit.place)


def test_waits_of_optimizers_do_not_count() -> None:
    model = net()

    def loss() -> Tensor:
        out = model(torch.ones(3, 8))
        if out.sum().item() > 1e9 or bool(out.isnan().any()):
            raise ValueError
        return out[out > -1e9].sum() + out.sum().cpu()

    recorded = Step(model).run(loss, torch.optim.Adam(model.parameters()))
    found = {wait.operation: wait.count for wait in recorded.waits}
    assert found == {".item()": 1, ".bool()": 1, "a mask as an index": 1, ".cpu()": 1}


def test_losses_over_classes() -> None:
    model = net()
    recorded = Step(model).run(lambda: F.cross_entropy(model(torch.ones(3, 8)), torch.tensor([0, 1, 2])))
    (loss,) = recorded.losses
    assert (loss.rows, loss.classes) == (3, 4)


def test_the_layout_of_convolutions() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Sequential(nn.Conv2d(4, 8, 3)).to(memory_format=layout)  # type: ignore[call-overload]
        recorded = Step(model).run(lambda model=model: model(torch.ones(2, 4, 6, 6)).sum())  # type: ignore[misc]
        (convolution,) = [o for o in recorded.operations if o.is_convolution]
        assert convolution.channels_last == (layout == torch.channels_last)


def test_recording_does_not_change_the_results() -> None:
    def weights(record: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(net(), nn.Dropout(0.5))
        optimizer = torch.optim.Adam(model.parameters())
        step = Step(model)
        if record:
            step.run(lambda: model(torch.ones(3, 8)).sum(), optimizer)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(3, 8)).sum()
            loss.backward()
            optimizer.step()
        return model.state_dict()

    torch.testing.assert_close(weights(True), weights(False), rtol=0, atol=0)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_peak_has_parts() -> None:
    casts = tuple(
        Operation("_to_copy", FORWARD, cast_bytes=size, cast_of=pointer)
        for pointer, size in ((1, 20), (2, 10), (1, 20))
    )
    recorded = Recording(casts, losses=(Loss(2, 5), Loss(2, 1)))
    found = Memory.of(1000, recorded, weights=100, gradients=100, states=200)
    assert (found.casts, found.logits, found.activations, found.peak) == (30, 120, 450, 1000)
    in_fp32 = Memory.of(1000, Recording((), losses=(Loss(2, 5),)), weights=100, gradients=100, states=200)
    assert (in_fp32.casts, in_fp32.logits, in_fp32.activations) == (0, 80, 520)
    unknown = Memory.of(0, recorded, weights=100, gradients=100, states=200)
    assert (unknown.logits, unknown.activations, unknown.peak) == (0, 0, 430)
