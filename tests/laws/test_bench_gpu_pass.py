"""What `gpu_pass` does on its host: the order of a decode loop, routes of its own each pass, and its time."""

from __future__ import annotations

import pytest
import torch

from bench.service.hops.sizes import Sizes
from bench.service.passes.gpu import loop
from bench.service.passes.gpu.clock import LEAST_PASSES, Clock
from bench.service.passes.gpu.loop import EQUAL, LOOP, ROWS, Batches, Case, Known, Loop, Wanted, forward

SIZES = Sizes(64, 32, 8, 2, 3)


class Noted:
    """A caller, attention and batches that note what is launched."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.under_way: dict[int, int] = {}

    def renew(self) -> None:
        self.done.append("renewed")

    def run(self) -> None:
        self.done.append("attention")

    def submit(self, stage: int, at: int) -> None:
        assert stage not in self.under_way
        self.under_way[stage] = at
        self.done.append(f"submit {stage} {at}")

    def wait(self, stage: int, at: int) -> None:
        assert self.under_way.pop(stage) == at
        self.done.append(f"wait {stage} {at}")

    def exchange(self, stage: int, at: int, other: int, before: int) -> None:
        self.submit(stage, at)
        self.wait(other, before)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_stage_has_its_attention_while_the_others_are_with_the_experts(stages: int) -> None:
    noted = Noted()
    forward(noted, noted, noted, stages)  # type: ignore[arg-type]
    assert not noted.under_way and noted.done.count("attention") == stages * LOOP
    assert noted.done[0] == "renewed"
    if stages == 2:
        assert noted.done[1:10] == [
            *("attention", "submit 0 0", "attention", "submit 1 0"),
            *("wait 0 0", "attention", "submit 0 1", "wait 1 0", "attention"),
        ]


def test_routes_are_others_each_pass_and_the_first_ones_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    of = Batches(SIZES, 4, "cpu")
    first = [[one.route.clone() for one in stage] for stage in of.given]
    seen = [of.given[2][5].route.clone()]
    for _ in range(2):
        of.renew()
        seen.append(of.given[2][5].route.clone())
        assert not torch.equal(seen[-1], seen[-2])
        assert 0 <= int(seen[-1].min()) <= int(seen[-1].max()) < SIZES.experts
        assert all(len(set(row)) == SIZES.top_k for row in seen[-1].tolist())
    of.rewind()
    of.renew()
    assert all(map(torch.equal, [one.route for one in of.given[1]], first[1]))


def test_a_case_makes_no_more_passes_than_its_share_of_the_time_holds() -> None:
    clock = Clock(100.0)
    assert clock.passes(1000, 1.0, 10) in (9, 10)
    assert clock.passes(5, 1.0, 10) == 5
    assert clock.passes(1000, 100.0 / LEAST_PASSES, 10) == 0
    assert Clock(-1.0).passes(1000, 1e-6, 1) == 0


def test_all_cases_are_told_with_the_aim_that_stages_have(monkeypatch: pytest.MonkeyPatch) -> None:
    every = Wanted(9).cases(ROWS)
    assert len(every) == len({case.text("x") for case in every}) == 36
    assert Wanted(9, [EQUAL], [3]).cases([1, 16]) == [Case(1, EQUAL, 3), Case(16, EQUAL, 3)]
    monkeypatch.setattr(loop, "Attention", lambda device, computes: None)
    two = Loop(SIZES, "cpu", "two processes on two GPUs, fp8", Wanted(9), Clock(1.0))
    one = Loop(SIZES, "cpu", "one process on one GPU, fp8", Wanted(9), Clock(1.0))
    known = Known(50.0, [])
    for stages, aim in ((1, None), (2, 230.0), (3, 315.0)):
        case = Case(16, 100.0, stages)
        told = two._told(case, 100.0, known, 240.0, 9, {})
        assert told is not None and told.aim == aim and told.peers["bound"] == 100.0 * stages
        told = one._told(case, 100.0, known, 240.0, 9, {})
        assert told is not None and told.aim is None
    assert two._told(Case(1, EQUAL, 1), 50.0, known, 0.0, 0, {}) is None
