"""Gradients between a backward and a step are scaled, unscaled, folded, checked, and carried to the next scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import CountReads, flags_on_a_device
from torch import Tensor, nn

from lightning_amp._compat import _sharding
from lightning_amp.scaling import HalfGradientsError, Scaled, Skip, Unscaled
from lightning_amp.scaling._gradient_state import UNCHECKED, Folded, Form, GradientState

INF, NAN = float("inf"), float("nan")


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def state(*grads: Any, form: Form = UNCHECKED, make: Callable[[Any], torch.optim.Optimizer] = sgd) -> GradientState:
    values = [torch.as_tensor(grad) for grad in grads]
    params = [nn.Parameter(torch.ones_like(value)) for value in values]
    for param, value in zip(params, values, strict=True):
        param.grad = value
    return GradientState(make(params), 0, form)


def grads(of: GradientState) -> list[list[float]]:
    return [p.grad.tolist() for group in of.optimizer.param_groups for p in group["params"] if p.grad is not None]


def found(of: GradientState) -> float | None:
    return None if of.found_inf is None else of.found_inf.item()


def overflow(of: GradientState) -> bool | None:
    return None if of.overflow_before_edits is None else of.overflow_before_edits.wait()


# -- from backward to backward -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("where_flags_live")
def test_from_scaled_to_unscaled_and_back_to_another_scale() -> None:
    of = state([8.0, 16.0], form=Scaled(scalar(8.0)))
    of.unscale_(scalar(8.0), (), may_overflow=False)
    assert isinstance(of.form, Unscaled)
    assert (grads(of), found(of), of.used_scale.item(), of.has_gradients) == ([[1.0, 2.0]], 0.0, 8.0, True)
    of.carry(to := Scaled(scalar(4.0)), ())
    assert of.form is to
    assert grads(of) == [[4.0, 8.0]]
    assert (of.found_inf, of.used_scale) == (None, None)


def test_what_has_the_scale_already_and_what_is_left_out_is_not_multiplied() -> None:
    of = state([1.0], form=Scaled(scale := scalar(8.0)))
    of.carry(Scaled(scale), ())
    assert grads(of) == [[1.0]]
    of = state([1.0], [1.0])
    first, _ = of.optimizer.param_groups[0]["params"]
    of.carry(Scaled(scale), {id(first)})
    assert grads(of) == [[1.0], [8.0]]


@pytest.mark.parametrize(("value", "expected"), [(8.0, 2.0), (INF, INF)])
def test_a_fused_step_makes_true_gradients_if_it_is_taken(value: float, expected: float) -> None:
    """A skipped step leaves gradients scaled. In both cases they are carried to the next scale correctly."""
    for then in ("carry", "unfold"):
        of = state([8.0], [value], form=Scaled(scale := scalar(8.0)), make=adamw)
        assert of.fold(None, may_overflow=False)
        assert of.used_scale is scale
        of.optimizer.found_inf = of.found_inf
        of.optimizer.step()
        if then == "carry":
            of.carry(Scaled(scalar(2.0)), ())
            assert grads(of) == [[2.0], [expected]]
        else:
            of.unfold()
            assert of.form is UNCHECKED
            assert grads(of) == [[1.0], [expected / 2]]


def test_a_loss_makes_what_was_known_out_of_date() -> None:
    of = state([1.0])
    of.check()
    assert found(of) == 0.0
    of.add_loss(scalar(1.0), may_have_none=False)
    assert of.form is UNCHECKED
    of = state([1.0], form=Scaled(scalar(2.0)))
    of.add_loss(scalar(1.0), may_have_none=False)
    assert isinstance(of.form, Scaled)


@pytest.mark.parametrize("may_have_none", [False, True])
@pytest.mark.parametrize("had_gradients", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_bad_loss_is_forgotten_with_its_gradients(
    may_have_none: bool, had_gradients: bool, has_gradients: bool
) -> None:
    """A rank without a shard never has gradients, so their absence does not mean that they were dropped."""
    of = state([1.0])
    of.add_loss(scalar(NAN), may_have_none=may_have_none)
    if had_gradients:
        of.check()
    if not has_gradients:
        of.optimizer.zero_grad()
    of.add_loss(scalar(1.0), may_have_none=may_have_none)
    forgotten = not has_gradients and (had_gradients or not may_have_none)
    assert of.loss_probe.isfinite().item() is forgotten


@pytest.mark.parametrize("left", [False, True])
def test_a_bad_loss_of_a_sharded_optimizer_is_forgotten_if_its_backward_left_gradients(
    left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without synchronisation FSDP2 keeps gradients elsewhere, so that missing ones were not dropped."""
    monkeypatch.setattr(_sharding, "is_sharded", lambda tensor: True)
    of = state([1.0])
    of.add_loss(scalar(NAN), may_have_none=True)
    if not left:
        of.optimizer.zero_grad()
    of.end_backward()
    of.optimizer.zero_grad()
    of.add_loss(scalar(1.0), may_have_none=True)
    assert of.loss_probe.isfinite().item() is left


