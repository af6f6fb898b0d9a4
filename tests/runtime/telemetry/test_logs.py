"""The log of a process: what a line has, what is counted, what is left out, and who never waits."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import pytest

from moeserve.runtime.config import Config
from moeserve.runtime.sections import ConfigError, LogConfig
from moeserve.runtime.telemetry import logs
from moeserve.runtime.telemetry.log_flow import ALIKE, QUEUE_BYTES, Budget, Repeats

PLACE = ("moeserve.one", "one.py", 1, logging.INFO)
OTHER = ("moeserve.two", "two.py", 2, logging.INFO)


class Captured:
    """A process's log whose lines a test reads."""

    def __init__(self, **config: object) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._seen = b""
        self.log = logs.start(LogConfig(**config), "rank 3", self._write)  # type: ignore[arg-type]

    def text(self) -> str:
        """All that was written, once what is queued is."""
        self.log._writer.flush()
        return self.now()

    def now(self) -> str:
        """All that was written so far."""
        try:
            while more := os.read(self._read, 1 << 16):
                self._seen += more
        except BlockingIOError:
            pass
        return self._seen.decode()

    def close(self) -> None:
        self.log.close()
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The process's logging as it was, and no `ServiceLog`."""
    root, own = logging.getLogger(), logging.getLogger(logs.OWN)
    handlers, level, own_level, hook = list(root.handlers), root.level, own.level, threading.excepthook
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)
    own.setLevel(own_level)
    threading.excepthook = hook
    logs._current = None


def captured(**config: object) -> Iterator[Captured]:
    """A log with that configuration, closed afterwards."""
    made = Captured(**config)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def text_log() -> Iterator[Captured]:
    """A log in text."""
    yield from captured()


@pytest.fixture
def json_log() -> Iterator[Captured]:
    """A log in JSON."""
    yield from captured(format="json")


log = logging.getLogger("moeserve.runtime.head.tested")


def refuse() -> None:
    """Logs a line, always from one place."""
    log.warning("refused")


def test_a_line_says_when_who_and_in_which_generation_and_epoch(text_log: Captured) -> None:
    logs.tell_where(lambda: (4, 12))
    log.warning("rank %d is given up", 3)
    line = text_log.text()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING rank 3 generation 4 epoch 12 head\.tested: "
        r"rank 3 is given up\n",
        line,
    )


def test_json_is_one_object_a_line(json_log: Captured) -> None:
    logs.tell_where(lambda: (4, None))
    try:
        raise KeyError("lost")
    except KeyError:
        log.exception("two\nlines")
    (line,) = json_log.text().splitlines()
    said = json.loads(line)
    assert said.pop("time").endswith("Z")
    assert "KeyError: 'lost'" in said.pop("traceback")
    assert said == {
        "level": "error",
        "rank": 3,
        "generation": 4,
        "epoch": None,
        "logger": "moeserve.runtime.head.tested",
        "message": "two\nlines",
    }


def test_the_heads_front_door_speaks_for_itself() -> None:
    for made in captured():
        made.log._process = "head"
        logging.getLogger("moeserve.runtime.doors.front_door").warning("one")
        log.warning("two")
        said = made.text()
        assert " door generation - epoch - " in said and " head generation - epoch - " in said


def test_no_text_can_pass_for_a_line(text_log: Captured) -> None:
    log.warning("refused %s", "a\n2026-11-23T00:00:00.000Z ERROR head generation 1: forged\r\x1b[2J")
    lines = text_log.text().splitlines()
    assert len(lines) == 2 and lines[1].startswith("    2026") and "\x1b" not in lines[1]
    assert lines[1].endswith(r"forged\x0d\x1b[2J")


def test_a_text_without_end_is_cut(text_log: Captured) -> None:
    log.warning("refused %s", "x" * 10_000_000)
    assert len(text_log.text()) < 1200
    try:
        raise ValueError("y" * 10_000_000)
    except ValueError:
        log.exception("failed")
    assert len(text_log.text()) < 1200 + 8192 + 1200


def test_a_secret_is_in_no_line(text_log: Captured) -> None:
    logs.hide("tokentokentoken")
    try:
        raise ValueError("bad tokentokentoken")
    except ValueError:
        log.exception("hello %s", {"token": "tokentokentoken"})
    said = text_log.text()
    assert "tokentoken" not in said and "hello {'token': '***'}" in said and "ValueError: bad ***" in said


