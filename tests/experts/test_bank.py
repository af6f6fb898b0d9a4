"""The bank: loading, empty slots, staging beside running slots, commit in place, checksums."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made_experts import activation_named, fresh_seed, make_weights
from torch import Tensor

from moeserve.device.machine import this_machine
from moeserve.experts.bank import Bank, StagingFull
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights
from moeserve.experts.checksum import slot_checksum
from moeserve.experts.kernel import Kernel, KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels import KERNELS
from moeserve.experts.placement import EMPTY
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

SHAPE = ExpertShape(136, 24, activation_named("swigluoai"), bias=True)
FP8 = Scheme(FP8_BLOCK, FP8_GROUP)
PLAIN = Scheme(BF16, BF16)

OWN = frozenset({"triton", "cuda.bindings"})
"""Packages that our own kernels run with; who needs another is a library, whose packing may need it too."""

ENTRIES = [
    pytest.param(entry, scheme, id=f"{entry.name}-{scheme}")
    for entry in KERNELS.values()
    for scheme in (PLAIN, FP8)
    if scheme in entry.schemes and entry.modules - OWN <= this_machine().modules
]


def made(experts: int, scheme: Scheme = PLAIN, shape: ExpertShape = SHAPE) -> ExpertWeights:
    return make_weights(shape, experts, scheme.weights, torch.Generator().manual_seed(fresh_seed()))


def kernel_of(entry: KernelEntry, scheme: Scheme = PLAIN, shape: ExpertShape = SHAPE) -> Kernel:
    return entry.build(KernelSpec(scheme, shape, torch.bfloat16))


GROUPED = KERNELS["torch_grouped_mm"]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.fixture
def bank() -> Bank:
    bank = Bank()
    bank.load(3, kernel_of(GROUPED), made(4), [0, 1, 2, 3])
    return bank


@pytest.mark.parametrize(("entry", "scheme"), ENTRIES)
def test_slots_hold_what_prepare_makes_and_empty_ones_zeros(entry: KernelEntry, scheme: Scheme) -> None:
    weights, kernel = made(3, scheme), kernel_of(entry, scheme)
    bank = Bank()
    bank.load(0, kernel, weights, np.array([7, EMPTY, 2, 5, EMPTY], dtype=np.int32))
    together = kernel.prepare(weights)
    assert bank[0].slots == 5
    for slot, expert in enumerate((0, None, 1, 2, None)):
        for name, tensor in bank[0].slot(slot).items():
            if expert is None:
                assert not tensor.view(torch.uint8).any(), (slot, name)
            else:
                assert same_bytes(tensor, together.slot(expert)[name]), (slot, name)


def test_the_bank_owns_its_storage() -> None:
    weights = made(2)
    bank = Bank()
    bank.load(0, kernel_of(GROUPED), weights, [0, 1])
    before = bank.checksum(0, 1)
    weights.down.parts[0].zero_()
    assert bank.checksum(0, 1) == before


def test_a_rank_with_no_expert_has_only_zeros() -> None:
    bank = Bank()
    bank.load(0, kernel_of(GROUPED), made(0), [EMPTY])
    assert bank[0].slots == 1
    assert not bank[0].per_slot["gate_up"].any()
    bank.load(1, kernel_of(GROUPED), made(0), [])
    assert bank[1].slots == 0


def test_layers_may_differ_in_shape_and_kernel(bank: Bank) -> None:
    small = replace(SHAPE, hidden=16, inner=8, bias=False)
    reference = KERNELS["torch_reference"]
    bank.load(1, kernel_of(reference, FP8, small), made(2, FP8, small), [0, 1])
    assert bank.layers == (1, 3)
    assert set(bank[1].per_slot) == {"gate_up.codes", "gate_up.scale", "down.codes", "down.scale"}
    assert set(bank[3].per_slot) == {"gate_up", "down", "gate_up_bias", "down_bias"}
    expert = 48 * 136 * 2 + 136 * 24 * 2 + (48 + 136) * 4  # bf16 matrices, float32 biases
    small_expert = 16 * 16 + 16 * 8 + 2 * 4  # fp8 codes, one float32 scale a matrix
    assert bank.nbytes == 4 * expert + 2 * small_expert


def test_loading_again_keeps_the_storage(bank: Bank) -> None:
    pointers = {name: tensor.data_ptr() for name, tensor in bank[3].per_slot.items()}
    newer = made(3)
    bank.load(3, kernel_of(GROUPED), newer, [9, 8, EMPTY, 7])
    assert {name: tensor.data_ptr() for name, tensor in bank[3].per_slot.items()} == pointers
    assert same_bytes(bank[3].per_slot["down"][3], newer.down.parts[0][2])
    assert not bank[3].per_slot["down"][2].any()


def test_loading_other_sizes_into_a_layer_is_refused(bank: Bank) -> None:
    with pytest.raises(ValueError, match=r"layer 3 is loaded with 4 slots .* found 2 of"):
        bank.load(3, kernel_of(GROUPED), made(2), [0, 1])
    with pytest.raises(ValueError, match="layer 5: 2 experts were given for 1 slots in use"):
        bank.load(5, kernel_of(GROUPED), made(2), [0, EMPTY])


def test_commit_copies_into_the_same_storage(bank: Bank) -> None:
    pointers = {name: tensor.data_ptr() for name, tensor in bank[3].per_slot.items()}
    before = [bank.checksum(3, slot) for slot in range(4)]
    expert = kernel_of(GROUPED).prepare(made(1)).slot(0)
    resting = bank.nbytes
    staged = bank.stage(3, 2, expert)
    assert bank.staged == ((3, 2),)
    assert bank.nbytes == resting + sum(tensor.nbytes for tensor in expert.values())
    assert [bank.checksum(3, slot) for slot in range(4)] == before
    assert bank.commit() == 1
    assert [bank.checksum(3, slot) for slot in range(4)] == [*before[:2], staged, before[3]]
    assert {name: tensor.data_ptr() for name, tensor in bank[3].per_slot.items()} == pointers
    assert bank.staged == ()
    kept = sum(tensor.nbytes for tensor in expert.values())
    assert bank.nbytes == resting + kept, "its storage serves the next epoch"
    bank.allow(0)
    assert bank.nbytes == resting


def test_abandon_leaves_every_slot_as_it_was(bank: Bank) -> None:
    before = [bank.checksum(3, slot) for slot in range(4)]
    bank.stage(3, 0, kernel_of(GROUPED).prepare(made(1)).slot(0))
    bank.abandon()
    assert bank.commit() == 0
    assert [bank.checksum(3, slot) for slot in range(4)] == before


def test_what_is_staged_is_a_copy(bank: Bank) -> None:
    expert = kernel_of(GROUPED).prepare(made(1)).slot(0)
    staged = bank.stage(3, 0, expert)
    expert["down"].zero_()
    bank.commit()
    assert bank.checksum(3, 0) == staged


def test_a_slot_can_be_staged_from_another_slot_of_the_bank(bank: Bank) -> None:
    """Two experts change places: both copies are taken before either is written."""
    first, second = bank.checksum(3, 0), bank.checksum(3, 1)
    bank.stage(3, 0, bank[3].slot(1))
    bank.stage(3, 1, bank[3].slot(0))
    bank.commit()
    assert (bank.checksum(3, 0), bank.checksum(3, 1)) == (second, first)


def test_staging_is_bounded(bank: Bank) -> None:
    expert = kernel_of(GROUPED).prepare(made(1)).slot(0)
    bank.stage(3, 0, expert)
    bank.stage(3, 1, expert)
    bank.stage(3, 1, expert)  # staged again: no further room taken
    with pytest.raises(
        StagingFull, match=r"slot 2 of layer 3 .* staging_slots=2 are in use; commit or abandon"
    ):
        bank.stage(3, 2, expert)
    bank.abandon()
    bank.stage(3, 2, expert)
    assert Bank(staging_slots=1).staged == ()


def test_staging_what_does_not_fit_names_the_tensor(bank: Bank) -> None:
    expert = kernel_of(GROUPED).prepare(made(1)).slot(0)
    with pytest.raises(ValueError, match=r"slot 4 of layer 3 must be between 0 and 3"):
        bank.stage(3, 4, expert)
    with pytest.raises(KeyError, match=r"layer 8 is not in the bank; layers: \[3\]"):
        bank.stage(8, 0, expert)
    with pytest.raises(
        ValueError, match=r"down of slot 0 of layer 3 must be torch.bfloat16 \[136, 24\]; found"
    ):
        bank.stage(3, 0, expert | {"down": expert["down"].float()})
    missing = {name: tensor for name, tensor in expert.items() if name != "down_bias"}
    with pytest.raises(
        ValueError, match=r"slot 0 of layer 3 holds \['down', 'down_bias'.*found \['down', 'gate_up'"
    ):
        bank.stage(3, 0, missing)
    assert bank.staged == ()


@pytest.mark.parametrize(("entry", "scheme"), ENTRIES)
def test_checksums_cover_every_tensor(entry: KernelEntry, scheme: Scheme) -> None:
    """One flipped bit in codes, scales or biases changes it; the same expert elsewhere has the same one."""
    kernel, weights = kernel_of(entry, scheme), made(3, scheme)
    expert = kernel.prepare(weights.rows(slice(1, 2))).slot(0)
    bank = Bank()
    bank.load(0, kernel, weights, [0, 1, 2])
    assert bank.checksum(0, 1) == slot_checksum(expert)
    assert len({bank.checksum(0, slot) for slot in range(3)}) == 3
    for name, tensor in expert.items():
        flipped = tensor.clone()
        flipped.view(-1).view(torch.uint8)[-1] ^= 1
        assert slot_checksum(expert | {name: flipped}) != slot_checksum(expert), name


def test_a_checksum_knows_names_and_shapes() -> None:
    ones, twos = torch.ones(4), torch.full((4,), 2.0)
    assert slot_checksum({"a": ones, "b": twos}) == slot_checksum({"b": twos, "a": ones})
    assert slot_checksum({"a": ones, "b": twos}) != slot_checksum({"a": twos, "b": ones})
    assert slot_checksum({"a": ones}) != slot_checksum({"a": ones.view(2, 2)})
    assert slot_checksum({"a": torch.zeros(4)}) != slot_checksum({"a": torch.zeros(4, dtype=torch.int32)})


class Codes:
    """A kernel whose form is the codes of gate and up, wherever they lie."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        return Prepared({"codes": weights.gate_up.parts[0]})

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        pytest.fail("a bank that loads computes nothing")


