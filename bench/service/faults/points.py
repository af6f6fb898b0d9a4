"""Places at which a rank's process ends itself, stops or hangs, when a file says so: armed from outside.

The service knows nothing of it. `environment` gives its processes a `sitecustomize` that wraps a few
functions of ranks as they are imported; each looks for the file `POINT.RANK` in a folder, and the first that
finds it takes it away and does what it says. Nothing heavy is imported here: every interpreter of the service
does it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "MOESERVE_CHAOS_FOLDER"  # of the environment: where files arm points
TELL_STACKS = signal.SIGUSR1  # has a rank's process write its threads' stacks to its stderr
STALLS = "stalls"  # the file that has every rank's interpreter held up now and then
STALL_SECONDS = 6.0
BETWEEN_STALLS = (8.0, 24.0)  # seconds

COLLECTIVES = ("all_to_all_single", "all_to_all", "broadcast", "all_reduce", "batch_isend_irecv")
ENTERED = {
    "forming": ("moeserve.runtime.launch.rank_process", "_RankProcess", "__init__"),
    "preparing": ("moeserve.runtime.rank.member.member", "Member", "_prepare"),
    "joining": ("moeserve.runtime.rank.rank", "Rank", "join"),
    "in a step": ("moeserve.runtime.rank.experts", "RankExperts", "compute"),
    "preparing a move": ("moeserve.runtime.rank.weights.mover", "Mover", "_copied_from"),
    "committing a move": ("moeserve.runtime.rank.weights.mover", "Mover", "commit"),
    "draining": ("moeserve.runtime.rank.member.draining", "MemberDrain", "_end"),
}
"""Points by name: module, class and method; what is armed happens when the method is entered."""

HEAD = ("moeserve.runtime.launch.head_process", "HeadProcess", "__init__")
"""What a head's process runs once, as `ENTERED` names it."""

STEPS = "steps"  # the file to which a head writes each step's end (`time.time`) and seconds, where it exists

INSIDE = {"in dispatch": ("dispatch",), "in combine": ("combine", "combine_into")}
"""Points by name: the dispatcher's methods; it happens before the first collective in one of them."""

POINTS = (*ENTERED, *INSIDE)
ACTIONS = ("stop", "kill", "hang", "hold")
"""Stopped by SIGSTOP; killed; a thread that sleeps for ever; and one that holds the interpreter meanwhile."""


def environment(folder: Path, root: Path) -> dict[str, str]:
    """This process's environment for a service whose ranks have points; `root` is the repository's."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("from bench.service.faults.points import install\n\ninstall()\n")
    paths = [str(site), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def arm(folder: Path, point: str, rank: int, action: str) -> None:
    """Has the next process of `rank` that comes to `point` do `action`."""
    part = folder / f".{point}.{rank}"
    part.write_text(action)
    part.rename(folder / f"{point}.{rank}")


def fired(folder: Path, point: str, rank: int) -> tuple[int, float] | None:
    """The process that has come to the point, and when (`time.time`); None where none has yet."""
    for path in folder.glob(f"fired.{point}.{rank}.*"):
        return int(path.name.rpartition(".")[2]), path.stat().st_ctime
    return None


def rank_processes(folder: Path) -> dict[int, list[int]]:
    """The ids of the processes that each rank has now, stopped ones too: one, where all is well.

    A process of another program that has the id of an earlier one is none of them: it was born later.
    """
    found: dict[int, list[int]] = {}
    for path in folder.glob("rank.*"):
        _, rank, pid = path.name.split(".")
        alive = found.setdefault(int(rank), [])
        if path.read_text() == _born(int(pid)):
            alive.append(int(pid))
    return found


def head_processes(folder: Path) -> list[int]:
    """The ids of the processes that are heads now: one, where all is well."""
    found = ((path, int(path.name.partition(".")[2])) for path in folder.glob("head.*"))
    return [pid for path, pid in found if path.read_text() == _born(pid)]


def every_process(folder: Path) -> dict[int, str]:
    """All running processes of a service, by id, with what each was started as.

    They are known by their environment, which a process gives to those that it starts.
    """
    found, mark = {}, f"{FOLDER}={folder}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


class _Here:
    """What this process is: the folder, and its rank once it is one."""

    def __init__(self) -> None:
        self.folder = Path(os.environ.get(FOLDER, ""))
        self.rank = -1
        self.inside = threading.local()


HERE = _Here()


def install() -> None:
    """Wraps what is imported from now on, in a process of a service that has points."""
    if os.environ.get(FOLDER):
        sys.meta_path.insert(0, _Finder())


def _fire(point: str) -> None:
    armed = HERE.folder / f"{point}.{HERE.rank}"
    try:
        action = armed.read_text()
        armed.rename(HERE.folder / f"fired.{point}.{HERE.rank}.{os.getpid()}")
    except FileNotFoundError:
        return
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        time.sleep(1e6)
    elif action == "hold":
        ctypes.PyDLL(None).sleep(1_000_000)


def _entered(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **named: Any) -> Any:
        if point == "forming":
            _begin(args[1].rank)
        _fire(point)
        return function(*args, **named)

    return wrapped


def _begin(rank: int) -> None:
    """This process is a rank's from now on."""
    HERE.rank = rank
    faulthandler.register(TELL_STACKS, all_threads=True)
    _say(f"rank.{rank}")
    threading.Thread(target=_stall, name="stalls", daemon=True).start()


