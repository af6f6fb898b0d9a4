"""Reads tensors of a checkpoint by name: `TensorStore`, over memory maps of its safetensors files.

Headers are parsed and checked first, so that a damaged file is named before anything is read from it. Bytes
of a tensor are then touched only where a slice asks for them (format:
https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeserve.checkpoints.read_ahead import Span, read_ahead
from moeserve.proto.texts import clipped

INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"  # how a file begins that stands for one that was not fetched
LENGTH_BYTES = 8  # little-endian length of the JSON header that follows

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""dtypes by their codes in a safetensors header; tensors that are read have one of these."""


SAMPLES, SAMPLE_BYTES = 256, 4096
"""Of the tensors that a mark is made of, at least, and the bytes that are read of each."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be served as it is; the message names the file, tensor or config key.

    What a file says is repeated in it as far as a person reads: a name there may have megabytes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(clipped(message))


class NotThere(CheckpointError):
    """A checkpoint that is not where it was looked for; it may come, with a disk or a download."""


ODD_VALUES = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What it raises to use a value of a file that is of another kind than expected."""


@contextmanager
def values_of(file: Path) -> Iterator[None]:
    """A context in which an error over a value of `file` is a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except ODD_VALUES as error:
        said = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} has a value of another kind than expected ({said})") from error


@dataclass(frozen=True)
class Entry:
    """The dtype, shape and place of one tensor, as its file's header declares them."""

    file: Path
    dtype: str  # a key of DTYPES, or an element type that is not supported
    shape: tuple[int, ...]
    nbytes: int
    start: int = 0  # of its bytes in the file


