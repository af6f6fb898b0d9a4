"""The law of dispatchers: four ranks answer as one, whatever the placement, the wire and the lanes."""

from collections import defaultdict

import pytest
import torch
from dispatcher_cases import RANKS, Case, Outcome, fault_cases, law_cases, run_cases
from parallel import parallel_launch

LAW, FAULTS = law_cases(), fault_cases()


@pytest.fixture(scope="module")
def outcomes() -> dict[Case, list[Outcome]]:
    """Every case's outcome by rank, from one launch of four processes."""
    cases = LAW + FAULTS
    by_rank = parallel_launch(RANKS, run_cases, cases, timeout=280)
    return dict(zip(cases, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("case", LAW, ids=str)
def test_four_ranks_answer_as_one(case: Case, outcomes: dict[Case, list[Outcome]]) -> None:
    found = outcomes[case]
    assert max(o.worst for o in found) <= 1.0, f"error over its bound, by rank: {[o.worst for o in found]}"
    assert all(o.repeats for o in found), "bits differ from one run to the next"
    assert all(o.exact for o in found), "quantizing before dispatch is not quantizing after"
    received, pairs = sum(o.received for o in found), found[0].pairs
    wanted = pairs * (RANKS if case.placement == "sliced" else 1)
    assert received == wanted, f"{received} of {wanted} valid pairs arrived"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_faulty_dispatcher_breaks_the_law(fault: Case, outcomes: dict[Case, list[Outcome]]) -> None:
    assert max(outcome.worst for outcome in outcomes[fault]) > 1.0


def test_dispatchers_agree_bit_for_bit(outcomes: dict[Case, list[Outcome]]) -> None:
    digests = defaultdict(set)
    for case in LAW:
        digests[case.inputs].add(tuple(outcome.digest for outcome in outcomes[case]))
    assert [inputs for inputs, seen in digests.items() if len(seen) > 1] == []


def test_the_sender_with_destinations_sends_least(outcomes: dict[Case, list[Outcome]]) -> None:
    sent = defaultdict(int)
    for case in LAW:
        if case.placement == "even" and case.step == "one_expert":
            sent[case.dispatcher] += sum(outcome.sent for outcome in outcomes[case])
    assert sent["all2allv"] < sent["allgather_reducescatter"] < sent["naive"]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("ranks", [2, RANKS])
def test_gpus_answer_as_one(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    major, minor = torch.cuda.get_device_capability()
    cases = law_cases(f"sm{major}{minor}", ranks)
    by_case = zip(*parallel_launch(ranks, run_cases, cases, timeout=280, device="cuda"), strict=True)
    digests = defaultdict(set)
    for case, outcomes in zip(cases, by_case, strict=True):
        assert max(outcome.worst for outcome in outcomes) <= 1.0, str(case)
        assert all(outcome.repeats and outcome.exact for outcome in outcomes), str(case)
        digests[case.inputs].add(tuple(outcome.digest for outcome in outcomes))
    assert [inputs for inputs, seen in digests.items() if len(seen) > 1] == []
