"""FLOPs by dtype, compared with counts by hand: 2 m n k for a product of (m, k) and (k, n)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_sequence

from lightning_amp.measure import MatmulFlops


def flops(step: Callable[[], Any]) -> dict[str, int]:
    with MatmulFlops() as counter:
        step()
    return dict(counter.by_dtype)


def test_a_linear_layer() -> None:
    layer, x = nn.Linear(3, 5), torch.randn(4, 3)
    assert flops(lambda: layer(x)) == {"float32": 2 * 4 * 3 * 5}
    # Backward: the gradient of the weight, and of the input if it requires one.
    assert flops(lambda: layer(x).sum().backward()) == {"float32": 2 * (2 * 4 * 3 * 5)}
    assert flops(lambda: layer(x.requires_grad_()).sum().backward()) == {"float32": 3 * (2 * 4 * 3 * 5)}
    assert flops(lambda: layer.double()(x.double())) == {"float64": 2 * 4 * 3 * 5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The dtype of the product counts, not the dtype of the weight or the loss."""
    first, last, x = nn.Linear(3, 5), nn.Linear(5, 2), torch.randn(4, 3)

    def step() -> None:
        with torch.autocast("cpu", dtype):
            hidden = first(x)
        last(hidden.float()).sum().backward()

    name = str(dtype).removeprefix("torch.")
    assert flops(step) == {name: 2 * (2 * 4 * 3 * 5), "float32": 3 * (2 * 4 * 5 * 2)}


def test_a_convolution() -> None:
    layer, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 8, 6)
    forward = 2 * (2 * 8 * 6) * 4 * (3 * 3 * 3)
    assert flops(lambda: layer(x)) == {"float32": forward}


def test_batches_of_matrices() -> None:
    a, b, c = torch.randn(6, 4, 3), torch.randn(6, 3, 5), torch.randn(6, 4, 5)
    assert flops(lambda: torch.bmm(a, b)) == {"float32": 6 * 2 * 4 * 3 * 5}
    assert flops(lambda: torch.baddbmm(c, a, b)) == {"float32": 6 * 2 * 4 * 3 * 5}
    assert flops(lambda: torch.einsum("bij,bjk->bik", a, b)) == {"float32": 6 * 2 * 4 * 3 * 5}


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_attention(backend: SDPBackend) -> None:
    """Two products forward; four backward, and one more if the scores are not kept."""
    query, key = torch.randn(2, 3, 8, 16, requires_grad=True), torch.randn(2, 3, 6, 16, requires_grad=True)
    product = 2 * (2 * 3) * 8 * 6 * 16
    back = 5 if backend == SDPBackend.FLASH_ATTENTION else 4

    def attend(q: Tensor, k: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, k)

    assert flops(lambda: attend(query, key)) == {"float32": 2 * product}
    assert flops(lambda: attend(query, key).sum().backward()) == {"float32": (2 + back) * product}
    name = "bfloat16" if backend == SDPBackend.FLASH_ATTENTION else "float32"  # in which the other one computes
    assert flops(lambda: attend(query.bfloat16(), key.bfloat16())) == {name: 2 * product}


def test_attention_is_counted_however_torch_computes_it() -> None:
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(3, 5, 16)
    tokens = 3 * 5
    expected = 2 * tokens * (4 * 16 * 16 + 2 * 16 * 32) + 2 * (2 * 3 * 2 * 5 * 5 * 8)
    assert flops(lambda: layer(x)) == {"float32": expected}


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers(kind: Any, gates: int) -> None:
    """Each row of each step is multiplied by each weight, in one operation or in a loop."""
    layer, x = kind(3, 5), torch.randn(7, 4, 3)
    forward = 2 * (7 * 4) * (gates * 5) * (3 + 5)
    assert flops(lambda: layer(x)) == {"float32": forward}
    back = flops(lambda: layer(x.requires_grad_())[0].sum().backward())["float32"] - forward
    assert 1.8 * forward < back <= 2 * forward


def test_sequences_of_several_lengths() -> None:
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    assert flops(lambda: nn.LSTM(3, 5)(packed)) == {"float32": 2 * (4 + 2) * 20 * (3 + 5)}


def test_a_recurrent_layer_of_cudnn() -> None:
    """Its shapes, without a GPU."""
    options: dict[str, Any] = {"device": "meta", "dtype": torch.float16}
    weights = [torch.empty(20, 3, **options), torch.empty(20, 5, **options), *(torch.empty(20, **options),) * 2]
    state = torch.empty(1, 4, 5, **options)

    def step() -> None:
        x = torch.empty(7, 4, 3, **options)
        torch.ops.aten._cudnn_rnn(x, weights, 4, None, state, state, 2, 5, 0, 1, False, 0.0, True, False, [], None)

    assert flops(step) == {"float16": 2 * (7 * 4) * 20 * (3 + 5)}


def test_what_is_no_product() -> None:
    x = torch.randn(4, 4)
    assert flops(lambda: (x + x).relu().sum()) == {}
    assert flops(lambda: nn.Linear(4, 4)(x[:0])).get("float32", 0) == 0


def test_it_counts_on_and_changes_nothing() -> None:
    layer, x = nn.Linear(3, 5), torch.randn(4, 3)
    expected = layer(x)
    with MatmulFlops() as counter:
        assert torch.equal(layer(x), expected)
    layer(x)
    with counter:
        layer(x)
    assert counter.by_dtype == {"float32": 2 * (2 * 4 * 3 * 5)}


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_backward_of_a_convolution_is_twice_its_forward(kind: type[nn.Module], groups: int) -> None:
    """This holds for groups too, where torch's formula counts a dense weight."""
    convolution = kind(4, 8, 3, groups=groups, stride=2)
    x = torch.randn(2, 4, 9, 9)
    with MatmulFlops() as forward:
        convolution(x)
    with MatmulFlops() as without_input:
        convolution(x).sum().backward()
    with MatmulFlops() as whole:
        convolution(x.requires_grad_()).sum().backward()
    once = forward.by_dtype["float32"]
    assert once > 0
    assert without_input.by_dtype["float32"] == 2 * once
    assert whole.by_dtype["float32"] == 3 * once
