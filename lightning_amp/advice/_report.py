"""`DoctorReport`: the result of :func:`lightning_amp.doctor`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, is_dataclass, replace
from functools import cached_property
from typing import Any

from typing_extensions import final, override

from lightning_amp._files import write_atomically
from lightning_amp._plain_data import plain
from lightning_amp.advice import _page
from lightning_amp.advice._decision import Decision, decide
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._record import Recording, Step
from lightning_amp.advice.findings import Finding, all_findings, facts_of

_FORMAT = 1


@final
class DoctorReport:
    """The result of :func:`lightning_amp.doctor`: findings, worst first, and the measurements behind them.

    .. code-block:: python

        report = doctor()
        print(report)
        print([finding.code for finding in report.findings if finding.is_problem])
        report.to_json("doctor.json")

    Attributes:
        machine: The measurements of the machine.
        step: The measurements of a training step; `None` if only the machine was examined.
        precision: The precision that the report examines, as :class:`AmpPrecision` names it.

    """

    def __init__(self, machine: Machine, step: Step | None = None, precision: str | None = None) -> None:
        self.machine, self.step = machine, step
        self.precision = precision or (step.precision if step is not None else machine.precision)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, worst first; there is always one."""
        return all_findings(self.machine, self.decision, self.step)

    @cached_property
    def decision(self) -> Decision:
        """Return the recommended precision and its basis. Every finding agrees with it."""
        return decide(self.machine, self.precision, self.step)

    @property
    def has_problems(self) -> bool:
        """Return whether a finding is a warning or an error."""
        return any(finding.is_problem for finding in self.findings)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({[finding.code for finding in self.findings]})"

    @override
    def __str__(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        """Return the findings and the measurements as Markdown."""
        return _page.to_markdown(self.findings, self.machine, self.step)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the findings and all measurements to a path or a URL. NaN and infinities become texts."""
        data = plain(
            {
                "format": _FORMAT,
                "precision": self.precision,
                "decision": asdict(self.decision),
                "findings": [asdict(finding) for finding in self.findings],
                "machine": asdict(self.machine),
                "step": None if self.step is None else _measured(self.step),
            }
        )
        write_atomically(path, lambda file: file.write(json.dumps(data, indent=1, allow_nan=False)))


def _measured(step: Step) -> dict[str, object]:
    """Return the measurements of a step and the facts derived from them, without the individual operations."""
    own = asdict(replace(step, recorded=Recording(()), fp32_recorded=None))
    del own["recorded"], own["fp32_recorded"]
    recorded = step.recorded
    return {
        **own,
        "flops": recorded.flops,
        "module_flops": recorded.module_flops,
        "product_s": recorded.product_s,
        "recorded_s": recorded.seconds,
        "convolution_flops": recorded.convolution_flops,
        "channels_last": recorded.channels_last,
        **{name: _data(fact) for name, fact in facts_of(step).items()},
    }


def _data(fact: Any) -> Any:
    if isinstance(fact, tuple):
        return [_data(item) for item in fact]
    return asdict(fact) if is_dataclass(fact) and not isinstance(fact, type) else fact
