"""`many-casts`: casts between floating-point formats beyond autocast's own cast of each weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from typing_extensions import final

from lightning_amp._text import memory, percent
from lightning_amp.advice._record import Operation, Step
from lightning_amp.advice.findings._finding import Evidence, Finding, graded
from lightning_amp.measure import FORWARD

Kind = Literal["explicit", "weight again", "weight", "activation"]

_SLOWEST = 3.0
"""A cast counts as at most this multiple of a usual cast: on a busy machine, one call may take far longer."""
_MOST = 8
"""Number of places to keep for each kind of cast."""
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Torch functions that cast their weights anew for each time step."""
_CASTING = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}


@final
@dataclass(frozen=True)
class CastSite:
    """The casts between floating-point formats that one line, or one weight, causes.

    Attributes:
        kind: `"explicit"` (`.float()`, `.to(...)`, ...), `"weight again"` (a weight that was cast in this step before),
            `"weight"` (autocast's own cast) or `"activation"` (autocast's own cast).
        where: A line of code with its file, or a module.
        num_bytes: Bytes that all of these casts write in a step.
        seconds: Their time, without the part that a busy machine has added to single calls.

    """

    kind: Kind
    where: str
    count: int
    num_bytes: int
    seconds: float


def cast_sites(step: Step) -> tuple[CastSite, ...]:
    """Return the casts by place, the slowest place first."""
    cast_before: set[int] = set()
    sites: dict[tuple[Kind, str], list[Operation]] = {}
    casts = [operation for operation in step.recorded.of_the_module if operation.cast_bytes]
    for cast in casts:
        sites.setdefault(_site(cast, cast_before), []).append(cast)
        cast_before.add(cast.cast_of)
    per_call = median(cast.seconds for cast in casts) if casts else 0.0
    per_byte = median(cast.seconds / cast.cast_bytes for cast in casts) if casts else 0.0

    def seconds(cast: Operation) -> float:
        return min(cast.seconds, _SLOWEST * max(per_call, per_byte * cast.cast_bytes))

    found = [
        CastSite(kind, where, len(own), sum(o.cast_bytes for o in own), sum(map(seconds, own)))
        for (kind, where), own in sites.items()
    ]
    found.sort(key=lambda site: (-site.seconds, site.kind, site.where))
    kept, kinds = list[CastSite](), list[Kind](site.kind for site in found)
    for kind in dict.fromkeys(kinds):
        own = [site for site in found if site.kind == kind]
        kept.extend(own[:_MOST])
        if rest := own[_MOST:]:  # one entry for all other places, so that sums over the entries stay correct
            sums = (sum(s.count for s in rest), sum(s.num_bytes for s in rest), sum(s.seconds for s in rest))
            kept.append(CastSite(kind, f"{len(rest)} other places", *sums))
    return tuple(kept)


def _site(cast: Operation, cast_before: set[int]) -> tuple[Kind, str]:
    """Return the kind and the place of a cast, given the weights that were cast before it."""
    asked, is_forward = cast.asked.rpartition(".")[2], cast.part == FORWARD
    first = cast.cast_of and cast.cast_of not in cast_before  # autocast would have to cast this weight as well
    if not first and is_forward and asked in _CASTING and cast.place:
        return "explicit", str(cast.place)
    if cast.cast_of and is_forward:
        again = cast.cast_of in cast_before and asked not in _RECURRENT
        return "weight again" if again else "weight", cast.module
    return "activation", cast.module if is_forward else cast.part


def many_casts(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding if casts beyond autocast's own take 1 % of the operations' time, or there are six or more."""
    beyond = [site for site in cast_sites(evidence.step) if site.kind in ("explicit", "weight again")]
    count = sum(site.count for site in beyond)
    if not count:
        return
    share = sum(site.seconds for site in beyond) / max(evidence.step.recorded.seconds, 1e-12)
    if share < 0.01 and count < 6:
        return
    size = sum(site.num_bytes for site in beyond)
    worst = beyond[0]
    what = "casts of your own" if worst.kind == "explicit" else "casts of weights that were cast already"
    text = (
        f"{count} {what} in a step, beyond autocast's one per weight, write {memory(size)} and take {percent(share)} of"
        f" the time in operations; most at {worst.where or 'the module itself'}."
    )
    action = (
        "Take the casts out: autocast casts where an operation needs it, and leaves the format alone elsewhere."
        if worst.kind == "explicit"
        else "Call the module once on all rows instead of once per row, so that its weight is cast once."
    )
    yield Finding(graded(share, 0.1), "many-casts", text, action, share)
