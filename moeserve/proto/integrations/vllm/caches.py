"""The seam of the engine: what becomes of key-value caches that were made with weights from before a reload.

`keep`: nothing. Prefixes and running requests go on with the keys and values that they have. `recompute`:
within a second of a reload's end running requests are preempted, all prefixes are forgotten, and both are
computed again with the new weights. No request is aborted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCore

from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.proto.integrations.settings import Settings

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class Reloads:
    """Looks for reloads once a second, in a thread, from the first time it is asked."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._known = 0
        self._changed = threading.Event()
        self._looking: threading.Thread | None = None

    def ended(self) -> bool:
        """Whether a reload has ended since this was last asked."""
        if self._looking is None:
            self._looking = threading.Thread(target=self._look, name="moeserve-reloads", daemon=True)
            self._looking.start()
        if not self._changed.is_set():
            return False
        self._changed.clear()
        return True

    def look(self) -> None:
        """Asks once; a service that does not answer is asked the next time."""
        try:
            version = self._ask()
        except MoeError as failed:
            log.debug("no answer about reloads: %s", failed)
            return
        if self._known and version != self._known:
            self._changed.set()
        self._known = version

    def _look(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self.look()
            except Exception:
                log.exception("the thread that looks for reloads goes on after an error")
            pause.wait(LOOK_SECONDS)


def install(settings: Settings) -> None:
    """Engines of this process follow the policy from now on."""
    if settings.caches == "keep":
        return
    clients: list[MoeClient] = []

    def version() -> int:
        if not clients:  # made in the engine's own process, after it was spawned
            shown = settings.credentials
            clients.append(MoeClient(settings.address, timeout=LOOK_SECONDS, credentials=shown))
        return int(clients[0].model().weights_version)

    reloads = Reloads(version)
    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCore, name, _recomputing(getattr(EngineCore, name), reloads))


def _recomputing(step: Any, reloads: Reloads) -> Any:
    def stepped(self: Any) -> Any:
        # vLLM drops the answers of batches under way to requests that it preempts so
        if reloads.ended():
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            log.warning(
                "the weights were reloaded: prefixes are forgotten, and running requests computed again"
            )
        return step(self)

    return stepped
