"""Workers that run adapters over stand-ins of their libraries, as if on four GPUs of one host."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import fakes
import torch
from dispatcher_cases import Case, Outcome, run_cases, spec_of
from parallel import group

from moeserve.dispatch.backends import DISPATCHERS, nccl_ep
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.libraries import probe
from moeserve.dispatch.libraries.probe import RankLocation, Surroundings

STAND_INS = tuple(import_module(f"fakes.{found.name}") for found in iter_modules(fakes.__path__))
"""Every file of tests/support/fakes; one that stands for modules lists them in its `STANDS_FOR`."""

STANDS_FOR = {name: fake for fake in STAND_INS for name in getattr(fake, "STANDS_FOR", ())}
"""Modules by the stand-in that answers for them, a parent before its children."""


def a_gpu_host(spec: DispatchSpec, dispatcher: str) -> Surroundings:
    """What a rank sees of the best host for `dispatcher`."""
    arch = max(DISPATCHERS[dispatcher].archs, key=lambda arch: (arch == "sm90", arch))
    location = RankLocation("host0", f"GPU-{spec.rank}")
    return Surroundings(location, arch, lambda gpu: gpu != location.gpu, (2, 30, 7), ("mlx5_0",))


def install(dispatcher: str) -> None:
    """Puts the stand-ins in their places and this process on a GPU host."""
    for name, fake in STANDS_FOR.items():
        parent, _, child = name.rpartition(".")
        if parent:
            sys.modules.setdefault(parent, ModuleType(parent))
        sys.modules[name] = fake
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    probe.surroundings = lambda spec: a_gpu_host(spec, dispatcher)
    nccl_ep._stream = lambda: 0


def run_over_stand_ins(rank: int, world: int, cases: list[Case]) -> list[Outcome]:
    """Worker: every case over its library's stand-in."""
    outcomes = []
    for case in cases:
        install(case.dispatcher)
        outcomes += run_cases(rank, world, [case])
    return outcomes


def refusals(rank: int, world: int, lacking: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Worker: what each dispatcher says on this rank when rank 1 alone has a host that lacks something.

    `lacking` are (dispatcher, fields of its surroundings); the field `module` is one that cannot be imported,
    and `bare` one that can and has nothing in it.
    """
    said = []
    for dispatcher, fields in lacking:
        install(dispatcher)
        lacks = fields if rank == 1 else {}
        if module := lacks.get("module"):
            sys.modules[module] = None  # type: ignore[assignment]
        if bare := lacks.get("bare"):
            sys.modules[bare] = ModuleType(bare)
        seen = {name: value for name, value in lacks.items() if name not in ("module", "bare")}
        case = Case(dispatcher, "even", "bf16", torch.bfloat16, "holes", 1, ranks=world)
        spec = spec_of(case, rank)
        here = replace(a_gpu_host(spec, dispatcher), **seen)
        probe.surroundings = partial(_given, here)
        try:
            DISPATCHERS[dispatcher].build(spec, group()).close()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def built(rank: int, world: int, dispatchers: list[str]) -> list[tuple[int, int]]:
    """Worker: steps that each dispatcher's library has made when it is built, and bytes counted by then."""
    found = []
    for name in dispatchers:
        install(name)
        case = Case(name, "even", "bf16", torch.bfloat16, "holes", 1)
        dispatcher = DISPATCHERS[name].build(spec_of(case, rank), group())
        library = dispatcher._handle if name.startswith("nccl") else dispatcher._buffer
        found.append((library.steps, dispatcher.traffic.dispatched + dispatcher.traffic.combined))
        dispatcher.close()
    return found


def _given(here: Surroundings, spec: DispatchSpec) -> Surroundings:
    return here


def unreachable(gpu: str) -> bool:
    """No GPU reaches another."""
    return False
