"""What of a process's log is written: repeated lines are counted, bytes a minute are limited, and nobody who
logs waits for whoever reads.

No class here has a clock or a lock of its own, but `LineWriter`, which has the one thread that writes.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

ALIKE = 10
"""Different lines of one place in the code that are written within a window; further ones are counted."""

QUEUE_BYTES = 1 << 20
"""Of lines that wait for whoever reads the log; further ones are left out, and counted."""

MINUTE = 60.0
RESERVED = 0.25
"""Of the bytes of a minute: only for errors, so that a flood of lesser lines hides none."""

FLUSH_SECONDS = 2.0  # that a process waits at its end for its last lines to be taken

Place = tuple[str, str, int, int]
"""Where a line comes from: its logger, file and line in the code, and the number of its level."""


@dataclass(eq=False)
class _Window:
    """Lines of one place within `repeat_seconds`."""

    began: float
    counts: dict[str, int] = field(default_factory=dict)  # text of a written line -> repetitions since
    more: int = 0  # lines of other texts
    last: str = ""  # of those


@dataclass(frozen=True)
class Repeated:
    """Lines of one place that were counted instead of written."""

    place: Place
    text: str  # of the line, or of the last one where their texts differ
    count: int
    seconds: float
    alike: bool  # whether their texts differ

    @property
    def shown(self) -> str:
        """The text with the count behind it."""
        if self.alike:
            return f"{self.text} (the last of {self.count} lines like it in {self.seconds:.1f} s)"
        return f"{self.text} (repeated {self.count} times in {self.seconds:.1f} s)"


class Repeats:
    """Counts lines that come again within `seconds`; 0 counts none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._windows: dict[Place, _Window] = {}

    def admit(self, place: Place, text: str, now: float) -> bool:
        """Whether a line is to be written; else it is counted."""
        if not self._seconds:
            return True
        window = self._windows.setdefault(place, _Window(now))
        if text in window.counts:
            window.counts[text] += 1
            return False
        if len(window.counts) < ALIKE:
            window.counts[text] = 0
            return True
        window.more += 1
        window.last = text
        return False

    def due(self) -> float:
        """When the next window ends; infinite where there is none."""
        began = min((window.began for window in self._windows.values()), default=math.inf)
        return began + self._seconds

    def ended(self, now: float, *, by: float) -> Iterator[Repeated]:
        """What was counted, as of `now`, in windows that end by then or `by`: infinity takes all.

        A line that was repeated is known in the window that follows: of what goes on for long, the first line
        and one count a window are written.
        """
        for place, window in list(self._windows.items()):
            if max(now, by) < window.began + self._seconds:
                continue
            lasted = now - window.began
            again = {text: count for text, count in window.counts.items() if count}
            for text, count in again.items():
                yield Repeated(place, text, count, lasted, alike=False)
            if window.more:
                yield Repeated(place, window.last, window.more, lasted, alike=True)
            if again:
                self._windows[place] = _Window(now, dict.fromkeys(again, 0))
            else:
                del self._windows[place]


class Budget:
    """Bytes that may be written a minute: `per_minute` at once, and as many more with each minute; 0: any."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def admit(self, nbytes: int, now: float, *, error: bool) -> bool:
        """Whether so many bytes may be written now; a part of each minute's is for errors only."""
        if not self._per_minute:
            return True
        gained = (now - self._at) / MINUTE * self._per_minute
        self._left, self._at = min(float(self._per_minute), self._left + gained), now
        if self._left - nbytes < (0.0 if error else RESERVED * self._per_minute):
            return False
        self._left -= nbytes
        return True


class LineWriter:
    """Writes lines to a descriptor in a thread of its own, which also asks for what is due.

    A log that nobody reads (a full pipe, a disk that hangs) holds up this thread and no other. `on_due` is
    called at the time that `due` says.
    """

    def __init__(self, descriptor: int, due: Callable[[], float], on_due: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._due, self._on_due = due, on_due
        self._lines: deque[bytes] = deque()
        self._nbytes = 0  # of the lines, and of the one that is being written
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> bool:
        """Queues a line; False where the queue is full."""
        with self._changed:
            if self._nbytes + len(line) > QUEUE_BYTES:
                return False
            self._lines.append(line)
            self._nbytes += len(line)
            self._changed.notify_all()
            return True

    def wake(self) -> None:
        """What is due has changed."""
        with self._changed:
            self._changed.notify_all()

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Waits until every line is written, `seconds` at most; whether all are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._nbytes, seconds)

    def close(self) -> None:
        """Writes what is queued, within a bound, and ends the thread."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._write(f"the thread that writes the log died: {type(error).__name__}: {error}\n".encode())
            raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._closed and self._due() > time.monotonic():
                    until = self._due()
                    self._changed.wait(None if math.isinf(until) else max(0.0, until - time.monotonic()))
                if self._closed:
                    return
                line = self._lines.popleft() if self._lines else None
            if line is not None:
                self._write(line)
                with self._changed:
                    self._nbytes -= len(line)
                    self._changed.notify_all()
            if self._due() <= time.monotonic():
                self._on_due()

    def _write(self, line: bytes) -> None:
        """Writes a whole line. One that cannot be written is lost: there is nowhere to say so."""
        while line:
            try:
                line = line[os.write(self._descriptor, line) :]
            except BlockingIOError:
                time.sleep(0.01)  # somebody made the descriptor non-blocking
            except OSError:
                return
