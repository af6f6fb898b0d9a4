"""Writes a checkpoint with its experts in another format: `Rewrite`, which can be interrupted and continued.

Files are written one after another. A file gets its name when it is whole, and a record beside the files
lists those that are. The index and config.json come last, so a folder that opens is complete.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from moeserve import __version__
from moeserve.checkpoints.checkpoint import QUANTIZATION_FILES, Checkpoint
from moeserve.checkpoints.store import INDEX, read_json
from moeserve.checkpoints.writing.plan import RewritePlan, Shard, plan_of
from moeserve.checkpoints.writing.record import RECORD, RewriteRecord, fingerprint, load
from moeserve.checkpoints.writing.shards import PARTIAL, ShardFile, Written, digest, write_whole
from moeserve.checkpoints.writing.targets import Target

CONFIG = "config.json"
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "expert_dtype")
WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", PARTIAL)
NOT_COPIED = (CONFIG, RECORD, *QUANTIZATION_FILES)
TEMPLATES = "additional_chat_templates"  # the one folder that transformers reads beside the weights

Progress = Callable[[int], None]
"""Called with the number of bytes that were written since the last call."""


@dataclass(frozen=True)
class Done:
    """The outcome of one run."""

    nbytes: int  # of all tensors of the new checkpoint
    written: tuple[str, ...]  # names of the shards that this run wrote
    kept: tuple[str, ...]  # names of the shards that an earlier run wrote
    broken: tuple[str, ...]  # those of `written` that were there with other bytes than recorded


@dataclass(frozen=True)
class Rewrite:
    """Writes `source` into the folder `destination`, with its experts as `target`, in files of `shard_bytes`.

    `shard_bytes` is about the size of a file. The plan is made and checked at its first use, which raises
    CheckpointError as `plan_of` does.
    """

    source: Checkpoint
    destination: Path
    target: Target
    shard_bytes: int

    @cached_property
    def plan(self) -> RewritePlan:
        """The plan of which tensors go into which files."""
        return plan_of(self.source, self.target, self.shard_bytes)

    def run(self, progress: Progress) -> Done:
        """Writes the files that are not there yet.

        Raises ValueError for a destination that holds other files or that another run is writing, and OSError
        for a full disk; files that are whole by then are kept.
        """
        self.plan  # noqa: B018 - whatever is wrong with the source is said before anything is written
        self._check_folder()
        self.destination.mkdir(parents=True, exist_ok=True)
        with _alone_in(self.destination):
            record, broken = self._begun(progress)
            todo = [shard for shard in self.plan.shards if shard.name not in record.shards]
            kept = tuple(record.shards)
            if todo:
                self._unfinish(record)
                self._check_space(sum(shard.nbytes for shard in todo))
            for shard in todo:
                made = self._write(shard, progress)
                record = replace(record, shards={**record.shards, shard.name: made})
                record.save(self.destination)
            self._finish()
        return Done(self.plan.nbytes, tuple(shard.name for shard in todo), kept, broken)

    @property
    def _record(self) -> RewriteRecord:
        options = {
            "format": self.target.entry.preset,
            "group_size": self.target.group,
            "shard_bytes": self.shard_bytes,
            "moeserve": __version__,
        }
        return RewriteRecord(fingerprint(self.source.path), options)

    def _check_folder(self) -> None:
        folder = self.destination
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; name a folder that is empty or not there yet")
        present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        present = [name for name in present if name != RECORD + PARTIAL]
        if present and RECORD not in present:
            raise ValueError(
                f"{folder} holds other files, as {present[0]}, and no {RECORD} of an earlier run; "
                f"name a folder that is empty or not there yet"
            )

    def _begun(self, progress: Progress) -> tuple[RewriteRecord, tuple[str, ...]]:
        """Returns the record of whole files, and the names of files with other bytes than recorded."""
        now, found = self._record, load(self.destination)
        if found is None:
            return now, ()
        if (difference := now.difference(found)) is not None:
            raise ValueError(f"{self.destination} was begun with {difference}; run with that, or delete it")
        whole, broken = {}, []
        for shard in self.plan.shards:
            made = found.shards.get(shard.name)
            if made is None:
                continue
            if self._holds(shard, made):
                whole[shard.name] = made
                progress(shard.nbytes)
            else:
                broken.append(shard.name)
        return replace(now, shards=whole), tuple(broken)

    def _holds(self, shard: Shard, made: Written) -> bool:
        path = self.destination / shard.name
        return path.is_file() and path.stat().st_size == made.nbytes and digest(path) == made

    def _unfinish(self, record: RewriteRecord) -> None:
        """Removes what makes the folder open as a checkpoint, until it is complete, and saves the record."""
        for name in (CONFIG, INDEX):
            (self.destination / name).unlink(missing_ok=True)
        record.save(self.destination)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.destination).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"{self.destination} needs {needed} bytes more, and its disk has {free}: "
                f"free some and run again, or name another folder",
            )

    def _write(self, shard: Shard, progress: Progress) -> Written:
        try:
            with ShardFile(self.destination / shard.name, shard.declared) as file:
                for unit in shard.units:
                    for name, piece in unit.pieces():
                        file.write(name, piece)
                        progress(piece.nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"the disk of {self.destination} is full; free some and run again: "
                f"the files that are whole are kept",
            ) from error
        if file.written is None:
            raise RuntimeError(f"{file.path} was not finished")
        return file.written

    def _finish(self) -> None:
        for path in sorted(self.source.path.iterdir()):
            if path.is_file() and not path.name.endswith(WEIGHTS) and path.name not in NOT_COPIED:
                _copy(path, self.destination / path.name)
        for path in sorted((self.source.path / TEMPLATES).glob("*")):
            if path.is_file():
                (self.destination / TEMPLATES).mkdir(exist_ok=True)
                _copy(path, self.destination / TEMPLATES / path.name)
        placed = {name: shard.name for shard in self.plan.shards for name in shard.declared}
        index = {"metadata": {"total_size": self.plan.nbytes}, "weight_map": dict(sorted(placed.items()))}
        write_whole(self.destination / INDEX, json.dumps(index, indent=2) + "\n")
        write_whole(self.destination / CONFIG, json.dumps(self._config(), indent=2) + "\n")
        _sync(self.destination)

    def _config(self) -> dict[str, object]:
        config = read_json(self.source.path / CONFIG)
        for part in (config, config.get("text_config")):
            for key in QUANTIZATION_KEYS:
                if isinstance(part, dict):
                    part.pop(key, None)
        return config | {"quantization_config": self.target.config(list(self.plan.ignore))}


def _copy(path: Path, place: Path) -> None:
    partial = place.with_name(place.name + PARTIAL)
    shutil.copyfile(path, partial)
    partial.rename(place)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder. Raises ValueError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another run is writing {folder}; wait for it, or end it") from error
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