def test_a_step_begins_anew_and_leaves_scaled_gradients_as_they_are() -> None:
    kept = [Scaled(scalar(2.0)), Folded(scalar(0.0), scalar(2.0))]
    forgotten = [Unscaled(scalar(0.0), scalar(2.0), Skip.YES), Folded(scalar(0.0), None)]
    for form in (*kept, *forgotten):
        of = state([1.0], form=form)
        of.add_loss(scalar(NAN), may_have_none=False)
        of.form = form
        of.finish()
        assert of.loss_probe is None
        assert of.form is (form if form in kept else UNCHECKED)


# -- unscale and check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_overflow", [False, True])
def test_a_scale_below_one_may_make_finite_values_infinite(may_overflow: bool) -> None:
    of = state([1e36], form=Scaled(scale := scalar(2.0**-14)))
    of.unscale_(scale, (), may_overflow=may_overflow)
    assert grads(of) == [[INF]]
    assert found(of) == float(may_overflow)


@pytest.mark.parametrize("bad", [1.0, NAN])
def test_what_another_optimizer_has_unscaled_is_checked_and_not_divided_again(bad: float) -> None:
    of = state([bad], [8.0], form=Scaled(scale := scalar(8.0)))
    first, _ = of.optimizer.param_groups[0]["params"]
    of.unscale_(scale, {id(first)}, may_overflow=False)
    assert grads(of)[1] == [1.0]
    assert found(of) == float(bad != 1.0)
    if bad == 1.0:
        assert grads(of)[0] == [1.0]


def test_half_gradients_are_refused_before_they_are_divided() -> None:
    of = state(torch.ones(2, dtype=torch.float16), form=Scaled(scale := scalar(8.0)))
    with pytest.raises(HalfGradientsError, match="float16"):
        of.unscale_(scale, (), may_overflow=False)
    assert grads(of) == [[1.0, 1.0]]


@pytest.mark.usefixtures("where_flags_live")
def test_mended_gradients_are_taken_and_their_overflow_is_remembered() -> None:
    of = state([INF], form=Scaled(scale := scalar(8.0)))
    of.unscale_(scale, (), may_overflow=False)
    of.optimizer.param_groups[0]["params"][0].grad.nan_to_num_(0.0, 0.0, 0.0)
    of.check()
    assert (found(of), overflow(of), of.used_scale) == (0.0, True, scale)
    of.check()
    assert overflow(of) is True  # a second check keeps it


@pytest.mark.usefixtures("where_flags_live")
def test_what_the_user_breaks_is_no_overflow() -> None:
    of = state([8.0], form=Scaled(scale := scalar(8.0)))
    of.unscale_(scale, (), may_overflow=False)
    of.optimizer.param_groups[0]["params"][0].grad.fill_(NAN)
    of.check()
    assert (found(of), overflow(of)) == (1.0, False)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("value", [INF, NAN, 1.0])
def test_what_was_found_can_be_kept(value: float) -> None:
    of = state([value])
    of.check()
    of.keep_found()
    of.optimizer.param_groups[0]["params"][0].grad.nan_to_num_(0.0, 0.5, -0.5)
    for _ in range(2):
        of.check()
        assert found(of) == float(value != 1.0)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("values", [[INF, 1.0], [NAN, 1.0], [INF, NAN]])
