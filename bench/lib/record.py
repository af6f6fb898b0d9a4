"""`Result`, one measured number beside its peers; `write` keeps each case's last run as a JSON line."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("moeserve", "torch", "transformers", "ray", "grpcio")


@dataclass(frozen=True)
class Result:
    """One case: our number, what it is compared with, and what was aimed at."""

    bench: str
    case: str
    ours: float
    unit: str
    better: str  # "lower" or "higher"
    aim: float | None = None  # in the same unit
    peers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.better not in ("lower", "higher"):
            raise ValueError(f"better={self.better!r} must be lower or higher")

    def ratio(self, peer: str) -> float:
        """Ours over the peer's."""
        return self.ours / self.peers[peer]


def write(results: Iterable[Result], path: Path | None = None) -> None:
    """Writes each result with its circumstances as one line of `bench/results/<bench>.jsonl`, or of `path`.

    A case that stands there from an earlier run is replaced; the others stay, as they were measured.
    """
    results = list(results)
    target = path or RESULTS / f"{results[0].bench}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = target.read_text().splitlines() if target.exists() else []
    kept = {line["case"]: line for line in map(json.loads, lines)}
    kept |= {result.case: asdict(result) | circumstances() for result in results}
    target.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept.values()))


def circumstances() -> dict[str, object]:
    """Returns how this process runs: hardware, versions, command (paths from the repository), date."""
    return {
        "hardware": hardware(),
        "versions": {"python": platform.python_version()} | dict(_versions()),
        "command": command(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def command() -> str:
    """The command line of this process as one types it in the repository root, under torchrun where it is."""
    program, *arguments = sys.argv
    path = Path(program)
    words = ["python", _relative(program)]
    if path.is_absolute() and path.suffix == ".py" and path.is_relative_to(ROOT / "bench"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        ranks = os.environ.get("LOCAL_WORLD_SIZE")
        words = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
        words += ["-m", module]
    return shlex.join([*words, *map(_relative, arguments)])


def hardware() -> str:
    """CPU model and cores this process may use, and the GPUs it sees."""
    with open("/proc/cpuinfo") as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{cpu}, {len(gpus)} x {gpus[0]}" if gpus else cpu


def _versions() -> Iterable[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _relative(argument: str) -> str:
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
