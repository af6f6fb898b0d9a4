"""Headers of safetensors files: what their own reader refuses is refused when a checkpoint is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from moeserve.checkpoints.store import CheckpointError, TensorStore

Header = dict[str, dict[str, Any]]


def header() -> Header:
    return {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [24, 24]},
        "b": {"dtype": "U8", "shape": [8], "data_offsets": [24, 32]},
        "one": {"dtype": "F32", "shape": [], "data_offsets": [32, 36]},
    }


def written(folder: Path, fields: Header, data: int = 36) -> Path:
    raw = json.dumps(fields).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return file


def changed(name: str, **fields: object) -> Callable[[Header], object]:
    return lambda made: made[name].update(fields)


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    written(tmp_path, header())
    entries = TensorStore(tmp_path).entries
    assert {name: entry.shape for name, entry in entries.items()} == {
        name: tuple(fields["shape"]) for name, fields in header().items()
    }


@pytest.mark.parametrize(
    ("change", "data", "said"),
    [
        (changed("a"), 38, "is damaged: 2 bytes follow its last tensor"),
        (changed("a"), 35, "is truncated"),
        (changed("b", data_offsets=[16, 24]), 36, "overlaps tensor a"),
        (changed("b", data_offsets=[0, 8]), 36, "overlaps"),
        (lambda made: made.pop("b"), 36, "leaves a gap after tensor none"),
        (lambda made: made.pop("a"), 36, "leaves a gap after the header"),
        (changed("a", data_offsets=[-24, 0]), 36, "data_offsets=[-24, 0] must be a list of whole numbers"),
        (changed("a", data_offsets=[24, 0]), 36, "data_offsets=[24, 0] are no begin and end"),
        (
            changed("a", data_offsets=[0.0, 24.0]),
            36,
            "data_offsets=[0.0, 24.0] must be a list of whole numbers",
        ),
        (changed("a", data_offsets=[0, 24, 24]), 36, "are no begin and end"),
        (changed("a", shape=[-2, -3]), 36, "shape=[-2, -3] must be a list of whole numbers"),
        (changed("a", shape=["2", "3"]), 36, "shape=['2', '3'] must be a list of whole numbers"),
        (changed("a", shape="23"), 36, "shape='23' must be a list of whole numbers"),
        (changed("a", shape=[2.0, 3]), 36, "shape=[2.0, 3] must be a list of whole numbers"),
        (changed("b", shape=[True, 8]), 36, "shape=[True, 8] must be a list of whole numbers"),
    ],
)
def test_a_damaged_header_is_refused_as_its_own_reader_does(
    change: Callable[[Header], object], data: int, said: str, tmp_path: Path
) -> None:
    fields = header()
    change(fields)
    file = written(tmp_path, fields, data)
    with pytest.raises(SafetensorError):
        safe_open(file, "pt")
    with pytest.raises(CheckpointError) as refused:
        TensorStore(tmp_path)
    assert str(file) in str(refused.value) and said in str(refused.value)
