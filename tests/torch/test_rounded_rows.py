"""Rows of a caller's GPU that travel in FP8: answers have the bits of rows that came as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_ways import FP8, batch, joined, opened
from houses import Alone, house_config
from pass_pairs import Pair, expected, given
from torch_blocks import Block, recorded

from moeserve.dispatch.mail.kernels import LOGITS, Given
from moeserve.dispatch.mail.layout import ROUNDED
from moeserve.proto.errors import MoeError
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.rank.runs.runs import PassRuns, Told
from moeserve.torch import MoeExperts, Settings, connect

pytestmark = pytest.mark.gpu(1)
SHARED = {"plan__device": "cuda", "passes__share_gpu": True}


@pytest.fixture(scope="module")
def rank(path: Path) -> Iterator[HostedRank]:
    with joined(path, model__load_as=FP8) as rank:
        yield rank


@pytest.fixture(scope="module")
def runs(rank: HostedRank) -> PassRuns:
    return PassRuns(rank)


def stretched(of: Given, turn: int) -> Given:
    """The same rows, some of them large, tiny, on codes of FP8, on ties between two, or half zeros."""
    hidden = of.hidden.clone()
    for row in range(len(hidden)):
        match (row + turn) % 6:
            case 1:
                hidden[row] *= 2.0 ** (turn % 9 - 4)
            case 2:
                hidden[row] = (hidden[row] * 150).round().clamp(-448, 448)
            case 3:
                hidden[row] *= 1e-11
            case 4:
                hidden[row] *= torch.logspace(-6, 6, hidden.shape[1], base=2, device="cuda").bfloat16()
            case 5:
                hidden[row, ::2] = 0
    return of._replace(hidden=hidden)


@pytest.mark.parametrize("most", [1, 40, 600])
def test_answers_have_the_bits_of_rows_that_came_as_they_are(
    runs: PassRuns, rank: HostedRank, alone: Alone, most: int
) -> None:
    rounded, plain = (Pair(runs, alone, 1, rows=most, wire=wire) for wire in (ROUNDED, ""))
    assert rounded.layout.blocks == plain.layout.blocks == max(1, most * 32 // 896)
    for turn, rows in enumerate((1, 3, 40, 33, 7, 600, 599, 1, 2, 40)):
        count = min(rows, most)
        one = stretched(given(alone, count, seed=turn), turn)
        found = rounded.answered(one, padded_rows(count))
        assert torch.equal(found, plain.answered(one, padded_rows(count))), (turn, count)
        assert torch.equal(found, expected(rank, 0, one)), (turn, count)


def test_rows_with_nan_and_infinity_spoil_their_own_answers_alone(runs: PassRuns, alone: Alone) -> None:
    pair = Pair(runs, alone, 1, wire=ROUNDED)
    one = given(alone, 8, seed=4)
    right = pair.answered(one, 8)
    one.hidden[2, 5], one.hidden[6, 200] = torch.nan, torch.inf
    found, others = pair.answered(one, 8), [0, 1, 3, 4, 5, 7]
    assert torch.equal(found[others], right[others]) and not found[[2, 6]].isfinite().all(1).any()


def test_logits_come_with_rounded_rows(runs: PassRuns, rank: HostedRank, alone: Alone) -> None:
    pair = Pair(runs, alone, stages=1, wire=ROUNDED)
    one = Given(given(alone, 5, seed=3).hidden, torch.randn(5, alone.checkpoint.num_experts).cuda(), None)
    for _ in range(3):
        flight = pair.launch(((0, 0),), 8, begins=pair.begin(), kind=LOGITS)
        pair.bring(0, 0, one)
        found = pair.fetch(0, one.hidden)
        assert pair.told(flight) == Told(0, (1,))
        assert torch.equal(found, expected(rank, 0, one))


@pytest.fixture(scope="module")
def house(path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(path, **SHARED, model__load_as=FP8)) as house:
        yield house


def test_a_service_takes_rounded_rows_and_answers_with_the_bits_of_calls(
    house: LocalCluster, alone: Alone
) -> None:
    remote = connect(Settings("remote", house.address, timeout=30.0))
    wires = {"auto": ROUNDED, ROUNDED: ROUNDED, "as_they_are": ""}
    ways = [opened(house, asked, rows_wire=asked) for asked in wires]
    assert [way._layout.wire for way in ways] == list(wires.values())
    for turn, rows in enumerate((1, 5, 16, 64, 2)):
        one = batch(alone, rows, seed=turn)
        right = [MoeExperts(remote, layer)(*one) for layer in (0, 1)]
        for way in ways:
            found = [MoeExperts(way, layer)(*one) for layer in (0, 1)]
            way.check()
            assert all(map(torch.equal, found, right)), (turn, way._layout.wire)
    for way in (*ways, remote):
        way.close()


@torch.no_grad()
def test_a_recorded_forward_pass_with_rounded_rows_is_replayed(house: LocalCluster, alone: Alone) -> None:
    way, remote = opened(house, "graph"), connect(Settings("remote", house.address, timeout=30.0))
    block, other = Block(way, alone), Block(remote, alone)
    static = batch(alone, 6, seed=1)[0]
    graph, out = recorded(block, static)
    for turn in range(6):
        fresh = batch(alone, 6, seed=30 + turn)[0]
        static.copy_(fresh)
        graph.replay()
        way.check()
        assert torch.equal(out, other(fresh)), turn
    way.close()
    remote.close()


def test_a_wire_that_the_layers_do_not_take_is_refused(path: Path) -> None:
    with LocalCluster(house_config(path, **SHARED)) as house:
        with pytest.raises(MoeError, match="this rank's layers take rows as they are") as refused:
            opened(house, rows_wire=ROUNDED)
        assert refused.value.reason == "device_refused"
        way = opened(house)
        assert way._layout.wire == ""
        way.close()
