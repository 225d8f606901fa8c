"""`find_fp32_modules` on modules with known culprits, checked by separate fits."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightning import LightningModule
from support.approved import assert_refused
from support.trainers import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from zoo import fp32_cases as cases

from lightning_amp import AmpPrecision, find_fp32_modules

CPU = {"accelerator": "cpu"}
Make = Callable[[], LightningModule]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:lightning_amp. `fp32_modules` has no effect"),  # in fits without validation
    pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary"),
]


def seeded(kind: type[LightningModule]) -> Make:
    def make() -> LightningModule:
        torch.manual_seed(0)
        return kind()

    return make


# -- a comparison of its own -------------------------------------------------------------------------------------------


def fit(module: LightningModule, plugin: AmpPrecision, batches: Sequence[Tensor]) -> None:
    torch.manual_seed(1)
    data: Any = DataLoader(list(batches), batch_size=None)
    trainer = quiet_trainer(plugins=[plugin], max_steps=len(batches), limit_val_batches=0, accelerator="cpu")
    trainer.fit(module, data)


def change(module: LightningModule, make_plugin: Callable[[float], AmpPrecision], batch: Tensor) -> Tensor:
    """Return the gradient, as the change of all weights in a step of SGD with rate 1 at the first scale that fits."""
    for scale in (2.0**14, 2.0**8, 2.0**2, 2.0**-4):
        trained, plugin = copy.deepcopy(module), make_plugin(scale)
        trained.configure_optimizers = lambda t=trained: torch.optim.SGD(t.parameters(), lr=1.0)  # type: ignore[method-assign]
        fit(trained, plugin, [batch])
        if plugin.num_skipped == 0:
            break
    else:
        return torch.full((1,), math.inf)
    pairs = zip(trained.parameters(), module.parameters(), strict=True)
    return torch.cat([(after - before).detach().double().flatten() for after, before in pairs])


def plugin(precision: str, rules: Sequence[Any], scale: float) -> AmpPrecision:
    return AmpPrecision(precision, fp32_modules=rules, scaler=scale if precision == "fp16" else None)


def relative(value: Tensor, reference: Tensor) -> float:
    error = float((value - reference).norm() / reference.norm())
    return math.inf if math.isnan(error) else error


class Comparison:
    """Compares gradients at the start and after ten steps, and metrics of three later batches, with fp32."""

    def __init__(self, make: Make) -> None:
        batches = list(cases.Rows().train_dataloader())
        first, later = make(), make()
        fit(later, AmpPrecision("fp32"), batches[:10])
        self.points = [(first, batches[0]), (later, batches[10])]
        self.rows = batches[:3]
        fp32 = partial(plugin, "fp32", ())
        self.true = [change(module, fp32, batch) for module, batch in self.points]
        self.true_metrics = self.metrics(fp32(1.0))

    def metrics(self, plugin: AmpPrecision) -> dict[str, float]:
        trainer = quiet_trainer(plugins=[plugin], accelerator="cpu")
        data: Any = DataLoader(self.rows, batch_size=None)  # type: ignore[arg-type]
        (found,) = trainer.validate(copy.deepcopy(self.points[1][0]), data, verbose=False)
        return dict(found)

    def error(self, precision: str, rules: Sequence[Any]) -> float:
        """Return the largest error."""
        make_plugin = partial(plugin, precision, rules)
        found = [change(module, make_plugin, batch) for module, batch in self.points]
        errors = [
            relative(value, true) if len(value) > 1 else math.inf for value, true in zip(found, self.true, strict=True)
        ]
        metrics = self.metrics(make_plugin(1.0))
        errors += [abs(metrics[name] - true) / abs(true) for name, true in self.true_metrics.items()]
        return max(math.inf if math.isnan(error) else error for error in errors)


@pytest.mark.parametrize(
    ("kind", "precision", "tolerance", "rules"),
    [
        (cases.InARow, "fp16", 0.02, {"body.0", "body.2", "body.4"}),
        (cases.Attention, "fp16", 0.02, {"body.2"}),  # its own code
        (cases.Two, "fp16", 0.02, {"one", "two"}),
        (cases.LargeActivations, "fp16", 0.02, None),
        (cases.OnlyValidation, "fp16", 0.02, {"check"}),
        (cases.Normalised, "bf16", 0.1, None),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.few(3)
def test_the_rules_are_enough_and_none_can_be_left_out(
    kind: type[LightningModule], precision: str, tolerance: float, rules: set[str] | None
) -> None:
    found = find_fp32_modules(seeded(kind), cases.Rows, precision, tolerance=tolerance, trainer_kwargs=CPU)
    assert found
    assert rules is None or set(found) == rules
    comparison = Comparison(seeded(kind))
    assert comparison.error(precision, found) <= tolerance * 1.01
    for left_out in found:
        assert comparison.error(precision, [rule for rule in found if rule != left_out]) > tolerance * 0.99
    assert found.gradient_errors[1] <= tolerance
    assert max(found.gradient_errors[0], *(without for without, _ in found.metric_errors.values())) > tolerance
    assert 0.2 < found.cost < 5
    assert f"{found[0]!r}" in found.message


@pytest.mark.parametrize(
    ("kind", "precision", "tolerance"),
    [
        (cases.Mlp, "fp16", 0.01),
        (cases.Mlp, "bf16", 0.05),
        (cases.Transformer, "bf16", 0.05),
        (cases.Convolutional, "bf16", 0.05),
    ],
)
@pytest.mark.few(2)
def test_healthy_modules_need_nothing(kind: type[LightningModule], precision: str, tolerance: float) -> None:
    found = find_fp32_modules(seeded(kind), cases.Rows, precision, tolerance=tolerance, trainer_kwargs=CPU)
    assert found == ()
    assert (found.cost, found.tried) == (1.0, 1)
    assert found.message.startswith(f"Nothing needs fp32: in {precision!r} gradients differ by ")
    assert 0 < found.gradient_errors[0] == found.gradient_errors[1] <= tolerance
    assert Comparison(seeded(kind)).error(precision, ()) <= tolerance


def test_where_nothing_helps_it_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"No set of modules in fp32 is enough: .*the loss is not finite.*fp32_region`"
    ):
        find_fp32_modules(seeded(cases.OutsideOfModules), cases.Rows, tolerance=0.05, trainer_kwargs=CPU)


class NanMetric(cases.Mlp):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("auc", torch.tensor(math.nan))


class NanGradient(cases.Mlp):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (self(batch).float() * 0).abs().sqrt().sum()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (cases.NotFinite, r"the loss is not finite"),
        (NanGradient, r"the gradient of `body.0.weight` is not finite"),
        (NanMetric, r"the metric `auc` is not finite"),
    ],
)
def test_fp32_that_is_not_finite_itself_is_an_error(kind: type[LightningModule], what: str) -> None:
    with pytest.raises(ValueError, match=f"No precision can help: in fp32 {what}"):
        find_fp32_modules(seeded(kind), cases.Rows, "bf16", tolerance=0.05, trainer_kwargs=CPU)


# -- what the caller has -----------------------------------------------------------------------------------------------


def test_a_module_that_the_factory_returns_twice_and_the_random_state_stay_as_they_were() -> None:
    module, data = cases.Two(), cases.Rows()
    before, attributes = copy.deepcopy(module.state_dict()), set(vars(module.one.linear))
    state, python = torch.get_rng_state(), random.getstate()
    found = find_fp32_modules(lambda: module, lambda: data, tolerance=0.05, trainer_kwargs=CPU)
    assert set(found) == {"one", "two"}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert set(vars(module.one.linear)) == attributes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


class Bce(cases.Normalised):
    """The plugin refuses its loss, unless a rule has it in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.BCELoss()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(torch.sigmoid(self(batch)), (batch[:, :1] > 0).float())


