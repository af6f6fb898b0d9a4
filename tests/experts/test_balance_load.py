"""Load traces: what is written is read back, others' count files are read, what is no load file says why."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.experts.load import Load, LoadTrace, LoadWindow, read_trace, window_line, write_trace


def trace() -> LoadTrace:
    windows = (
        LoadWindow(Load(np.array([[1.0, 2, 3], [4, 5, 6]])), 10.0, 5.0, "decode"),
        LoadWindow(Load(np.array([[0.5, 0, 0], [0, 0, 9]])), 15.0, 5.0),
    )
    return LoadTrace((3, 7), windows)


def test_a_trace_reads_back_and_can_be_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    write_trace(trace(), path)
    with path.open("a") as file:
        file.write(window_line(trace().windows[0]) + "\n")
    found = read_trace(path)
    assert (found.layers, found.experts, len(found.windows)) == ((3, 7), 3, 3)
    for one, other in zip(found.windows, (*trace().windows, trace().windows[0]), strict=True):
        assert (one.start, one.seconds, one.phase) == (other.start, other.seconds, other.phase)
        assert one.load.tokens.tolist() == other.load.tokens.tolist()
    assert found.total.tokens.tolist() == [[2.5, 4, 6], [8, 10, 21]]


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("suffix", ["json", "pt"])
def test_published_counts_are_read_and_dense_layers_left_out(
    tmp_path: Path, suffix: str, records: bool
) -> None:
    counts = np.array([[0.0, 0, 0], [5, 0, 1], [0, 0, 0], [2, 2, 2]])
    found = np.stack([counts, counts]) if records else counts
    path = tmp_path / f"counts.{suffix}"
    if suffix == "pt":
        torch.save({"logical_count": torch.from_numpy(found)}, path)
    else:
        path.write_text(json.dumps({"logical_count": found.tolist()}))
    read = read_trace(path)
    assert read.layers == (1, 3)
    assert read.total.tokens.tolist() == (counts[[1, 3]] * (1 + records)).tolist()


@pytest.mark.parametrize("suffix", ["json", "pt"])
def test_a_bare_matrix_is_read(tmp_path: Path, suffix: str) -> None:
    counts, path = [[5.0, 0, 1], [2, 2, 2]], tmp_path / f"weight.{suffix}"
    if suffix == "pt":
        torch.save(torch.tensor(counts), path)
    else:
        path.write_text(json.dumps(counts))
    read = read_trace(path)
    assert (read.layers, read.total.tokens.tolist()) == ((0, 1), counts)


def test_records_by_slot_are_added_up_by_expert(tmp_path: Path) -> None:
    holds = torch.tensor([[0, 1, 2, 1], [2, 2, 1, 0], [0, 1, 2, 0]])
    passes = [
        torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]]),
        torch.tensor([[1, 0, 0, 1]] * 2 + [[0] * 4]),
    ]
    records = [
        {"forward_pass_id": number, "rank": 0, "gatherer_key": "primary", "global_physical_count": counts}
        for number, counts in enumerate(passes)
    ]
    path = tmp_path / "recorded.pt"
    torch.save({"records": records, "last_physical_to_logical_map": holds}, path)
    read = read_trace(path)
    assert read.layers == (0, 1)
    assert read.total.tokens.tolist() == [[2, 7, 3], [9, 7, 12]]
    torch.save({"records": records, "last_physical_to_logical_map": holds[:2]}, path)
    with pytest.raises(ValueError, match=r"records count slots \[3, 4\], and the map is of \[2, 4\]"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a load file: Expecting value"),
        ("[1]", r"it must hold logical_count or records, be \[layers, experts\]"),
        ('{"records": []}', r"it must hold logical_count or records, be \[layers, experts\]"),
        ('{"records": [{}], "last_physical_to_logical_map": [[0]]}', "no 'global_physical_count'"),
        ('{"logical_count": [1, 2]}', r"logical_count \[2\] must be \[layers, experts\]"),
        ('{"logical_count": [[0, 0]]}', "logical_count counts no token"),
        ('{"logical_count": [[1, -2], [3, 4]]}', "window 0 has tokens that are negative or not finite"),
        ('{"logical_count": [[1, NaN]]}', "window 0 has tokens that are negative or not finite"),
        ('{"logical_count": [[1, 2], [3]]}', "is not a load file"),
        (
            '{"format": "moeserve.load", "version": 2, "layers": [0], "experts": 1}',
            "version 2, and this reads 1",
        ),
        ('{"format": "moeserve.load", "version": 1, "layers": [0], "experts": 1}', "one window or more"),
        (
            '{"format": "moeserve.load", "version": 1, "layers": [0]}\n{"start": 0}',
            "line 2 is no window: it has no 'tokens'",
        ),
        (
            '{"format": "moeserve.load", "version": 1, "layers": [0]}\n\nnull',
            "line 3 is no window",
        ),
        (
            '{"format": "moeserve.load", "version": 1, "layers": [0, 1], "experts": 2}\n'
            '{"start": 0, "seconds": 1, "phase": "", "tokens": [[1, 2]]}',
            r"window 0 has tokens \[1, 2\], and the trace 2 layers of 2 experts",
        ),
    ],
)
def test_what_is_no_load_file_says_why(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "load.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as found:
        read_trace(path)
    assert str(path) in str(found.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the load file .*none.json: No such file"):
        read_trace(tmp_path / "none.json")
