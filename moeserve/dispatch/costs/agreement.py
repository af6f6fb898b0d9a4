"""`Agreement`: work that all members of a group did, or none; one that fails is heard by all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moeserve.dispatch.group import GroupKind, end_group, group_beside

T = TypeVar("T")


def gathered(mine: Any, group: ProcessGroup | None) -> list[Any]:
    """`mine` of every member, by position, pickled. Collective over `group`; None: this member is alone."""
    if group is None:
        return [mine]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


class RankFailed(RuntimeError):
    """What failed on which ranks; all ranks raise it together."""


class Agreement:
    """Work that went well on all ranks or on none, past the collectives that a failed rank leaves unanswered.

    Making one is collective over `group`; None: this member is alone. within: seconds for a rank to do its
    part, a library that compiles at first use included. On a GPU ranks tell each other over the
    CPU: a dispatcher only launches its collectives, so the ranks that wait in them on the device can still
    listen, by a group that is formed beside `group`.
    """

    def __init__(self, group: ProcessGroup | None, within: float = 300.0) -> None:
        self._group = group
        self._own = group is not None and dist.get_backend(group) != "gloo"
        if group is not None and self._own:
            self._group = group_beside(group, GroupKind("gloo", within))

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
        found = gathered(mine, self._group)
        if wrong := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]:
            raise RankFailed("; ".join(wrong))
        return [value for value, _ in found]

    def close(self) -> None:
        """Ends the group that it formed for itself."""
        if self._group is not None and self._own:
            end_group(self._group)


def first_line(error: Exception) -> str:
    """Returns what the error says first, or its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