def test_rules_of_ones_own_are_kept() -> None:
    arm = {"precision": "bf16", "fp32_modules": ["loss"], "scaler": None}
    found = find_fp32_modules(seeded(Bce), cases.Rows, arm, tolerance=0.1, trainer_kwargs=CPU)
    assert found[0] == "loss"
    assert any(rule.startswith("centred") for rule in found[1:])
    assert "in addition to your own rules" in found.message
    class_rule = {"precision": "bf16", "fp32_modules": [nn.BCELoss, cases.Centred, "inp"]}
    found = find_fp32_modules(seeded(Bce), cases.Rows, class_rule, tolerance=0.1, trainer_kwargs=CPU)
    assert found == (nn.BCELoss, cases.Centred, "inp")


def test_evaluation_in_fp32_has_no_error() -> None:
    arm = {"precision": "fp16", "eval_precision": "fp32"}
    found = find_fp32_modules(seeded(cases.OnlyValidation), cases.Rows, arm, tolerance=0.02, trainer_kwargs=CPU)
    assert found == ()
    assert found.metric_errors == {"val_loss": (0.0, 0.0)}


# -- how people train --------------------------------------------------------------------------------------------------


class Adversarial(LightningModule):
    """Manual optimization of two nets, of which one overflows; no validation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, cases.SIZE))
        self.critic = nn.Sequential(cases.LargeInside(cases.SIZE), nn.ReLU(), nn.Linear(cases.SIZE, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        made = self.generator(torch.randn(len(batch), 4))
        for optimizer, scores in zip(self.optimizers(), (self.critic(made), -self.critic(made.detach())), strict=True):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            loss = nn.functional.softplus(scores.float()).mean()
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (self.generator, self.critic)]


class Endless(cases.Rows):
    def train_dataloader(self) -> Any:
        class Stream(IterableDataset[Tensor]):
            def __iter__(self) -> Any:
                while True:
                    yield torch.randn(cases.SIZE)

        return DataLoader(Stream(), batch_size=4)


class Scheduled(cases.Normalised):
    """Asks for the length of training; its schedule monitors a metric at the end of each short epoch."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 100
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Tied(cases.Case):
    """Calls one module several times, ties a weight, and calls another module only by a method other than `forward`."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.again, self.never = nn.Linear(cases.SIZE, 16), cases.LargeInside(16), nn.Linear(3, 3)

        def encode(self, x: Tensor) -> Tensor:
            return self.again(self.again(self.inp(x)).tanh())

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = Tied.Encoder(), nn.Linear(16, cases.SIZE)
        self.out.weight = nn.Parameter(self.encoder.inp.weight.detach().T.clone())
        self.last = nn.Linear(16, cases.SIZE)
        self.last.weight = self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder.encode(x)
        return self.out(z).sum(1, keepdim=True) + self.last(z).mean(1, keepdim=True)


class FrozenHalf(cases.Case):
    """A backbone that was loaded in bf16; no rule may match it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(cases.SIZE, 16).bfloat16().requires_grad_(False)
        self.centred, self.head = cases.Centred(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.centred(self.backbone(x)))


