"""`Machine`: what a plan needs to know about the device it is made for; this one, or a named one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

GIB = 1 << 30

_NVIDIA = frozenset(
    {
        "triton",
        "cuda.bindings",
        "flashinfer",
        "deep_ep",
        "deep_gemm",
        "triton_kernels",
        "nccl.ep",
        "nixl_ep",
    }
)
_AMD = frozenset({"triton", "triton_kernels", "aiter", "mori"})

OPTIONAL_MODULES = _NVIDIA | _AMD
"""Packages that some kernel or dispatcher needs, by whose GPUs they are made for; looked up, never imported,
when a machine is described.
"""


@dataclass(frozen=True)
class Machine:
    """One device a rank runs on: architecture name, memory in bytes, and the optional packages installed
    there.
    """

    name: str
    arch: str  # "cpu", "sm90", "sm100", "gfx942", ...
    memory: int
    modules: frozenset[str] = frozenset()

    @property
    def device(self) -> str:
        """The torch device type: `cpu` or `cuda` (ROCm included)."""
        return "cpu" if self.arch == "cpu" else "cuda"


def this_machine() -> Machine:
    """The device of this process: CUDA device 0 where there is one, else the CPU."""
    modules = frozenset(name for name in OPTIONAL_MODULES if installed(name))
    if not torch.cuda.is_available():
        return Machine("cpu", "cpu", _host_memory(), modules)
    properties = torch.cuda.get_device_properties(0)
    arch = getattr(properties, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
    return Machine(
        properties.name, arch or f"sm{properties.major}{properties.minor}", properties.total_memory, modules
    )


@cache
def kernels_serve(device: torch.device) -> bool:
    """Whether our Triton kernels can run on tensors of `device`."""
    return device.type == "cuda" and installed("triton")


def installed(name: str) -> bool:
    """Whether the module can be imported here; it is looked up, and not imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a dotted name, its parent
        return False


def _host_memory() -> int:
    with open("/proc/meminfo") as lines:
        return int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024


NAMED: dict[str, tuple[str, int | None, frozenset[str]]] = {
    "cpu": ("cpu", None, frozenset()),
    "a100": ("sm80", 80, _NVIDIA),
    "l40s": ("sm89", 48, _NVIDIA),
    "h20": ("sm90", 96, _NVIDIA),
    "h100": ("sm90", 80, _NVIDIA),
    "h200": ("sm90", 141, _NVIDIA),
    "b200": ("sm100", 180, _NVIDIA),
    "b300": ("sm103", 288, _NVIDIA),
    "mi300x": ("gfx942", 192, _AMD),
    "mi325x": ("gfx942", 256, _AMD),
    "mi350x": ("gfx950", 288, _AMD),
    "mi355x": ("gfx950", 288, _AMD),
}
"""Machines by public name: architecture, memory in GiB (None: what this host has), and the optional packages
of its maker's software.
"""


def machine_named(name: str, modules: Iterable[str] | None = None) -> Machine:
    """A machine by its public name, with `modules` taken as installed: all that there are for it by default.

    Raises ValueError with the names known.
    """
    key = name.lower()
    if key not in NAMED:
        raise ValueError(f"unknown machine {name!r}; known: {', '.join(NAMED)}")
    arch, memory, packages = NAMED[key]
    held = _host_memory() if memory is None else memory * GIB
    return Machine(key, arch, held, packages if modules is None else frozenset(modules))


def torch_device(machine: Machine, index: int) -> str:
    """The torch device of GPU `index` of a host with `machine`s."""
    return "cpu" if machine.device == "cpu" else f"cuda:{index % torch.cuda.device_count()}"
