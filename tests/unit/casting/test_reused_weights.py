"""A weight that is used many times: one half-precision copy, gradients summed in fp32, never stale."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from support import DEVICE, assert_same
from support.devices import Casts
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_amp.casting import ReusedWeights

WIDTH = 8
shared = pytest.mark.skipif(DEVICE != "cpu", reason="on this device each use has a copy of its own")


class Root(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


@contextlib.contextmanager
def cast_per_use(dtype: torch.dtype = torch.bfloat16) -> Generator[None, None, None]:
    """Enter autocast as Lightning's own plugin does."""
    with torch.autocast(DEVICE, dtype=dtype, cache_enabled=False):
        yield


class Sharing:
    """Shares weights as the plugin does, without a Trainer."""

    def __init__(self, root: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self.weights = ReusedWeights(root, DEVICE)
        self.dtype = dtype

    @contextlib.contextmanager
    def __call__(self) -> Generator[None, None, None]:
        with self.weights, cast_per_use(self.dtype):
            yield


def linear() -> tuple[Root, Tensor, Sharing]:
    root = Root(net=nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    return root, torch.randn(3, WIDTH, device=DEVICE), Sharing(root)


# -- as exact as a cast per use, bit for bit ---------------------------------------------------------------------------


def again(module: nn.Module, x: Tensor, times: int = 5) -> Tensor:
    for _ in range(times):
        x = torch.tanh(module(x)) + x / 2
    return x


def cell(module: nn.Module, x: Tensor, times: int = 5) -> Tensor:
    state: Any = torch.zeros(len(x), WIDTH, device=x.device)
    state = (state, state) if isinstance(module, nn.LSTMCell) else state
    for step in range(times):
        state = module(x / (1 + step), state)
    return state[0] if isinstance(state, tuple) else state


def images(module: nn.Module, x: Tensor, dims: int = 1) -> Tensor:
    return again(module, x[(...,) + (None,) * dims].expand(*x.shape, *[3] * dims))


def self_attention(module: nn.Module, x: Tensor) -> Tensor:
    x = x[None]
    for _ in range(3):
        x = x + module(x, x, x)[0]
    return x


def attention(module: nn.Module, x: Tensor) -> Tensor:
    x = x[None]
    for _ in range(3):
        x = x + module(x, x + 1, x)[0]
    return x


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), again),
    "linear without bias": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), again),
    "conv1d": (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), images),
    "conv2d": (lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2), functools.partial(images, dims=2)),
    "conv2d channels last": (
        lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1).to(memory_format=torch.channels_last),
        functools.partial(images, dims=2),
    ),
    "conv3d": (lambda: nn.Conv3d(WIDTH, WIDTH, 3, padding=1), functools.partial(images, dims=3)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1), images),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 3, padding=1), functools.partial(images, dims=2)),
    "rnn cell": (lambda: nn.RNNCell(WIDTH, WIDTH), cell),
    "gru cell": (lambda: nn.GRUCell(WIDTH, WIDTH), cell),
    "lstm cell": (lambda: nn.LSTMCell(WIDTH, WIDTH), cell),
    "self-attention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), self_attention),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), attention),
    "attention, other keys": (lambda: nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=WIDTH), attention),
    "attention with extra biases": (lambda: nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True), attention),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True),
        lambda module, x: again(module, x[None], 3)),
    "frozen weight": (lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False), again),
    "frozen bias": (lambda: frozen_bias(nn.Linear(WIDTH, WIDTH)), again),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), again),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), again),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), again),
    "somebody else's forward": (lambda: Own(WIDTH, WIDTH), again),
    "a conv whose weight is computed": (lambda: Standardized(WIDTH, WIDTH, 3, padding=1), images),
    "tied weights": (lambda: tied(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), again),
    "bias in half precision": (lambda: half_bias(nn.Linear(WIDTH, WIDTH)), again),
}  # fmt: skip
FP16 = [k for k in KINDS if "conv" not in k]  # fp16 convolutions take seconds on a CPU


class Own(nn.Linear):
    """Applies an operation to its weight that autocast computes in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, torch.softmax(self.weight * 3, 1), self.bias)


class Standardized(nn.Conv1d):
    """Has torch's `forward`, and computes its weight in fp32 in the method that torch offers for this."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight * torch.rsqrt(weight.square().mean((1, 2), keepdim=True) + 1e-10)
        return super()._conv_forward(x, weight, bias)


