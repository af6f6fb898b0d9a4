"""The high-throughput carrier over peer memory: its layout, its limits, and its twin when peers stay away."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from ht_steps import SLOTS, lane, overlapping, spec_of, with_absence, without_excluded
from parallel import parallel_launch

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers import ht_kernels, ht_layout
from moeserve.dispatch.peers.ht_layout import Layout, cut_for
from moeserve.dispatch.peers.ht_twin import positions
from moeserve.dispatch.peers.sources import source
from moeserve.quant.formats import FORMATS

HOPPER = (132, 232448)  # multiprocessors, bytes of shared memory a block


def served(lane_rows: int, wire: str = "fp8_group128", **changes: object) -> DispatchSpec:
    spec = replace(spec_of(0, 4), slots=64, hidden=7168, top_k=8, dtype=torch.bfloat16, wire=FORMATS[wire])
    return replace(spec, lane_rows=lane_rows, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["fp8_group128", "mxfp4", "bf16", "fp32"])
@pytest.mark.parametrize("lane_rows", [1, 9, 256, 1100, 4096, 16384])
def test_every_token_has_a_channel_with_room(lane_rows: int, wire: str) -> None:
    spec = served(lane_rows, wire)
    cut = cut_for(spec, *HOPPER)
    layout = Layout.of(spec, cut)
    assert (2 * cut.senders + cut.ring * cut.receivers) * layout.row_stride <= HOPPER[1]
    assert cut.blocks < HOPPER[0]  # one more leads
    assert cut.senders % cut.receivers == 0
    for tokens in (0, 1, lane_rows // 2, lane_rows):
        firsts = [layout.first_token(channel, tokens) for channel in range(layout.channels + 1)]
        runs = [b - a for a, b in pairwise(firsts)]
        assert sum(runs) == tokens
        assert min(runs) >= 0
        assert max(runs) <= layout.channel_rows


def test_sections_do_not_overlap() -> None:
    layout = Layout.of(served(1000), cut_for(served(1000), *HOPPER))
    ends = [layout.starts[name] + size for name, size in layout.sizes.items()]
    assert all(start % 256 == 0 for start in layout.starts.values())
    assert all(end <= start for end, start in zip(ends, list(layout.starts.values())[1:], strict=False))
    assert ends[-1] <= layout.nbytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": 7176}, "H=7176 must be a multiple of 16"),
        ({"ranks": 16}, "at most 8 ranks, not 16"),
        ({"top_k": 40}, "1 to 32 experts a token, not 40"),
        ({"hidden": 65536}, "bytes of shared memory; use all2allv"),
        ({"slots": 4000}, "bytes of shared memory; use all2allv"),
    ],
)
def test_sizes_without_room_are_refused(changes: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        cut_for(served(64, "fp32", **changes), *HOPPER)


def test_kernels_and_python_mean_the_same_numbers() -> None:
    text = source(*ht_kernels.DISPATCH) + source(*ht_kernels.COMBINE)
    defined = dict(re.findall(r"^#define (\w+) (\w+)", text, flags=re.MULTILINE))
    assert int(defined["DONE"].removesuffix("u"), 0) == ht_layout.DONE
    assert int(defined["PIECE_BYTES"]) == ht_layout.PIECE_BYTES
    assert int(defined["STATE_WORDS"]) == ht_kernels.STATE_WORDS
    assert int(defined["STAGES"]) == ht_kernels.STAGES
    assert int(defined["DEPTH"]) == ht_kernels.DEPTH
    sections = set(re.findall(r"\b([A-Z_]+)_AT\b", text)) - {"PART0", "PART1", "PART2"}
    assert {name for name in sections if not name.startswith("PART")} == set(
        Layout.of(served(9), cut_for(served(9), *HOPPER)).starts
    )


def test_positions_count_the_rows_of_a_slot_before() -> None:
    slots = torch.tensor([[3, 1], [1, -1], [3, 0], [1, 3]], dtype=torch.int32)
    here = slots >= 0
    assert positions(slots)[here].tolist() == [0, 0, 1, 1, 0, 2, 2]


def test_two_steps_are_under_way_at_once() -> None:
    assert parallel_launch(2, overlapping, timeout=60) == [[True] * 4] * 2


@pytest.mark.timed
def test_a_late_rank_is_named_once_and_nobody_hangs() -> None:
    patience, pause = 1.0, 2.5
    *others, last = parallel_launch(3, with_absence, patience, pause, timeout=60)
    for first, second, third in others:
        assert (first.late, second.late, third.late) == ((), (2,), ())
        assert patience <= second.seconds < pause
        assert third.seconds < patience
        assert first.right
        assert second.right
        assert third.right
    assert [seen.late for seen in last] == [(), (0, 1), ()]
    assert last[1].seconds < patience  # it finds their farewells
    assert all(seen.right for seen in last)


def test_an_excluded_rank_is_not_waited_for() -> None:
    ranks = 3
    *others, _ = parallel_launch(ranks, without_excluded, timeout=20)
    for rank, (late, rows) in enumerate(others):
        chosen = torch.cat([lane(r, ranks, 0)[1].slots for r in range(ranks - 1)]) // SLOTS
        assert late == ()
        assert rows == int((chosen == rank).sum())
