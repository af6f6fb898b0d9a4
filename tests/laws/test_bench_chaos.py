"""`bench/service/chaos.py`: points arm once and for one rank, and whom a log names is read right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.lib.record import ROOT
from bench.service.chaos import Case, Outcome, outcomes_of, shard, unnamed
from bench.service.faults import points

CASE = Case("in a step", 1, "stop")
GIVEN_UP = "generation 4 aborts: rank 1 (pid 77) is given up: it is stopped (state T) for 1.6 s"
LATE = "rank 1 (pid 77) is given up: it is late: step 9 does not go on"
KILLED = "2026-11-23T00:31:02.123Z WARNING head generation 4 - generations: rank 1 (pid 77) is killed: why"


@pytest.mark.parametrize("line", [GIVEN_UP, LATE, KILLED, "rank 1 (pid 77) ended with -9; it is started"])
def test_a_log_names_the_guilty(line: str) -> None:
    assert unnamed(f"before\n{line}\nafter", CASE, 77, {70, 79}) == ""
    assert unnamed(line, CASE, 78, set()).startswith("the log does not name rank 1 (pid 78)")


def test_a_log_that_blames_another_is_no_good() -> None:
    blamed = f"{GIVEN_UP}\nrank 0 (pid 70) is lost: the other end closed the stream"
    assert unnamed(blamed, CASE, 77, {70, 79}).startswith("the log blames processes [70], and it was 77")
    waited = f"{GIVEN_UP}\nrank 0 (pid 70): joined; rank 1 (pid 77) is given up"
    assert unnamed(waited, CASE, 77, {70, 79}) == "", "it is only spoken of"


def test_outcomes_of_shards_are_judged_as_one_run(tmp_path: Path) -> None:
    outcomes = [Outcome(CASE, 1.5), Outcome(CASE, 0.0, "no answer came"), Outcome(CASE, 2.0, "", "nobody")]
    files = [tmp_path / "one", tmp_path / "other"]
    files[0].write_text(outcomes[0].line() + outcomes[1].line())
    files[1].write_text(outcomes[2].line())
    assert outcomes_of(files) == outcomes, "also of a case that was run twice"


def test_shards_take_every_case_once() -> None:
    cases = list(range(10))
    taken = [cases[number - 1 :: count] for number, count in map(shard, ("1/3", "2/3", "3/3"))]
    assert sorted(case for part in taken for case in part) == cases
    with pytest.raises(ValueError, match="4/3"):
        shard("4/3")


RANK = """
import sys, time
from moeserve.runtime.rank.weights import mover
from bench.service.faults import points
points._begin(int(sys.argv[1]))
print("ready", flush=True)
while True:
    sys.stdin.readline()
    try:
        mover.Mover._copied_from(None, None, None, None)
        next(mover.Mover._copied_from(None, None, None, []), None)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("action", ["stop", "kill"])
def test_a_point_does_what_its_file_says_once_and_in_its_rank_alone(tmp_path: Path, action: str) -> None:
    environment = points.environment(tmp_path, ROOT)
    point = "preparing a move"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank)],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        points.arm(tmp_path, point, 1, action)
        assert points.fired(tmp_path, point, 1) is None
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        assert ranks[0].stdout is not None and "Error" in ranks[0].stdout.readline(), "it goes on"
        until = time.monotonic() + 20.0
        while (met := points.fired(tmp_path, point, 1)) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert met[0] == ranks[1].pid and abs(met[1] - time.time()) < 20.0
        _, how = os.waitpid(ranks[1].pid, os.WUNTRACED)
        assert os.WIFSTOPPED(how) if action == "stop" else os.WTERMSIG(how) == signal.SIGKILL
        left = {0: [ranks[0].pid], 1: [ranks[1].pid] if action == "stop" else []}
        assert points.rank_processes(tmp_path) == left, "a stopped one is still there"
        (tmp_path / f"rank.2.{os.getpid()}").write_text("1")
        assert points.rank_processes(tmp_path)[2] == [], "this process was born later than rank 2's"
        assert not list(tmp_path.glob(f"{point}.*"))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