def test_repeated_lines_are_counted() -> None:
    for made in captured(repeat_seconds=2.0):  # long enough for busy cores to come to all lines of a window
        for _ in range(313):
            refuse()
        assert made.text().count("refused") == 1
        until(lambda made=made: told("refused (repeated 312 times in ", made.now()) >= 2.0)
        for _ in range(5):  # it goes on: only the next count is written
            refuse()
        assert made.text().count("refused") == 2
        until(lambda made=made: told("refused (repeated 5 times in ", made.now()) >= 2.0)


def told(words: str, text: str) -> float:
    """Over how many seconds lines were counted, as the log says after these words; 0 if it says nothing."""
    found = re.search(re.escape(words) + r"(\d+\.\d) s\)", text)
    return float(found[1]) if found else 0.0


def test_lines_that_differ_in_a_callers_address_are_counted_too() -> None:
    for made in captured(repeat_seconds=2.0):
        for port in range(1000):
            log.warning("refused a stream from %d", port)
        assert made.text().count("\n") == ALIKE
        last = f"refused a stream from 999 (the last of {1000 - ALIKE} lines like it in "
        until(lambda made=made, last=last: told(last, made.now()) >= 2.0)


def test_counts_are_said_at_the_end_too(text_log: Captured) -> None:
    for _ in range(3):
        log.warning("refused")
    logs.finish()
    assert re.search(r"refused \(repeated 2 times in \d\.\d s\)", text_log.text())


def test_what_repeats_for_long_is_one_line_a_window() -> None:
    repeats = Repeats(10.0)
    written, counts = 0, []
    for at in range(1000):
        written += repeats.admit(PLACE, "same", at / 10)
        counts += [each.count for each in repeats.ended(at / 10, by=at / 10)]
    assert written == 1 and len(counts) == 9 and sum(counts) >= 890
    list(repeats.ended(200.0, by=200.0))
    list(repeats.ended(210.0, by=210.0))
    assert repeats.admit(PLACE, "same", 211.0), "once it was quiet, it is a line again"


def test_places_are_counted_apart() -> None:
    repeats = Repeats(10.0)
    assert repeats.admit(PLACE, "same", 0.0) and repeats.admit(OTHER, "same", 0.0)
    assert not repeats.admit(PLACE, "same", 1.0)
    (counted,) = repeats.ended(10.0, by=10.0)
    assert (counted.place, counted.count) == (PLACE, 1)


def test_bytes_a_minute_are_limited_and_errors_have_room() -> None:
    budget = Budget(1000, 0.0)
    assert sum(budget.admit(100, 0.0, error=False) for _ in range(20)) == 7
    assert sum(budget.admit(100, 0.0, error=True) for _ in range(20)) == 3
    assert not budget.admit(100, 1.0, error=True) and budget.admit(100, 10.0, error=True)
    assert Budget(0, 0.0).admit(1 << 40, 0.0, error=False)


def test_what_is_over_the_limit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "COUNT_SECONDS", 0.2)
    for made in captured(bytes_per_minute=20_000, repeat_seconds=0.0):
        for number in range(1000):
            log.warning("line %d", number)
        assert len(made.text()) <= 20_000
        until(lambda made=made: "lines of" in made.now())
        assert re.search(r"ERROR .* \d+ lines of \d+ bytes were left out in \d", made.now())
        assert len(made.text()) <= 20_000


def test_who_logs_waits_for_no_reader() -> None:
    for made in captured(repeat_seconds=0.0, bytes_per_minute=0):
        started = time.monotonic()
        for number in range(20_000):  # a pipe holds 64 KiB, and nobody reads it
            log.warning("%d %s", number, "x" * 100)
        assert time.monotonic() - started < 10.0
        assert made.log._writer._nbytes <= QUEUE_BYTES
        assert made.log._left_out.lines > 5000
        while made.log._writer._nbytes:
            made.now()


@pytest.mark.parametrize("name", ["grpc._server", "asyncio", "ray.worker", "torch.distributed"])
def test_libraries_are_heard_from_warnings_on(text_log: Captured, name: str) -> None:
    logging.getLogger(name).info("not this")
    logging.getLogger(name).warning("but this")
    assert f" {name}: but this\n" in (said := text_log.text()) and "not this" not in said


