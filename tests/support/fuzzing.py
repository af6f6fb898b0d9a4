"""A small coverage-guided fuzzer: inputs that reach new lines of `moeserve` become seeds of others.

The law of every target: an input ends with a result or with one of the target's named errors, whose text has
a kibibyte at most, within bounds of time and memory.
"""

from __future__ import annotations

import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bench.lib.mutations import Mutations

PACKAGE = str(Path(__file__).parents[2] / "moeserve")
LONGEST_TEXT = 1024  # bytes
SECONDS = 5.0  # of one input, on a machine that does much else
MEMORY_MIB = 256  # that a target's inputs may add to the process's largest size
LONGEST_INPUT = 1 << 20
LEAST_INPUTS = 20  # of a run, however busy the machine is

Run = Callable[[bytes], None]


class Broken(AssertionError):
    """An input that breaks the law."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed: seeds, how they are mutated, the errors that may end an input, and what runs it."""

    name: str
    opened: Callable[[Path], AbstractContextManager[tuple[list[bytes], Run]]]
    mutate: Callable[[Mutations, bytes, list[bytes]], bytes]
    errors: tuple[type[BaseException], ...]
    texts: bool = True  # whether their texts are short; False where whoever catches them cuts them

    def check(self, run: Run, data: bytes) -> None:
        """Runs one input. Raises Broken where the law does not hold."""
        started = time.monotonic()
        try:
            run(data)
        except Broken:
            raise
        except self.errors as error:
            text = str(error)
            if self.texts and len(text.encode(errors="replace")) > LONGEST_TEXT:
                raise Broken(f"{type(error).__name__} has a text of {len(text)} characters") from error
        except BaseException as error:
            raise Broken(
                f"{type(error).__name__} at {_place(error)} is not named: {str(error)[:300]}"
            ) from error
        if (seconds := time.monotonic() - started) > SECONDS:
            raise Broken(f"an input took {seconds:.1f} s")


@dataclass
class Outcome:
    """What a fuzzing of one target did."""

    inputs: int = 0
    corpus: int = 0
    lines: int = 0
    broken: list[tuple[bytes, str]] = None  # type: ignore[assignment]


def fuzz(target: Target, folder: Path, seed: int, inputs: int, seconds: float) -> Outcome:
    """Runs up to so many inputs, for so long, and a few at least. What breaks the law is collected: one input
    a kind.
    """
    mutations, outcome = Mutations(seed), Outcome(broken=[])
    reached: set[tuple[CodeType, int]] = set()
    kinds = set[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with target.opened(folder) as (corpus, run):
        end = time.monotonic() + seconds
        corpus = list(corpus)
        waiting = list(corpus)
        while outcome.inputs < inputs and (time.monotonic() < end or outcome.inputs < LEAST_INPUTS):
            seeds = mutations.random.choice(corpus)
            data = waiting.pop() if waiting else target.mutate(mutations, seeds, corpus)[:LONGEST_INPUT]
            outcome.inputs += 1
            new: set[tuple[CodeType, int]] = set()
            try:
                with traced(reached, new):
                    target.check(run, data)
            except Broken as broken:
                kind = str(broken).partition(" is not named")[0][:80]
                if kind not in kinds:
                    kinds.add(kind)
                    lines = "".join(traceback.format_exception(broken)).splitlines()
                    outcome.broken.append((data, "\n".join(line[:300] for line in lines)))
            if new:
                reached |= new
                corpus.append(data)
        outcome.corpus, outcome.lines = len(corpus), len(reached)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > MEMORY_MIB:
        outcome.broken.append((b"", f"the inputs took {grown} MiB"))
    return outcome


def _place(error: BaseException) -> str:
    """The line of the package that raised it, or called what did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(PACKAGE)] or frames
    return f"{own[-1].filename.removeprefix(PACKAGE)}:{own[-1].lineno}"


@contextmanager
def traced(reached: set[tuple[CodeType, int]], new: set[tuple[CodeType, int]]) -> Iterator[None]:
    """Notes lines of the package that this thread reaches for the first time."""

    def lines(frame: FrameType, event: str, arg: Any) -> Any:
        at = (frame.f_code, frame.f_lineno)
        if at not in reached:
            new.add(at)
        return lines

    def calls(frame: FrameType, event: str, arg: Any) -> Any:
        return lines if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)
