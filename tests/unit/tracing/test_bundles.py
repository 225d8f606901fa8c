"""Bundles hold any batch, and a bundle that cannot be loaded is refused with the reason."""

from __future__ import annotations

import random
import sys
from collections import UserDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_amp._files import write_atomically
from lightning_amp.tracing._bundles import copy_to, load_bundle

WHOLE: dict[str, Any] = {
    "format": 1, "module_state": {}, "batch": None, "batch_idx": 0, "random_state": {}, "scale": 1.0, "loss_divisor": 1,
}  # fmt: skip


def save(batch: Any, path: Any, **options: Any) -> None:
    torch.save({**WHOLE, "batch": batch}, path, **options)


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str = "a"

    def __getitem__(self, key: str) -> Tensor:
        return getattr(self, key)


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping that moves itself in place, like `transformers.BatchEncoding`."""

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.items()}
        return self


class Moves:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> Moves:
        return Moves(self.x.to(device))

    def __getitem__(self, key: str) -> Tensor:
        return getattr(self, key)


REFUSED = {
    "dataclass": (Sample, "Sample"),
    "numpy array": (lambda x: {"x": x, "ids": np.arange(3)}, "numpy"),
    "numpy scalar": (lambda x: {"x": x, "id": np.int64(3)}, "numpy"),
    "BatchEncoding": (lambda x: Encoding({"x": x}), "Encoding"),
    "defaultdict": (lambda x: defaultdict(list, {"x": x}), "collections.defaultdict"),
    "a class": (Moves, "Moves"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_batch_that_weights_only_refuses(kind: str, tmp_path: Path) -> None:
    """The error names the class in the file and the argument that allows it; the argument works."""
    make, name = REFUSED[kind]
    batch = make(torch.randn(3, 4))
    save(batch, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=rf"{name}.*If you trust it, pass `weights_only=False` to `replay`") as caught:
        load_bundle(tmp_path / "a.pt", weights_only=True)
    assert len(str(caught.value).splitlines()) == 1
    loaded = load_bundle(tmp_path / "a.pt", weights_only=False)["batch"]
    assert type(loaded) is type(batch)
    assert torch.equal(loaded["x"], batch["x"])


def test_a_bundle_at_a_url(tmp_path: Path, folder_url: str) -> None:
    url = f"{folder_url}/a.pt"
    write_atomically(url, lambda file: save(torch.ones(3), file), mode="binary")
    assert torch.equal(load_bundle(url, weights_only=True)["batch"], torch.ones(3))
    write_atomically(url, lambda file: save(Sample(torch.ones(3)), file), mode="binary")
    with pytest.raises(ValueError, match=rf"`{url}` holds more than tensors .*Sample.* pass `weights_only=False`"):
        load_bundle(url, weights_only=True)
    with pytest.raises(FileNotFoundError):
        load_bundle(f"{folder_url}/missing.pt", weights_only=True)
    with pytest.raises(ValueError, match="`bundle` must be a path or a URL of fsspec"):
        load_bundle("no-such://a.pt", weights_only=True)


@pytest.mark.parametrize("make", [Sample, Moves, lambda x: Encoding({"x": x}), lambda x: defaultdict(list, {"x": x})])
def test_such_a_batch_goes_to_the_device(make: Any) -> None:
    batch = make(torch.randn(3, 4))
    moved = copy_to(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert moved["x"].device.type == "meta"
    assert batch["x"].device.type == "cpu"


def test_tensors_are_copied() -> None:
    x = torch.ones(2, requires_grad=True)
    copy = copy_to({"x": x, "again": [x * 1], "name": "a"}, torch.device("cpu"))
    assert copy["x"].data_ptr() != x.data_ptr()
    assert not copy["x"].requires_grad
    assert copy["again"][0].grad_fn is None


def test_a_class_that_is_not_there_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Sample(torch.randn(3, 4)), tmp_path / "a.pt")
    monkeypatch.delattr(sys.modules[__name__], "Sample")
    with pytest.raises(ValueError, match=r"cannot be found here \(.*Sample.*\). Call `replay` where the class"):
        load_bundle(tmp_path / "a.pt", weights_only=False)


@pytest.mark.parametrize("weights_only", [True, False])
def test_what_is_no_bundle_is_not_advised_to_be_trusted(weights_only: bool, tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="This is not a bundle .* it is a `list`"):
        load_bundle(tmp_path / "list.pt", weights_only)
    (tmp_path / "text.pt").write_text("nothing")
    with pytest.raises(ValueError, match=r"This is not a bundle .*text.pt` cannot be loaded"):
        load_bundle(tmp_path / "text.pt", weights_only)
    with pytest.raises(FileNotFoundError):
        load_bundle(tmp_path / "missing.pt", weights_only)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_file(zipped: bool, weights_only: bool, tmp_path: Path) -> None:
    """A file cut anywhere, or with flipped bytes, raises one error that names it."""
    path = tmp_path / "a.pt"
    save(torch.ones(3), path, _use_new_zipfile_serialization=zipped)
    whole, draw, errors = path.read_bytes(), random.Random(0), list[str]()
    flipped = [bytearray(whole) for _ in range(40 * weights_only)]  # a pickle that is not checked could do anything
    for one in flipped:
        for _ in range(3):
            one[draw.randrange(len(one))] = draw.randrange(256)
    cut = [whole[:end] for end in range(0, len(whole), max(1, len(whole) // 20))]
    for data in [b"", b"\x80", b"\x80\x02.", *cut, *flipped]:
        path.write_bytes(data)
        try:
            load_bundle(path, weights_only)
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) >= len(cut) + 3
    assert all(len(text.splitlines()) == 1 for text in errors)
    assert all("This is not a bundle" in text or "The bundle is damaged" in text for text in errors)


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "format"])
def test_an_entry_is_missing_or_of_another_type(name: str) -> None:
    assert load_bundle(WHOLE, weights_only=True) == WHOLE
    with pytest.raises(ValueError, match=f"The bundle is damaged: it has no entry `{name}`."):
        load_bundle({key: value for key, value in WHOLE.items() if key != name}, weights_only=True)
    if name != "batch":
        with pytest.raises(ValueError, match=f"The bundle is damaged: its entry `{name}` is a `list`."):
            load_bundle({**WHOLE, name: []}, weights_only=True)


def test_a_later_format() -> None:
    with pytest.raises(ValueError, match=r"or one of a later version: it has \['format'\]"):
        load_bundle({"format": 2}, weights_only=True)
