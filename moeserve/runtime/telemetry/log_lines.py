"""How a line of the log looks: as text, or as one object of JSON.

    2026-11-23T00:31:02.123Z WARNING rank 3 generation 4 epoch 12 rank.member.member: ...

The second and further lines of a text are indented, so that no text that a caller chose can pass for a line.
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_MESSAGE = 4096  # characters; a table of measured costs has some thousand
LONGEST_TRACEBACK = 8192  # characters, of which the last are kept
LONGEST_PART = 1024  # characters of one line within a message or a traceback

DOOR = "moeserve.runtime.doors"
"""Loggers that speak for the front door, in the head's process."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True)
class Origin:
    """Whose a line is, and when in the group's life. None: not known, or of no generation that lives."""

    process: str  # head, launcher, or rank 3
    generation: int | None = None
    epoch: int | None = None

    def speaker(self, logger: str) -> str:
        """Who says it: the process, or the head's front door."""
        return "door" if self.process == "head" and logger.startswith(DOOR) else self.process


@dataclass(frozen=True)
class Line:
    """A line before it has a format."""

    created: float  # seconds since 1970
    level: str
    logger: str
    message: str
    origin: Origin
    traceback: str = ""

    def as_text(self) -> str:
        """The line, with further lines indented; ends with a newline."""
        name = self.logger.removeprefix("moeserve.").removeprefix("runtime.")
        generation, epoch = (
            "-" if number is None else number for number in (self.origin.generation, self.origin.epoch)
        )
        whose = f"{self.origin.speaker(self.logger)} generation {generation} epoch {epoch}"
        text = f"{self.message}\n{self.traceback}".rstrip("\n").replace("\n", "\n    ")
        return f"{stamp(self.created)} {self.level.upper():7} {whose} {name}: {text}\n"

    def as_json(self) -> str:
        """The line as an object; ends with a newline."""
        speaker = self.origin.speaker(self.logger)
        rank = speaker.removeprefix("rank ")
        fields: dict[str, object] = {
            "time": stamp(self.created),
            "level": self.level,
            "rank": int(rank) if rank.isdecimal() else rank,
            "generation": self.origin.generation,
            "epoch": self.origin.epoch,
            "logger": self.logger,
            "message": self.message,
        }
        if self.traceback:
            fields["traceback"] = self.traceback
        return json.dumps(fields) + "\n"


def stamp(seconds: float) -> str:
    """A time since 1970 as UTC to the millisecond."""
    milliseconds = int(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def message_of(record: logging.LogRecord) -> str:
    """The text of a record, cut and without control characters."""
    try:
        text = record.getMessage()
    except Exception as error:  # a logger's arguments do not fit its text; the line must not end its caller
        text = f"{record.msg!r} cannot be formatted: {type(error).__name__}"
    return _readable(text, LONGEST_MESSAGE)


def traceback_of(record: logging.LogRecord) -> str:
    """The traceback of a record, its end where it is long; empty where it has none."""
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    lines = "".join(traceback.format_exception(record.exc_info[1], limit=-32))
    cut = lines if len(lines) <= LONGEST_TRACEBACK else f"...{lines[-LONGEST_TRACEBACK:]}"
    return _readable(cut.rstrip("\n"), LONGEST_TRACEBACK + 3)


def format_named(name: str) -> Callable[[Line], str]:
    """How a line is written in the format of that name."""
    return {"text": Line.as_text, "json": Line.as_json}[name]


def _readable(text: str, longest: int) -> str:
    if len(text) > longest:
        text = f"{text[: longest - 3]}..."
    parts = (part if len(part) <= LONGEST_PART else f"{part[:LONGEST_PART]}..." for part in text.split("\n"))
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", "\n".join(parts))
