"""`CallerLane`: a caller's end of a device lane between two GPUs: memory, words, and the wire of rows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch

from moeserve.dispatch.mail.layout import MailLayout
from moeserve.dispatch.peers.memory import Mapped, memory_on
from moeserve.proto.errors import MoeError
from moeserve.proto.passes.attached import ANY_WIRE, AttachedLane
from moeserve.torch.attached import Pinned

log = logging.getLogger(__name__)

REST_SECONDS = 10.0
"""For a rank to end a pass before memory that it writes to is freed."""

GONE_SECONDS = 0.5
"""The same for one whose lane is gone: it may have detached it, and still run."""


class Said(NamedTuple):
    """What a rank is told of a lane, beside its sizes."""

    device: str  # its name
    answers: bytes  # the handle of this side's memory
    rows_wire: str  # asked for, as in AttachLaneRequest


Attach = Callable[[Said], AttachedLane]
"""Attaches a lane."""


class CallerLane:
    """The lane, and this process's end of it: memory for answers, the rank's as it is mapped, and words.

    rows_wire: asked for; `layout` has the one that rows are to come in. Raises MoeError as `attach`, and for
    a service that does not take it; RuntimeError for memory that cannot be had, mapped or registered;
    ValueError for a wire that this version does not know.
    """

    def __init__(self, attach: Attach, layout: MailLayout, device: torch.device, rows_wire: str) -> None:
        self._leaving: threading.Thread | None = None
        self._over = False  # whether the rank writes no answer any more
        self._device = device
        uuid = torch.cuda.get_device_properties(device).uuid
        with ExitStack() as undone:
            self.answers: Mapped = memory_on(str(device), layout.answers_bytes)
            undone.callback(self.answers.close)
            self.lane = attach(Said(f"cuda:{uuid}", bytes(self.answers.handle()), rows_wire))
            undone.callback(self.lane.close)
            found = self.lane.sizes
            if found != (layout.hidden, layout.experts, layout.top_k):
                raise RuntimeError(f"the service has hidden size, experts and top-k {found} now")
            if rows_wire not in (ANY_WIRE, self.lane.rows_wire):
                text = f"rows_wire: the service takes no rows as {rows_wire}, as one of an older version"
                raise MoeError("FAILED_PRECONDITION", "device_refused", text)
            self.layout = replace(layout, wire=self.lane.rows_wire)
            self.mailbox = self.answers.open(self.lane.mailbox_handle, self.layout.mailbox_bytes)
            self.mirror = Pinned.of(self.lane.memory.bytes[:1])
            undone.callback(self.mirror.end)
            if not self.mirror.whole:
                raise RuntimeError("the lane's words in host memory cannot be registered with this GPU")
            undone.pop_all()
        box = torch.frombuffer(self.lane.memory.bytes[0], dtype=torch.uint8)
        self.addresses = self.mailbox.data_ptr(), self.answers.mine.data_ptr(), box.data_ptr()

    def leave(self) -> None:
        """Detaches it, and waits for nothing; nothing on this device uses it any more."""
        self._leaving = threading.Thread(target=self._leave, name="lane-leaves", daemon=True)
        self._leaving.start()

    @property
    def left(self) -> bool:
        """Whether `leave` has come so far that `close` waits for nothing."""
        return self._leaving is not None and not self._leaving.is_alive()

    def _leave(self) -> None:
        self._over = self.lane.rest(REST_SECONDS if self.lane.alive else GONE_SECONDS) or not self.lane.alive
        self.lane.detach()

    def close(self) -> None:
        """Leaves it, where that is yet to be done, and frees its memory; what the rank may still write to
        stays allocated, and what cannot be freed, which is logged.
        """
        if self._leaving is None:
            self.leave()
        assert self._leaving is not None
        self._leaving.join()  # which waits for no longer than it rests and detaches
        try:
            self._free()
        except RuntimeError:  # whoever closes it has another lane, or none
            log.exception("memory of a device lane is not freed")

    def _free(self) -> None:
        with torch.cuda.device(self._device), ExitStack() as all_of_it:
            if self._over:
                all_of_it.callback(self.answers.close)
            else:
                log.error("memory for answers is kept: a rank does not end its pass in %g s", REST_SECONDS)
            all_of_it.callback(self.lane.close)
            self.mirror.end()
