"""`bench/service/serve_on.py`: events are a seed's, gaps are what a caller sees, faults are counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.service.faults.points import FOLDER, every_process
from bench.service.serving_on.events import Event, Outcome, Setup, drawn, gaps, outcomes_of
from bench.service.serving_on.members import collateral
from bench.service.serving_on.pages import drop, in_memory
from bench.service.serving_on.raw import RawAnswer, failed_on_living
from bench.service.serving_on.run import quantile
from bench.service.serving_on.tables import kinds_of, table

SETUP = Setup("local", 24, shadows=True)
COUNTS = {"kill": 6, "stop": 3, "double": 5}


def test_events_are_those_of_the_seed_and_reach_every_rank() -> None:
    events = drawn(SETUP, 7, COUNTS, 4)
    assert events == drawn(SETUP, 7, COUNTS, 4) != drawn(SETUP, 8, COUNTS, 4)
    assert [event.number for event in events] == list(range(14))
    assert {event.ranks[0] for event in events if event.kind == "kill"} == {0, 1, 2, 3}
    for event in events:
        assert len(set(event.ranks)) == len(event.ranks) == (2 if event.kind == "double" else 1)
        assert 0.0 <= event.apart <= 1.0


def test_a_file_of_outcomes_holds_the_last_of_each_event(tmp_path: Path) -> None:
    event = Event(3, "double", (1, 2), 0.5)
    outcomes = [Outcome(SETUP, event, 9.0), Outcome(SETUP, event, 0.2, faults={"raw": ["late"]})]
    path = tmp_path / "outcomes"
    path.write_text("".join(one.line() for one in outcomes))
    assert outcomes_of([path, tmp_path / "no file"]) == outcomes[1:]


def test_a_gap_reaches_from_the_last_right_answer_to_the_next() -> None:
    assert gaps([1.0, 2.0, 2.5, 6.0, 6.25], 2.25, 6.25) == [0.5, 3.5, 0.25, 0.0]
    assert gaps([1.0, 2.0], 2.25, 6.0) == [4.0], "nobody has answered since"


def test_what_fails_on_a_lane_that_lives_counts() -> None:
    dead = {1: (10.0, 12.0)}
    fault = "UNAVAILABLE: it is lost"
    on_the_dead = RawAnswer(1, "unary", 9.0, 11.0, fault)
    before = RawAnswer(1, "unary", 8.0, 9.0, fault)
    after = RawAnswer(1, "stream", 12.5, 13.0, fault)
    on_the_living = RawAnswer(2, "unary", 10.5, 11.0, fault)
    right = RawAnswer(2, "unary", 10.5, 11.0, "")
    found = failed_on_living([on_the_dead, before, after, on_the_living, right], dead)
    assert [text.partition(":")[0] for text in found] == [
        "unary at lane 1, 1.000 s",
        "stream at lane 1, 0.500 s",
        "unary at lane 2, 0.500 s",
    ]


def test_members_that_end_beside_those_that_were_killed_are_found() -> None:
    lines = ["rank 2 (pid 77) ended with -9; it is started", "x rank 1 (pid 78) ended with -6; it is started"]
    ray = "rank 3 (pid 79) has ended; it is started again"
    assert collateral("\n".join([*lines, ray]), [77, 79]) == ["rank 1 (pid 78) ended too -6"]


def test_the_table_counts_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    event = Event(0, "kill", (1,))
    outcomes = [
        Outcome(SETUP, event, 0.2, covered="shadows 3, replicas 1", right=5),
        Outcome(SETUP, event, 0.4, covered="shadows 4", faults={"failed": ["one", "other"]}),
    ]
    results = {result.case: result for result in table(outcomes)}
    assert results[f"{SETUP}, kill, experts from shadows: interruption, p95"].ours == 0.4
    assert results["2 events on local: failed"].ours == 2
    assert results["2 events on local: wrong"].ours == 0
    assert "5 answers were right; wrong 0, failed 2" in capsys.readouterr().out


def test_kinds_are_counted_by_name() -> None:
    assert kinds_of("kill=50,double=20") == {"kill": 50, "double": 20}
    with pytest.raises(ValueError, match="hang"):
        kinds_of("hang=1")


def test_a_quantile_is_a_value_that_so_many_do_not_exceed() -> None:
    values = [float(value) for value in range(20, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile(values, 1.0)) == (10.0, 19.0, 20.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="advising another process' memory needs CAP_SYS_NICE")
def test_pages_that_a_process_has_mapped_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 22))
    text = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print(sum(view[::4096]), flush=True)\n"
        "sys.stdin.readline()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert in_memory([path]) == 1.0
        assert drop([path], [process.pid]) == 0.0
    finally:
        process.kill()
        process.communicate()


def test_processes_of_a_service_are_known_by_its_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    mine, other = (
        subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {FOLDER: str(folder)})
        for folder in (tmp_path, tmp_path / "other")
    )
    try:
        assert list(every_process(tmp_path)) == [mine.pid]
    finally:
        for process in (mine, other):
            process.kill()
            process.communicate()
    assert every_process(tmp_path) == {}
