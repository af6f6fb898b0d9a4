"""Kernels of a device lane of a GPU: a caller brings rows and fetches answers, an owner takes and posts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.device.arguments import Argument
from moeserve.device.nvrtc import Program
from moeserve.device.overlap import overlaps
from moeserve.device.source import source
from moeserve.dispatch.dispatcher import Living
from moeserve.dispatch.mail.arguments import AWAIT, BRING, COPY, EXCHANGE, FETCH, POST, TAKE
from moeserve.dispatch.mail.layout import FEW_BLOCKS, MOST_BLOCKS, WORDS, MailLayout, Word
from moeserve.dispatch.peers.wires import FUSED, RowRecord, divides_truly
from moeserve.experts.batch import Tally

THREADS = 512
TELLING = 1  # block of a kernel that brings: it tells the owner's host
MISFIT = 64
"""Beside a pass's statuses: a step has more rows than were launched for, or was to yield. It, and those
behind it, are to be launched anew.
"""

ABORT, YIELD = 1, 2
"""The host's word to kernels that wait: the pass is over; or others want the device, and steps that wait are
to be launched anew, as MISFIT says.
"""

CHOICE, LOGITS = 0, 1
"""What comes with the rows: chosen experts and weights, or router logits."""

LATE, LOST = 2, 3
"""Statuses of a pass whose rows, or whose answers, do not come."""


class Given(NamedTuple):
    """Rows of a step in device memory, dense: hidden states `[T, H]` of the lane's dtype, and chosen experts
    int32 `[T, K]` with weights float32 `[T, K]`, or logits float32 `[T, E]` without.
    """

    hidden: Tensor
    route: Tensor
    weights: Tensor | None


def program(record: RowRecord | None = None, *, true_division: bool = True) -> Program:
    """The text of all kernels. record: how rows come that are rounded, of bfloat16; None: as they are.
    true_division: as `divides_truly` tells of the caller's device.
    """
    memory = source("moeserve.dispatch.peers", "memory.cu")
    arguments = BRING, FETCH, EXCHANGE, TAKE, POST, COPY, AWAIT
    kernels = source("moeserve.dispatch.mail", *arguments, "mail.cu", "caller.cu", "owner.cu")
    if record is None:
        return Program("\n".join((memory, kernels)))
    rounding = source("moeserve.dispatch.peers", "numbers.cu", "records.cu")
    options = (
        f"-DHIDDEN={record.hidden}",
        "-DSOURCE=0",
        f"-DWIRE={FUSED[record.wire.name]}",
        f"-DTRUE_DIVISION={int(true_division)}",
        f"-DRECORD_BYTES={record.nbytes}",
        f"-DPART1_AT={record.starts[1]}",
    )
    return Program("\n".join((memory, rounding, kernels)), options)


def _program_of(record: RowRecord | None, device: torch.device) -> Program:
    return program() if record is None else program(record, true_division=divides_truly(device))


def load(record: RowRecord | None = None) -> None:
    """Loads all kernels on the current device, which waits for it. record: of `program`."""
    made = _program_of(record, torch.device("cuda", torch.cuda.current_device()))
    for name, arguments in (
        ("mail_bring", BRING),
        ("mail_fetch", FETCH),
        ("mail_exchange", EXCHANGE),
        ("mail_take", TAKE),
        ("mail_post", POST),
        ("mail_words", COPY),
        ("mail_await", AWAIT),
    ):
        made.function(name, arguments)


def words(device: torch.device) -> Tensor:
    """A table, or a state: zeros, int64 `[WORDS]`."""
    return torch.zeros(WORDS, dtype=torch.int64, device=device)


class Words:
    """Begins runs on the current device, one at a time and in the order of its stream."""

    def __init__(self) -> None:
        self._copy = program().function("mail_words", COPY)

    def begin(
        self,
        state: Tensor,
        now: Tensor,
        host: Tensor,
        *,
        least: int = 0,
        again: bool = False,
        holding: bool = False,
    ) -> None:
        """A run of the lane that has this state: `now` is what its kernels read. host: int64 `[WORDS]`,
        pinned. least: rows that its first step must have; 0: any. again: steps before it were left. holding:
        the interpreter is kept meanwhile, as little is queued to the stream.

        Behind the `post` that is its last one, the state and `host` have the words as the run has left them:
        by an event that is recorded then they are there, and no engine has to be waited for.
        """
        given: dict[str, Argument] = {"from": state, "to": now, "host": host.data_ptr()}
        launch = self._copy.launch_holding if holding else self._copy.launch
        launch(1, WORDS, given | {"least": least, "again": int(again)})


class CallerKernels:
    """What a caller launches on its own GPU, the current device. Under capture it becomes part of the graph:
    addresses, the pass and the step are read from `table` when it runs.
    """

    def __init__(self, layout: MailLayout, table: Tensor) -> None:
        self._layout, self._overlaps = layout, overlaps(table.device)
        made = _program_of(layout.record, table.device)
        self._bring = made.function("mail_bring", BRING).bound({"table": table})
        self._fetch = made.function("mail_fetch", FETCH).bound({"table": table})
        self._exchange = made.function("mail_exchange", EXCHANGE).bound({"table": table})
        self._await = made.function("mail_await", AWAIT).bound(_awaits(layout, table, Word.ANSWERS, LOST))

    def bring(self, stage: int, layer: int, given: Given, header_at: int = 0) -> None:
        """Stores the rows of the stage's next step in the mailbox. header_at: where the stage's header begins
        in the mirror, in bytes.
        """
        rows = self._brought(stage, layer, given, header_at)
        blocks = self._layout.blocks_of(given.hidden.shape[0])
        self._bring.launch(blocks + TELLING, THREADS, rows, overlapped=self._overlaps)

    def _brought(self, stage: int, layer: int, given: Given, header_at: int) -> dict[str, Argument]:
        rows = _rows(self._layout, (stage, layer), given)
        return rows | {"header_at": header_at, "count": given.hidden.shape[0]}

    def fetch(self, stage: int, out: Tensor) -> None:
        """Waits on the device for the answer to the stage's rows, and stores it in `out [T, H]`, dense and of
        as many rows as were brought.
        """
        lines, rows = self._layout.answer(stage)
        blocks = self._layout.readers_of(out.shape[0])
        if awaited := blocks > FEW_BLOCKS:
            given = {"lines_at": lines, "stage": stage, "early": int(self._overlaps)}
            self._await.launch(1, MOST_BLOCKS, given, overlapped=self._overlaps)
        self._fetch.launch(
            blocks,
            THREADS,
            {
                "out": out,
                "lines_at": lines,
                "rows_at": rows,
                "stage": stage,
                "count": out.shape[0],
                "row_words": self._layout.row_words,
                "lines": self._layout.blocks_of(out.shape[0]),
                "awaited": int(awaited),
            },
            overlapped=self._overlaps,
        )

    def exchange(
        self, stage: int, layer: int, given: Given, header_at: int, answer: tuple[int, Tensor]
    ) -> None:
        """Does what `bring` does and then `fetch`, of another stage: `answer` is that, and `out`. It is one
        kernel, unless so many blocks fetch that one has to wait before them.
        """
        fetched, out = answer
        count = out.shape[0]
        fetching = self._layout.readers_of(count)
        if fetching > FEW_BLOCKS or fetched == stage:
            self.bring(stage, layer, given, header_at)
            self.fetch(fetched, out)
            return
        lines, at = self._layout.answer(fetched)
        bringing = self._layout.blocks_of(given.hidden.shape[0])
        self._exchange.launch(
            bringing + fetching + TELLING,
            THREADS,
            self._brought(stage, layer, given, header_at)
            | {
                "bringing": bringing,
                "out": out,
                "answer_lines_at": lines,
                "answer_at": at,
                "answer_stage": fetched,
                "answer_count": count,
                "lines": self._layout.blocks_of(count),
            },
            overlapped=self._overlaps,
        )


class OwnerKernels:
    """What an owner launches on its GPU, the current device; `state` is that of the lane whose step it is."""

    def __init__(self, layout: MailLayout, state: Tensor) -> None:
        self._layout, self._overlaps = layout, overlaps(state.device)
        made = _program_of(layout.record, state.device)
        always: dict[str, Argument] = {"state": state, "host": int(layout.in_host_memory)}
        self._take = made.function("mail_take", TAKE).bound(always)
        self._post = made.function("mail_post", POST).bound(always)
        self._await = made.function("mail_await", AWAIT).bound(_awaits(layout, state, Word.MAILBOX, LATE))

    def take(
        self,
        stage: int,
        layer: int,
        room: Given,
        valid: Tensor,
        *,
        early: int = 0,
        lone: bool = False,
    ) -> None:
        """Waits on the device for the rows of the stage's next step, and stores them in `room`; `valid` bool
        `[R]` says which of its rows there are. More than it holds are left, and the state is ended by MISFIT.

        early: what was launched right before is a `post` of another stage, beside which this may begin; as
        many steps as the run has before this one. The step before has another room, and what it posts stays
        until the next post is launched. lone: one block alone waits, however few there are: others
        want the multiprocessors meanwhile.
        """
        layout, padded = self._layout, room.hidden.shape[0]
        logits = 0 if room.weights is not None else room.route.shape[1] // 4
        rows, blocks = _rows(layout, (stage, layer), room), layout.readers_of(padded, logits)
        awaited, early = lone or blocks > FEW_BLOCKS, early if self._overlaps else 0
        if awaited:
            given = {"lines_at": rows["lines_at"], "stage": stage, "early": early}
            self._await.launch(1, MOST_BLOCKS, given, overlapped=self._overlaps)
        more = {"padded": padded, "most": layout.rows, "experts": layout.experts, "blocks": layout.blocks}
        more["buffers"], _ = layout.answer_buffers
        begins = {"awaited": int(awaited), "early": early}
        self._take.launch(blocks, THREADS, rows | more | {"valid": valid} | begins, overlapped=self._overlaps)

    def post(
        self,
        stage: int,
        answer: Tensor,
        tally: Tally | None = None,
        living: Living | None = None,
        *,
        took: int = 0,
        early: bool = False,
        last: bool = False,
    ) -> None:
        """Stores the answer `[R, H]` to the rows that were taken last in the caller's memory; where a member
        was given up whose sums it should have, the pass ends as lost instead. tally: counted behind that.
        took: steps of the run up to this one; 0 where no take begins beside this. last: of a run that `Words`
        has begun. early: kernels lie between the take of the step and this, the first of which has waited
        until the take was over.
        """
        lines, rows = self._layout.answer(stage)
        self._post.launch(
            self._layout.blocks_of(answer.shape[0]),
            THREADS,
            {
                "answer": answer,
                "living": None if living is None else living.words,
                "places": 0 if living is None else living.places,
                "counts": None if tally is None else tally.counts,
                "totals": None if tally is None else tally.totals,
                "taken": None if tally is None else tally.taken,
                "slots": 0 if tally is None else len(tally.counts),
                "took": took,
                "early": int(early and self._overlaps),
                "last": int(last),
                "blocks": self._layout.blocks,
                "lines_at": lines,
                "rows_at": rows,
                "buffer_bytes": self._layout.answer_buffers[1],
                "stage": stage,
                "row_words": self._layout.row_words,
            },
            overlapped=self._overlaps,
        )


def _rows(layout: MailLayout, step: tuple[int, int], given: Given) -> dict[str, Argument]:
    """What `ROWS` names, and the columns. step: stage and layer."""
    stage, layer = step
    lines, hidden, ids, weights, logits = layout.columns(stage)
    chosen = given.weights is not None
    return {
        "hidden": given.hidden,
        "route": as_words(given.route),
        "weights": None if given.weights is None else as_words(given.weights),
        "lines_at": lines,
        "hidden_at": hidden,
        "route_at": ids if chosen else logits,
        "weights_at": weights,
        "stage": stage,
        "layer": layer,
        "kind": CHOICE if chosen else LOGITS,
        "row_words": layout.row_words,
        "route_words": given.route.shape[1],
    }


def _awaits(layout: MailLayout, words: Tensor, box: Word, late: int) -> dict[str, Argument]:
    """What a kernel that waits takes each time."""
    row_words, blocks = layout.row_words, layout.blocks
    given: dict[str, Argument] = {"words": words, "box": int(box), "late": late, "row_words": row_words}
    return given | {"blocks": blocks, "host": int(layout.in_host_memory)}


def as_words(column: Tensor) -> Tensor:
    """A dense column of 32-bit elements as int32."""
    return column.view(torch.int32)
