"""`MemberGroup`: one member's part in the process group of the generation that it is in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import ProcessGroup

from moeserve.dispatch.fence import close_to_strangers, listeners
from moeserve.dispatch.group import GroupKind, abort_group, end_group, form_group
from moeserve.runtime.control.store import StreamStore
from moeserve.runtime.control.stream import Message

LOOK_SECONDS = 0.02  # between looks whether a group that forms is wanted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessGroupSettings:
    """How a generation's process group comes together."""

    backend: str  # gloo, nccl
    timeout: float  # seconds of one collective
    own_process: bool = False  # as `GroupKind` has it


class Meeting(NamedTuple):
    """Which group is to form, and this member's place in it."""

    name: str
    generation: int
    position: int
    size: int  # members


class Forming:
    """One group that comes together, in a thread that may be left alone: a group that it forms too late is
    ended by it.
    """

    def __init__(self, form: Callable[[], ProcessGroup]) -> None:
        self._form = form
        self._lock = threading.Lock()  # around those below
        self._left = False
        self._made: ProcessGroup | BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, name="forming", daemon=True).start()

    def wait(self, live: Callable[[], bool]) -> ProcessGroup:
        """The group. Raises what forming it does, and RuntimeError once `live` says that nobody wants it."""
        while not self._over.wait(LOOK_SECONDS) and live():
            pass
        with self._lock:
            self._left = self._made is None
        if isinstance(self._made, BaseException):
            raise self._made
        if self._made is None:
            raise RuntimeError("the generation was aborted while its process group formed")
        return self._made

    def _run(self) -> None:
        try:
            made: ProcessGroup | BaseException = self._form()
        except BaseException as error:  # it is raised where the group is waited for
            made = error
        with self._lock:
            self._made, left = made, self._left
        self._over.set()
        if left and not isinstance(made, BaseException):
            end_group(made)
        elif left:
            log.info("a process group that nobody waits for any more does not form: %s", made)


class MemberGroup:
    """The group of the rank in seat `index`, and the store where it meets; both at most one at a time.

    The thread that executes entries calls `join` and `leave`. The one that receives them calls the others
    meanwhile: `answered` brings the head's answers to the store, `close` ends the waits of a group that still
    forms, `interrupt` those of one that has formed.
    """

    def __init__(self, index: int, settings: ProcessGroupSettings, send: Callable[[Message], None]) -> None:
        self._index = index
        self._settings = settings
        self._send = send
        self._formed: ProcessGroup | None = None
        self._store: StreamStore | None = None  # where it met; as long as there is the group

    def join(self, meeting: Meeting, device: str, live: Callable[[], bool]) -> ProcessGroup:
        """Forms the group with its other members; `device` is this rank's.

        `live` says whether the generation still counts. Whoever ends it has `live` say so before `close` and
        `interrupt`, which find no store or no group yet where they come early. Raises RuntimeError where it
        ended meanwhile, and as `form_group` does.
        """
        settings = self._settings
        self._store = StreamStore(self._send, meeting.generation, settings.timeout)
        if live():  # else its abort has found no store to close
            self._formed = self._form(self._store, meeting, device, live)
        if self._formed is None or not live():  # its abort found no group yet
            raise RuntimeError("the generation was aborted while its process group formed")
        return self._formed

    def _form(
        self, store: StreamStore, meeting: Meeting, device: str, live: Callable[[], bool]
    ) -> ProcessGroup:
        """The group, formed. gloo does so in a thread of its own, which is left alone once the generation has
        ended: it was seen to wait for ever for a member that died while they connected.
        """
        settings = self._settings
        place = (meeting.name, meeting.position, meeting.size)
        if settings.backend != "gloo":
            kind = GroupKind(settings.backend, settings.timeout, device, settings.own_process)
            return form_group(store, *place, kind)
        before = listeners() if settings.own_process else None
        kind = GroupKind(settings.backend, settings.timeout, device)
        forming = Forming(lambda: form_group(store, *place, kind))
        formed = forming.wait(live)
        if before is not None:
            close_to_strangers(but=before)  # all members are connected
        return formed

    def answered(self, message: Message) -> None:
        """Takes the head's answer to what the store asked."""
        if (store := self._store) is not None:
            store.answered(message)

    def close(self, reason: str) -> None:
        """Ends the waits of a process group that forms: nobody answers them any more."""
        if (store := self._store) is not None:
            store.close(reason)

    def interrupt(self) -> None:
        """Ends the waits for other members in the group's collectives; returns at once.

        gloo sees a dead peer by itself, while a NCCL kernel waits for ever. The group is ended by a thread of
        its own: NCCL's abort was seen to wait until the group was destroyed, which the executing thread does
        once it hears of the abort from the one that receives.
        """
        if (group := self._formed) is not None:
            threading.Thread(target=self._abort, args=(group,), name="abort", daemon=True).start()

    def _abort(self, group: ProcessGroup) -> None:
        try:
            abort_group(group)
        except (RuntimeError, ValueError) as error:
            log.info("rank %d: the process group was gone already: %s", self._index, error)

    def leave(self) -> None:
        """Ends the group, where there is one; no other group of the process changes.

        gloo's connections are closed by a thread: for each it waits until gloo's own thread has looked, 10 to
        30 ms in all, and the next group need not wait for that. The process does when it ends.
        """
        kept: list[object] = [self._store, self._formed]
        group, self._formed, self._store = self._formed, None, None
        if group is None:
            return
        end_group(group)
        del group
        if self._settings.backend == "gloo":
            threading.Thread(target=_let_go, args=(kept,), name="closing").start()


def _let_go(kept: list[object]) -> None:
    """Forgets a group and then the store where it met, which torch does not keep."""
    while kept:
        kept.pop()