def test_warnings_and_what_ends_a_thread_are_lines(text_log: Captured) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)  # pytest's own hook is between
        warnings.warn("odd", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    said = text_log.text()
    assert "UserWarning: odd" in said
    assert "CRITICAL rank 3" in said and "thread 'worker' died: ZeroDivisionError" in said


def test_levels_are_set_while_it_runs(text_log: Captured) -> None:
    log.debug("not this")
    logs.set_levels({"moeserve": "debug", "moeserve.runtime.head": "error"})
    log.warning("nor this")
    logging.getLogger("moeserve.runtime.rank").debug("but this")
    said = text_log.text()
    assert "this" in said and "not this" not in said and "nor this" not in said and "but this" in said
    assert "logger moeserve logs from level debug on" in said
    logging.getLogger("moeserve.runtime.head").setLevel(logging.NOTSET)


def test_levels_that_are_set_no_more_are_as_at_the_start(text_log: Captured) -> None:
    names = ("moeserve", "moeserve.runtime.rank", "grpc")
    before = [logging.getLogger(name).level for name in names]
    told = logs.SetLevels()
    told({"moeserve": "debug", "grpc": "info"})
    told({"moeserve": "error", "moeserve.runtime.rank": "debug"})
    assert [logging.getLogger(name).level for name in names] == [logging.ERROR, logging.DEBUG, before[2]]
    with pytest.raises(ValueError, match="level"):
        told({"moeserve": "loud"})
    told({})
    assert [logging.getLogger(name).level for name in names] == before
    assert "logger moeserve logs as at the start" in text_log.text()


@pytest.mark.parametrize(
    ("logger", "level", "wrong"),
    [
        ("moeserve", "loud", "level: 'loud'; known: debug, info, warning, error"),
        ("somebody", "info", "logger: 'somebody' is none of moeserve, "),
        ("moeserve.runtime.rnak", "info", "logger: 'moeserve.runtime.rnak' is no module of moeserve"),
        ("moeserve.runtime.step.deeper", "info", "is no module of moeserve"),
        ("moeserve..runtime", "info", "logger: "),
        ("moeserve.\n", "info", "logger: "),
        ("moeserve." + "x" * 1_000_000, "info", "logger: "),
    ],
)
def test_a_level_that_cannot_be_is_refused(logger: str, level: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong)) as refused:
        logs.checked_level(logger, level)
    assert len(str(refused.value)) < 1024
    before = logging.getLogger(logs.OWN).level
    with pytest.raises(ValueError, match="level"):
        logs.set_levels({"moeserve": "debug", "moeserve.runtime": "loud"})
    assert logging.getLogger(logs.OWN).level == before


@pytest.mark.parametrize(("key", "value"), [("log.level", "loud"), ("log.format", "xml")])
def test_a_configuration_that_cannot_be_names_the_key(key: str, value: str) -> None:
    config = Config().with_values({"model.checkpoint": "/nowhere", key: value})
    with pytest.raises(ConfigError, match=f"{re.escape(key)} = '{value}'; known: "):
        config.checked()


ENDS = """
import logging, os
from moeserve.runtime.sections import LogConfig
from moeserve.runtime.telemetry import logs
logs.start(LogConfig(), "head")
logging.getLogger("moeserve.runtime.head").warning("last words")
if os.fork() == 0:
    logging.getLogger("moeserve.runtime.head").warning("of a child")
    os._exit(0)
os.wait()
"""


def test_last_words_are_written_and_a_forked_child_logs_too() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING head generation - epoch - head: last words\n" in done.stderr
    assert "of a child" in done.stderr


def test_an_end_waits_for_no_reader() -> None:
    read, write = os.pipe()
    endless = (
        ENDS.split("if os.fork")[0] + "for n in range(3000): logging.getLogger('x').error('y' * 900 + str(n))"
    )
    endless = endless.replace("LogConfig()", "LogConfig(repeat_seconds=0.0)") + "\nprint(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", endless], stderr=write, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"\n", "it has said all, after imports that may take long"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
        os.close(read)
        os.close(write)


def until(true: object, seconds: float = 10.0) -> None:
    """Waits until `true()`."""
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
