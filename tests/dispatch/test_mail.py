"""Memory and kernels of a device lane of a GPU, as far as they can be looked at without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from compiler import needs_nvrtc

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.nvrtc import Program
from moeserve.dispatch.dispatcher import Living
from moeserve.dispatch.mail import kernels
from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.dispatch.mail.layout import (
    FEW_BLOCKS,
    LINE_BYTES,
    MOST_BLOCKS,
    ROUNDED,
    SHARE_WORDS,
    STEPS,
    VERSION_AT,
    WORDS,
    MailLayout,
    Word,
)
from moeserve.experts.batch import Tally
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MOST_STAGES, Status
from moeserve.proto.passes.running import PARTED_BYTES
from moeserve.quant.formats import FP8_GROUP

TEXT = (files("moeserve.dispatch.mail") / "text" / "mail.cu").read_text()


@pytest.mark.parametrize("rows", [1, 5, 64, 4096])
@pytest.mark.parametrize("stages", [1, 3, MOST_STAGES])
def test_nothing_lies_over_anything_else(rows: int, stages: int) -> None:
    made = MailLayout(rows, stages, 7168, 256, 8, torch.bfloat16)
    sizes = made.blocks * LINE_BYTES, rows * 7168 * 2, rows * 8 * 4, rows * 8 * 4, rows * 256 * 4
    spans = [
        (at, at + size)
        for stage in range(stages)
        for at, size in zip(made.columns(stage), sizes, strict=True)
    ]
    spans.append((made.mailbox_bytes, made.mailbox_bytes))
    answers = [
        (at, at + size)
        for stage in range(stages)
        for at, size in zip(made.answer(stage), (sizes[0], sizes[1]), strict=True)
    ]
    answers.append((made.answers_bytes, made.answers_bytes))
    for found in (spans, answers):
        assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
        assert all(begin % 16 == 0 for begin, _ in found)


def test_rounded_rows_take_the_bytes_of_their_records() -> None:
    made = MailLayout(64, 2, 7168, 256, 8, torch.bfloat16, ROUNDED)
    plain = MailLayout(64, 2, 7168, 256, 8, torch.bfloat16)
    assert (
        made.mailbox_row_bytes == 7168 + 4 * 7168 // 128
        and plain.mailbox_row_bytes == plain.row_bytes == made.row_bytes
    )
    assert made.answers_bytes == plain.answers_bytes and made.blocks == plain.blocks
    _, hidden, ids, *_ = made.columns(1)
    assert ids - hidden >= 64 * made.mailbox_row_bytes and ids - hidden < 65 * made.mailbox_row_bytes
    assert made.mailbox_bytes < 0.6 * plain.mailbox_bytes


@pytest.mark.parametrize(
    ("hidden", "dtype", "wire", "why"),
    [
        (256, torch.bfloat16, "mxfp4", "come as they are or as fp8_group128, not as mxfp4"),
        (256, torch.float16, ROUNDED, r"rows of torch\.float16 are not those"),
        (192, torch.bfloat16, ROUNDED, "a row of 192 elements is no multiple of 128"),
    ],
)
def test_rows_that_cannot_be_rounded_are_refused(
    hidden: int, dtype: torch.dtype, wire: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        MailLayout(4, 1, hidden, 8, 2, dtype, wire)


def test_rows_that_were_rounded_once_are_not_changed_when_they_are_rounded_again() -> None:
    random = torch.Generator().manual_seed(5)
    powers = torch.linspace(-14, 14, 512).exp2().unsqueeze(1)
    rows = torch.cat(
        [
            torch.randn(512, 1024, generator=random) * powers,
            torch.randn(512, 1024, generator=random) * torch.randn(512, 1024, generator=random).mul(4).exp2(),
            torch.randint(-448, 449, (64, 1024), generator=random) * powers[::8],  # on ties, and on codes
            torch.randn(8, 1024, generator=random) * 1e-11,  # under the least scale
            torch.zeros(1, 1024),
        ]
    ).bfloat16()
    once = FP8_GROUP.quantize(rows)
    again = FP8_GROUP.quantize(once.dequantize().bfloat16())
    for before, after in zip(once.parts, again.parts, strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_rows_are_divided_alike_and_never_among_more_blocks_than_have_lines() -> None:
    made = MailLayout(1024, 1, 7168, 256, 8, torch.bfloat16)
    counts = [made.blocks_of(rows) for rows in range(made.rows + 1)]
    assert (
        counts == sorted(counts) and counts[0] == counts[1] == 1 and counts[-1] == made.blocks == MOST_BLOCKS
    )
    assert MailLayout(1, 1, 64, 8, 2, torch.bfloat16).blocks == 1


def test_a_row_that_is_no_multiple_of_16_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a row of 60 torch\.bfloat16 has 120 bytes"):
        MailLayout(4, 1, 60, 8, 2, torch.bfloat16)


def test_the_text_counts_as_the_host_does() -> None:
    """Words, statuses and shares have numbers on both sides."""
    words = re.search(r"enum \{ (MAILBOX.*?) \};", TEXT)
    assert words is not None
    at, found = -1, {}
    for part in words[1].split(","):
        name, _, given = part.partition("=")
        at = int(given) if given else at + 1
        found[name.strip()] = at
    steps, tickets = found.pop("STEPS"), found.pop("TICKETS")
    assert found == {word.name: int(word) for word in Word}
    assert steps == STEPS and tickets - steps == MOST_STAGES and tickets + MOST_STAGES == WORDS
    named = dict(re.findall(r"(LATE|LOST|REFUSED|MISFIT|YIELD) = (\d+)", TEXT))
    assert named == {
        "LATE": str(int(Status.LATE)),
        "LOST": str(int(Status.LOST)),
        "REFUSED": str(int(Status.REFUSED)),
        "MISFIT": str(kernels.MISFIT),
        "YIELD": str(kernels.YIELD),
    }
    assert (kernels.LATE, kernels.LOST) == (Status.LATE, Status.LOST)
    assert kernels.MISFIT not in set(Status) and kernels.ABORT not in (0, kernels.YIELD)
    headers = {
        "HEADER": (m.TAG, m.LAYER, m.STAGE, m.COUNT, m.KIND, m.FILLED, m.BUFFER),
        "ANSWER": (m.TAG, m.EPOCH, m.VERSION, m.ANSWERED),
    }
    for name, places in headers.items():
        said = re.search(rf"enum \{{ ({name}_TAG.*?) \}};", TEXT)
        assert (
            said is not None
            and len(said[1].split(",")) == len(places)
            and places == tuple(range(len(places)))
        )
    parts, bits = (int(re.findall(rf"#define {name} +(\d+)", TEXT)[0]) for name in ("PARTS", "PART_BITS"))
    first = int(re.findall(r"#define PART_BIT +(\d+)", TEXT)[0])
    assert int(re.findall(r"#define PARTED +(\d+)", TEXT)[0]) * 16 == PARTED_BYTES
    assert first + parts * bits <= 64 and 2**bits > MOST_BLOCKS, "a ticket holds them all"
    assert f"#define SHARE {SHARE_WORDS} " in TEXT and f"#define LANE_WORDS {WORDS} " in TEXT
    line = re.search(r"struct __align__\(32\) Line \{(.*?)\};", TEXT, re.DOTALL)
    assert line is not None and "of answers: status, epoch, version" in line[1]
    places, at = {}, 0
    for kind, names in re.findall(r"u(32|64) ([\w, ]+)[;\[]", line[1]):
        for name in names.split(", "):
            places[name], at = at, at + int(kind) // 8
    assert places["third"] == VERSION_AT and places["unused"] + 8 == LINE_BYTES


class Packed:
    """A kernel whose launches are packed, and noted."""

    def __init__(self, name: str, arguments: Arguments, launches: list[tuple[str, int]]) -> None:
        self._name, self._arguments, self._launches = name, arguments, launches

    def bound(self, given: Mapping[str, Argument]) -> Packed:
        return Packed(self._name, self._arguments.bound(given), self._launches)

    def launch(
        self, grid: int, block: int, given: Mapping[str, Argument], *, overlapped: bool = False
    ) -> None:
        assert not overlapped, "only a GPU has launches that overlap"
        assert len(bytes(self._arguments.pack(given))) == self._arguments.nbytes
        assert 1 <= grid <= MOST_BLOCKS + kernels.TELLING and block <= 1024
        self._launches.append((self._name, grid))


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize(
    ("rows", "blocks", "readers"),
    [(1, 1, 1), (4, 4, 4), (5, 5, 4), (32, 32, 4), (33, 33, 33), (1024, MOST_BLOCKS, MOST_BLOCKS)],
)
def test_every_launch_has_its_arguments_and_one_block_waits_for_many(
    monkeypatch: pytest.MonkeyPatch, rows: int, blocks: int, readers: int, logits: bool
) -> None:
    launches: list[tuple[str, int]] = []

    def function(program: Program, name: str, arguments: Arguments) -> Packed:
        return Packed(name, arguments, launches)

    monkeypatch.setattr(Program, "function", function)
    made = MailLayout(1024, 2, 7168, 256, 8, torch.bfloat16)
    words = kernels.words(torch.device("cpu"))
    caller, owner = kernels.CallerKernels(made, words), kernels.OwnerKernels(made, words)
    hidden = torch.zeros(rows, 7168, dtype=torch.bfloat16)
    chosen = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, 8)
    given = kernels.Given(hidden, *((torch.zeros(rows, 256), None) if logits else chosen))
    caller.bring(1, 3, given, 64)
    owner.take(1, 3, given, torch.zeros(rows, dtype=torch.bool))
    tally = Tally(torch.ones(3, dtype=torch.int32), *torch.zeros(4, dtype=torch.int64).split(3))
    owner.post(1, hidden, tally, Living(torch.ones(5, dtype=torch.int32), 0b11101))
    owner.post(1, hidden)
    caller.fetch(1, hidden)
    takers = made.readers_of(rows, 64 if logits else 0)
    assert takers == (32 if logits and rows == 32 else readers), "logits count where few blocks read"
    waits = [("mail_await", 1)] if readers > FEW_BLOCKS else []
    before = [("mail_await", 1)] if takers > FEW_BLOCKS else []
    first, last = [("mail_bring", blocks + kernels.TELLING)], [("mail_fetch", readers)]
    taken = [("mail_take", takers), *[("mail_post", blocks)] * 2]
    assert launches == first + before + taken + waits + last


@pytest.mark.parametrize(
    ("rows", "takers", "posters"), [(1, 1, 1), (32, 4, 32), (1024, MOST_BLOCKS, MOST_BLOCKS)]
)
def test_an_owner_of_rows_in_host_memory_launches_likewise(
    monkeypatch: pytest.MonkeyPatch, rows: int, takers: int, posters: int
) -> None:
    launches: list[tuple[str, int]] = []

    def function(program: Program, name: str, arguments: Arguments) -> Packed:
        assert arguments.fields["host"] == "int"
        return Packed(name, arguments, launches)

    monkeypatch.setattr(Program, "function", function)
    made = HostMailLayout(1024, 2, 7168, 256, 8, torch.bfloat16)
    owner = kernels.OwnerKernels(made, kernels.words(torch.device("cpu")))
    hidden = torch.zeros(rows, 7168, dtype=torch.bfloat16)
    given = kernels.Given(hidden, torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, 8))
    owner.take(1, 3, given, torch.zeros(rows, dtype=torch.bool))
    owner.post(1, hidden, last=True)
    before = [("mail_await", 1)] if takers > FEW_BLOCKS else []
    assert launches == [*before, ("mail_take", takers), ("mail_post", posters)]


def test_blocks_of_an_early_take_go_by_what_they_are_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that finds a place when the first is over would read that the take itself has been counted."""
    launches = dict[str, list[Argument]]()

    class Noted(Packed):
        def bound(self, given: Mapping[str, Argument]) -> Noted:
            return self

        def launch(
            self, grid: int, block: int, given: Mapping[str, Argument], *, overlapped: bool = False
        ) -> None:
            launches.setdefault(self._name, []).append(given["early"])

    monkeypatch.setattr(Program, "function", lambda program, name, arguments: Noted(name, arguments, []))
    monkeypatch.setattr(kernels, "overlaps", lambda device: True)
    made = MailLayout(64, 2, 7168, 256, 8, torch.bfloat16)
    owner = kernels.OwnerKernels(made, kernels.words(torch.device("cpu")))
    for rows in (4, 64):
        hidden = torch.zeros(rows, 7168, dtype=torch.bfloat16)
        given = kernels.Given(hidden, torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, 8))
        owner.take(1, 3, given, torch.zeros(rows, dtype=torch.bool), early=3)
        owner.take(1, 3, given, torch.zeros(rows, dtype=torch.bool))
    assert launches == {"mail_take": [3, 0, 3, 0], "mail_await": [3, 0]}
    owner_text = (files("moeserve.dispatch.mail") / "text" / "owner.cu").read_text()
    taken = owner_text[owner_text.index("void mail_take(") : owner_text.index("bool lacks_sums(")]
    assert taken.count("word(words, TOOK)") == taken.count("took = behind ? behind : word(words, TOOK);") == 1
    posted = owner_text[owner_text.index("void mail_post(") : owner_text.index("void mail_words(")]
    assert posted.count("TOOK") == posted.count("took = args.took ? args.took : word(words, TOOK);") == 1
    assert "TOOK" not in owner_text[owner_text.index("void mail_await(") :]


def test_all_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    from moeserve.device import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    assert nvrtc.compiled(kernels.program().source, "sm_90a")
    for hidden in (128, 7168):
        record = MailLayout(1, 1, hidden, 8, 2, torch.bfloat16, ROUNDED).record
        rounding = kernels.program(record, true_division=hidden == 128)
        assert nvrtc.compiled(rounding.source, "sm_90a", rounding.options)
