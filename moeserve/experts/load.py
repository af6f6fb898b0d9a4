"""Expert load: the `Load` value that policies and dashboards read, and the `LoadTrace` that keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PHASES = ("decode", "prefill")
"""The phases of a step: few rows a lane (decode), or many (prefill)."""

TRACE = "moeserve.load"
VERSION = 1
TORCH = ".pt"  # how files of torch are called


@dataclass(frozen=True, eq=False)
class Load:
    """Tokens each logical expert got over some window: `tokens [L, E]` float64."""

    tokens: NDArray[np.float64]

    def __add__(self, other: Load) -> Load:
        return Load(self.tokens + other.tokens)


@dataclass(frozen=True, eq=False)
class LoadWindow:
    """The load of one stretch of time."""

    load: Load
    start: float = 0.0  # seconds since the epoch, or since anything the trace's other windows share
    seconds: float = 0.0  # 0: not known
    phase: str = ""  # "prefill", "decode", or both when empty


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """Loads of some decoder layers, window after window: what `moeserve simulate` plans from.

    Our own file is JSON lines: a head `{"format": "moeserve.load", "version": 1, "layers": [...], "experts":
    E}`, then one line a window, `{"start", "seconds", "phase", "tokens": [[...] of each layer]}`, so that a
    recorder can append. Also read, JSON or torch's `.pt`, one window each:

    - `logical_count` `[layers, E]` of all decoder layers, or `[records, layers, E]`, which are added up: the
      published DeepSeek-V3 counts, and SGLang's recorder in its mode `stat`;
    - `records` with `global_physical_count` `[layers, slots]` each, and `last_physical_to_logical_map`:
      SGLang's recorder in its modes `per_pass` and `per_token`, one rank's share a file;
    - a bare `[layers, E]`, as DeepSeek's balancer takes it.

    Layers that counted nothing are dense and left out.
    """

    layers: tuple[int, ...]  # decoder layers, ascending; row i of a window's load is of layers[i]
    windows: tuple[LoadWindow, ...]

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("a load trace needs one window or more")
        for number, window in enumerate(self.windows):
            tokens = window.load.tokens
            if tokens.ndim != 2 or tokens.shape != (len(self.layers), self.experts) or not tokens.size:
                raise ValueError(
                    f"window {number} has tokens {list(tokens.shape)}, "
                    f"and the trace {len(self.layers)} layers of {self.experts} experts"
                )
            if not (np.isfinite(tokens).all() and (tokens >= 0).all()):
                raise ValueError(f"window {number} has tokens that are negative or not finite")

    @property
    def experts(self) -> int:
        """E, the logical experts of a layer."""
        return int(self.windows[0].load.tokens.shape[-1])

    @property
    def total(self) -> Load:
        """The load of all windows together."""
        return Load(np.sum([window.load.tokens for window in self.windows], axis=0))


def read_trace(path: Path | str) -> LoadTrace:
    """The trace in a file of any of the formats `LoadTrace` names. Raises ValueError that names the file."""
    path = Path(path)
    try:
        if path.suffix == TORCH:
            return _published(_of_torch(path))
        text = path.read_text()
        first = json.loads(text.split("\n", 1)[0] or "null") if text.startswith(_BEGINNING) else None
        return _ours(first, text.splitlines()[1:]) if first else _published(json.loads(text))
    except OSError as error:
        raise ValueError(f"cannot read the load file {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a load file: {reason}") from error


def _of_torch(path: Path) -> object:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever torch finds wrong with a file
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"torch cannot read it: {said or type(error).__name__}") from error


def is_trace(path: Path | str) -> bool:
    """Whether a file is a trace in our own format, which alone can be gone on with. Raises OSError."""
    path = Path(path)
    with path.open("rb") as file:
        return path.suffix != TORCH and file.read(len(_BEGINNING)) == _BEGINNING.encode()


def write_trace(trace: LoadTrace, path: Path | str) -> None:
    """Writes a trace to `path` in our own format."""
    Path(path).write_text("\n".join([head_line(trace), *map(window_line, trace.windows)]) + "\n")


def head_line(trace: LoadTrace) -> str:
    """The first line of our own format, without its end."""
    return json.dumps(
        {"format": TRACE, "version": VERSION, "layers": list(trace.layers), "experts": trace.experts}
    )


def window_line(window: LoadWindow) -> str:
    """One window as a line of our own format, without its end."""
    tokens = [[int(count) if count == int(count) else count for count in row] for row in window.load.tokens]
    fields: dict[str, Any] = {"start": window.start, "seconds": window.seconds, "phase": window.phase}
    return json.dumps(fields | {"tokens": tokens})


_BEGINNING = f'{{"format": "{TRACE}"'
"""How the first line of our own format begins."""


def _ours(head: dict[str, Any], lines: Sequence[str]) -> LoadTrace:
    if head["version"] != VERSION:
        raise ValueError(f"version {head['version']}, and this reads {VERSION}")
    windows = [_window(line, number) for number, line in enumerate(lines, start=2) if line]
    return LoadTrace(tuple(head["layers"]), tuple(windows))


def _window(line: str, number: int) -> LoadWindow:
    """The window of a line of our own format. Raises ValueError that names the line."""
    try:
        fields = json.loads(line)
        load = Load(np.array(fields["tokens"], dtype=np.float64))
        return LoadWindow(load, float(fields["start"]), float(fields["seconds"]), str(fields["phase"]))
    except KeyError as error:
        raise ValueError(f"line {number} is no window: it has no {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"line {number} is no window: {error}") from error


def _published(found: object) -> LoadTrace:
    counts = _counts(found)
    if counts.ndim not in (2, 3):
        raise ValueError(
            f"logical_count {list(counts.shape)} must be [layers, experts] or [records, layers, experts]"
        )
    counts = counts.sum(axis=0) if counts.ndim == 3 else counts
    layers = np.flatnonzero(counts.sum(axis=1) != 0)
    if not len(layers):
        raise ValueError("logical_count counts no token")
    return LoadTrace(tuple(map(int, layers)), (LoadWindow(Load(counts[layers])),))


def _counts(found: Any) -> NDArray[np.float64]:
    """The counts by logical expert in a published file."""
    if isinstance(found, dict) and "logical_count" in found:
        return np.asarray(found["logical_count"], dtype=np.float64)
    if isinstance(found, dict) and found.get("records"):
        holds = np.asarray(found["last_physical_to_logical_map"], dtype=np.int64)
        slots = np.sum([np.asarray(one["global_physical_count"]) for one in found["records"]], axis=0)
        if holds.ndim != 2 or slots.shape != holds.shape or holds.min(initial=0) < 0:
            raise ValueError(
                f"records count slots {list(slots.shape)}, and the map is of {list(holds.shape)}"
            )
        counts = np.zeros((len(holds), int(holds.max(initial=0)) + 1))
        np.add.at(counts, (np.arange(len(holds))[:, None], holds), slots)
        return counts
    if not isinstance(found, dict) and np.ndim(found) == 2:
        return np.asarray(found, dtype=np.float64)
    raise ValueError(
        f"it must hold logical_count or records, be [layers, experts], or begin with the format {TRACE!r}"
    )