def test_infinities_alone_can_be_kept(values: list[float]) -> None:
    """A user who removes NaN repairs the gradients. Clipping by value does not remove NaN."""
    of = state(values)
    of.check()
    of.keep_found(infinities_only=True)
    of.optimizer.param_groups[0]["params"][0].grad.nan_to_num_(0.0, 0.5, -0.5)
    of.check()
    assert found(of) == float(values == [INF, 1.0])


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("make", [sgd, adamw])
def test_what_is_kept_outlives_another_backward_and_ends_with_the_step(make: Any) -> None:
    of = state([INF], form=Scaled(scale := scalar(8.0)), make=make)
    of.unscale_(scale, (), may_overflow=False)
    of.keep_found()
    of.optimizer.param_groups[0]["params"][0].grad.clamp_(-0.5, 0.5)
    of.add_loss(scalar(1.0), may_have_none=False)
    of.carry(Scaled(scalar(4.0)), ())
    assert found(of) is None
    if make is adamw:
        assert of.fold(None, may_overflow=False)
    else:
        of.unscale_(scalar(4.0), (), may_overflow=False)
    assert found(of) == 1.0
    of.finish()
    of.release()
    of.check()
    assert found(of) == 0.0


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("to_none", [True, False])
def test_what_is_kept_ends_where_the_gradients_are_dropped(to_none: bool) -> None:
    of = state([INF])
    of.check()
    of.keep_found()
    of.optimizer.zero_grad(set_to_none=to_none)
    of.add_loss(scalar(1.0), may_have_none=False)
    of.optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    of.check()
    assert found(of) == 0.0


def test_a_flag_that_is_zero_for_sure_is_used_again() -> None:
    of = state([1.0])
    of.keep_spare(spare := scalar(0.0))
    of.check()
    assert of.found_inf is spare
    of.check()
    assert of.found_inf is spare
    with flags_on_a_device():  # the host does not know its value
        of.check()
        assert of.found_inf is not spare


# -- folding -----------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[list[Any], float | None, bool]] = {
    "complex": ([torch.ones(1, dtype=torch.complex64)], None, False),
    "two devices": ([[1.0], torch.ones(1, device="meta")], None, False),
    "no gradients": ([], None, False),
    "a scale below one": ([[1.0]], None, True),
    "a norm that overflows": ([[1e30, 1e30]], 1.0, False),
    "a norm of NaN": ([[NAN]], 1.0, False),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_cannot_be_folded_is_left_as_it_was(kind: str) -> None:
    values, max_norm, may_overflow = OTHERS[kind]
    of = state(*(values or [[1.0]]), form=Scaled(scalar(8.0)), make=sgd)
    if not values:
        of.optimizer.zero_grad()
    before, form = [p.grad for p in of.optimizer.param_groups[0]["params"]], of.form
    assert not of.fold(max_norm, may_overflow=may_overflow)
    assert of.form is form
    assert [p.grad for p in of.optimizer.param_groups[0]["params"]] == before
    assert "grad_scale" not in vars(of.optimizer)


def test_folding_changes_no_gradient() -> None:
    of = state([3.0, 4.0], form=Scaled(scale := scalar(8.0)), make=adamw)
    assert of.fold(None, may_overflow=False)
    assert of.form == Folded(of.found_inf, scale)
    assert (grads(of), found(of), of.optimizer.grad_scale, of.has_gradients) == ([[3.0, 4.0]], 0.0, scale, True)
    with pytest.raises(HalfGradientsError, match="bfloat16"):
        state(torch.ones(1, dtype=torch.bfloat16), form=Scaled(scale)).fold(None, may_overflow=False)


@pytest.mark.parametrize(("max_norm", "divisor"), [(0.25, 2.5), (1.0, 1.0)])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_clipping_is_folded_into_the_scale(scale: float | None, max_norm: float, divisor: float) -> None:
    """The true norm is 5/8. The kernel divides by the scale and by the divisor of clipping."""
    true = 1.0 if scale is None else scale
    of = state([3.0 * true / 8, 4.0 * true / 8], form=UNCHECKED if scale is None else Scaled(scalar(scale)), make=adamw)
    assert of.fold(max_norm, may_overflow=True)
    assert of.optimizer.grad_scale.item() == pytest.approx(true * divisor, rel=1e-5)
    assert found(of) == 0.0


def test_a_bad_norm_is_folded_where_only_the_device_knows() -> None:
    with flags_on_a_device():
        of = state([NAN], form=Scaled(scalar(8.0)), make=adamw)
        assert of.fold(1.0, may_overflow=False)
    assert found(of) == 1.0


# -- all ranks ---------------------------------------------------------------------------------------------------------


