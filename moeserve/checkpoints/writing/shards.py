"""Writes safetensors files a piece at a time: `ShardFile` holds no more than one piece in memory.

The header comes first and tells where every tensor is, so tensors may be written in any order. Wider dtypes
are placed first, as in the library, so that each tensor is aligned (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedRandom
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from moeserve.checkpoints.store import DTYPES, LENGTH_BYTES

PARTIAL = ".part"
"""Suffix of the name of a file that is not whole yet."""

ALIGNMENT = 8
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Declared:
    """The dtype and shape of a tensor, as a safetensors header declares them."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """The size and digest of a file that is whole and on disk."""

    nbytes: int
    sha256: str


class ShardFile:
    """Writes the file `path`, which gets its name only once all `declared` tensors are in it.

    It is a context manager: without an error it checks, syncs and renames the file at the end; with an error
    it removes the partial file.
    """

    def __init__(self, path: Path, declared: Mapping[str, Declared]) -> None:
        self.path = path
        self.written: Written | None = None
        self._declared = declared
        order = sorted(declared, key=lambda name: (-declared[name].dtype.itemsize, name))
        self._partial = path.with_name(path.name + PARTIAL)
        self._file: BufferedRandom = self._partial.open("w+b")
        self._next = self._write_header(order)

    def _write_header(self, order: list[str]) -> dict[str, int]:
        """Writes the header; returns the place in the file where each tensor begins."""
        fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, offset = {}, 0
        for name in order:
            tensor = self._declared[name]
            stop = offset + tensor.nbytes
            fields[name] = {
                "dtype": CODES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": [offset, stop],
            }
            starts[name], offset = offset, stop
        raw = json.dumps(fields, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % ALIGNMENT)
        self._file.write(len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
        first = LENGTH_BYTES + len(raw)
        self._file.truncate(first + offset)
        self._stops = {name: first + start + self._declared[name].nbytes for name, start in starts.items()}
        return {name: first + start for name, start in starts.items()}

    def write(self, name: str, piece: Tensor) -> None:
        """Appends `piece` to the tensor `name`. Raises ValueError for another dtype or too many elements."""
        declared, start = self._declared[name], self._next[name]
        if piece.dtype != declared.dtype or start + piece.nbytes > self._stops[name]:
            found = f"{piece.dtype} {list(piece.shape)}"
            raise ValueError(f"{found} does not fit into {name}, {declared.dtype} {list(declared.shape)}")
        self._file.seek(start)
        self._file.write(piece.contiguous().flatten().view(torch.uint8).numpy().data)
        self._next[name] = start + piece.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            if self.written is None:
                self._partial.unlink()

    def _finish(self) -> None:
        lacking = [name for name, place in self._next.items() if place != self._stops[name]]
        if lacking:
            raise ValueError(
                f"{self.path} is not whole: {len(lacking)} tensors lack elements, as {lacking[0]}"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        self._partial.rename(self.path)
        self.written = Written(self.path.stat().st_size, digest)


def digest(path: Path) -> Written:
    """Reads the file `path` and returns its size and digest."""
    with path.open("rb") as stream:
        return Written(path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def write_whole(path: Path, content: str) -> None:
    """Writes a text file under another name and renames it, so that it is never there in part."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)
