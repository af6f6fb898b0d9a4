"""Members that only bring rows, or only hold experts, beside ranks: they answer as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import Alone
from member_ranks import SHAPES, STEPS, first_epoch, served_and_planned, serving, stepping
from parallel import parallel_launch

from moeserve.runtime.rank.rank import Rank


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers and eight experts, whose rows suit peer memory."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path, hidden=128)
    return path


@pytest.mark.parametrize(
    "backend", ["naive", "allgather_reducescatter", "all2allv", "nvlink_ll", "nvlink_ht"]
)
def test_lanes_and_owners_answer_as_one_rank_does(path: Path, backend: str) -> None:
    by_member = parallel_launch(3, stepping, path, backend)
    top_k, whole = Alone(path).checkpoint.top_k, 0
    for at, (name, members) in enumerate(SHAPES.items()):
        found = {members.at(seat): shapes[at] for seat, shapes in zip(members.seats, by_member, strict=True)}
        for member, (read, held, computed) in found.items():
            assert (read > 0, held > 0, computed > 0) == (3 * (member.owner is not None,)), member
        whole = sum(computed for _, _, computed in found.values())
        assert whole == 2 * top_k * sum(map(sum, STEPS[name]))


def test_a_lane_reads_no_expert_and_an_owner_its_own(path: Path) -> None:
    members = SHAPES["a lane, a rank, an owner"]
    served, plans = served_and_planned(path, members, "all2allv")
    ranks = {seat: Rank(seat, served, plans, "cpu") for seat in members.seats}
    for rank in ranks.values():
        rank.load(first_epoch(served, members))
    assert (ranks[0].experts.bytes_read, ranks[0].experts.bank.layers) == (0, ())
    assert [ranks[seat].experts.bank[0].slots for seat in (3, 4)] == [5, 5]
    assert ranks[3].experts.bytes_read == ranks[4].experts.bytes_read > 0
    assert ranks[0].load_reading().tokens.shape == ranks[4].load_reading().tokens.shape


def test_numbers_of_steps_rise(path: Path) -> None:
    members = SHAPES["one lane, two owners"]
    served, plans = served_and_planned(path, members, "all2allv")
    one = Rank(0, served, plans, "cpu")
    one.load(first_epoch(served, members))
    assert [one._numbered(number) for number in (None, 7, None, 20)] == [1, 7, 8, 20]
    for number in (20, 3):
        with pytest.raises(ValueError, match=f"step {number} comes after step 20; numbers rise"):
            one._numbered(number)


def test_a_group_with_a_lane_and_an_owner_serves_while_experts_move(path: Path) -> None:
    lane, rank, owner = parallel_launch(3, serving, path)
    steps = len(lane[0])
    assert lane[0] == steps * [5] and steps >= 3
    assert rank[0] == owner[0] == steps * [0], "owners took every step and brought nothing"
    assert lane[1] == rank[1] == owner[1] >= 3
    assert lane[2] == [] and sorted(expert for expert in rank[2] + owner[2] if expert >= 0) == list(range(8))
    assert torch.equal(torch.tensor(owner[2][:4]), torch.tensor([7, 0, 1, 2])), "experts moved"
