"""`Agreement`: work that all ranks did, or none; a rank that fails is heard by all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

AGREE_SECONDS = 300.0
"""Within which a rank has done its part, a library that compiles at first use included."""


def gathered(mine: Any) -> list[Any]:
    """`mine` of every rank, by rank. Collective over the default group."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class RankFailed(RuntimeError):
    """What failed on which ranks; all ranks raise it together."""


class Agreement:
    """Work that went well on all ranks or on none, past the collectives that a failed rank leaves unanswered.

    Making one is collective. On a GPU ranks tell each other over the CPU: a dispatcher only launches its
    collectives, so the ranks that wait in them on the device can still listen.
    """

    def __init__(self) -> None:
        self._own = dist.get_backend() != "gloo"
        self._group = dist.group.WORLD
        if self._own:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_SECONDS))

    def agreed(self, work: Callable[[], T]) -> T:
        """What `work` gives here, once it went well on all ranks; all raise RankFailed otherwise."""
        kept: list[T] = []

        def keep() -> None:
            kept.append(work())

        self.from_all(keep)
        return kept[0]

    def from_all(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on every rank, by rank, pickled. All raise RankFailed where it failed on any."""
        mine: tuple[T | None, str] = (None, "")
        try:
            mine = (work(), "")
        except (RuntimeError, ValueError) as error:
            mine = (None, first_line(error))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self._group)
        if wrong := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]:
            raise RankFailed("; ".join(wrong))
        return [value for value, _ in found]

    def close(self) -> None:
        """Frees the group that it made for itself. Collective."""
        if self._own:
            dist.destroy_process_group(self._group)


def first_line(error: Exception) -> str:
    """Returns what the error says first, or its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
