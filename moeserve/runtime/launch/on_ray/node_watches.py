"""`NodeWatches`: a watch on every node that has ranks, which tells which of their processes run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moeserve.proto.texts import clipped
from moeserve.runtime.launch.on_ray import niceness
from moeserve.runtime.launch.watch import ProcessWatch

log = logging.getLogger(__name__)

Looks = Mapping[int, tuple[float, str] | None]
"""By process, what a watch has seen of it, as `ProcessWatch.look` has it."""


@dataclass(eq=False)
class NodeWatch:
    """The watch of one node, and what it is asked now."""

    handle: Any
    asked_at: float
    late_at: float  # when it was asked, or Ray was asked for its node last
    answer: Any = None
    began: bool = False  # it has answered before


class NodeWatches:
    """Not thread-safe. bounds: seconds for a new watch to answer, and for one that has before; then Ray is
    asked for the node, or a new watch begins. processes: those of a node that are watched;
    seen: told what a node's watch has seen of them; lost: told of a node that is dead.
    """

    def __init__(
        self,
        bounds: tuple[float, float],
        processes: Callable[[str], list[int]],
        seen: Callable[[str, Looks], None],
        lost: Callable[[str], None],
    ) -> None:
        (self._begin_seconds, self._late_seconds), self._processes = bounds, processes
        self._seen, self._lost = seen, lost
        self._watches: dict[str, NodeWatch] = {}  # by node

    def watch(self, node: str) -> None:
        """Has a node watched from now on."""
        if node not in self._watches:
            self._watches[node] = _node_watch(node)

    def kill(self, node: str, pid: int) -> None:
        """Has the watch of a node kill a process there; does nothing where the node has none."""
        if node in self._watches:
            self._watches[node].handle.kill.remote(pid)

    def stop(self) -> None:
        """Ends all watches."""
        for watch in list(self._watches.values()):
            ray.kill(watch.handle)

    def look(self, *, again: bool = False) -> None:
        """Takes the watches' answers, and asks them again at the next look, or with `again` at once."""
        for node, watch in list(self._watches.items()):
            if watch.answer is None:
                self._ask(node, watch)
            elif is_ready(watch.answer):
                self._take_answer(node, watch)
                if again and self._watches.get(node) is watch:
                    self._ask(node, watch)
            elif time.monotonic() - watch.late_at > self._late_seconds:
                self._ask_for_node(node, watch)

    def _ask(self, node: str, watch: NodeWatch) -> None:
        watch.asked_at = watch.late_at = time.monotonic()
        watch.answer = watch.handle.look.remote(self._processes(node))

    def _ask_for_node(self, node: str, watch: NodeWatch) -> None:
        """Asks Ray for a node whose watch does not answer. One that begins has longer to do so."""
        watch.late_at = time.monotonic()
        waited = watch.late_at - watch.asked_at
        if not _lives(node):
            self._lose(node)
        elif watch.began or waited > self._begin_seconds:
            self._replace(node, watch, f"no answer for {waited:.0f} s")

    def _take_answer(self, node: str, watch: NodeWatch) -> None:
        try:
            looks, watch.answer, watch.began = ray.get(watch.answer), None, True
        except RayError as error:
            if _lives(node):
                self._replace(node, watch, first_line(error))
            else:
                self._lose(node)
            return
        self._seen(node, looks)

    def _replace(self, node: str, watch: NodeWatch, why: str) -> None:
        log.warning("the watch of node %s is started again: %s", node, why)
        ray.kill(watch.handle)
        self._watches[node] = _node_watch(node)

    def _lose(self, node: str) -> None:
        del self._watches[node]
        self._lost(node)


def _lives(node: str) -> bool:
    """Whether Ray counts a node as alive."""
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def _node_watch(node: str) -> NodeWatch:
    """A watch in a process of its own on a node; it reserves none of its CPUs, and yields none to ranks."""
    told = {niceness.KEY: os.environ.get(niceness.KEY, "0")}
    options = ray.remote(ProcessWatch).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        max_restarts=0,
        runtime_env={"env_vars": told},
    )
    remote: Callable[..., Any] = options.remote
    return NodeWatch(remote(), time.monotonic(), time.monotonic())


def is_ready(ref: Any) -> bool:
    """Whether there is an answer, or a failure in its place."""
    return ref is not None and bool(ray.wait([ref], timeout=0)[0])


def first_line(error: Exception) -> str:
    """What an error says, in one line for a log."""
    lines = str(error).strip().splitlines() or [""]
    return clipped(f"{type(error).__name__}: {lines[-1]}")
