"""The law of members: groups whose lanes and owners differ answer as one process, also while lanes are absent
and the numbers of steps jump.
"""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from member_cases import (
    GPU_SHAPES,
    HALF_TURN,
    OURS,
    RUNS,
    SEED_TURNS,
    SHAPES,
    MemberCase,
    Seen,
    broken,
    digests,
    faulty_cases,
    gpu_member_cases,
    member_cases,
    numbers,
    run_members,
)
from parallel import parallel_launch

from moeserve.dispatch.peers.sequence import LAST

FAULTY_SHAPE = "2x3"

LAW = {shape: member_cases(shape) for shape in SHAPES}
FAULTY = faulty_cases(FAULTY_SHAPE)

Outcomes = dict[MemberCase, list[Seen]]


def launched(shape: str, cases: list[MemberCase], told: Path, device: str = "cpu") -> Outcomes:
    """What every member of a group saw of its cases, from one launch."""
    world = len((SHAPES | GPU_SHAPES)[shape].members)
    by_member = parallel_launch(world, run_members, cases, str(told), timeout=280, device=device)
    return dict(zip(cases, map(list, zip(*by_member, strict=True)), strict=True))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Every case's outcome by member, from one launch for each group."""
    found: Outcomes = {}
    for shape, cases in LAW.items():
        more = FAULTY if shape == FAULTY_SHAPE else []
        found |= launched(shape, cases + more, tmp_path_factory.mktemp(shape))
    return found


@pytest.mark.parametrize("case", [case for cases in LAW.values() for case in cases], ids=str)
def test_members_answer_as_one(case: MemberCase, outcomes: Outcomes) -> None:
    assert broken(outcomes[case], case) == []


@pytest.mark.parametrize("fault", FAULTY, ids=str)
def test_a_fault_breaks_the_law_of_members(fault: MemberCase, outcomes: Outcomes) -> None:
    assert broken(outcomes[fault], fault) != []


def test_our_dispatchers_agree_bit_for_bit_in_every_group(outcomes: Outcomes) -> None:
    assert disagreeing(outcomes, [case for cases in LAW.values() for case in cases]) == []


def disagreeing(outcomes: Outcomes, cases: list[MemberCase]) -> list[tuple[object, ...]]:
    """Inputs that dispatchers gave different bits for."""
    seen = defaultdict(set)
    for case in cases:
        seen[case.inputs].add(digests(outcomes[case]))
    return [inputs for inputs, found in seen.items() if len(found) > 1]


def test_cases_have_what_the_law_is_about() -> None:
    """Numbers jump by odd and even amounts, to just before the turn of sequence numbers, and over it."""
    far = set()
    for run in range(len(RUNS)):
        given = numbers(run)
        jumps = [after - before for before, after in pairwise(given)]
        assert min(jumps) > 0
        assert HALF_TURN - 25_000 < max(jumps) < HALF_TURN
        assert {jump % 2 for jump in jumps} == {0, 1}
        turns = [number // LAST for number in given]
        assert turns[-1] > turns[0]
        far |= {jump % 2 for jump in jumps if jump > HALF_TURN // 2}
    assert far == {0, 1}
    every = [
        number + SEED_TURNS * seed for seed in range(3) for run in range(len(RUNS)) for number in numbers(run)
    ]
    assert every == sorted(every)
    assert len({number % LAST for number in every}) == len(every), "no two share a sequence number"
    assert numbers(1)[0] > numbers(0)[-1]
    assert {case.dispatcher for cases in LAW.values() for case in cases} == set(OURS)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_two_gpus_answer_as_one(shape: str, tmp_path: Path) -> None:
    """Over peer memory 2 x 300 cases and more in all groups, with lane-only and owner-only members."""
    cases = gpu_member_cases(shape)
    found = launched(shape, cases, tmp_path, "cuda")
    assert {str(case): said for case in cases if (said := broken(found[case], case))} == {}
    assert disagreeing(found, cases) == []


def test_gpus_are_held_to_300_cases_of_each_dispatcher_over_peer_memory() -> None:
    cases = [case for shape in GPU_SHAPES for case in gpu_member_cases(shape)]
    assert len(cases) == len(set(cases))
    for name in ("nvlink_ll", "nvlink_ht"):
        assert sum(case.dispatcher == name for case in cases) >= 300
    assert torch.bfloat16 in {case.dtype for case in cases}
