"""A disk that is slow to read, put where a checkpoint's files are opened: every read really waits for it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors

PAGE = 4096


class SlowDisk:
    """Moves `rate` bytes a second; what was asked for comes `latency` seconds after it was moved.

    Bytes that a program touches and that nobody asked for come by `window` bytes, one window after the other,
    as pages of a memory map do. What `posix_fadvise` asks for is moved while the program does something else.
    """

    def __init__(self, *, rate: float, latency: float, window: int) -> None:
        self.rate, self.latency, self.window = rate, latency, window
        self.faults = 0  # windows that came only when they were touched
        self.asked = 0  # bytes
        self._free_at = 0.0  # when all that was asked for so far has been moved
        self._ready: dict[tuple[str, int], float] = {}  # by file and page

    def install(self, monkeypatch: pytest.MonkeyPatch, *, advice: bool) -> None:
        """Puts the checkpoints of this process on the disk; without `advice` the system cannot be asked."""
        monkeypatch.setattr("moeserve.checkpoints.store.safe_open", self._opened)
        if advice:
            monkeypatch.setattr(os, "posix_fadvise", self._advise)
        else:
            monkeypatch.delattr(os, "posix_fadvise")

    def touch(self, file: str, start: int, stop: int) -> None:
        """Waits until bytes `start` to `stop` of a file are there."""
        for page in range(start // PAGE, -(-stop // PAGE)):
            if (file, page) not in self._ready:
                self.faults += 1
                self._move(file, page * PAGE, page * PAGE + self.window)
            time.sleep(max(0.0, self._ready[file, page] - time.monotonic()))

    def _advise(self, descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        self.asked += length
        self._move(os.readlink(f"/proc/self/fd/{descriptor}"), start, start + length)

    def _move(self, file: str, start: int, stop: int) -> None:
        pages = range(start // PAGE, -(-stop // PAGE))
        absent = [page for page in pages if (file, page) not in self._ready]
        for page in absent:
            self._free_at = max(self._free_at, time.monotonic()) + PAGE / self.rate
            self._ready[file, page] = self._free_at + self.latency

    def _opened(self, path: str, **options: Any) -> _SlowFile:
        return _SlowFile(self, os.readlink(path), safetensors.safe_open(path, **options))


class _SlowFile:
    """A safetensors file on the disk."""

    def __init__(self, disk: SlowDisk, file: str, opened: Any) -> None:
        self._disk, self._file, self._opened = disk, file, opened
        with Path(file).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            self._header = json.loads(stream.read(length))
        self._start = 8 + length

    def get_slice(self, name: str) -> _SlowSlice:
        start, stop = (self._start + offset for offset in self._header[name]["data_offsets"])
        return _SlowSlice(self._disk, (self._file, start, stop), self._opened.get_slice(name))


class _SlowSlice:
    """A tensor on the disk; any part of it takes all of it."""

    def __init__(self, disk: SlowDisk, place: tuple[str, int, int], tensor: Any) -> None:
        self._disk, self._place, self._tensor = disk, place, tensor

    def __getitem__(self, index: Any) -> Any:
        self._disk.touch(*self._place)
        return self._tensor[index]
