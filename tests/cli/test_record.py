"""`moeserve record`: statuses become windows by phase, files become traces, and what it refuses."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.cli import main
from moeserve.cli.record import Recorder, _write, recorded
from moeserve.experts.load import Load, LoadWindow, read_trace
from moeserve.proto import moe_pb2
from moeserve.proto.errors import Unavailable

LAYERS = (3, 7)


def status(
    prefill: object, decode: object, generation: int = 1, steps: tuple[int, ...] = ()
) -> moe_pb2.GetStatusReply:
    """What a service says that counted `[2, E]` of each phase, and of the steps of its ranks."""
    both = np.add(prefill, decode)
    layers = [
        moe_pb2.LayerLoad(layer=layer, tokens=all_.tolist(), prefill_tokens=list(some))
        for layer, all_, some in zip(LAYERS, both, prefill, strict=True)
    ]
    ranks = [moe_pb2.RankStatus(rank=rank, up=True, steps=taken) for rank, taken in enumerate(steps)]
    return moe_pb2.GetStatusReply(generation=generation, layers=layers, ranks=ranks)


def shown(windows: list[LoadWindow]) -> list[tuple[str, float, float, list[list[float]]]]:
    return [(w.phase, w.start, w.seconds, w.load.tokens.tolist()) for w in windows]


def test_a_window_is_what_grew_in_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(status([[5, 5], [5, 5]], [[1, 0], [0, 0]]), 100.0)
    assert recorder.layers == LAYERS
    first = recorder.window(status([[5, 7], [5, 5]], [[2, 0], [0, 9]]), 110.0)
    assert shown(first) == [
        ("decode", 100.0, 10.0, [[1, 0], [0, 9]]),
        ("prefill", 100.0, 10.0, [[0, 2], [0, 0]]),
    ]
    assert capsys.readouterr().out == ""
    assert shown(recorder.window(status([[5, 7], [5, 5]], [[2, 0], [0, 9]]), 120.0)) == []
    assert capsys.readouterr().out == "no expert got a token: nothing is written of this window\n"
    last = recorder.window(status([[5, 7], [5, 5]], [[2, 1], [0, 9]]), 125.0)
    assert shown(last) == [("decode", 120.0, 5.0, [[0, 1], [0, 0]])]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_window_in_which_counts_began_again_is_left_out(
    generation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(status([[0, 0], [0, 0]], [[10, 0], [0, 0]]), 0.0)
    fewer = status([[0, 0], [0, 0]], [[4, 90], [8, 8]], generation)
    assert recorder.window(fewer, 1.0) == []
    assert "this window is left out" in capsys.readouterr().out
    more = status([[0, 0], [0, 0]], [[5, 90], [8, 8]], generation)
    assert shown(recorder.window(more, 2.0)) == [("decode", 1.0, 1.0, [[1, 0], [0, 0]])]


def test_windows_are_left_out_until_all_ranks_have_reported_to_a_new_head() -> None:
    """Until then counts lack all that a rank ever counted; one that takes no step is not waited for."""
    none, recorder = [[0, 0], [0, 0]], Recorder(status([[0, 0], [0, 0]], [[9, 9], [9, 9]], 1, (5, 5)), 0.0)
    for now, counts, generation, steps in (
        (1.0, none, 2, (0, 0)),
        (2.0, [[7, 7], [0, 0]], 2, (6, 0)),
        (3.0, [[9, 9], [9, 9]], 2, (6, 6)),
    ):
        assert recorder.window(status(none, counts, generation, steps), now) == [] and recorder.left_out
    assert shown(recorder.window(status(none, [[9, 9], [9, 10]], 2, (7, 7)), 4.0)) == [
        ("decode", 3.0, 1.0, [[0, 0], [0, 1]])
    ]
    for now in (5.0, 10.0, 15.1):
        assert recorder.window(status(none, none, 3, (7, 0)), now) == [] and recorder.left_out
    assert recorder.window(status(none, [[1, 0], [0, 0]], 3, (7, 0)), 16.0) and not recorder.left_out


def test_a_service_without_a_head_is_asked_again_and_windows_left_out_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replies() -> Iterator[moe_pb2.GetStatusReply | Unavailable]:
        yield status([[0, 0], [0, 0]], [[5, 0], [0, 0]])
        yield Unavailable("UNAVAILABLE", "nobody", "no head is there")
        yield status([[0, 0], [0, 0]], [[0, 0], [0, 0]], 2)
        yield status([[0, 0], [0, 0]], [[3, 0], [0, 0]], 2)

    found = replies()

    def ask() -> moe_pb2.GetStatusReply:
        if isinstance(said := next(found), Unavailable):
            raise said
        return said

    monkeypatch.setattr("moeserve.cli.record.time.sleep", lambda seconds: None)
    windows = [shown(list(one)) for _, one in recorded(ask, 10.0, 1)]
    assert [[w[3] for w in one] for one in windows] == [[], [[[3, 0], [0, 0]]]]
    monkeypatch.setattr("moeserve.cli.record.AWAY_SECONDS", 0.0)
    found = replies()
    with pytest.raises(Unavailable, match="no head is there"):
        list(recorded(ask, 10.0, 1))


def test_a_full_disk_leaves_a_whole_trace(counts: tuple[str, str], tmp_path: Path) -> None:
    """A line that does not fit is not there in part."""
    out, none = tmp_path / "trace.jsonl", tmp_path / "none.jsonl"
    assert main(["record", "--out", str(out), "--from", counts[0]]) == 0
    whole = out.read_bytes()
    room = len(whole) + len(whole.splitlines()[1]) * 3 // 2  # for one window, and half of another
    assert "File too large" in recorded_with(room, out, *counts, "--append")
    assert len(read_trace(out).windows) == 2 and out.read_bytes().startswith(whole)
    assert "File too large" in recorded_with(9, none, *counts)
    assert not none.exists()


def recorded_with(room: int, out: Path, *words: str) -> str:
    """What `record` says that fails since no file can have more bytes than that."""
    command = [sys.executable, "-c", FULL_DISK, str(room), "record", "--out", str(out), "--from", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr


FULL_DISK = """
import resource, signal, sys
from moeserve.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
room = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
sys.exit(main(sys.argv[2:]))
"""
"""`moeserve` on a disk with as much room."""


def test_an_interruption_ends_the_last_window_early(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = (status([[0, 0], [0, 0]], [[n, 0], [0, n]]) for n in (0, 3, 5, 99))
    naps: Iterator[None] = iter([None])

    def sleep(_: float) -> None:
        if next(naps, "over") is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr("moeserve.cli.record.time.sleep", sleep)
    found = [list(windows) for _, windows in recorded(lambda: next(replies), 10.0, 0)]
    assert [window.load.tokens.tolist() for (window,) in found] == [[[3, 0], [0, 3]], [[2, 0], [0, 2]]]


def test_a_service_without_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="tells no layer's experts"):
        Recorder(moe_pb2.GetStatusReply(layers=[moe_pb2.LayerLoad(layer=0)]), 0.0)


@pytest.fixture
def counts(tmp_path: Path) -> tuple[str, str]:
    """Two published count files."""
    paths = []
    for number in (1, 2):
        paths.append(tmp_path / f"counts{number}.json")
        paths[-1].write_text(json.dumps({"logical_count": [[0, 0], [number, 4], [5, number]]}))
    return str(paths[0]), str(paths[1])


def test_count_files_become_a_trace_that_can_be_gone_on_with(
    counts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.jsonl"
    assert main(["record", "--from", counts[0], "--out", str(out)]) == 0
    assert "1 windows in" in capsys.readouterr().out
    assert main(["record", "--from", *counts, "--out", str(out), "--append"]) == 0
    trace = read_trace(out)
    assert trace.layers == (1, 2)
    assert [w.load.tokens[0, 0] for w in trace.windows] == [1, 1, 2]
    assert main(["simulate", "--load", str(out), "--ranks", "2", "--policy", "eplb", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.split("\n", 3)[3])[0]["balancedness_over_time"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the HOST:PORT of a service, or --from FILE, and not both"),
        (["127.0.0.1:1", "--from", "COUNTS"], "and not both"),
        (["127.0.0.1:1", "--window", "0.5"], "--window=0.5 must be 1 second or more"),
        (["127.0.0.1:1", "--window", "nan"], "--window=nan must be 1 second or more"),
        (["127.0.0.1:1", "--window", "inf"], "and a year at most"),
        (["127.0.0.1:1", "--windows", "-1"], "--windows=-1 0 or more"),
        (["--from", "nowhere.json"], "cannot read the load file nowhere.json"),
        (["--from", "COUNTS", "--out", "nowhere/trace.jsonl"], "nowhere is no folder to write in"),
        (["--from", "COUNTS", "THERE"], "is there already; --append goes on with it"),
        (["--from", "COUNTS", "THERE", "--append"], "a trace is of one model"),
    ],
)
def test_what_it_refuses(
    words: list[str],
    message: str,
    counts: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "trace.jsonl"
    if "THERE" in words:
        head = {"format": "moeserve.load", "version": 1, "layers": [0], "experts": 1}
        line = {"start": 0, "seconds": 1, "phase": "", "tokens": [[1]]}
        out.write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n")
    words = [counts[0] if word == "COUNTS" else word for word in words if word != "THERE"]
    assert main(["record", "--out", str(out), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_another_recording_began_meanwhile_stays_whole(tmp_path: Path) -> None:
    """Two that are started together see no file; each waits a window before it has something to write."""
    out = tmp_path / "trace.jsonl"

    def found() -> Iterator[tuple[tuple[int, ...], list[LoadWindow]]]:
        out.write_text("another's\n")
        yield LAYERS, [LoadWindow(Load(np.ones((2, 2))), 0.0, 1.0, "decode")]

    with pytest.raises(ValueError, match="is there already; --append goes on with it"):
        _write(out, found(), argparse.Namespace(append=False))
    assert out.read_text() == "another's\n"


@pytest.mark.parametrize("name", ["counts.json", "counts.pt", "empty.jsonl", "bare.jsonl", "folder"])
def test_what_is_no_trace_is_not_appended_to(
    name: str, counts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    loads = {"logical_count": [[0, 0], [1, 4], [5, 1]]}
    if name == "folder":
        out.mkdir()
    elif name.endswith(".pt"):
        torch.save(loads, out)
    else:
        out.write_text({"counts.json": json.dumps(loads), "bare.jsonl": "[[1, 4], [5, 1]]\n"}.get(name, ""))
    before = out.read_bytes() if out.is_file() else b""
    assert main(["record", "--from", counts[0], "--out", str(out), "--append"]) == 2
    assert f"--out {out} " in capsys.readouterr().err
    assert (out.read_bytes() if out.is_file() else b"") == before


def test_a_new_trace_is_not_called_as_files_of_torch_are(
    counts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", "--from", counts[0], "--out", str(tmp_path / "trace.pt")]) == 2
    assert "give the trace another ending than .pt" in capsys.readouterr().err
    assert not (tmp_path / "trace.pt").exists()


def test_a_service_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["record", "127.0.0.1:1", "--out", str(tmp_path / "trace.jsonl"), "--timeout", "2"]
    assert main(words) == 1
    assert "moeserve record: UNAVAILABLE" in capsys.readouterr().err
