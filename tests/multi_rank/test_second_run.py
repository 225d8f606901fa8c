"""Callbacks that run steps twice, on sharded modules: same bits, the same report on all ranks, the right numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import launch_once, shared_folder

SCRIPT = Path(__file__).parent / "second_run_scenarios.py"
Ranks = list[dict[str, Any]]
MODULES = (
    "Tied", "Llama", "Routed", "Normed", "Adapted", "Manual", "Teacher", "Keeper", "Checkpointed", "Compiled", "Uneven",
    "Branched",
)  # fmt: skip
SOME = ("Tied", "Keeper", "Manual", "Normed")
PAIRS = {
    2: [
        *(
            f"{module}-{layout}-{rest}"
            for layout in ("fsdp2", "fsdp1", "tp", "ddp")
            for module in MODULES
            for rest in ("fp16-troubled", "bf16")
            if (module, layout) != ("Teacher", "fsdp1")  # FSDP1 forbids to edit weights in a forward
        ),
        *(
            f"{module}-{rest}"
            for module in ("Tied", "Manual", "Keeper", "Routed", "Teacher", "Adapted")
            for rest in ("policy-bf16", "offload-bf16")
        ),
        *("StepsInHooks-fsdp2-bf16", "StepsInHooks-ddp-bf16"),
        *("accumulation-fsdp2-fp16-troubled", "accumulation-tp-bf16"),
        *("Tied-fsdp2-fp16", "Keeper-tp-fp16", "Normed-fsdp1-fp16"),
        *("Adversaries-fsdp2-fp16", "Follower-fsdp2-fp16", "Follower-policy-bf16", "ParallelLoss-tp-bf16"),
        *("Edited-fsdp1-bf16", "Edited-fsdp1 half-bf16", "Edited-fsdp2-fp16"),
        *("Tied-fsdp1 half-bf16", "Keeper-fsdp1 half-bf16"),
    ],
    4: [
        f"{module}-{layout}-{rest}"
        for module in SOME
        for layout in ("fsdp2 tp", "hsdp")
        for rest in ("fp16-troubled", "bf16")
    ],
}
QUICK = ["Tied-fsdp2-fp16-troubled", "Keeper-tp-fp16"]
HARMLESS = ["returned `None`", "auto_wrap"]
if torch.__version__ < "2.10":  # its garbage collection, pytorch#167564
    HARMLESS.append("Deallocating Tensor that still has live PyObject references")
ON_RANK_1 = "shard 1 of 2 in mesh dimension"
FAULTS: dict[int, dict[str, tuple[int, str, str, list[str]]]] = {
    2: {
        "data of rank 1": (1, "batch", "", ["batch[0]: 1 of ", "fix: the data"]),
        "data of rank 0": (0, "batch", "", ["batch[0]: 1 of ", "fix: the data"]),
        "data, tp": (0, "batch", "", ["batch[0]: 1 of ", "fix: the data"]),
        "shard of a weight": (1, "weights", f"{ON_RANK_1} `data_parallel`", ["`net.1.up.weight`", "checkpoint"]),
        "shard of a weight, policy": (1, "weights", f"{ON_RANK_1} `data_parallel`", ["`net.1.up.weight`"]),
        "shard of a weight, tp": (1, "weights", f"{ON_RANK_1} `tensor_parallel`", ["`net.1.up.weight`"]),
        "forward": (1, "forward", "", ["net.2: mul gave", "return (x + 2) * 6e4", 'AmpPrecision("bf16")']),
        "forward, fsdp1": (0, "forward", "", ["net.2: mul gave", "return (x + 2) * 6e4", 'AmpPrecision("bf16")']),
        "forward in a shard": (
            1, "forward", f"{ON_RANK_1} `tensor_parallel`", ["net.1.middle: mul gave", "return (x + 2) * 6e4"],
        ),
        "backward": (1, "backward", "", ["Infinite gave", "return gradient * torch.inf"]),
        "loss": (0, "loss", "", ["log gave", "return loss + torch.log("]),
        "buffer": (1, "weights", "", ["`net.2.factor`"]),
        "mask": (1, "forward", "", ["a row is masked entirely", "return torch.softmax(scores + mask", "unmasked"]),
        "root": (1, "backward", "", ["net.2: sqrt gave", "return x + torch.sqrt(", "an epsilon"]),
        "entropy": (1, "loss", "", ["cross_entropy gave", "loss = loss + F.cross_entropy(", 'AmpPrecision("bf16")']),
        "loss scale": (0, "backward", "", ["gave a true gradient of"]),
        "loss, and the scale of another rank": (1, "loss", "", ["div gave", "return loss + part / (part * 0)"]),
        "detached loss, and the scale of another rank": (1, "loss", "", ["div gave", "return loss + part / (part"]),
        **{
            f"gathered {what}": (1, "loss", "", ["log gave", code])
            for what, code in {
                "rows": "rows = torch.log(", "rows, ddp": "rows = torch.log(",
                "gradients": "return loss + torch.log(", "gradients, ddp": "return loss + torch.log(",
            }.items()
        },
    },
    4: {
        "data": (2, "batch", "", ["batch[0]: 1 of "]),  # of the second replica, whose first rank is 2
        "forward in a shard": (3, "forward", f"{ON_RANK_1} `tensor_parallel`", ["net.1.middle: mul gave"]),
        "shard of a weight": (3, "weights", f"{ON_RANK_1} `tensor_parallel`", ["`net.1.up.weight`"]),
        "shard of a weight, hsdp": (3, "weights", f"{ON_RANK_1} `shard`", ["`net.1.up.weight`"]),
    },
}  # fmt: skip
QUICK_FAULTS = ["shard of a weight", "gathered gradients"]
NUMBERS = {
    2: [
        *(f"{lay}, {p}" for lay in ("fsdp2", "tp", "fsdp1", "ddp") for p in ("fp16", "bf16")),
        *("policy, bf16", "fsdp1 half, bf16"),
    ],
    4: ["fsdp2 tp, fp16", "hsdp, fp16"],
}
QUICK_NUMBERS = ["fsdp2, fp16"]
SCENARIOS = {
    size: [*PAIRS[size], *(f"fault, {name}" for name in FAULTS[size]), *(f"numbers, {name}" for name in NUMBERS[size])]
    for size in (2, 4)
}
SCENARIOS[2] += [
    "fault, validation",
    "fault, validation, tp",
    "fault, validation, swapped",
    "accumulation-fsdp1-fp16-troubled",
]
QUICK_SCENARIOS = [
    *QUICK, *(f"fault, {name}" for name in QUICK_FAULTS), "fault, validation",
    *(f"numbers, {name}" for name in QUICK_NUMBERS),
]  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch_once(SCRIPT, 2, shared_folder(tmp_path_factory, "second-run"), *QUICK_SCENARIOS)


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Return a function that returns the results of one scenario, from a launch of a part of them."""

    def results(size: int, name: str) -> Ranks:
        if size == 2 and name in QUICK_SCENARIOS:
            return [rank[name] for rank in request.getfixturevalue("quick")]
        names = [one for one in SCENARIOS[size] if size == 4 or one not in QUICK_SCENARIOS]
        count = 24 // size
        part = names.index(name) // count
        folder = shared_folder(tmp_path_factory, f"second-run-{size}-{part}")
        ranks = launch_once(SCRIPT, size, folder, *names[count * part : count * (part + 1)])
        return [rank[name] for rank in ranks]

    return results


