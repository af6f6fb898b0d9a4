"""Laws of the meter: slots of an expert sum to its tokens, phases part them, windows keep and halve them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.experts.load import PHASES
from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.meter import LoadMeter, Metering, Reading
from moeserve.experts.routing.replicas import REPLICA_CHOICES

SLOTS = np.array([[0, 1, 2, 0, 3, 0], [3, 2, 1, 0, EMPTY, 1]])
SIZES = (2, 4, 6)  # layers, experts, slots


def ids(rows: int, seed: int = 0) -> Tensor:
    """Ids [rows, 3], none among them."""
    return torch.randint(-1, 4, (rows, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def read(meter: LoadMeter, now: float = 0.0) -> Reading:
    return meter.snapshot(now).read()


def counted(experts: Tensor) -> list[int]:
    return [int((experts == expert).sum()) for expert in range(4)]


@pytest.mark.parametrize("choice", REPLICA_CHOICES)
def test_the_slots_of_an_expert_sum_to_its_tokens_in_every_phase_and_lane(choice: str) -> None:
    placement = Placement(SLOTS, 3, 4)
    total = np.zeros((len(PHASES), 2, 4))
    for lane in range(3):
        book, meter = AddressBook(placement, choice=choice, lane=lane), LoadMeter(SIZES)
        for step, rows in enumerate((1, 40, 128, 500, 0)):
            experts = ids(rows, seed=10 * lane + step)
            for layer in range(2):
                slots = book.resolve(layer, experts, torch.arange(rows) % 4 != 1)
                meter.count(layer, torch.where(slots == EMPTY, EMPTY, experts), slots, rows)
        reading = read(meter)
        for layer, held in enumerate(SLOTS):
            for expert in range(4):
                of_slots = reading.slots[:, layer, held == expert].sum(axis=1)
                assert of_slots.tolist() == reading.tokens[:, layer, expert].tolist()
        assert not reading.slots[:, 1, 4].any()  # the empty one
        total += reading.tokens
    assert (total > 0).all()


def test_rows_of_the_fullest_lane_decide_the_phase() -> None:
    meter = LoadMeter(SIZES, metering=Metering(prefill_rows=100))
    few, many = ids(99, 1), ids(100, 2)
    meter.count(0, few, few, 99)
    meter.count(0, many, many, 100)
    reading = read(meter)
    assert reading.load("decode").tokens[0].tolist() == counted(few)
    assert reading.load("prefill").tokens[0].tolist() == counted(many)
    assert reading.load().tokens[0].tolist() == counted(torch.cat([few, many]))
    assert reading.load("prefill").tokens[1].tolist() == [0, 0, 0, 0]


def test_none_and_ids_out_of_range_are_not_counted() -> None:
    meter = LoadMeter(SIZES)
    meter.count(1, torch.tensor([[0, 3], [3, -1], [7, 3]]), torch.tensor([[0, 5], [5, -1], [99, 5]]), 3)
    reading = read(meter)
    assert reading.tokens.sum(axis=0).tolist() == [[0, 0, 0, 0], [1, 0, 0, 3]]
    assert reading.slots.sum(axis=0)[1].tolist() == [1, 0, 0, 0, 0, 3]


@pytest.mark.parametrize("half_life", [10.0, 37.0])
def test_load_halves_with_each_half_life_and_the_sum_since_the_start_stays(half_life: float) -> None:
    meter = LoadMeter(SIZES, metering=Metering(half_life=half_life, window_seconds=10))
    experts = ids(50)
    meter.tick(100.0)
    meter.count(0, experts, experts, 50)
    meter.tick(110.0)  # closes: the window's tokens count as of now
    whole = np.array(counted(experts), dtype=float)
    for lives in (0, 1, 2, 5):
        reading = read(meter, 110.0 + lives * half_life)
        assert reading.recent_load().tokens[0] == pytest.approx(whole / 2**lives)
        assert reading.load().tokens[0].tolist() == whole.tolist()


def test_what_is_counted_while_a_window_closes_is_of_the_next_one() -> None:
    meter = LoadMeter(SIZES, metering=Metering(half_life=20, window_seconds=10, windows=3))
    before, meanwhile = ids(20, 1), ids(20, 2)
    meter.tick(0.0)
    meter.count(0, before, before, 20)
    closed = meter._closed

    class Closing:
        def add_(self, counted: Tensor) -> None:
            closed.add_(counted)
            meter.count(0, meanwhile, meanwhile, 20)

    meter._closed = Closing()  # type: ignore[assignment]
    meter.tick(10.0, beside=True)
    meter._closed = closed
    meter.tick(20.0, beside=True)
    reading = read(meter, 20.0)
    assert reading.windows[:, PHASES.index("decode"), 0].tolist() == [counted(before), counted(meanwhile)]
    assert reading.tokens[PHASES.index("decode"), 0].sum() == sum(counted(before)) + sum(counted(meanwhile))


@pytest.mark.parametrize("beside", [False, True])
def test_windows_close_decay_by_their_age_and_the_oldest_goes(beside: bool) -> None:
    meter = LoadMeter(SIZES, metering=Metering(half_life=20, window_seconds=10, windows=3))
    steps = [ids(20, seed) for seed in range(5)]
    meter.tick(0.0)
    for number, experts in enumerate(steps):
        meter.count(0, experts, experts, 20)
        meter.tick(10.0 * number + 5, beside=beside)  # too early
        meter.tick(10.0 * number + 10, beside=beside)
    reading = read(meter, 50.0)
    assert reading.seconds == (10.0, 10.0, 10.0)
    assert reading.windows[:, PHASES.index("decode"), 0].tolist() == [counted(one) for one in steps[2:]]
    wanted = sum(np.array(counted(one)) * 0.5 ** ((40 - 10 * n) / 20) for n, one in enumerate(steps))
    assert reading.recent_load("decode").tokens[0] == pytest.approx(wanted)
    assert reading.load().tokens[0].tolist() == counted(torch.cat(steps))


def test_an_open_window_is_part_of_a_reading_and_a_reading_stays_what_it_was() -> None:
    meter, experts = LoadMeter(SIZES), ids(9)
    assert read(meter).windows.shape == (0, 2, 2, 4)
    meter.count(0, experts, experts, 9)
    snapshot = meter.snapshot(0.0)
    meter.count(0, experts, experts, 9)
    assert snapshot.ready
    first = snapshot.read()
    assert first.load().tokens[0].tolist() == counted(experts)
    assert first.recent_load().tokens[0].tolist() == counted(experts)
    assert read(meter).load().tokens[0].tolist() == (2 * np.array(counted(experts))).tolist()


def test_slots_begin_anew_where_experts_moved() -> None:
    meter, experts = LoadMeter(SIZES), ids(30)
    for layer in range(2):
        meter.count(layer, experts, experts, 30)
    meter.moved(1)
    reading = read(meter)
    assert not reading.slots[:, 1].any()
    assert reading.slots.sum(axis=0)[0, :4].tolist() == counted(experts)
    assert reading.load().tokens[1].tolist() == counted(experts)


@pytest.mark.parametrize("name", ["prefill_rows", "half_life", "window_seconds", "windows"])
def test_a_metering_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be more than 0"):
        Metering(**{name: 0})


@pytest.mark.gpu(1)
def test_on_a_gpu_counting_waits_for_nothing_and_a_graph_counts() -> None:
    meter, experts = LoadMeter(SIZES, "cuda"), ids(64).cuda()
    meter.count(0, experts, experts, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        meter.tick(0.0)
        meter.count(0, experts, experts, 64)
        meter.tick(60.0)
        snapshot = meter.snapshot(60.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert snapshot.read().load().tokens[0].tolist() == (2 * np.array(counted(experts.cpu()))).tolist()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        meter.count(1, experts, experts, 64)
    for _ in range(3):
        graph.replay()
    assert read(meter, 60.0).load().tokens[1].tolist() == (3 * np.array(counted(experts.cpu()))).tolist()
