"""How many gradients become zero in fp16, over the loss scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting, overall
from benchmarks.claims._models import GPT, text, text_loss
from benchmarks.claims._sources import MICIKEVICIUS
from benchmarks.claims._training import Task, batches, fit, seeded, trained
from lightning_amp import AmpPrecision, GradientMonitor

_SCALES = (1.0, 2.0**8, 2.0**16)


def run(setting: Setting) -> Outcome:
    """Look at gradients of weights by `GradientMonitor`, and at those of activations in two sizes of a batch."""
    found = {"weights": {s: Interval.of(_of_weights(setting, s, seed) for seed in setting.seeds) for s in _SCALES}}
    for rows in (8, 512):
        shares = [_of_activations(setting, rows, seed) for seed in setting.seeds]
        found[f"activations of {24 * rows:,} tokens"] = {s: Interval.of(share[s] for share in shares) for s in _SCALES}
    figure = ", ".join(f"{name} {100 * shares[1.0].mean:.2g} %" for name, shares in found.items())
    scaled = "; ".join(
        f"{scale:.0f}: " + ", ".join(f"{100 * shares[scale].mean:.2g} %" for shares in found.values())
        for scale in _SCALES[1:]
    )
    return Outcome(overall(s[1.0].within(0.05, 1.0) for s in found.values()), figure, f"The same at scale {scaled}.")


def _of_weights(setting: Setting, scale: float, seed: int) -> float:
    steps = 2 if setting.tiny else 10
    monitor = GradientMonitor(every_n_steps=steps)
    task, plugin = Task(seeded(seed, GPT)), AmpPrecision("fp16", scaler=scale)
    fit(task, batches(steps + 1, seed), setting, plugins=[plugin], callbacks=[monitor])
    return monitor.table.last[-1].underflow_fraction


def _of_activations(setting: Setting, rows: int, seed: int) -> dict[float, float]:
    """Return the shares of the outputs of all linear layers of a trained GPT, by scale."""
    net = trained(setting, "fp32", seed).net
    found: list[Tensor] = []

    def keep(layer: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: found.append(gradient.flatten()))

    hooks = [layer.register_forward_hook(keep) for layer in net.modules() if isinstance(layer, nn.Linear)]
    text_loss(net, text(rows, 25, seed).to(setting.device)).backward()
    for hook in hooks:
        hook.remove()
    gradients = torch.cat(found)
    gradients = gradients[gradients != 0]
    return {scale: float(((scale * gradients).half() == 0).float().mean()) for scale in _SCALES}


CLAIM = Claim(
    "Without scaling 5 % of gradients vanish in fp16",
    MICIKEVICIUS,
    "Share of a GPT's non-zero gradients that round to zero: of weights by `GradientMonitor`, of outputs by hooks.",
    run,
)
