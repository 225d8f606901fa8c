"""A bucket behind a URL that fails on demand, as S3 does."""

from __future__ import annotations

from typing import Any, ClassVar

from fsspec import AbstractFileSystem, register_implementation
from fsspec.spec import AbstractBufferedFile
from typing_extensions import override


class Bucket(AbstractFileSystem):
    """A store of whole objects at `test-bucket://`, which can fail like S3.

    A file written through `open` becomes an object when it is closed, even if only half of it was written. There are no
    folders: making one would make a bucket. An upload can fail with an error of the driver's own.
    """

    protocol = "test-bucket"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    failure: ClassVar[BaseException | None] = None

    @override
    def put_file(self, lpath: Any, rpath: str, **kwargs: Any) -> None:
        with open(lpath, "rb") as file:
            value = file.read()
        if self.failure is not None:
            raise self.failure
        self.objects[self._strip_protocol(rpath)] = value

    @override
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError(f"somebody pays for the bucket {path}")

    @override
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if (key := self._strip_protocol(path)) not in self.objects:
            raise FileNotFoundError(path)
        return {"name": key, "size": len(self.objects[key]), "type": "file"}

    @override
    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> AbstractBufferedFile:
        return Object(self, path, mode)


class Object(AbstractBufferedFile):
    @override
    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            Bucket.objects[self.path] = self.buffer.getvalue()
        return True

    @override
    def _fetch_range(self, start: int, end: int) -> bytes:
        return Bucket.objects[self.path][start:end]


register_implementation(Bucket.protocol, Bucket)
