"""A process's log: every line has time, level, who says it, generation and epoch.

`start` takes over the log of a process that belongs to the service: the head's, a rank's, a launcher's. A
program that runs a `LocalCluster` inside itself keeps its own logging, unless it calls this too.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moeserve.proto.texts import quoted
from moeserve.runtime.sections import LOG_LEVELS, LogConfig
from moeserve.runtime.telemetry.log_flow import Budget, LineWriter, Place, Repeats
from moeserve.runtime.telemetry.log_lines import Line, Origin, format_named, message_of, traceback_of

OWN = "moeserve"

LIBRARIES = ("asyncio", "concurrent", "grpc", "py.warnings", "ray", "torch", "transformers")
"""Loggers of others whose level can be set while the service runs; from WARNING on they are heard anyway."""

MOST_LEVELS = 64  # loggers with a level of their own, set while the process runs

LONGEST_LOGGER = 100  # characters of a logger's name

STDERR = 2

COUNT_SECONDS = 10.0  # between two lines that say how many were left out

HIDDEN = "***"
"""What stands in a line for a secret."""

Where = Callable[[], tuple[int | None, int | None]]
"""The generation and the epoch that a process is in now; None where it is in none."""


def start(config: LogConfig, process: str, descriptor: int | None = None) -> ServiceLog:
    """Makes `process` (head, launcher, rank 3) log to `descriptor` as configured, by default to stderr.

    Every logger goes there, libraries' from WARNING on; so do warnings, and what ends a thread.
    """
    global _current
    if _current is not None:
        _current.close()
    log = _current = ServiceLog(config, process, _stderr() if descriptor is None else descriptor)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    for library in _with_handlers_of_their_own():
        library.propagate = True
        for old in list(library.handlers):
            library.removeHandler(old)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.NOTSET)  # Ray gives its own a level when it is imported
    root.addHandler(log)
    root.setLevel(logging.WARNING)
    logging.getLogger(OWN).setLevel(config.level.upper())
    logging.captureWarnings(capture=True)
    threading.excepthook = _thread_died
    return log


def current() -> ServiceLog | None:
    """The log that `start` made in this process; None where the process has a log of its own."""
    return _current


def tell_where(where: Where) -> None:
    """Has lines of this process name the generation and epoch that `where` says. It must take no lock."""
    if _current is not None:
        _current.where = where


def hide(secret: str) -> None:
    """Keeps `secret` out of every line of this process's log."""
    if _current is not None and secret:
        _current.secrets += (secret,)


def finish() -> None:
    """Writes what was counted and queued, within a bound: for the end of a process."""
    if _current is not None:
        _current.flush()


def checked_level(logger: str, level: str) -> tuple[str, str]:
    """The logger's name and its level, as they are set. Raises ValueError naming what is wrong."""
    logger = logger or OWN
    first = logger.partition(".")[0]
    named = len(logger) <= LONGEST_LOGGER and re.fullmatch(r"\w+(\.\w+)*", logger)
    if not named or not (first == OWN or first in LIBRARIES or logger in LIBRARIES):
        known = ", ".join((OWN, *LIBRARIES))
        raise ValueError(f"logger: {quoted(logger)} is none of {known}, nor below one of them")
    if first == OWN and not _is_module(logger):
        raise ValueError(f"logger: {quoted(logger)} is no module of {OWN}; its loggers have their names")
    if level.lower() not in LOG_LEVELS:
        raise ValueError(f"level: {quoted(level)}; known: {', '.join(LOG_LEVELS)}")
    return logger, level.lower()


def _is_module(name: str) -> bool:
    """Whether there is a module of this name; the packages above it are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what is above it is no package
        return False


def set_levels(levels: Mapping[str, str]) -> None:
    """Sets levels of loggers by name. Raises ValueError for one that cannot be, and sets none then."""
    if len(levels) > MOST_LEVELS:
        raise ValueError(f"{len(levels)} loggers have levels of their own; {MOST_LEVELS} may")
    for logger, level in [checked_level(*pair) for pair in levels.items()]:
        if logging.getLogger(logger).level != (number := logging.getLevelName(level.upper())):
            logging.getLogger(logger).setLevel(number)
            logging.getLogger(__name__).warning("logger %s logs from level %s on", logger, level)


class SetLevels:
    """The levels that an operator has set in this process. One who sets others ends those that are not among
    them: such loggers log from the level on that they had before. Not thread-safe.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}  # levels of loggers that were set since

    def __call__(self, levels: Mapping[str, str]) -> None:
        """Does `set_levels`, and ends levels of before. Raises ValueError as that does."""
        before = {logger: logging.getLogger(logger).level for logger in levels}
        set_levels(levels)
        self._before = before | self._before
        for logger in self._before.keys() - levels.keys():
            logging.getLogger(logger).setLevel(self._before.pop(logger))
            logging.getLogger(__name__).warning("logger %s logs as at the start", logger)


