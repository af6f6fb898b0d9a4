"""`Held`: what a process holds, as /proc says: memory, threads, descriptors."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """Descriptors, threads and resident bytes of one process. Descriptors are counted by kind."""

    kinds: Counter[str]
    threads: int
    nbytes: int

    @property
    def descriptors(self) -> int:
        """All of them."""
        return sum(self.kinds.values())

    @classmethod
    def of(cls, pid: int) -> Held:
        """The process `pid` as it is now."""
        status = Path(f"/proc/{pid}/status").read_text()
        threads, kilobytes = (
            int(re.search(rf"^{key}:\s+(\d+)", status, re.M)[1])  # type: ignore[index]
            for key in ("Threads", "VmRSS")
        )
        return cls(_descriptors(pid), threads, kilobytes << 10)


def _descriptors(pid: int) -> Counter[str]:
    """The open descriptors of a process by what they are, numbers left out."""
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found[re.sub(r"[\d\[\]]+", "", os.readlink(descriptor)).rstrip(":")] += 1
    return found
