"""`say`: a line for whoever reads, which waits for nobody who does not."""

from __future__ import annotations

import select
import time
from typing import TextIO

SAY_SECONDS = 0.5  # for a full pipe, or a terminal that is held, to take what is said
PIECE = 4096  # bytes that a pipe which is ready takes at once (Linux' PIPE_BUF)


def say(stream: TextIO | None, line: str) -> None:
    """Writes a line, by one write where it is short. `print` writes its end apart where Python does not
    buffer, and a line of the log, which often goes to the same file, may come between.

    What nobody takes within SAY_SECONDS is left out. Raises BrokenPipeError where the reader has gone.
    """
    if stream is None:  # the process was started without
        return
    until = time.monotonic() + SAY_SECONDS
    for piece in _pieces(f"{line}\n"):
        if not _takes(stream, until - time.monotonic()):
            return
        stream.write(piece)
        stream.flush()


def _pieces(text: str) -> list[str]:
    """`text` in pieces of at most PIECE bytes, however many its characters take."""
    step = PIECE if text.isascii() else PIECE // 4
    return [text[start : start + step] for start in range(0, len(text), step)]


def _takes(stream: TextIO, seconds: float) -> bool:
    """Whether there is room for a piece, or an error to meet, within so many seconds."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # it is an object of a test's
        return True
    asked = select.poll()
    asked.register(number, select.POLLOUT)
    return bool(asked.poll(max(0.0, seconds) * 1000))