class ServiceLog(logging.Handler):
    """Writes records as lines; counts what repeats and what is over `log.bytes_per_minute`."""

    def __init__(self, config: LogConfig, process: str, descriptor: int) -> None:
        super().__init__()
        self.where: Where = lambda: (None, None)
        self.secrets: tuple[str, ...] = ()
        self._process = process
        self._format = format_named(config.format)
        self._limit = config.bytes_per_minute
        self._repeats = Repeats(config.repeat_seconds)
        self._budget = Budget(config.bytes_per_minute, time.monotonic())
        self._left_out = _LeftOut()
        self._due = math.inf  # when to say what was counted
        self._writer = LineWriter(descriptor, lambda: self._due, self._say_due)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or counts it; the caller waits for no reader.

        `handle`, which calls this, holds the handler's lock.
        """
        now = time.monotonic()
        file = record.pathname + str(getattr(record, "sort", ""))  # one line of code may speak of several
        place, message = (record.name, file, record.lineno, record.levelno), message_of(record)
        if self._repeats.admit(place, message, now):
            self._put(place, message, traceback_of(record), now)
            self._look_again()

    def flush(self) -> None:
        """Says what was counted, and waits within a bound until all is taken."""
        with self._own_lock:
            self._say(math.inf)
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left, and ends the thread."""
        self.flush()
        self._writer.close()
        super().close()

    @property
    def _own_lock(self) -> threading.RLock:
        """The handler's lock, which every handler has."""
        lock: threading.RLock = self.lock  # type: ignore[assignment]
        return lock

    def _say_due(self) -> None:
        with self._own_lock:
            self._say(time.monotonic())

    def _say(self, until: float) -> None:
        """Writes what was counted in windows that have ended by `until`, and what was left out."""
        now = time.monotonic()
        for counted in self._repeats.ended(now, by=until):
            self._put(counted.place, counted.shown, "", now)
        left = self._left_out
        if left.lines and left.since + COUNT_SECONDS <= until:
            why = f"log.bytes_per_minute = {self._limit}, or nobody took them"
            what, lasted = f"{left.lines} lines of {left.nbytes} bytes", now - left.since
            text = f"{what} were left out in {lasted:.1f} s: {why}"
            line = self._line((__name__, "", 0, logging.ERROR), text, "")
            if self._admit(line, now, logging.ERROR):
                self._left_out = _LeftOut()
            else:
                left.told = now
        self._look_again()

    def _look_again(self) -> None:
        """Sets when the next count is to be said."""
        left = self._left_out
        due = min(self._repeats.due(), max(left.since, left.told) + COUNT_SECONDS if left.lines else math.inf)
        if due != self._due:
            self._due = due
            self._writer.wake()

    def _put(self, place: Place, message: str, traceback: str, now: float) -> None:
        line = self._line(place, message, traceback)
        if not self._admit(line, now, place[3]):
            self._left_out.count(len(line), now)

    def _admit(self, line: bytes, now: float, level: int) -> bool:
        """Queues a line, where neither its bytes nor those that wait are too many."""
        return self._budget.admit(len(line), now, error=level >= logging.ERROR) and self._writer.put(line)

    def _line(self, place: Place, message: str, traceback: str) -> bytes:
        for secret in self.secrets:
            message, traceback = message.replace(secret, HIDDEN), traceback.replace(secret, HIDDEN)
        level = logging.getLevelName(place[3]).lower()
        line = Line(time.time(), level, place[0], message, Origin(self._process, *self.where()), traceback)
        return self._format(line).encode(errors="replace")


@dataclass(eq=False)
class _LeftOut:
    """Lines that were left out since it was said last."""

    lines: int = 0
    nbytes: int = 0
    since: float = 0.0
    told: float = 0.0  # when it was tried in vain to say so

    def count(self, nbytes: int, now: float) -> None:
        """Counts one line more."""
        if not self.lines:
            self.since = now
        self.lines += 1
        self.nbytes += nbytes


_current: ServiceLog | None = None


def _stderr() -> int:
    """The descriptor of stderr, also where Python has no such stream."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return STDERR


def _with_handlers_of_their_own() -> list[logging.Logger]:
    """Loggers of libraries that print by themselves, and would hand on nothing."""
    loggers = logging.Logger.manager.loggerDict
    names = [name for name in loggers if name.partition(".")[0] in LIBRARIES]
    return [logger for name in names if isinstance(logger := loggers[name], logging.Logger)]


def _thread_died(died: threading.ExceptHookArgs) -> None:
    """What ends a thread is a line of the log; SystemExit is no failure."""
    if died.exc_type is SystemExit or died.exc_value is None:
        return
    name = died.thread.name if died.thread is not None else "?"
    logging.getLogger(OWN).critical(
        "thread %s died: %s", quoted(name), died.exc_type.__name__, exc_info=died.exc_value
    )


def _forked() -> None:
    """A child has no thread that writes: it logs as Python does, until it calls `start` itself."""
    global _current
    if _current is not None:
        logging.getLogger().removeHandler(_current)
        _current = None


atexit.register(finish)
os.register_at_fork(after_in_child=_forked)
