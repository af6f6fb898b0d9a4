"""How many threads compute a step on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from checkpoints import make_checkpoint
from member_ranks import served_and_planned

from moeserve.dispatch.members import Members
from moeserve.experts.kernel import Problem
from moeserve.runtime.rank.host_threads import OPERATIONS, HostThreads, as_here, threads_for


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    make_checkpoint("qwen3_moe", tmp_path / "one")
    members = Members.of_ranks(1)
    served, plans = served_and_planned(tmp_path / "one", members, "auto")
    found = plans[served.layers[0]].problem
    return replace(found, shape=replace(found.shape, hidden=1024, inner=512), top_k=2)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_small_step_is_computed_by_one_and_a_large_one_by_all(problem: Problem) -> None:
    each = 2 * 6 * 1024 * 512  # of a row
    last = OPERATIONS // each
    assert [threads_for(problem, rows) for rows in (0, 1, last, last + 1)] == [1, 1, 1, 2]
    assert threads_for(problem, 4096) == 1 + 4096 * each // OPERATIONS
    threads = HostThreads(3)
    torch.set_num_threads(3)
    for rows, wanted in ((1, 1), (4096, 3), (last + 1, 2), (last, 1), (4096, 3)):
        with threads.computing(problem, (rows,)):
            assert torch.get_num_threads() == wanted, rows
        assert torch.get_num_threads() == 3


def test_rows_of_all_lanes_count_and_owners_share_them(problem: Problem) -> None:
    threads, rows = HostThreads(8), -(-2 * OPERATIONS // (2 * 6 * 1024 * 512))
    with threads.computing(problem, (1, 0, rows - 1)):
        assert torch.get_num_threads() == threads_for(problem, rows) == 3
    shared = replace(problem, owners=4, lanes=4)
    assert threads_for(shared, 8192) - 1 == (threads_for(problem, 8192) - 1) // 4
    assert threads_for(replace(shared, reserved_owners=3), 8192) == threads_for(problem, 8192)
    assert threads_for(replace(shared, sliced=True), 8192) == threads_for(problem, 8192)


def test_between_two_steps_all_compute_and_in_threads_that_begin_meanwhile(problem: Problem) -> None:
    found = list[int]()

    def note() -> None:
        found.append(torch.get_num_threads())

    torch.set_num_threads(3)
    threads, begun = HostThreads(3), Thread(target=as_here(note))
    with threads.computing(problem, (1,)):
        begun.start()
        begun.join()
        assert (found, torch.get_num_threads()) == ([3], 1), "and a step's are the step's"
    assert torch.get_num_threads() == 3
