"""Whether a dispatcher's library can serve here: checked on every rank, agreed by all before it is first
called.

A library that works on some ranks only leaves the others waiting in its first collective. So every rank looks
at its own surroundings, all exchange what they found, and all refuse together or none does.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moeserve.device.machine import this_machine
from moeserve.dispatch.dispatcher import DispatchEntry, DispatchSpec
from moeserve.dispatch.limits import Version, dotted
from moeserve.quant.formats.floats import FLOATS

log = logging.getLogger(__name__)

RDMA_ADAPTERS = "/sys/class/infiniband"


@dataclass(frozen=True)
class RankLocation:
    """The place where a rank runs: host name and its GPU's id, empty where there is none."""

    host: str
    gpu: str


@dataclass(frozen=True)
class Surroundings:
    """What one rank sees of its machine."""

    location: RankLocation
    arch: str  # "cpu", "sm90", "gfx942", ...
    reaches: Callable[[str], bool]  # GPU id of this host -> whether its memory can be reached
    nccl: Version | None  # of the library in this process, or that would be loaded
    adapters: tuple[str, ...]  # for RDMA


@dataclass(frozen=True)
class ProbeFinding:
    """A check that failed on one rank."""

    check: str
    found: str
    required: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.check}: found {self.found}, required {self.required}; {self.remedy}"


def probe(entry: DispatchEntry, spec: DispatchSpec, group: ProcessGroup) -> None:
    """Checks on all ranks of `group` whether the library can serve, before any call of it. Collective.

    Raises RuntimeError on every rank, with each rank's first failed check, unless all passed. The library is
    imported where the checks before that passed.
    """
    here = surroundings(spec)
    locations = _gathered(here.location, group)
    finding = next((f for check in CHECKS if (f := check(entry, spec, here, locations))), None)
    findings = _gathered(finding, group)
    failed = [f"rank {rank}: {found}" for rank, found in enumerate(findings) if found is not None]
    if failed:
        raise RuntimeError(f"dispatcher {entry.name} cannot serve\n  " + "\n  ".join(failed))
    if entry.limits.waiting and spec.rank == 0:
        log.info("dispatcher %s: %s, not %g s as planned", entry.name, entry.limits.waiting, spec.patience)


def surroundings(spec: DispatchSpec) -> Surroundings:
    """What this rank sees with `spec.device` as its own."""
    adapters = rdma_adapters()
    host = socket.gethostname()
    if spec.device == "cpu" or not torch.cuda.is_available():
        return Surroundings(RankLocation(host, ""), "cpu", lambda gpu: False, nccl_at_run_time(), adapters)
    own = torch.device(spec.device).index
    own = torch.cuda.current_device() if own is None else own
    gpus = {_gpu_id(index): index for index in range(torch.cuda.device_count())}

    def reaches(gpu: str) -> bool:
        return gpu in gpus and gpus[gpu] != own and torch.cuda.can_device_access_peer(own, gpus[gpu])

    return Surroundings(
        RankLocation(host, _gpu_id(own)), this_machine().arch, reaches, nccl_at_run_time(), adapters
    )


def rdma_adapters() -> tuple[str, ...]:
    """Names of this host's RDMA adapters."""
    return tuple(sorted(os.listdir(RDMA_ADAPTERS))) if os.path.isdir(RDMA_ADAPTERS) else ()


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def nccl_at_run_time() -> Version | None:
    """Version of the NCCL that this process has loaded or would load; None without one.

    torch reports the one it was compiled with, which need not be the one that runs.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10000, code.value % 10000 // 100, code.value % 100


def _gathered(value: Any, group: ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


Check = Callable[[DispatchEntry, DispatchSpec, Surroundings, "list[RankLocation]"], "ProbeFinding | None"]


def _architecture(
    entry: DispatchEntry, spec: DispatchSpec, here: Surroundings, locations: list[RankLocation]
) -> Any:
    if here.arch in entry.archs:
        return None
    return ProbeFinding(
        "GPU", here.arch, " or ".join(sorted(entry.archs)), "use allgather_reducescatter here"
    )


def _peers(
    entry: DispatchEntry, spec: DispatchSpec, here: Surroundings, locations: list[RankLocation]
) -> Any:
    if not entry.limits.one_host:
        return None
    away = [rank for rank, location in enumerate(locations) if location.host != here.location.host]
    if away:
        return ProbeFinding(
            "peer memory",
            f"ranks {away} on other hosts",
            "all ranks on one host",
            "use a dispatcher that crosses hosts, such as all2allv",
        )
    others = [rank for rank in range(spec.ranks) if rank != spec.rank]
    hidden = [rank for rank in others if not here.reaches(locations[rank].gpu)]
    if hidden:
        return ProbeFinding(
            "peer memory",
            f"no access to the GPUs of ranks {hidden}",
            "access between every pair of GPUs, one a rank",
            "let every rank see all GPUs of the host, or use all2allv",
        )
    return None


def _import(
    entry: DispatchEntry, spec: DispatchSpec, here: Surroundings, locations: list[RankLocation]
) -> Any:
    for name in sorted(entry.modules):
        try:
            package = importlib.import_module(name)
        except (ImportError, OSError, AssertionError) as error:
            reason = " ".join(str(error).split()) or "no reason given"
            return ProbeFinding(
                f"import of {name}",
                f"{type(error).__name__}: {reason}",
                "a build for this torch, CUDA and Python",
                f"install or build {name} on every host",
            )
        if lacking := sorted(entry.limits.api.difference(dir(package))):
            return ProbeFinding(
                f"package {name}",
                f"one without {', '.join(lacking)}",
                "the generation that has it",
                f"install that generation of {name} on every host, or use another dispatcher",
            )
    return None


def _nccl(entry: DispatchEntry, spec: DispatchSpec, here: Surroundings, locations: list[RankLocation]) -> Any:
    oldest = entry.limits.nccl
    if oldest is None or (here.nccl is not None and here.nccl >= oldest):
        return None
    found = "none" if here.nccl is None else dotted(here.nccl)
    return ProbeFinding(
        "NCCL at run time", found, f"at least {dotted(oldest)}", "install a newer nvidia-nccl on every host"
    )


def _sizes(
    entry: DispatchEntry, spec: DispatchSpec, here: Surroundings, locations: list[RankLocation]
) -> Any:
    dtype = FLOATS[spec.dtype].name
    reason = entry.limits.refuses(spec.ranks, spec.top_k, spec.hidden, dtype)
    if reason is None and spec.wire.name in entry.wires and not (spec.sliced and not entry.sliced):
        return None
    found = f"{spec.ranks} ranks, top-{spec.top_k}, H={spec.hidden}, {dtype}, wire {spec.wire}"
    wires = f"a wire of {', '.join(sorted(entry.wires))}, whole experts"
    return ProbeFinding(
        "sizes", found, f"it {reason}" if reason else wires, "name another dispatcher or wire"
    )


def _rdma(entry: DispatchEntry, spec: DispatchSpec, here: Surroundings, locations: list[RankLocation]) -> Any:
    if not entry.limits.rdma or here.adapters:
        return None
    return ProbeFinding(
        "RDMA",
        f"no adapter in {RDMA_ADAPTERS}",
        "one",
        "use a dispatcher over NVLink or all2allv on this host",
    )


CHECKS: tuple[Check, ...] = (_architecture, _peers, _import, _nccl, _sizes, _rdma)
"""The checks in their order: cheap and telling ones come first, and nothing is imported in vain."""
