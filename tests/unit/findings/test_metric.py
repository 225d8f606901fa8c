"""The text of a report. `tests/promises/test_evaluation_diseases.py` has reports of real faults."""

from __future__ import annotations

import json
import math
from typing import Any

from lightning_amp.findings import EvaluationReport, TriedRemedy


def report(**values: Any) -> EvaluationReport:
    return EvaluationReport("val_loss", 1.6543, 0.173, **values)


def test_a_module() -> None:
    failed, works = TriedRemedy("fp32_modules=['a']", 1.6, False), TriedRemedy("fp32_modules=['a', 'b']", 0.1731, True)
    text = str(
        report(
            cause="module", module="a", module_class="Rotary", input_sqnr_db=51.2, output_sqnr_db=8.4, batch_idx=3,
            batch_amp=1.5, batch_fp32=0.15, operation="cos", place="net.py:3 \"x.cos()\"", tried=(failed, works),
        )
    )  # fmt: skip
    assert text.splitlines() == [
        "`val_loss` is 1.65 in AMP and 0.173 in fp32 (epoch 0)",
        "  first seen: batch 3: AMP 1.5, fp32 0.15",
        "  cause: the output of `a` (Rotary) is wrong: it has 8 dB of SQNR against fp32, and its input has 51",
        '  operation: `cos`, net.py:3 "x.cos()"',
        "  tried: `fp32_modules=['a']` alone does not help; `fp32_modules=['a', 'b']` works: 0.173 on this batch",
    ]


def test_what_is_so_in_fp32_too_suggests_no_precision() -> None:
    for cause in ("batch", "weights", "module", "operation"):
        text = str(report(cause=cause, in_fp32_too=True, names=("1 in `batch['x']`",), module="a", module_class="B"))
        assert "no precision can help" in text
        assert "fp32_modules" not in text
        assert "eval_precision" not in text
    assert "look for a row that is masked entirely" in str(
        report(cause="module", in_fp32_too=True, operation="softmax")
    )


def test_loader_and_rank() -> None:
    text = str(report(loader_idx=1, batch_idx=2, rank=3, world_size=4, batch_amp=math.nan, batch_fp32=1.0))
    assert "first seen: batch 2 of loader 1, rank 3: AMP nan, fp32 1" in text
    assert "cause: not found" in text


def test_exact_inputs_and_infinite_outputs() -> None:
    exact = report(cause="module", module="a", module_class="B", output_sqnr_db=3.0)
    assert "its input is exact" in str(exact)
    assert "is not finite, although its input is" in str(report(cause="operation", operation="pow"))


def test_what_adds_up() -> None:
    tried = (TriedRemedy("float32", 0.5, True),)
    text = str(report(cause="state", names=("`count` (bfloat16) is 256, in fp32 600",), tried=tried))
    assert "adds up over the batches in half precision: `count` (bfloat16) is 256, in fp32 600" in text
    assert "tried: in float32 it works: 0.5 over the same batches" in text


def test_plain_types() -> None:
    values = report(tried=(TriedRemedy("a", 1.0, True),)).as_dict()
    assert json.loads(json.dumps(values))["tried"] == [{"setting": "a", "value": 1.0, "works": True}]
