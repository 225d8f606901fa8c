"""Modules that compute in fp32 under autocast equal the same code written by hand."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
from support import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanSquaredError, MetricCollection

from lightning_amp import AmpPrecision
from lightning_amp._compat._modules import compiled_backward_without_autocast
from lightning_amp.casting import Fp32Modules, modules_matching

autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        y = self.layer(self.norm(x))
        return y if shift is None else y @ shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(), Block()])
        self.decoder = Block()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x)
        shift = x.mT @ x  # half precision
        return self.head(self.decoder(x, shift=shift))


def computing_in_fp32(root: nn.Module, *rules: Any) -> Fp32Modules:
    return Fp32Modules(root, rules, "cpu", active=True)


def run(net: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    with autocast():
        out = net(x)
    return out.detach(), [*torch.autograd.grad(out.float().square().sum(), [*net.parameters()])]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8)


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append((args, kwargs, torch.is_autocast_enabled("cpu")))
        return self.layer(args[0])


def test_inputs_are_upcast_wherever_they_are(x: Tensor) -> None:
    net = nn.Sequential(Recorder())
    computing_in_fp32(net, "0")
    with autocast():
        out = net[0](x.half(), [x.bfloat16(), {"a": x.double()}], mask=torch.ones(2).int(), shift=x.bfloat16())
        assert torch.is_autocast_enabled("cpu")
    args, kwargs, inside = net[0].seen[0]
    assert out.dtype == args[0].dtype == args[1][0].dtype == kwargs["shift"].dtype == torch.float32
    assert args[1][1]["a"].dtype == torch.float64
    assert kwargs["mask"].dtype == torch.int32
    assert inside is False


def test_exception_leaves_autocast_as_it_was(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    computing_in_fp32(net, "0")
    with autocast():
        with pytest.raises(RuntimeError, match="shapes"):
            net(torch.ones(2, 3))
        assert torch.is_autocast_enabled("cpu")
        assert net.forward(x).dtype == torch.float32


def test_nested_and_shared_modules(x: Tensor) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Recorder()
            self.b = nn.Sequential(self.a, Recorder())

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    net = Shared()
    assert list(modules_matching(net, ["b.0"])) == ["b.0"]  # the second name of `a`
    ours = computing_in_fp32(net, "b", "b.0", "a")
    with autocast():
        net(x)
        assert [inside for module in (net.a, net.b[1]) for *_, inside in module.seen] == [False] * 3
        assert net.b[1](x).dtype == torch.bfloat16  # not a match itself, and not called inside of one
    ours.remove()
    assert all("forward" not in vars(m) for m in net.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(x: Tensor, reentrant: bool) -> None:
    net = Net()
    computing_in_fp32(net, "decoder", "encoder.1")
    expected = run(net, x)
    with autocast():
        out = checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)
    out.float().square().sum().backward()
    assert_same((out.detach(), [p.grad for p in net.parameters()]), expected)


class TestCopies:
    def test_a_deep_copy_computes_in_fp32_with_its_own_weights(self, x: Tensor) -> None:
        net = Net()
        ours = computing_in_fp32(net, "decoder")
        other = copy.deepcopy(net)
        twice = copy.deepcopy(other)
        expected = run(net, x)
        ours.remove()
        for copied in (other, twice):
            assert_same(run(copied, x), expected)
        with torch.no_grad():
            net.decoder.layer.weight.fill_(float("nan"))
        assert torch.isfinite(run(other, x)[0]).all()

    @pytest.mark.parametrize("save", [pickle.dumps, lambda m: torch.save(m, f := io.BytesIO()) or f.getvalue()])
    def test_a_pickle_is_a_plain_module(self, x: Tensor, save: Any) -> None:
        net = Net()
        plain = run(copy.deepcopy(net), x)
        computing_in_fp32(net, "decoder")
        data = save(net)
        assert b"lightning_amp" not in data
        load = pickle.loads if save is pickle.dumps else lambda d: torch.load(io.BytesIO(d), weights_only=False)
        other = load(data)
        assert_same(run(other, x), plain)
        with torch.no_grad():
            net.decoder.layer.weight.fill_(float("nan"))
        assert torch.isfinite(other(x)).all()
        assert torch.isfinite(copy.deepcopy(other)(x)).all()

    def test_a_forward_that_was_patched_before(self, x: Tensor) -> None:
        net = nn.Sequential(nn.Linear(8, 8))
        patched = net[0].forward
        vars(net[0])["forward"] = patched
        ours = computing_in_fp32(net, "0")
        assert copy.deepcopy(net)(x).shape == pickle.loads(pickle.dumps(net))(x).shape == (4, 8)
        ours.remove()
        assert vars(net[0])["forward"] is patched

    @pytest.mark.filterwarnings("ignore:`torch.jit")
    def test_state_dict_and_trace(self, x: Tensor) -> None:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        keys = list(net.state_dict())
        computing_in_fp32(net, "0")
        assert list(net.state_dict()) == keys
        traced = torch.jit.trace(net, x, check_trace=False)
        torch.testing.assert_close(traced(x), net(x))


@pytest.mark.parametrize("what", ["whole", "wrapped", "fp32 module", "child of the user"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at all inputs
@pytest.mark.few(3)
def test_compiled(x: Tensor, what: str, backend: str) -> None:
    torch._dynamo.reset()
    net = Net()
    reference = copy.deepcopy(net)
    computing_in_fp32(reference, "decoder")
    expected = run(reference, x)
    options: dict[str, Any] = {"backend": backend, "fullgraph": True}
    if what == "child of the user":
        net.decoder = torch.compile(net.decoder, **options)  # type: ignore[assignment]
    ours = computing_in_fp32(net, "decoder")
    if what in ("whole", "fp32 module"):
        (net if what == "whole" else net.decoder).compile(**options)
    called = torch.compile(net, **options) if what == "wrapped" else net
    with compiled_backward_without_autocast():
        for _ in range(2):
            assert_same(run(called, x), expected)
    assert not torch.is_autocast_enabled("cpu")
    ours.remove()
    assert not torch.equal(run(called, x)[0], expected[0])  # compiled again, since `forward` is another


class TestRules:
    def test_what_they_match(self) -> None:
        net = Net()
        assert list(modules_matching(net, ["decoder"])) == ["decoder"]
        assert list(modules_matching(net, ["*.norm"])) == ["encoder.0.norm", "encoder.1.norm", "decoder.norm"]
        assert list(modules_matching(net, [nn.LayerNorm])) == list(modules_matching(net, ["*.norm"]))
        assert list(modules_matching(net, ["head", "encoder.1.*"])) == ["head", "encoder.1.norm", "encoder.1.layer"]
        assert list(modules_matching(net, ["encoder"])) == ["encoder.0", "encoder.1"]  # a list computes nothing itself
        assert list(modules_matching(net, ["encoder.[0]"])) == ["encoder.0"]
        assert "" not in modules_matching(net, ["*", nn.Module])
        assert modules_matching(net, []) == {}

    def test_names_do_not_show_compilation(self) -> None:
        net = Net()
        inner = net.decoder
        net.decoder = torch.compile(net.decoder, backend="eager")  # type: ignore[assignment]
        assert modules_matching(net, ["decoder"]) == {"decoder": inner}
        found = modules_matching(net, ["decoder.norm", Block])
        assert list(found) == ["decoder.norm", "encoder.0", "encoder.1", "decoder"]

    def test_metrics_count_and_are_left_alone(self) -> None:
        net = nn.ModuleDict({"mse": MeanSquaredError(), "all": MetricCollection([MeanSquaredError()])})
        assert modules_matching(net, ["mse", "all", "*"]) == {}

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            ("decoder.haed", "'decoder.haed', which matches no module. Close to it are: '(decoder|head)"),
            ("norm", "'norm', which matches no module. Close to it are: .*'encoder.0.norm'"),
            ("zzz", "'zzz', which matches no module. There are: 'encoder', 'encoder.0', .* and 6 more"),
            (nn.BatchNorm1d, "`BatchNorm1d`, which matches no module. .* are: `LayerNorm`"),
            (nn.Bilinear, "`Bilinear`, which matches no module. Close to it are: `Linear`"),
        ],
    )
    def test_a_rule_that_matches_nothing(self, rule: Any, message: str) -> None:
        net = Net()
        with pytest.raises(ValueError, match=message):
            computing_in_fp32(net, "decoder", rule)
        assert all("forward" not in vars(m) for m in net.modules())

    @pytest.mark.parametrize(
        ("rules", "message"),
        [
            ("decoder", r"must be a sequence of rules, got 'decoder'. Write `fp32_modules=\['decoder'\]`"),
            (nn.LayerNorm, r"Write `fp32_modules=\[LayerNorm\]`"),
            ([3], "subclasses of `torch.nn.Module`; got 3"),
            ([""], "got ''"),
            ([int], "got int"),
            ([nn.Linear(2, 2)], "got Linear"),
            (3, "got 3"),
            (None, "got None"),
        ],
    )
    def test_what_is_no_rule(self, rules: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            AmpPrecision(fp32_modules=rules)

    def test_half_parameters(self) -> None:
        net = Net()
        net.decoder.norm.bfloat16()
        with pytest.raises(ValueError, match="matches `decoder`, whose .*`decoder.norm.weight` .torch.bfloat16"):
            computing_in_fp32(net, "head", "decoder")
        assert "forward" not in vars(net.head)
