"""`say`: a line for whoever reads, which waits for nobody who does not."""

from __future__ import annotations

import logging
import os
import select
import time
from typing import TextIO

log = logging.getLogger(__name__)

SAY_SECONDS = 0.5  # for a full pipe, or a terminal that is held, to take what is said
PIECE = 4096  # bytes that a pipe which is ready takes at once (Linux' PIPE_BUF)


def say(stream: TextIO | None, line: str) -> None:
    """Writes a line, by one write where it is short. `print` writes its end apart where Python does not
    buffer, and a line of the log, which often goes to the same file, may come between.

    What nobody takes within SAY_SECONDS is left out, and so is what cannot be written, as to a file on a full
    disk. Raises BrokenPipeError where the reader has gone.
    """
    if stream is None:  # the process was started without
        return
    until = time.monotonic() + SAY_SECONDS
    try:
        for piece in _pieces(f"{line}\n"):
            if not _takes(stream, until - time.monotonic()):
                return
            _write(stream, piece)
    except BrokenPipeError:
        raise
    except OSError as error:
        log.warning("%s takes no line: %s", getattr(stream, "name", stream), error)


def _write(stream: TextIO, text: str) -> None:
    """Writes past the stream's buffer, which would keep what cannot be written, and fail at the end."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # it is an object of a test's
        stream.write(text)
        stream.flush()
        return
    stream.flush()
    left = text.encode(stream.encoding, "backslashreplace")
    while left:
        left = left[os.write(number, left) :]


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
