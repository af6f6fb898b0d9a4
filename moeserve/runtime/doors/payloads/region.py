"""`Region`: one shared-memory region of a rank's process; `Hold`, `Held`: its parts that calls use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from moeserve.runtime.doors.payloads.registration import Registration

ViewsKey = tuple[object, ...]
"""What a call says of its rows, and of where it wants its answer."""


@dataclass
class Region:
    """A region as its process knows it, under the lock of `Regions`."""

    name: str
    public: str
    memory: memoryview
    descriptor: int | None
    maker: str = ""
    made: float = field(default_factory=time.monotonic)
    claimed: bool = False
    leases: int = 0
    holds: int = 0
    released: bool = False
    registration: Registration | None = None  # with the device; a region by name has none
    on_device: bool = False  # the device is this host, and the memory stays as large as it is
    views: dict[ViewsKey, tuple[Region, object]] = field(default_factory=dict)  # see `Regions.remember`
    viewed_with: dict[str, Region] = field(default_factory=dict)  # those whose `views` name this one
    when_left: dict[object, Callable[[], object]] = field(default_factory=dict)  # see `Regions.when_left`

    @property
    def reached(self) -> bool:
        """Whether the device reads and writes the memory in place."""
        return self.on_device or self.registration is not None


class Holds(Protocol):
    """Whose regions they are."""

    def unhold(self, *regions: Region) -> None:
        """Ends as many holds on each as it is named times."""


class Hold:
    """Part of a region, kept mapped and listed as in use until closed. `memory` is writable bytes."""

    def __init__(self, regions: Holds, region: Region, memory: memoryview) -> None:
        self.memory = memory
        self.reached = region.reached  # the device reads and writes it in place
        self._regions = regions
        self.region: Region | None = region  # None: it is held no more

    def close(self) -> None:
        """Ends the hold; a second time does nothing."""
        region, self.region = self.region, None
        if region is not None:
            self._regions.unhold(region)

    def __enter__(self) -> memoryview:
        return self.memory

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Held:
    """Two regions that a call holds; the same one twice where its answer goes to where its rows came from."""

    def __init__(self, regions: Holds, held: tuple[Region, Region]) -> None:
        self._regions = regions
        self._held: tuple[Region, Region] | None = held

    def close(self) -> None:
        """Ends both holds; a second time does nothing."""
        held, self._held = self._held, None
        if held is not None:
            self._regions.unhold(*held)