def _say(what: str) -> None:
    """Notes in the folder what this process is."""
    part = HERE.folder / f".{what}.{os.getpid()}"
    part.write_text(_born(os.getpid()))
    part.rename(HERE.folder / f"{what}.{os.getpid()}")


def _head(function: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` of a head, which says that it is there, and notes steps where that is wanted."""

    @functools.wraps(function)
    def wrapped(self: Any, *args: Any, **named: Any) -> None:
        _say("head")
        function(self, *args, **named)
        if (steps := HERE.folder / STEPS).exists():
            log = steps.open("a", buffering=1)
            self.coordinator.observe_steps(lambda layer, seconds: log.write(f"{time.time()} {seconds}\n"))

    return wrapped


def _stall() -> None:
    """Holds the interpreter now and then, as a long call into a library does."""
    draw = random.Random(HERE.rank)
    while True:
        time.sleep(draw.uniform(*BETWEEN_STALLS))
        if (HERE.folder / STALLS).exists():
            ctypes.PyDLL(None).usleep(int(STALL_SECONDS * 1e6))
            with (HERE.folder / "stalled").open("a") as log:
                log.write(f"{HERE.rank}\n")


class _Dispatcher:
    """A dispatcher that says which of its methods is under way."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        points = [point for point, methods in INSIDE.items() if name in methods]
        if not points:
            return found

        def noted(*args: Any) -> Any:
            HERE.inside.point = points[0]
            try:
                return found(*args)
            finally:
                HERE.inside.point = ""

        return noted


def _collective(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **named: Any) -> Any:
        if point := getattr(HERE.inside, "point", ""):
            _fire(point)
        return function(*args, **named)

    return wrapped


def _wrap_collectives(module: ModuleType) -> None:
    import torch.distributed as dist

    for name in COLLECTIVES:
        setattr(dist, name, _collective(getattr(dist, name)))
    carriers = module.RankDispatchers
    real = carriers.__getitem__
    carriers.__getitem__ = lambda self, layer: _Dispatcher(real(self, layer))


def _wrap(module: ModuleType) -> None:
    """Wraps what a module that was just imported has of the points."""
    if module.__name__ == "moeserve.runtime.rank.all2all":
        _wrap_collectives(module)
    for point, (name, owner, method) in ENTERED.items():
        if name == module.__name__:
            found = getattr(module, owner)
            setattr(found, method, _entered(point, getattr(found, method)))
    if module.__name__ == HEAD[0]:
        head = getattr(module, HEAD[1])
        setattr(head, HEAD[2], _head(getattr(head, HEAD[2])))


WRAPPED = frozenset({"moeserve.runtime.rank.all2all", HEAD[0], *(name for name, _, _ in ENTERED.values())})


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as ever, and has those that are wrapped changed once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that is wrapped; None for any other, which others find."""
        if name not in WRAPPED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def loaded(module: ModuleType) -> None:
                load(module)
                _wrap(module)

            spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def _born(pid: int) -> str:
    """When a process was started, as its kernel counts; empty for one that has ended."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if told[0] in ("Z", "X") else told[19]