class TensorStore:
    """Every tensor of a checkpoint directory, from one safetensors file or from the shards of an index.

    Raises CheckpointError for a missing file, a shard that is missing or truncated, a malformed header, and a
    tensor that is in two shards or not in the shard that the index names.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        self.bytes_read = 0
        self._mapped: dict[Path, Any] = {}
        self._descriptors: dict[Path, int] = {}  # kept: what a path names may change
        self._marked: tuple[object, str] = None, ""  # the last mark, and of which names and files it is
        weakref.finalize(self, _close, self._descriptors)
        index = directory / INDEX
        placed = _weight_map(index) if index.is_file() else {}
        files = sorted(set(placed.values())) or sorted(path.name for path in directory.glob("*.safetensors"))
        if not files:
            raise NotThere(f"{directory} has no *.safetensors file and no {INDEX}")
        for file in files:
            self._add(directory / file)
        for name, file in placed.items():
            if name not in self.entries or self.entries[name].file.name != file:
                raise CheckpointError(f"{index} places tensor {name} in {file}, which does not hold it")

    def _add(self, file: Path) -> None:
        for name, entry in _header(file):
            if name in self.entries:
                other = self.entries[name].file
                places = f"{other.name} and {file.name}" if other != file else f"the header of {file.name}"
                raise CheckpointError(f"duplicate tensor {name}: it stands twice, in {places}")
            self.entries[name] = entry

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def read(self, name: str, *index: slice | int) -> Tensor:
        """Returns `name[index]` in the file's dtype: a view of the memory map, to be copied if it is kept."""
        entry = self.entries[name]
        try:
            found: Tensor = self._map(entry.file).get_slice(name)[index or ...]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read tensor {name} from {entry.file}: {error}") from error
        self.bytes_read += found.nbytes
        return found

    def mark(self, names: tuple[str, ...]) -> str:
        """What tells the tensors called so from others: a digest of their dtypes, shapes and of a sample of
        their bytes. Equal ones have one mark wherever they lie.

        It is of what `read` finds, and made anew once a file was written to. Raises CheckpointError for one
        that cannot be read.
        """
        try:
            files = {self.entries[name].file: 0 for name in names}
            files = {file: self._descriptor(file) for file in files}
            written = tuple((of.st_size, of.st_mtime_ns) for of in map(os.fstat, files.values()))
            before, mark = self._marked
            if before != (names, written):
                mark = self._mark(names, files)
                self._marked = (names, written), mark
            return mark
        except OSError as error:
            raise CheckpointError(
                f"cannot read {error.filename or self.directory}: {error.strerror}"
            ) from error

    def _mark(self, names: tuple[str, ...], descriptors: Mapping[Path, int]) -> str:
        found, each = hashlib.sha256(), -(-SAMPLES // max(1, len(names)))
        for name in names:
            entry = self.entries[name]
            found.update(repr((name, entry.dtype, entry.shape)).encode(errors="surrogatepass"))
            for sample in range(each):
                at = entry.start + max(0, entry.nbytes - SAMPLE_BYTES) * (2 * sample + 1) // (2 * each)
                end = min(at + SAMPLE_BYTES, entry.start + entry.nbytes)
                found.update(os.pread(descriptors[entry.file], end - at, at))
        return found.hexdigest()[:32]

    def unmap(self) -> None:
        """Lets go of all maps, from any thread; what is read later is mapped again, from the same files.

        Pages that were read stay in the system's cache. A process with maps takes 20 ms a GB longer to end.
        """
        self._mapped = {}

    def read_ahead(self, spans: Iterable[Span]) -> int:
        """Asks the system for bytes of the files, as `read_ahead` does. Raises CheckpointError."""
        return read_ahead(spans, self._descriptor)

    def _descriptor(self, file: Path) -> int:
        """A file, open for as long as this is there. Raises CheckpointError where it is gone and was not
        opened before.
        """
        if file not in self._descriptors:
            try:
                with opened(file) as stream:
                    ours = os.dup(stream.fileno())
            except OSError as error:
                raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
            if self._descriptors.setdefault(file, ours) != ours:
                os.close(ours)  # another thread was first
        return self._descriptors[file]

    def _map(self, file: Path) -> Any:
        mapped, found = self._mapped, self._mapped.get(file)
        if found is None:
            found = mapped[file] = safe_open(f"/proc/self/fd/{self._descriptor(file)}", framework="pt")
        return found


def _close(descriptors: dict[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _weight_map(index: Path) -> dict[str, str]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index} needs a weight_map of tensor names to files")
    for name, file in placed.items():
        if not isinstance(file, str) or file in ("", ".", "..") or {"/", "\0"} & set(file):
            raise CheckpointError(f"{index} places tensor {name} in {file!r}, which names no file beside it")
    for file in set(placed.values()):
        if not is_file(index.parent / file):
            lost = [name for name, place in placed.items() if place == file]
            raise CheckpointError(
                f"shard {index.parent / file} is missing; {len(lost)} tensors, as {lost[0]}"
            )
    return placed


def _header(file: Path) -> Iterator[tuple[str, Entry]]:
    """Returns the tensors that `file` declares, after checking that the file is as long as they need."""
    try:
        check_fetched(file)
    except OSError as error:  # as a link of a hub cache whose blob is gone
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
            raise CheckpointError(
                f"{file} is truncated: {size} bytes do not hold its header of {length} bytes"
            )
        raw = stream.read(length)
    try:
        pairs = json.loads(raw, object_pairs_hook=tuple)  # a dict would keep one of two equal names
        if not isinstance(pairs, tuple):
            raise TypeError(f"it is no JSON object but a {type(pairs).__name__}")
        declared = [(name, dict(fields)) for name, fields in pairs if name != "__metadata__"]
        entries = [(name, _entry(file, fields, LENGTH_BYTES + length)) for name, fields in declared]
    except (ValueError, *ODD_VALUES) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file: its header cannot be read ({error})"
        ) from error
    end = max((entry.start + entry.nbytes for _, entry in entries), default=LENGTH_BYTES + length)
    if size < end:
        raise CheckpointError(f"{file} is truncated: its header declares {end} bytes, found {size}")
    for name, entry in entries:
        width = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
        if width is not None and prod(entry.shape) * width != entry.nbytes:
            expected = f"{entry.dtype} {list(entry.shape)}, {prod(entry.shape) * width} bytes"
            raise CheckpointError(
                f"tensor {name} of {file} is declared {expected}, but has {entry.nbytes} bytes"
            )
        yield name, entry
    _check_whole(file, entries, LENGTH_BYTES + length, size)


def _entry(file: Path, fields: Mapping[str, Any], before: int) -> Entry:
    """Returns the place of a tensor whose data begin `before` the offsets. Raises ValueError."""
    offsets, shape = _counts(fields["data_offsets"], "data_offsets"), _counts(fields["shape"], "shape")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets={offsets} are no begin and end")
    return Entry(file, str(fields["dtype"]), tuple(shape), offsets[1] - offsets[0], before + offsets[0])


def _counts(found: object, name: str) -> list[int]:
    if not isinstance(found, list) or not all(type(entry) is int and entry >= 0 for entry in found):
        raise ValueError(f"{name}={found!r} must be a list of whole numbers that are not negative")
    return found


def _check_whole(file: Path, entries: list[tuple[str, Entry]], first: int, size: int) -> None:
    """Raises CheckpointError unless tensors fill the file from `first` to its end."""
    end, before = first, "the header"
    for name, entry in sorted(entries, key=lambda pair: (pair[1].start, pair[1].nbytes)):
        if entry.start != end:
            kind = "overlaps" if entry.start < end else "leaves a gap after"
            raise CheckpointError(
                f"{file} is damaged: tensor {name} begins at byte {entry.start} and {kind} {before}, "
                f"which ends at {end}"
            )
        end, before = end + entry.nbytes, f"tensor {name}"
    if end != size:
        raise CheckpointError(f"{file} is damaged: {size - end} bytes follow its last tensor")


def opened(file: Path) -> BinaryIO:
    """Opens a file of a checkpoint to be read; never waits, as opening a pipe would.

    Raises CheckpointError for anything but a file (a pipe, socket, device or folder), OSError for one that is
    not there.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{file} is no file but a pipe, socket, device or folder")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_fetched(file: Path) -> None:
    """Raises CheckpointError where `file` is a Git LFS pointer, a few lines of text in place of the file."""
    with opened(file) as stream:
        text = stream.read(1024)
    if text.startswith(LFS_POINTER):
        sizes = [line.split()[-1].decode() for line in text.splitlines() if line.startswith(b"size ")]
        whole = f" of {sizes[0]} bytes" if sizes else ""
        raise CheckpointError(
            f"{file} is a Git LFS pointer, not the file{whole} that it stands for: "
            f"run `git lfs pull` in {file.parent}"
        )


def is_file(path: Path) -> bool:
    """Whether there is such a file; none has a name that is too long, or that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object from `file`. Raises CheckpointError if it is missing or holds anything else."""
    try:
        check_fetched(file)
        with opened(file) as stream:
            found = json.loads(stream.read().decode())
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object, found {type(found).__name__}")
    return found