@pytest.mark.parametrize(
    ("kind", "data", "precision", "kwargs", "rules"),
    [
        (Adversarial, cases.Rows, "fp16", {}, {"critic.0"}),
        (cases.Two, Endless, "fp16", {"max_steps": 3}, {"one", "two"}),
        (cases.Two, cases.Rows, "fp16", {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}, {"one", "two"}),
        (Scheduled, partial(cases.Rows, 8), "bf16", {}, None),
        (Tied, cases.Rows, "fp16", {}, {"encoder.again"}),
        (FrozenHalf, cases.Rows, "bf16", {}, {"centred.linear"}),
    ],
)
@pytest.mark.few(2)
def test_other_ways_to_train(kind: Any, data: Any, precision: str, kwargs: Any, rules: set[str] | None) -> None:
    found = find_fp32_modules(seeded(kind), data, precision, tolerance=0.1, trainer_kwargs=CPU | kwargs)
    assert found
    assert rules is None or {str(rule).removesuffix(".linear") for rule in found} == {
        rule.removesuffix(".linear") for rule in rules
    }


class Raising(cases.Mlp):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise KeyError("no such column")


def test_an_exception_of_the_step_is_the_users_own() -> None:
    with pytest.raises(KeyError, match="no such column"):
        find_fp32_modules(Raising, cases.Rows, tolerance=0.05, trainer_kwargs=CPU)


def test_arguments_that_are_refused() -> None:
    legal = {"make_module": cases.Mlp, "make_data": cases.Rows, "tolerance": 0.05, "trainer_kwargs": CPU}
    arguments = ({"fp32_module": ["head"]}, {"fp32_modules": "head"})
    precisions = ["fp32", "fp8", "half", *({"precision": "fp16", **one} for one in arguments)]
    wrong = [
        {"make_module": 3},
        *({"tolerance": one} for one in (0, math.nan, True)),
        *({"precision": one} for one in precisions),
        *({"trainer_kwargs": one} for one in ({"plugins": []}, {"max_epoch": 1})),
    ]
    assert_refused("find_fp32_modules", lambda **one: find_fp32_modules(**(legal | one)), wrong)


# -- what a step is like -----------------------------------------------------------------------------------------------


class OfOneDtype(cases.Case):
    """Does not run in half precision, because it writes values into a tensor of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.part, self.head = nn.Linear(cases.SIZE, 16), nn.Linear(cases.SIZE, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inp(x).float()
        return self.head(out.index_put((torch.arange(2),), self.part(x[:2])))


def test_the_cost_of_what_does_not_run_without() -> None:
    found = find_fp32_modules(seeded(OfOneDtype), cases.Rows, "bf16", tolerance=0.05, trainer_kwargs=CPU)
    assert found == ("part",)
    assert math.isnan(found.cost)
    assert "A step does not run without them." in found.message
    assert "against one without" not in found.message


class Counts(cases.Mlp):
    """Its loss depends on how many steps it has seen; a comparison with other steps would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_seen += 1
        return (1 + self.num_seen) * super().training_step(batch, batch_idx)


def test_attributes_are_those_of_the_measured_step() -> None:
    assert find_fp32_modules(seeded(Counts), cases.Rows, "bf16", tolerance=0.05, trainer_kwargs=CPU) == ()
