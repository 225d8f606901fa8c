"""Run a step that overflowed again from its file: in fp32, or at another scale, without a Trainer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.findings import Diagnosis
from lightning_amp.numerics import FORMATS, HALF_DTYPES, headroom_bits, largest, nonfinite_gradients
from lightning_amp.tracing._bundles import copy_to, load_bundle
from lightning_amp.tracing._conditions import RandomState, paired_random
from lightning_amp.tracing._diagnosis import diagnose, with_operation
from lightning_amp.tracing._operation_watch import OperationWatch
from lightning_amp.tracing._trace import Trace


@final
@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replayed step.

    Attributes:
        loss: The unscaled loss.
        diagnosis: The first non-finite value and its cause, which is `"none"` if everything was finite.
        parameters: Names of the parameters whose gradients are not finite.
        headroom_bits: How often the scale could be doubled before the largest scaled gradient of a parameter overflows
            in fp16; negative if it overflows already. It is meaningful only if the gradients are finite, so above all
            in fp32.

    """

    loss: float
    diagnosis: Diagnosis
    parameters: tuple[str, ...]
    headroom_bits: float


def replay(
    bundle: str | os.PathLike[str] | Mapping[str, Any],
    module_fn: Callable[[], nn.Module] | nn.Module,
    *,
    step: Callable[[nn.Module, Any], Any] | None = None,
    precision: str | torch.dtype = "fp32",
    scale: float | None = None,
    device: str | torch.device = "cpu",
    weights_only: bool = True,
) -> Replay:
    """Run the step of a bundle again, forward and backward, from the same weights, batch and random numbers.

    .. code-block:: python

        from lightning_amp.tracing import replay

        locator = OverflowLocator(dirpath="overflows", save_bundles=True)
        plugin = AmpPrecision("fp16", scaler=2.0**24)  # static, and too high
        L.Trainer(plugins=[plugin], callbacks=[locator], max_epochs=1).fit(model, data)
        again = replay("overflows/overflow_step00000_rank0.pt", model, precision="fp32")
        print(again.diagnosis.cause, again.headroom_bits)  # none -7.5: fp16 has room for it at a scale 2**8 times lower

    Args:
        bundle: A bundle of `OverflowLocator(save_bundles=True)`: its path or URL, or the loaded dictionary.
        module_fn: A function that makes a module for the saved state; or a module, which is copied.
        step: Called with the module and the batch. It returns the loss, or a mapping with the loss under `"loss"`.
            `None` calls `module.training_step(batch, batch_idx)`, and drops what it logs.
        precision: `"fp32"`, `"fp16"`, `"bf16"` or their dtypes.
        scale: The loss scale. `None` takes the scale of the failed step, in fp32 too: an fp32 replay then shows how far
            the gradients exceed fp16.
        device: The device of the replay.
        weights_only: Passed to `torch.load`. `False` lets the file run code; needed if the batch holds anything but
            tensors, numbers, strings and plain containers: NumPy arrays, a dataclass, a `BatchEncoding`.

    Raises:
        ValueError: If `bundle` is not a bundle, is damaged or cannot be loaded, or if the precision is not one of
            these.
        OSError: If there is no such file.
        ImportError: If the driver of its URL is not installed.
        TypeError: If `module_fn` does not return a module, or the step does not return a loss.

    """
    loaded = load_bundle(bundle, weights_only)
    known = [FORMATS[name] for name in ("fp32", "fp16", "bf16")]
    dtype = next((format_.dtype for format_ in known if precision in (format_.name, format_.dtype)), None)
    if dtype is None:
        raise ValueError(f"`precision` must be 'fp32', 'fp16' or 'bf16'; got {precision!r}.")
    device = torch.device(device)
    with paired_random(device.type):
        module = copy.deepcopy(module_fn) if isinstance(module_fn, nn.Module) else module_fn()
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module_fn` must return a module, its result is a `{type(module).__name__}`.")
        state = _renamed(loaded["module_state"], module)
        _upcast_like(state, module.to(device))
        module.load_state_dict(state)
        module.train().zero_grad()
        batch = copy_to(loaded["batch"], device)
        try:
            RandomState.unpack(loaded["random_state"], device.type).restore(device.type)
        except Exception as error:
            raise ValueError(f"The bundle is damaged: its entry `random_state` cannot be used ({error}).") from error
        watch = OperationWatch(module, __file__)
        with torch.compiler.set_stance("force_eager"), Trace(module) as trace, watch:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
                if step is not None:
                    output = step(module, batch)
                else:
                    output = cast(Any, module).training_step(batch, loaded["batch_idx"])
            loss: Any = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                raise TypeError(
                    f"The step returned no loss, but a `{type(loss).__name__}`. Pass one that does, `step=lambda"
                    " module, batch: ...`: a step of manual optimization has none to return."
                )
            watch.note_loss(loss)
            with trace.in_backward(), watch.in_backward():
                used_scale = float(loaded["scale"] if scale is None else scale)
                _modules.watched_backward(loss.float() / loaded["loss_divisor"] * used_scale)
        parameters = _modules.plain_parameters(module)
        magnitudes = [largest(p.grad) for p in parameters.values() if p.grad is not None]
        room = headroom_bits(torch.stack(magnitudes)) if magnitudes else torch.tensor(torch.inf)
        found = with_operation(module, diagnose(trace, loss, batch), watch)
        return Replay(float(loss.detach()), found, nonfinite_gradients(parameters), float(room))


def _upcast_like(state: Mapping[str, Any], module: nn.Module) -> None:
    """Upcast half-precision parameters and buffers that were saved in float32; see `upcast_parameters`."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        saved = state.get(name)
        if tensor.dtype in HALF_DTYPES and isinstance(saved, Tensor) and saved.dtype == torch.float32:
            tensor.data = tensor.data.float()


def _renamed(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Rename the entries of a saved state to the names in `module`: only one of the two may be compiled."""
    own = {_modules.plain_name(name): str(name) for name in module.state_dict()}
    return {own.get(_modules.plain_name(name), name): value for name, value in state.items()}
