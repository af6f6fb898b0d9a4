"""The record of a rewrite, a JSON file in its folder: source, options, and which files are whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moeserve.checkpoints.store import LENGTH_BYTES, CheckpointError, read_json
from moeserve.checkpoints.writing.shards import Written, write_whole

RECORD = "moeserve_quantize.json"


@dataclass(frozen=True)
class RewriteRecord:
    """The fingerprint of the source, the options, and the digest of every file that is whole."""

    source: Mapping[str, Mapping[str, Any]]  # file: bytes, when it was modified, digest of its header
    options: Mapping[str, Any]
    shards: Mapping[str, Written] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes the record into `folder`; an interruption leaves the one before."""
        shards = {name: asdict(self.shards[name]) for name in sorted(self.shards)}
        found = {"source": self.source, "options": self.options, "shards": shards}
        write_whole(folder / RECORD, json.dumps(found, indent=2) + "\n")

    def difference(self, other: RewriteRecord) -> str | None:
        """Describes the first difference of `other` in source or options; None if there is none."""
        for key in {**self.options, **other.options}:
            mine, theirs = self.options.get(key), other.options.get(key)
            if mine != theirs:
                return f"{key}={theirs!r}, now {key}={mine!r}"
        for file in sorted({**self.source, **other.source}):
            if self.source.get(file) != other.source.get(file):
                return f"another {file} of the source"
        return None


def load(folder: Path) -> RewriteRecord | None:
    """Reads the record in `folder`; None if there is none. Raises CheckpointError for a damaged one."""
    file = folder / RECORD
    if not file.is_file():
        return None
    raw = read_json(file)
    try:
        shards = {
            name: Written(int(made["nbytes"]), str(made["sha256"])) for name, made in raw["shards"].items()
        }
        return RewriteRecord(dict(raw["source"]), dict(raw["options"]), shards)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged ({error!r}): delete {folder} and start anew") from error


def fingerprint(folder: Path) -> dict[str, dict[str, Any]]:
    """Identifies a source without reading weights, by the digests of config.json and of every header."""
    found = {"config.json": {"sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()}}
    return found | {path.name: _file(path) for path in sorted(folder.glob("*.safetensors"))}


def _file(path: Path) -> dict[str, Any]:
    about = path.stat()
    with path.open("rb") as stream:
        raw = stream.read(LENGTH_BYTES)
        header = stream.read(int.from_bytes(raw, "little"))
    digest = hashlib.sha256(header).hexdigest()
    return {"nbytes": about.st_size, "modified": about.st_mtime_ns, "header": digest}