def agree(of: GradientState, *elsewhere: float) -> None:
    """Agree with one other rank, which reports: found_inf, bad loss, has gradients, overflow before edits."""

    def all_reduce_max(flags: Tensor) -> None:
        flags.copy_(torch.maximum(flags, torch.tensor(elsewhere)))

    of.agree(all_reduce_max, None)


@pytest.mark.parametrize("form", [Unscaled(scalar(0.0), scalar(8.0)), Folded(scalar(0.0), scalar(8.0))])
def test_what_one_rank_finds_all_know(form: Form) -> None:
    of = state([1.0], form=form)
    agree(of, 1.0, 0.0, 1.0, 0.0)
    assert type(of.form) is type(form)
    assert (found(of), of.used_scale.item(), of.has_gradients) == (1.0, 8.0, True)
    assert of.loss_probe.isfinite()
    agree(of, 0.0, 1.0, 0.0, 0.0)
    assert (found(of), of.has_gradients) == (1.0, True)
    assert not of.loss_probe.isfinite()


@pytest.mark.parametrize(("mine", "elsewhere"), [(Skip.NO, 1.0), (Skip.YES, 0.0), (Skip.NO, 0.0)])
def test_an_overflow_that_was_mended_on_one_rank_lowers_the_scale_of_all(mine: Skip, elsewhere: float) -> None:
    of = state([1.0], form=Unscaled(scalar(0.0), scalar(8.0), mine))
    agree(of, 0.0, 0.0, 1.0, elsewhere)
    assert overflow(of) is (mine is Skip.YES or elsewhere == 1.0)
    assert found(of) == 0.0


# -- the step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_loss", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_gradients_and_loss_are_waited_for_together(bad: bool, bad_loss: bool) -> None:
    with flags_on_a_device():
        of = state([1.0])
        of.add_loss(scalar(NAN if bad_loss else 1.0), may_have_none=False)
        of.optimizer.param_groups[0]["params"][0].grad.fill_(INF if bad else 1.0)
        of.check()
        with CountReads() as reads:
            assert of.wait(asks_for_loss=True) is bad
        assert reads.count == 1
    assert of.bad_loss is (Skip.YES if bad_loss else Skip.NO)


def test_the_loss_is_left_on_the_device_if_nobody_asks() -> None:
    with flags_on_a_device():
        of = state([1.0])
        of.add_loss(loss := scalar(NAN), may_have_none=False)
        of.check()
        assert of.wait(asks_for_loss=False) is False
    assert of.loss_probe.data_ptr() == loss.data_ptr()


class Base(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class Usual(Base):
    def step(self, closure: Any = None) -> None: ...


class AnyKeyword(Base):
    def step(self, **kwargs: Any) -> None: ...


class Nothing(Base):
    def step(self) -> None: ...


class KeywordOnly(Base):
    def step(self, *, temperature: float = 1.0) -> None: ...


class AnyPositional(Base):
    def step(self, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(torch.optim.AdamW, True), (torch.optim.LBFGS, True), (Usual, True), (AnyKeyword, True),
     (Nothing, False), (KeywordOnly, False), (AnyPositional, False)],
)  # fmt: skip
def test_whether_its_step_takes_a_closure(kind: Any, expected: bool) -> None:
    optimizer = kind([nn.Parameter(torch.ones(1))])
    assert GradientState(optimizer, 0).takes_closure is expected
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # wraps `step`
    assert GradientState(optimizer, 0).takes_closure is expected


def test_a_step_that_cannot_be_read_is_taken_for_an_ordinary_one() -> None:
    optimizer = Nothing([nn.Parameter(torch.ones(1))])
    optimizer.step = dict.update  # compiled code without a signature
    assert GradientState(optimizer, 0).takes_closure


def test_a_snapshot_is_needed_only_where_a_closure_is_called_after_a_move() -> None:
    users, torchs = state([1.0], make=Usual), state([1.0])
    lbfgs = state([1.0], make=torch.optim.LBFGS)
    assert (users.needs_snapshot, torchs.needs_snapshot, lbfgs.needs_snapshot) == (True, False, True)
    for calls, needed in ((1, False), (2, True), (0, False)):
        users.note_closure_calls(calls, moved_first=False)
        assert users.needs_snapshot is needed
    users.note_closure_calls(1, moved_first=True)
    assert users.needs_snapshot