def frozen_bias(module: nn.Linear) -> nn.Linear:
    module.bias.requires_grad_(False)
    return module


def half_bias(module: nn.Linear) -> nn.Linear:
    module.bias = nn.Parameter(module.bias.detach().to(torch.bfloat16))
    return module


def tied(first: nn.Linear, second: nn.Linear) -> nn.Module:
    second.weight = first.weight
    return nn.Sequential(first, second)


def gradients(root: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor], context: Any) -> dict[str, Any]:
    root.zero_grad()
    x = x.detach().requires_grad_()
    with context:
        out = run(root.net, x)
    out.float().square().mean().backward()
    return {"x": x.grad, "out": out.detach(), **{n: p.grad for n, p in root.named_parameters() if p.grad is not None}}


def needing(kind: str, *values: Any) -> Any:
    return pytest.param(kind, *values, marks=[pytest.mark.needs("gru")] if kind == "gru cell" else [])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*(needing(k, torch.bfloat16) for k in KINDS), *(needing(k, torch.float16) for k in FP16)],
)
def test_same_bits_as_a_cast_per_use(kind: str, dtype: torch.dtype) -> None:
    make, run = KINDS[kind]
    root = Root(net=make()).to(DEVICE)
    other = copy.deepcopy(root)
    x = torch.randn(3, WIDTH, device=DEVICE)
    sharing = Sharing(root, dtype)
    for _ in range(3):
        ours = gradients(root, x, run, sharing())
        assert_same(ours, gradients(other, x, run, cast_per_use(dtype)))
    assert not any("forward" in vars(m) for m in root.modules())