def cases(every: dict[int, Any], quick: list[str]) -> list[Any]:
    return [
        pytest.param(size, name, marks=() if size == 2 and name in quick else pytest.mark.slow)
        for size, names in every.items()
        for name in names
    ]


@pytest.mark.parametrize(("size", "name"), cases(PAIRS, QUICK))
def test_training_ends_with_the_same_bits_and_healthy_runs_are_quiet(size: int, name: str, ranks_of: Any) -> None:
    ranks = ranks_of(size, name)
    for rank in ranks:
        assert rank["differs"] == []
        assert rank["compared_values"] > 200
        assert rank["reports"] == ranks[0]["reports"]
        assert [said for said in rank["said"] if not any(words in said for words in HARMLESS)] == []
        assert rank["compared"]
        assert rank["gradients"]
        assert rank["metric"] == ""
    layout = name.split("-")[1]
    if not name.endswith("troubled") and "accumulation" not in name:
        assert ranks[0]["reports"] == []
        return
    replicas = size // 2 if "tp" in layout else size
    # ranks that are tensor parallel have the same batch; the first of them is named
    width = size // replicas
    expected = {(replica * width, cause) for replica, cause in enumerate(["backward", "loss"][:replicas])}
    found = {(rank, cause) for rank, cause, _ in ranks[0]["where"]}
    if name.startswith("Manual"):  # its second optimizer also has the infinite gradients of the batch before
        found.discard((0, "not reproduced"))
    assert found == expected


@pytest.mark.slow
def test_fsdp1_says_on_all_ranks_that_it_cannot_compare_within_an_accumulation_and_compares_later(
    ranks_of: Any,
) -> None:
    for rank in ranks_of(2, "accumulation-fsdp1-fp16-troubled"):
        assert rank["differs"] == []
        (said,) = rank["said"]
        assert "FSDP1 keeps the gradients of an accumulation in a form that cannot be set aside" in said
        assert "the next comparison tries again" in said
        assert {row[2] for row in rank["compared"]} == {"val_loss"}


