"""Dispatchers over peer memory: their protocol on the CPU twin, late peers, and what they refuse."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_nvrtc
from parallel import parallel_launch
from peer_ranks import DELAY, PATIENCE, everything, number_after_seven, spec, two_streams

from moeserve.device.machine import machine_named
from moeserve.device.source import source
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.peers import kernels, layout, twin, wires
from moeserve.dispatch.peers import liveness as late
from moeserve.dispatch.peers import packets as packets
from moeserve.dispatch.peers import sequence as sequences
from moeserve.dispatch.peers.dispatcher import bytes_needed, check_sizes, lacks_room
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape, Grouping
from moeserve.experts.kernel import Problem
from moeserve.experts.kernels import KERNELS
from moeserve.quant.format import Scheme
from moeserve.quant.formats import BF16, FORMATS, STATIC, WIRES
from moeserve.runtime.planning.plan import make_plan
from moeserve.runtime.sections import Wanted

pytestmark = pytest.mark.timed  # one launch shows all, patience included

RANKS = 3


@pytest.fixture(scope="module")
def seen() -> list[tuple[Any, ...]]:
    """What each rank saw: the protocol, a late rank, an excluded one."""
    return parallel_launch(RANKS, everything, timeout=150)


@pytest.mark.parametrize(
    "what",
    [
        "over the turn of the sequence numbers",
        "two under way",
        "abandoned steps",
        "a stale step is refused",
        "random sizes",
        "nobody was late",
    ],
)
def test_the_protocol_holds(what: str, seen: list[tuple[Any, ...]]) -> None:
    assert [held[what] for held, _, _ in seen] == [True] * RANKS


def test_a_late_rank_is_named_by_all_others_and_nobody_hangs(seen: list[tuple[Any, ...]]) -> None:
    first, late_one, last = (found for _, found, _ in seen)
    for other in (first, last):
        assert other["whole"] and other["named"] == (1,) and other["again"] == ()
        assert PATIENCE <= other["took"] < DELAY, "it waits as long as it is told, not for the late rank"
        assert other["answer"], "the step goes on with what the others brought"
        assert other["after"] and other["then"] < PATIENCE, "nobody waits for it again"
    assert late_one["named"] == (0, 2), "the late rank learns that it was given up"
    assert late_one["took"] < PATIENCE and late_one["then"] < PATIENCE, "and waits for nobody who has gone on"


def test_an_excluded_rank_is_not_waited_for(seen: list[tuple[Any, ...]]) -> None:
    *others, excluded = (found for _, _, found in seen)
    assert excluded is None
    assert [(well, unnamed) for well, unnamed, _ in others] == [(True, True)] * 2
    assert all(took < PATIENCE for _, _, took in others)


def test_sequences_alternate_in_parity_over_the_turn_and_skip_what_memory_holds() -> None:
    at, seen = sequences.LAST - 2, []
    for _ in range(5):
        at = sequences.next_sequence(at)
        seen.append(at)
    assert seen == [sequences.LAST - 1, sequences.LAST, 1, 2, 3] and sequences.NEVER not in seen
    assert [sequences.parity(sequence) for sequence in seen] == [1, 0, 1, 0, 1]


def test_sections_of_the_layout_do_not_overlap() -> None:
    given = replace(spec(0, 4), wire=FORMATS["mxfp8"], row_align=8, lane_rows=6)
    made = layout.PeerLayout(given, Grouping.PADDED)
    ends = [
        made.choices + 4 * made.choice_words(6) * 16,
        made.weights + 4 * 6 * made.weight_words * 16,
        made.records + 4 * 6 * packets.PACKET,
    ]
    assert all(
        end <= start
        for end, start in zip(ends, (made.weights, made.records, made.arrivals_bytes), strict=True)
    )
    assert made.sums_bytes >= 4 * 6 * 2 * packets.PACKET and made.capacity == 24
    both, owner, lane = Member(0, 0, 0), Member(0, owner=0), Member(0, lane=0)
    assert made.arrivals == late.HEADER_BYTES >= late.GIVEN_UP_BYTES + 4 * late.MOST_OWNERS
    assert late.GIVEN_UP_BYTES >= 4 * late.MOST_SEATS
    assert made.sums(both) == made.arrivals + 2 * made.arrivals_bytes and made.sums(lane) == late.HEADER_BYTES
    assert made.nbytes == made.nbytes_of(both) == made.sums(both) + 2 * made.sums_bytes
    assert made.nbytes_of(owner) == made.sums(both)
    assert made.nbytes_of(lane) == late.HEADER_BYTES + 2 * made.sums_bytes


def test_reserved_seats_take_memory_and_nothing_else() -> None:
    given = spec(0, 4)
    roomy = replace(given, members=Members.of_ranks(4, max_lanes=12, max_owners=6))
    before, after = (layout.PeerLayout(one, Grouping.PADDED) for one in (given, roomy))
    assert after.arrivals_bytes == 3 * before.arrivals_bytes and after.capacity == 3 * before.capacity
    assert before.sums_bytes < after.sums_bytes < 2 * before.sums_bytes


def test_the_kernels_and_the_layout_agree_on_their_constants() -> None:
    text = source(kernels.__package__, *kernels.SOURCES)
    defined = dict(re.findall(r"#define (\w+) +\(?(\w+)", text))
    assert int(defined["GIVEN_UP_BYTES"]) == late.GIVEN_UP_BYTES
    assert int(defined["THREADS"]) == kernels.THREADS
    assert int(defined["COMBINE_THREADS"]) == kernels.COMBINE_THREADS
    warps = kernels.THREADS // 32
    assert 1 << int(defined["WARPS_LOG2"]) == warps
    assert int(defined["LEAST_TEAM"]) * kernels.TEAMS == warps
    assert (int(defined["PACKET"]), int(defined["PACKET_WORDS"])) == (packets.WARP_THREADS, packets.WORDS)
    numbers = {name: int(defined[f"WIRE_{name.removesuffix('_static').upper()}"]) for name in wires.FUSED}
    assert numbers == wires.FUSED and int(defined["WIRE_RECORDS"]) == wires.RECORDS
    assert "0xFFFFFFFEu" in text and sequences.LAST == 0xFFFFFFFE


@pytest.mark.parametrize(
    ("wire", "dtype", "ranks", "top_k", "hidden", "grouping"),
    [
        ("bf16", torch.bfloat16, 8, 8, 7168, Grouping.RAGGED),
        ("bf16", torch.bfloat16, (3, 2), 8, 7168, Grouping.RAGGED),
        ("fp8_group128", torch.bfloat16, (32, 8), 8, 7168, Grouping.PADDED),
        ("bf16", torch.float32, 3, 2, 160, Grouping.PADDED),
        ("fp8_group128", torch.bfloat16, 2, 8, 7168, Grouping.PADDED),
        ("fp8_group128", torch.float16, 4, 1, 2048, Grouping.RAGGED),
        ("mxfp8", torch.float32, 3, 6, 2880, Grouping.RAGGED),
        ("nvfp4_static", torch.bfloat16, 8, 10, 4096, Grouping.RAGGED),
        ("mxfp4", torch.bfloat16, 1, 32, 1024, Grouping.PADDED),
    ],
)
def test_the_kernels_compile(
    wire: str,
    dtype: torch.dtype,
    ranks: int | tuple[int, int],
    top_k: int,
    hidden: int,
    grouping: Grouping,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_nvrtc()
    from moeserve.device import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    members = Members.of_ranks(ranks) if isinstance(ranks, int) else Members.split(*ranks)
    made = replace(spec(0, 1), members=members, dtype=dtype, top_k=top_k, hidden=hidden)
    given = STATIC[wire].given if wire in STATIC else None
    made = replace(made, wire=WIRES[wire] if given is None else given(torch.tensor(0.25)))
    for seat in {0, members.seats[-1]}:
        here = replace(made, seat=seat)
        program = kernels.program_for(layout.PeerLayout(here, grouping), wires.wire_code(here))
        assert nvrtc.compiled(program.source, "sm_90a", program.options)


@pytest.mark.parametrize("words", [1, 7, 31, 32, 93])
def test_rows_come_out_of_their_packets(words: int) -> None:
    rows = torch.randint(0, 256, (5, 16 * words), dtype=torch.uint8)
    made = packets.to_packets(rows)
    assert made.shape == (5, packets.packets_of(16 * words), 32, 4) and not packets.tags(made).any()
    packets.tags(made).fill_(7)
    assert torch.equal(packets.from_packets(made, 16 * words), rows)
    lines = made.view(5, -1, 32)  # of 128 bytes
    assert (lines[..., -1] == 7).all(), "each line ends with its tag"


def test_positions_count_the_rows_of_a_slot_before() -> None:
    slots = torch.tensor([[3, 1], [1, -1], [3, 0], [1, 3]], dtype=torch.int32)
    assert twin.positions(slots)[slots >= 0].tolist() == [0, 0, 1, 1, 0, 2, 2]


@pytest.mark.parametrize("name", sorted(WIRES))
def test_a_record_holds_a_row_of_any_wire(name: str) -> None:
    record, rows = wires.RowRecord(WIRES[name], 160), torch.randn(5, 160)
    packed = record.pack(rows)
    assert packed.shape == (5, record.nbytes) and record.nbytes % 16 == 0
    for got, want in zip(record.parts(packed), WIRES[name].quantize(rows).parts, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def test_only_the_rule_the_kernels_know_is_made_by_them() -> None:
    from moeserve.quant.formats.mx import mxfp8

    made = replace(spec(0, 2), dtype=torch.bfloat16)
    assert wires.wire_code(replace(made, wire=FORMATS["mxfp8"])).fused
    assert not wires.wire_code(replace(made, wire=mxfp8("even_e2m1"))).fused
    assert not wires.wire_code(replace(made, wire=FORMATS["bf16"])).fused
    given = STATIC["nvfp4_static"].given
    assert given is not None
    code = wires.wire_code(replace(made, wire=given(torch.tensor(0.25))))
    assert code.fused and code.factor == 4.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"members": Members.of_ranks(9)}, "at most 32 lanes and 8 owners, not 9 and 9"),
        ({"members": Members.split(33, 2)}, "at most 32 lanes and 8 owners, not 33 and 2"),
        ({"hidden": 72}, "H=72 must be a multiple of 16"),
        ({"lane_rows": 70000}, "lane_rows=70000 must lie between 1 and 65535"),
        ({"top_k": 33}, "top_k=33 must lie between 1 and 32"),
        ({"slots": 40000}, "80000 slots do not fit in 16 bits"),
        ({"slots": 23000}, "23000 slots need 184000 bytes of a block's shared memory"),
        ({"hidden": 65536}, "H=65536 and 3 slots need 262144 bytes of a block's shared memory"),
    ],
)
def test_sizes_without_room_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_sizes(replace(spec(0, 2), **change))


def test_what_does_not_fit_is_refused_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(spec(0, 2), lane_rows=4096, slots=128, hidden=7168, device="cuda")
    padded = layout.PeerLayout(large, Grouping.PADDED)
    needed = bytes_needed(padded)
    assert needed > 2 * 128 * 2 * 4096 * 7168 * 4  # two batches of float32
    assert bytes_needed(layout.PeerLayout(large, Grouping.RAGGED)) < needed / 16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed, 2 * needed))
    check_sizes(large)
    assert lacks_room(padded) == ""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 1, 2 * needed))
    assert f"needs {needed} bytes for 4096 rows a lane" in lacks_room(padded)
    assert f"{needed - 1} are free" in lacks_room(padded)


def test_on_a_cpu_it_serves_only_when_named() -> None:
    shape = ExpertShape(256, 256, Activation("silu"))
    asked = Problem(Scheme(BF16, BF16), BF16, shape, experts=8, lanes=4, owners=4, top_k=2, lane_rows=64)
    cpu = machine_named("cpu", ())
    alone = {name: DISPATCHERS[name] for name in ("nvlink_ll", "all2allv")}
    assert make_plan(asked, cpu, KERNELS, alone, Wanted()).dispatcher_names == "all2allv"
    assert (
        make_plan(asked, cpu, KERNELS, alone, Wanted(dispatcher="nvlink_ll")).dispatcher_names == "nvlink_ll"
    )


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (7, "step 7 comes after step 7: numbers of steps rise"),
        (6, "step 6 comes after step 7: numbers of steps rise"),
    ],
)
def test_numbers_that_do_not_rise_are_refused(number: int, why: str) -> None:
    (heard,) = parallel_launch(1, number_after_seven, number, timeout=60)
    assert heard.startswith(why)


@pytest.mark.parametrize("jump", [2**31 - 1, 2**31, 2**32])
def test_a_dispatcher_that_was_long_idle_takes_the_next_step(jump: int) -> None:
    assert parallel_launch(2, number_after_seven, 7 + jump, timeout=60) == ["taken"] * 2


@pytest.mark.gpu(2)
def test_collective_kernels_of_two_streams_run_in_one_order() -> None:
    for right in parallel_launch(2, two_streams, timeout=100, device="cuda"):
        assert len(right) == 40 and all(right)
