"""Row 37: rules of `fp32_modules` whose modules never run."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from support import FEATURES, Toy, batches, quiet_trainer
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.precision import fp32_region


class Coder(nn.Module):
    """Is used through `encode`, as autoencoders are; its `forward` never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 16)
        self.dtypes: list[torch.dtype] = []

    def encode(self, x: Tensor) -> Tensor:
        out = self.encoder(x)
        self.dtypes.append(out.dtype)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


class UsesParts(Toy):
    """Has a tied weight, and a module that is used through another method."""

    def __init__(self) -> None:
        super().__init__()
        self.vae, self.head, self.late = Coder(), nn.Linear(16, 1), nn.Linear(FEATURES, FEATURES)
        self.late_from, self.late_in = 10**9, "training"

    def encode(self, batch: Tensor) -> Tensor:
        return self.vae.encode(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step >= self.late_from and self.late_in == "training":
            batch = self.late(batch)
        out = nn.functional.linear(self.encode(batch), self.head.weight, self.head.bias)
        return self.loss(batch) + out.float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.late_in == "validation":
            self.late(batch)


class Attention(Toy):
    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)))
        self.attention = nn.MultiheadAttention(FEATURES, 2)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(self.attention(batch, batch, batch)[0].float())


def idle(
    module: Any, rules: list[Any], steps: int = 4, precision: str = "bf16", **kwargs: Any
) -> tuple[list[str], L.Trainer]:
    """Return the warnings of a run, and its Trainer."""
    trainer = quiet_trainer(plugins=[AmpPrecision(precision, fp32_modules=rules)], **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, batches(steps), batches(1))
    return [str(w.message) for w in caught if "fp32_modules" in str(w.message)], trainer


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_module_that_never_runs_is_named(precision: str) -> None:
    said, _ = idle(UsesParts(), ["vae", "head", "net"], precision=precision)
    (text,) = said
    assert "`vae`, `head`:" in text
    assert "`net`" not in text


def test_what_it_says_helps() -> None:
    class Calls(UsesParts):
        def encode(self, batch: Tensor) -> Tensor:
            return self.vae(batch)

    class Region(UsesParts):
        def encode(self, batch: Tensor) -> Tensor:
            with fp32_region():
                return self.vae.encode(batch)

    for kind, rules in ((Calls, ["vae"]), (UsesParts, ["vae.*"]), (Region, [])):
        said, trainer = idle(kind(), rules)
        assert said == []
        assert set(trainer.lightning_module.vae.dtypes) == {torch.float32}
    assert set(idle(UsesParts(), ["vae"])[1].lightning_module.vae.dtypes) == {torch.bfloat16}


@pytest.mark.parametrize(("late_in", "late_from"), [("validation", 0), ("training", 3), ("training", 9)])
@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_no_false_alarm(late_in: str, late_from: int, num_sanity_val_steps: int) -> None:
    """A module that runs in some batches only, or only in validation, which may come late."""
    module = UsesParts()
    module.late_in, module.late_from = late_in, late_from
    assert idle(module, ["late"], 10, num_sanity_val_steps=num_sanity_val_steps)[0] == []


@pytest.mark.parametrize("rules", [["*"], ["vae*", "net"], ["attention*"]])
def test_what_runs_inside_is_fine(rules: list[str]) -> None:
    """A parent in fp32 covers what it uses; a child that runs stands for its parent."""

    class Both(UsesParts):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(FEATURES, 2)
            del self.head, self.late

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.encode(batch)
            return self.loss(self.attention(batch, batch, batch)[0].float())

    assert idle(Both(), rules)[0] == []


def test_a_rule_that_works_elsewhere_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """`nn.MultiheadAttention` uses the weight of its `out_proj`."""
    with caplog.at_level("INFO"):
        said, _ = idle(Attention(), [nn.Linear])
    assert said == []
    (line,) = [r.getMessage() for r in caplog.records if "forward" in r.getMessage()]
    assert "`attention.out_proj`" in line
    assert "net" not in line


@pytest.mark.parametrize("rules", [["vae"], ["vae.*"], ["net"]])
def test_nothing_is_said_where_nothing_is_known(rules: list[str]) -> None:
    module = UsesParts()
    trainer = quiet_trainer(plugins=[AmpPrecision("bf16", fp32_modules=rules)])
    trainer.validate(module, batches(1), verbose=False)  # warnings are errors
    assert idle(UsesParts(), rules, precision="fp32")[0] == []
    with pytest.raises(KeyError), warnings.catch_warnings():
        trainer = quiet_trainer(plugins=[AmpPrecision("bf16", fp32_modules=rules)], callbacks=[Crash()])
        trainer.fit(UsesParts(), batches(3), batches(1))


class Crash(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise KeyError


def test_copies_that_run_count() -> None:
    """The learner is copied in each step, as in meta-learning."""

    class Meta(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            learner = copy.deepcopy(self.net)
            out = learner(batch).float().square().mean()
            return out.detach() + nn.functional.linear(batch, self.net[0].weight).float().mean()

    assert idle(Meta(), ["net.0"])[0] == []


@pytest.mark.parametrize("what", ["module", "function"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_nothing_is_said_of_compiled_code(what: str) -> None:
    """Equal blocks share a graph, so it is not known which of them ran."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs, self.never, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(2, 2), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.runs(x))

    torch._dynamo.reset()
    module, net = Toy(), Net()
    module.net = torch.compile(net, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    if what == "function":
        module.net = net
        net.forward = torch.compile(net.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    texts = idle(module, ["net.runs", "net.never"])[0]
    assert texts == []