@pytest.mark.parametrize(("named", "there"), [(None, "meta"), ("cpu", "cpu")])
def test_experts_stay_on_their_device_unless_another_is_named(named: str | None, there: str) -> None:
    """Weights that lie on a GPU were brought to the host by default, and kernels were given its addresses."""
    bank, weights = Bank(), made(3)
    bank.load(0, Codes(), weights.to("meta") if named is None else weights, range(3), named)
    assert bank[0].per_slot["codes"].device.type == there


def test_a_checksum_of_a_slot_that_was_written_meanwhile_is_not_kept(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = kernel_of(GROUPED).prepare(made(1)).slot(0)
    written = []

    def slowly(slots: list[dict[str, Tensor]]) -> list[str]:
        found = [slot_checksum(slot) for slot in slots]
        if not written:  # between the reading and the keeping
            written.append(bank.write(3, 1, new))
        return found

    monkeypatch.setattr("moeserve.experts.bank.slot_checksums", slowly)
    old = slot_checksum(bank.slot(3, 1))
    assert bank.checksums(3, [0, 1])[1] == old, "what it was when it was read"
    assert bank.checksums(3, [1]) == [slot_checksum(new)] != [old]


def test_what_is_copied_into_a_slot_is_there_when_write_returns(bank: Bank) -> None:
    new, copied = kernel_of(GROUPED).prepare(made(1)).slot(0), []

    def copy(pairs: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
        for source, target in pairs:
            for name, own in target.items():
                own.copy_(source[name])
            copied.append(True)

    bank.write(3, 2, new, copy)
    assert copied == [True]
    assert bank.checksum(3, 2) == slot_checksum(new)
    with pytest.raises(ValueError, match="slot 2 of layer 3"):
        bank.write(3, 2, {"other": torch.zeros(1)}, copy)
    assert copied == [True], "what does not fit is not copied"