@shared
@pytest.mark.parametrize(
    "kind",
    [*map(needing, ["linear", "gru cell", "lstm cell", "conv1d", "self-attention", "transformer layer"])],
)
def test_one_copy_per_step(kind: str) -> None:
    make, run = KINDS[kind]
    root = Root(net=make()).to(DEVICE)
    x = torch.randn(3, WIDTH, device=DEVICE)
    sharing = Sharing(root)
    weights = [tuple(p.shape) for p in root.net.parameters() if p.dim() > 1]
    found: list[list[int]] = []
    for _ in range(3):
        with Casts() as casts:
            gradients(root, x, run, sharing())
        found.append([casts.shapes.count(shape) // weights.count(shape) for shape in weights])
    assert max(found[0]) == 2  # the first use tells nothing yet
    assert found[1:] == [[1] * len(weights)] * 2
    with Casts() as casts:
        gradients(root, x, run, cast_per_use())
    assert min(casts.shapes.count(shape) // weights.count(shape) for shape in weights) > 2  # so that the test can fail


# -- grad modes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_comes_first(mode: Any) -> None:
    """A teacher may run first. Its copies must be usable by a forward that is trained."""
    root, x, sharing = linear()
    for _ in range(3):
        root.zero_grad()
        with sharing():
            with mode():
                again(root.net, x)
            out = again(root.net, x)
        out.float().sum().backward()
        assert root.net.weight.grad is not None
        assert float(root.net.weight.grad.abs().sum()) > 0


def test_frozen_in_between() -> None:
    """`toggle_optimizer` does so."""
    root, x, sharing = linear()
    x.requires_grad_()
    for _ in range(3):
        with sharing():
            again(root.net, x)
            root.requires_grad_(False)
            frozen = again(root.net, x)
            root.requires_grad_(True)
            trained = again(root.net, x)
        frozen.float().sum().backward()
        assert root.net.weight.grad is None
        trained.float().sum().backward()
        assert root.net.weight.grad is not None
        root.zero_grad()


def test_double_backward() -> None:
    root = Root(net=nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    other = copy.deepcopy(root)
    x = torch.randn(3, WIDTH, device=DEVICE, requires_grad=True)
    sharing = Sharing(root)

    def penalty(root: nn.Module, context: Any) -> dict[str, Tensor]:
        root.zero_grad()
        with context:
            (gradient,) = torch.autograd.grad(again(root.net, x).float().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return {n: p.grad for n, p in root.named_parameters() if p.grad is not None}

    for _ in range(3):
        assert_same(penalty(root, sharing()), penalty(other, cast_per_use()))


def selective(policy: CheckpointPolicy) -> dict[str, Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: policy)
    return {"use_reentrant": False, "context_fn": contexts}


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        selective(CheckpointPolicy.MUST_SAVE),
        selective(CheckpointPolicy.PREFER_RECOMPUTE),
    ],
    ids=["reentrant", "not reentrant", "saved", "recomputed"],
)
def test_activation_checkpointing(options: dict[str, Any]) -> None:
    root, x, sharing = linear()
    x.requires_grad_()
    other = copy.deepcopy(root)

    def run(root: nn.Module, forward: Any, backward: Any) -> Any:
        root.zero_grad()
        out = x
        with forward:
            for _ in range(4):
                out: Any = checkpoint(again, root.net, out, 3, **options)
        with backward:
            out.float().sum().backward()
        return root.net.weight.grad

    for _ in range(3):
        ours = run(root, sharing(), contextlib.nullcontext())
        assert_same(ours, run(other, cast_per_use(), contextlib.nullcontext()))


# -- left alone --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x + 1)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("how", ["instance", "class", "in a step"])
def test_a_forward_that_is_replaced_later_stays(how: str) -> None:
    root, x, sharing = linear()
    with sharing():
        again(root.net, x)
    expected = 2 * root.net(x)

    if how == "class":
        root.net.__class__ = Doubled
    else:
        with sharing() if how == "in a step" else contextlib.nullcontext():
            before = root.net.forward
            root.net.forward = lambda x: 2 * before(x)
    for _ in range(3):
        with sharing():
            outputs = [root.net(x) for _ in range(2)]
        assert_same(root.net(x), expected)
        for output in outputs:
            torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["in place", "wrapped", "also known by its wrapper"])
def test_compiled_modules_are_left_alone(how: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    net, root, x = Layer(), Root(), torch.randn(3, WIDTH, device=DEVICE)
    if how == "in place":
        net.compile(backend=counter, fullgraph=True)
    if how != "wrapped":
        root.net = net
    root.wrapper = net if how == "in place" else torch.compile(net, backend=counter, fullgraph=True)
    sharing = Sharing(root.to(DEVICE))
    for _ in range(4):
        with sharing():
            root.wrapper(x)
            root.wrapper(x)
    assert counter.frame_count == 1


def test_torch_func() -> None:
    root, x, sharing = linear()

    def each(x: Tensor) -> Tensor:
        return again(root.net, x).float().sum()

    def of_weights(weights: dict[str, Tensor]) -> Tensor:
        return sum((torch.func.functional_call(root.net, weights, x) for _ in range(3)), torch.zeros(())).float().sum()

    def gradients() -> tuple[Any, Any]:
        again(root.net, x)
        weights = dict(root.net.named_parameters())
        return torch.func.vmap(torch.func.grad(each))(x), torch.func.grad(of_weights)(weights)

    for _ in range(3):
        with sharing():
            ours = gradients()
        with cast_per_use():
            assert_same(ours, gradients())


def test_outside_of_autocast_nothing_is_cast() -> None:
    root, x, sharing = linear()
    for _ in range(3):
        with sharing():
            again(root.net, x)
            with torch.autocast(DEVICE, enabled=False):
                ours = again(root.net, x)
        assert_same(ours, again(root.net, x))


# -- the module is as it was -------------------------------------------------------------------------------------------


def test_copies_and_pickles_in_the_middle_of_a_step() -> None:
    root, x, sharing = linear()
    copies: list[Any] = []
    for _ in range(3):
        with sharing():
            again(root.net, x)
            saved = io.BytesIO()
            torch.save(root.net, saved)
            saved.seek(0)
            copies += [
                copy.deepcopy(root.net),
                pickle.loads(pickle.dumps(root.net)),
                torch.load(saved, weights_only=False),
            ]
    expected = root.net(x)
    with torch.no_grad():
        root.net.weight.zero_()
    for module in copies:
        assert_same(module(x), expected)  # it has its own weights
    assert "forward" not in vars(root.net)
