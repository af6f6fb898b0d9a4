"""What a member holds once others are lost: it knows which layers lack experts, and fills each by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, rewrite
from member_ranks import served_and_planned

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.dispatch.members import Members
from moeserve.experts.placement import EMPTY
from moeserve.runtime.epoch import Epoch, marked
from moeserve.runtime.rank.experts import RankExperts
from moeserve.runtime.rank.weights.copies import Abandoned, Copier

MEMBERS = Members.of_ranks(2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers and eight experts."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


def loaded(path: Path, epoch: Epoch, seat: int = 0) -> RankExperts:
    """What the member of `seat` holds once it has loaded `epoch`."""
    served, plans = served_and_planned(path, MEMBERS, "all2allv")
    experts = RankExperts(seat, served, plans, "cpu")
    experts.use_weights(epoch.names)
    experts.load(epoch, iter)
    return experts


def with_slots(epoch: Epoch, *rows: list[int]) -> Epoch:
    """The next epoch, with these slots in its layers."""
    slots = np.array(rows, dtype=np.int32)
    return replace(epoch, number=epoch.number + 1, placement=epoch.placement.with_slots(slots))


def spare_epoch(path: Path) -> Epoch:
    """Eight experts on two owners with eight slots each: either has room for all."""
    served, _ = served_and_planned(path, MEMBERS, "all2allv")
    return Epoch.first(served.mesh, 2, 8, 8, MEMBERS)


def contents(experts: RankExperts, epoch: Epoch, seat: int = 0) -> list[list[str]]:
    """The checksums of the slots of each layer that hold an expert in `epoch`."""
    owner = epoch.members.at(seat).owner
    assert owner is not None
    return [
        [
            experts.bank.checksum(layer, slot)
            for slot, expert in enumerate(epoch.placement.of_owner(layer, owner).tolist())
            if expert != EMPTY
        ]
        for layer in range(2)
    ]


def test_what_a_lost_owner_held_is_missing_and_restored_layer_by_layer(path: Path) -> None:
    start = spare_epoch(path)
    experts, epoch = loaded(path, start), start.without({1})
    assert (experts.missing(start), experts.missing(epoch)) == ((), (0, 1))
    experts.use(epoch)
    before = experts.bytes_read
    assert before == sum(4 * served_nbytes(path, layer) for layer in (0, 1))
    assert (experts.missing(epoch), experts.bytes_read) == ((0, 1), before), "nothing is read"
    assert [experts.source(epoch, at) for at in (0, 1)] == ["disk", "disk"]
    experts.restore(epoch, 1, Copier(0.0, "cpu"))
    assert (experts.missing(epoch), experts.source(epoch, 1)) == ((0,), "held")
    assert experts.bytes_read == before + 4 * served_nbytes(path, 1), "and only what was lost"
    experts.restore(epoch, 0)
    assert experts.missing(epoch) == ()
    assert contents(experts, epoch) == contents(loaded(path, epoch), epoch)


def test_a_slot_that_is_given_up_keeps_its_expert(path: Path) -> None:
    start = spare_epoch(path)
    held = loaded(path, start)
    row = start.placement.slots[0].tolist()
    row[3], row[12] = EMPTY, 3  # expert 3 goes to the other owner
    given_up = with_slots(start, row, start.placement.slots[1].tolist())
    held.use(given_up)
    before = held.bytes_read
    assert held.missing(start) == ()
    held.load(start, iter)
    assert (held.bytes_read, contents(held, start)) == (before, contents(loaded(path, start), start))


def test_what_was_filled_before_the_end_stays_known(path: Path) -> None:
    start = spare_epoch(path)
    experts, epoch = loaded(path, start), start.without({1})
    by, read = Copier(0.0, "cpu"), experts.read

    def twice(layer: int, expert: int, version: int) -> object:
        if experts.bytes_read - before == 2 * served_nbytes(path, 0):
            by.abandoned.set()
        return read(layer, expert, version)

    experts.read, before = twice, experts.bytes_read  # type: ignore[method-assign,assignment]
    with pytest.raises(Abandoned):
        experts.restore(epoch, 0, by)
    assert experts.missing(epoch) == (0, 1)
    by.abandoned.clear()
    experts.read, before = read, experts.bytes_read  # type: ignore[method-assign]
    experts.restore(epoch, 0, by)
    assert experts.bytes_read == before + 2 * served_nbytes(path, 0), "the other two, of four"
    assert contents(experts, epoch)[0] == contents(loaded(path, epoch), epoch)[0]


def test_a_layer_of_other_weights_is_missing_whole(path: Path, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, seed=1)
    start = spare_epoch(path)
    experts, epoch = loaded(path, start), start.with_weights(str(tmp_path)).reloaded(1, 2)
    experts.use_weights(epoch.weights)
    experts.use(epoch)
    assert experts.missing(epoch) == (1,)
    experts.restore(epoch, 1, Copier(0.0, "cpu"))
    assert experts.missing(epoch) == ()
    assert contents(experts, epoch) == contents(loaded(path, epoch), epoch)
    assert contents(experts, epoch)[1] != contents(loaded(path, start), start)[1]


def test_steps_of_other_layers_go_on_and_see_only_their_own(path: Path) -> None:
    start = spare_epoch(path)
    experts, epoch = loaded(path, start), start.without({1})
    experts.use(epoch)
    before = {name: tensor.clone() for name, tensor in experts.bank[1].per_slot.items()}
    experts.restore(epoch, 0, Copier(0.0, "cpu"))
    for name, tensor in experts.bank[1].per_slot.items():
        assert torch.equal(tensor, before[name])


def served_nbytes(path: Path, layer: int) -> int:
    """Bytes of one expert of a layer in the checkpoint."""
    served, _ = served_and_planned(path, MEMBERS, "all2allv")
    return served.checkpoint.expert_nbytes(layer)


def test_what_is_on_disk_instead_of_the_experts_of_a_version_is_not_read(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    start = spare_epoch(tmp_path)
    begun = start.with_names([marked("", Checkpoint(tmp_path).mark)])
    experts = loaded(tmp_path, begun)
    before = experts.read(0, 0, 1)
    file, kept = tmp_path / "model.safetensors", tmp_path / "kept"
    file.rename(kept)
    make_checkpoint("qwen3_moe", tmp_path)
    rewrite(tmp_path, lambda tensors: {name: tensor + 1 for name, tensor in tensors.items()})
    assert all(torch.equal(before[name], now) for name, now in experts.read(0, 0, 1).items()), "it is open"
    kept.write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"are not those that weights version 1 began with"):
        experts.read(0, 0, 1)
    with pytest.raises(CheckpointError, match=r"are not those that weights version 1 began with"):
        loaded(tmp_path, begun)
    again = begun.with_weights(marked(str(tmp_path), Checkpoint(tmp_path).mark)).reloaded(0, 2)
    experts.use_weights(again.names)
    experts.read(0, 0, 2)
