"""`Member`: one process's part in the group. It follows the coordinator's ordered stream and alone issues
collectives. A member without a lane takes no calls; a step that it has no part in is not sent to it.

Two threads: one receives (so that an abort is seen while a step runs: `receiving`), one executes entries in
their order, and takes steps from the stream itself between two of them (`entries`). An entry counts while its
generation does (`generation`). Doors have threads of their own, and so has the mover, which prepares the next
epoch beside them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from moeserve.proto.host import sleep_finely
from moeserve.proto.texts import clipped, quoted
from moeserve.runtime.control.head_stream import HeadStream
from moeserve.runtime.control.messages import (
    epoch_from,
    held_message,
    here_message,
    plans_message,
)
from moeserve.runtime.control.reached import Phase
from moeserve.runtime.control.shadowed import Shadowed, addresses_from, shadowed_message
from moeserve.runtime.control.stream import Message, Stream, StreamClosed
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.given import is_for_good
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.member.announcing import Announcing
from moeserve.runtime.rank.member.changes import MemberChanges
from moeserve.runtime.rank.member.draining import MemberDrain
from moeserve.runtime.rank.member.entries import Entries
from moeserve.runtime.rank.member.generation import MemberGeneration
from moeserve.runtime.rank.member.held_epoch import HeldEpoch
from moeserve.runtime.rank.member.member_group import MemberGroup, ProcessGroupSettings
from moeserve.runtime.rank.member.own_order import OwnOrder, header_in, run_in
from moeserve.runtime.rank.member.receiving import Receiving
from moeserve.runtime.rank.member.restoring import Restoring
from moeserve.runtime.rank.member.steps import REPORT_SECONDS, MemberSteps
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.runs.group_runs import GroupRuns
from moeserve.runtime.rank.weights.copies import Copier
from moeserve.runtime.step import Announcement, StepRecord

log = logging.getLogger(__name__)

GLANCE_SECONDS = 3e-5  # between two looks at lanes and steps under way, while jobs of several callers flow
ALWAYS = ("abort", "load", "held", "act")  # entries that count in every generation


class Member:
    """Runs one member's entries. `run` returns when the coordinator ends the stream or says stop.

    `lane` holds the jobs of its doors; None for a member that only holds experts.
    """

    def __init__(
        self,
        rank: Rank,
        lane: Lane | None,
        stream: Stream | HeadStream,
        group_settings: ProcessGroupSettings,
        observe: Callable[[StepRecord], None],
    ) -> None:
        self._rank = rank
        self._lane = lane
        self._stream = stream
        self._entries = Entries(stream if isinstance(stream, HeadStream) else None)
        self.order = OwnOrder(rank.index, self._entries.put_beside, self._tell_head)
        self.order.failed = self._report_failure
        self._announcing = Announcing(self._tell, self.order.announce)
        self._held = HeldEpoch(rank, None if lane is None else lane.number, self._say_here)
        group = MemberGroup(rank.index, group_settings, stream.send)
        self._generation = MemberGeneration(rank, group)
        self.steps = MemberSteps(rank, lane, self._tell, observe)
        self.changes = MemberChanges(self._held, self.steps.drain, self._tell)
        self.drain = MemberDrain(lane, self._tell)
        self._restoring = Restoring(
            lambda: Copier(0.0, rank.device, "restoring"), self._held.restore, self._tell
        )
        self.steps.failed = self._report_failure
        self.steps.another = lambda: self._entries.another
        self._runs: GroupRuns | None = None
        at_once: dict[str, Callable[[Message], None]] = {
            "stage": self.changes.prepare,
            "abandon": self.changes.prepare,
            "log_levels": lambda message: self.on_log_levels(message["levels"]),
            "peers": lambda message: self.on_peers(addresses_from(message)),
            "open_layers": self._open_layers,
            "ask": lambda message: self._say_here(message["generation"]),
            "company": lambda message: self.order.on_company(),
            "steady": self.order.steady,
            "stored": group.answered,
            "drain": self.drain.told,
        }
        first = {"abort": self._see_abort, "prepare": self._see_prepare}
        self._receiving = Receiving(rank.index, stream, self._entries, at_once, first)
        self._receiving.on_lost = lambda why: self._end_generation(why, back=True)
        self._receiving.come_back = lambda: self.come_back()
        self._receiving.on_found, self._receiving.on_end = self._say_held, self._close
        self.on_serving: Callable[[int, int], None] = lambda generation, epoch: None  # (0, epoch): it stopped
        self.on_layers: Callable[[bool], None] = lambda all_open: None  # of layers, whether steps run of all
        self.on_log_levels: Callable[[Mapping[str, str]], None] = lambda levels: None  # by logger
        # where each owner's process gives its experts, since the group serves
        self.on_peers: Callable[[Mapping[int, str]], None] = lambda addresses: None
        self.on_end: Callable[[], None] = lambda: None  # the generation has ended; from any thread
        self.on_leave: Callable[[], None] = lambda: (
            None
        )  # dispatchers are about to be closed, and nothing runs
        self._attends = False  # this thread looks after lanes, and has not said that it does no more
        self._look: Callable[[], None] = lambda: None
        self._looks_no_more: Callable[[], None] = lambda: None
        self.joined = False  # steps can be launched
        self.before_entry: Callable[[], None] = lambda: None  # what comes next is no run of a pass
        self.closed_layers = frozenset[int]()  # decoder indices, that members still read
        # once the head's stream has ended: whether a head is there again that has taken this member's hello
        self.come_back: Callable[[], bool] = lambda: False

    @property
    def where(self) -> tuple[int | None, int | None]:
        """The generation and the epoch that this member is in, None for none; takes no lock."""
        epoch = self._held.epoch
        return self._generation.live or None, None if epoch is None else epoch.number

    def observe_rows(self, observe: Callable[[int, int, int], None]) -> None:
        """Has `observe` told how many rows of a layer the device has computed since the last time, and how
        many it has taken from device lanes.
        """
        self.steps.observe_rows = observe

    def weights_version(self) -> int:
        """The version of the weights that this rank holds; 0 before they are loaded."""
        return self._held.epoch.weights_version if self._held.epoch is not None else 0

    def take_runs(self, runs: GroupRuns) -> None:
        """Has `runs` launch runs of the group's lanes."""
        self._runs, runs.tell, runs.observe = runs, self._tell, self.steps.ran
        runs.failed, runs.others = self._report_failure, lambda: self.steps.on_others()

    def announce(self, job: Announcement) -> None:
        """Tells the coordinator of a job; called by doors."""
        self._announcing.announce(job)

    def announce_together(self) -> AbstractContextManager[None]:
        """Jobs that the calling thread announces meanwhile go in few messages, as `Announcing` has it."""
        return self._announcing.together()

    def withdraw(self, jobs: list[int]) -> None:
        """Tells the coordinator of jobs whose callers have left; called by doors."""
        self._announcing.withdraw(self._generation.number, jobs)

    def tell_shadows(self, shadowed: Shadowed) -> None:
        """Tells the coordinator what this member keeps in host memory."""
        self._tell(shadowed_message(shadowed))

    def between_steps(self, act: Callable[[], None]) -> None:
        """Has `act` done by the thread that launches steps, between two of them. It raises nothing."""
        self._entries.put_beside({"kind": "act", "act": act})

    def attend(self, look: Callable[[], None], back: Callable[[], None]) -> None:
        """Has the thread that launches steps look after lanes while jobs of several callers flow. look: at
        what their callers want. back: it looks no more.
        """
        self._look, self._looks_no_more = look, back
        self.steps.attends, self.steps.away = True, back

    def _tell(self, message: Message) -> None:
        """Says something to whom it is for: who orders steps here, or the head."""
        if not self.order.take(message):
            self._tell_head(message)

    def _tell_head(self, message: Message) -> None:
        """Says something to the head. Where the stream has ended, whoever receives sees to what follows: the
        generation ends, and so do its jobs.
        """
        try:
            self._stream.send(message)
        except StreamClosed as closed:
            log.info("rank %d: the head does not hear %r: %s", self._rank.index, message["kind"], closed)

    def _say_here(self, generation: int) -> None:
        """Tells the head that this process runs, and goes on."""
        self._tell(here_message(generation, self._rank.progress.reached))

    def run(self) -> None:
        """Executes entries until the stream ends."""
        sleep_finely()
        threading.Thread(target=self._receiving.run, name="stream", daemon=True).start()
        while (entry := self._next())["kind"] != "stop":
            if entry["kind"] not in ALWAYS and not self._generation.counts(entry):
                continue
            try:
                self._execute(entry)
            except Exception as error:
                self._report_failure(entry, error)
        log.info("rank %d stops: the head says so, or is gone", self._rank.index)
        self._close_lane("the rank is stopping")
        self.order.end()
        self.on_end()  # nothing on the device waits for rows any more
        self.steps.close()
        self._leave()
        self._rank.free()
        for left in self._entries.rest():
            if left["kind"] == "act":  # it finds that no step can be launched
                left["act"]()

    def _next(self) -> Message:
        """The next entry; while none comes, what was counted is reported, and lanes may be looked after."""
        while True:
            if (self._attends or self.steps.attended) and (entry := self._next_attending()) is not None:
                return entry
            if (entry := self._entries.next(REPORT_SECONDS)) is not None:
                return entry
            self.steps.report(self._generation.live)

    def _next_attending(self) -> Message | None:
        """The next entry; None where jobs of several callers flow no more. Meanwhile this thread begins such
        jobs and answers them: others would take the interpreter from it, and it from them.
        """
        self._attends = True
        while self.steps.attended:
            if (entry := self._entries.next(0.0)) is not None:
                if entry["kind"] != "step":  # it may take long
                    self.steps.hand_over()
                return entry
            ended = self.steps.finish_ended()
            self._look()
            if not ended:
                time.sleep(GLANCE_SECONDS)
        self._attends = False
        self.steps.hand_over()
        self._looks_no_more()
        return None

    def _close_lane(self, reason: str) -> None:
        if self._lane is not None:
            self._lane.close(reason)

    # -- what the receiving thread sees to while steps run ---------------------------------------------------

    def _see_prepare(self, message: Message) -> None:
        """A generation forms: what is still to be executed of those before it does not count."""
        self._generation.announced(message["generation"])
        self._say_here(message["generation"])

    def _see_abort(self, message: Message) -> None:
        """The generation ends: nobody waits in it any more."""
        log.info("generation %d is aborted: %s", message["generation"], clipped(message["reason"]))
        self._end_generation(message["reason"], back=message["back"])

    def _open_layers(self, message: Message) -> None:
        """Steps run of all layers but some, whose jobs wait."""
        if not self._generation.is_live(message["generation"]):
            return
        closed = [int(layer) for layer in message["closed"]]
        self.closed_layers = frozenset(closed)
        if self._lane is not None:
            self._lane.wait_for_layers(closed)
        self.order.close_layers(closed)
        self.on_layers(not closed)

    def _end_generation(self, reason: str, *, back: bool) -> None:
        """Ends the waits of the generation, whatever thread is in them; where the group comes `back`, the
        lane keeps its jobs.
        """
        self._generation.abort()  # before the lane: a commit under way sees it
        self.order.end()
        if back and self._lane is not None:
            self._lane.hold(reason)
        else:
            self._close_lane(reason)
        self._generation.close(reason)
        self._generation.interrupt()
        self.on_end()
        self.changes.abandon()

    def _say_held(self) -> None:
        """Tells a head that is there again what this member holds."""
        if self._held.adopted is None:  # it serves nobody yet, and may be reading experts for long
            self._tell(self._held_message(None))
        else:
            self._entries.put({"kind": "held"})

    def _held_message(self, epoch: Epoch | None) -> Message:
        drained = self._lane is not None and self._lane.drained
        return held_message(self._generation.newest, epoch, drained=drained)

    def _close(self, why: str) -> None:
        """Nothing comes any more: no job and no process group waits for it."""
        self._close_lane(why)
        self._generation.close(why)

    # -- entries, by the executing thread -------------------------------------------------------------------

    def _execute(self, entry: Message) -> None:
        if entry["kind"] != "act":
            self.before_entry()
        match entry["kind"]:
            case "step":
                epoch = self._held.epoch
                self.steps.run(header_in(entry, epoch), entry["generation"], epoch)
            case "run" if self._runs is not None:
                self._runs.execute(run_in(entry, self._held.epoch))
                self.steps.report_if_due(entry["generation"])
            case "prepare":
                self._prepare(entry)
            case "load":
                self._load_beforehand(entry)
            case "join":
                self._join_generation(entry)
            case "commit":
                self.changes.commit(entry)
            case "abort":
                self.on_serving(0, 0)
                self._leave()
            case "act":
                entry["act"]()
                self.steps.report_if_due(self._generation.live)
            case "held":  # by the thread that adopts epochs: none is adopted meanwhile
                self._tell(self._held_message(self._held.adopted))
            case unknown:
                raise ValueError(f"unknown entry {unknown!r}")

    def _report_failure(self, entry: Message, error: Exception) -> None:
        """A rank never skips an entry: if it cannot run one, the generation aborts."""
        first_line = (str(error).splitlines() or [""])[0]
        what = f"rank {self._rank.index}: {quoted(entry['kind'])} failed: {type(error).__name__}"
        reason = clipped(f"{what}: {first_line}")
        if entry["kind"] != "load" and not self._generation.fail(entry):  # a load is of no generation yet
            log.info("%s (its generation was aborted)", reason)
            return
        log.error("%s", reason, exc_info=error)
        failed = {"kind": "failed", "generation": entry["generation"], "reason": reason}
        self._tell(failed | {"for_good": entry["kind"] == "prepare" and is_for_good(error)})

    def _prepare(self, entry: Message) -> None:
        """Leaves the generation before, loads what the epoch gives this member, and votes."""
        self._rank.progress.join(Phase.PREPARED)
        self._say_here(entry["generation"])
        self._leave()
        self.changes.release()
        self._held.prepare(epoch_from(entry["epoch"]), entry["generation"], after=entry["after"])
        prepared = {"kind": "prepared", "generation": entry["generation"], "number": self.order.next_number}
        self._tell(prepared | self._held.counts() | {"lacks": list(self._held.lacks)})

    def _load_beforehand(self, entry: Message) -> None:
        """Loads the experts of the epoch that this member is to join, while the group serves without it. What
        a head asked for that is gone since counts for nothing, but it is held: the next one asks again.
        """
        if entry["heads"] != self._receiving.heads:
            return
        self._held.load_beforehand(epoch_from(entry["epoch"]))
        if entry["heads"] != self._receiving.heads:
            return
        self._tell({"kind": "loaded", "generation": 0} | self._held.counts())

    def _join_generation(self, entry: Message) -> None:
        """Everyone is prepared: joins the generation's process group and takes jobs."""
        if self._held.epoch is None:
            raise RuntimeError("join came before prepare")
        generation = entry["generation"]
        self._generation.join(entry)
        self.joined = True
        self._rank.progress.join(Phase.JOINED)
        if not self._generation.is_live(generation):  # aborted while it joined
            return
        self.order.begin(entry, self._rank.served.layers, self._held.epoch.members, self._held.lacks)
        if self._lane is not None:
            self._lane.open(generation)
        if not self._generation.is_live(generation):  # its abort came before the lane was open
            self.order.end()
            if self._lane is not None:
                self._lane.hold("the group is forming again")
        self.on_serving(generation, self._held.epoch.number)
        self._tell({"kind": "joined", "generation": generation, "plans": plans_message(self._rank.plans)})
        self._restoring.begin(generation, self._held.lacks)

    def _leave(self) -> None:
        """Leaves the generation, once the steps that were launched in it have ended."""
        self._restoring.stop()
        self.steps.drain()
        self.joined = False
        self.on_leave()
        self._generation.leave()