@pytest.mark.parametrize(("size", "name"), cases(FAULTS, QUICK_FAULTS))
def test_a_fault_is_named_with_rank_and_line_by_the_same_words_on_all_ranks(
    size: int, name: str, ranks_of: Any
) -> None:
    rank, cause, shard, words = FAULTS[size][name]
    ranks = ranks_of(size, f"fault, {name}")
    first = ranks[0]
    assert first["where"][0][:2] == (rank, cause)
    assert shard in first["where"][0][2]
    assert bool(shard) == bool(first["where"][0][2])
    assert f"rank {rank}" in first["reports"][0]
    for text in [*words, shard]:
        assert text in first["reports"][0]
    assert {cause for _, cause, _ in first["where"]} == {cause}
    if name != "loss scale":  # which is too high on all ranks
        assert {rank for rank, _, _ in first["where"]} == {rank}
    for other in ranks[1:]:
        assert other["reports"] == first["reports"]


@pytest.mark.parametrize("name", ["fault, validation", pytest.param("fault, validation, tp", marks=pytest.mark.slow)])
def test_a_fault_in_validation_alone_is_named_with_module_and_remedy(name: str, ranks_of: Any) -> None:
    ranks = ranks_of(2, name)
    for rank in ranks:
        assert rank["reports"] == []
        assert rank["metric"] == ranks[0]["metric"]
        for text in ("`net.2` (Amplify): its output is not finite in fp16", "(tried: works)"):
            assert text in rank["metric"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("shard of a weight", "net.1.up.weight"),
        ("shard of a weight, tp", "net.1.up.weight"),
        ("buffer", "net.2.factor"),
    ],
)
def test_a_bad_shard_or_buffer_in_validation_is_named(name: str, where: str, ranks_of: Any) -> None:
    for rank in ranks_of(2, f"fault, {name}"):
        assert rank["metric"] == ""
        assert all("values that are not finite: " in said and f"`{where}`" in said for said in rank["said"])


@pytest.mark.slow
def test_no_cause_is_searched_with_other_weights_than_those_of_the_validation(ranks_of: Any) -> None:
    for rank in ranks_of(2, "fault, validation, swapped"):
        assert rank["metric"] == ""
        assert all("no module explains it in the first batches of the evaluation" in said for said in rank["said"])


@pytest.mark.parametrize(("size", "name"), cases(NUMBERS, QUICK_NUMBERS))
def test_metrics_in_fp32_equal_one_process_with_the_same_weights(size: int, name: str, ranks_of: Any) -> None:
    ranks = ranks_of(size, f"numbers, {name}")
    for rank in ranks:
        for metric, value in ranks[0]["single"]["fp32"].items():
            assert rank["fp32"][metric] == pytest.approx(value, rel=1e-6)
            assert rank["amp"][metric] != pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("size", "name"), cases(NUMBERS, QUICK_NUMBERS))
def test_figures_of_gradients_are_those_of_gathered_gradients(size: int, name: str, ranks_of: Any) -> None:
    """The reference runs the same sharded step by hand, and gathers its gradients."""
    for rank in ranks_of(size, f"numbers, {name}"):
        rows = {row: dict(zip(COLUMNS, values, strict=False)) for row, values in rank["gradients"].items()}
        assert bool(rank["by_hand"]) == (name.split(",", maxsplit=1)[0] in ("fsdp2", "tp", "fsdp2 tp", "hsdp"))
        for row, (num_values, sqnr_db, largest) in rank["by_hand"].items():
            assert rows[row]["num_values"] == num_values, row
            assert rows[row]["sqnr_db"] == pytest.approx(sqnr_db, abs=0.1), row
            if row != "(all)":  # which also has the gradients of outputs
                assert rows[row]["largest"] == pytest.approx(largest, rel=1e-3), row


@pytest.mark.parametrize(("size", "name"), cases(NUMBERS, QUICK_NUMBERS))
def test_figures_of_gradients_agree_with_one_process_and_the_whole_batch(size: int, name: str, ranks_of: Any) -> None:
    """True gradients are the same. The noise differs, because partial sums over ranks are rounded to half precision."""
    ranks = ranks_of(size, f"numbers, {name}")
    single = ranks[0]["single"]["gradients"]
    for rank in ranks:
        found = rank["gradients"]
        assert found == ranks[0]["gradients"]
        assert found.keys() == single.keys()
        for row, expected in single.items():
            values, wanted = dict(zip(COLUMNS, found[row], strict=False)), dict(zip(COLUMNS, expected, strict=False))
            if row == "(all)":
                assert values["sqnr_db"] == pytest.approx(wanted["sqnr_db"], abs=2.5)
            if not name.startswith("ddp"):  # its ranks examine their gradients before these are averaged
                assert values["num_values"] == wanted["num_values"], row
                if row != "(all)":  # the gradients of outputs are those of a rank's own batch
                    assert values["largest"] == pytest.approx(wanted["largest"], rel=1e-3), row


COLUMNS = ["step", "name", "scale", "num_values", "underflow", "subnormal", "headroom", "sqnr_db", "cosine", "largest"]
