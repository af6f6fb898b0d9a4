"""CUDA C++ compiled at first use by NVRTC and kept on disk: `Program`, `Function.launch`, `tensor_map`.

The package stays pure Python: sources are files in a folder `text` beside the Python that launches them, and
the compiler and the driver's API come with `cuda-bindings`, which torch's CUDA wheels bring. Sources include
no header, since a user's machine has none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeserve.device.arguments import MAP_BYTES, Argument, Arguments, TensorMap
from moeserve.device.streams import raw_stream

NEEDED_MODULE = "cuda.bindings"
"""What a row that launches through this file names among its modules."""

Dim = int | tuple[int, int, int]

MOST_CONFIGS = 64
"""Of one kernel that are kept; those of a prefill have other grids for each number of rows."""


class _How(NamedTuple):
    """How a kernel is launched, but for its arguments."""

    grid: Dim
    block: Dim
    shared: int
    cluster: int
    cooperative: bool
    overlapped: bool
    stream: int


class CompileError(RuntimeError):
    """A source that NVRTC refused, with its log."""


class LaunchError(RuntimeError):
    """The driver refused to load or launch a kernel; names the kernel and the driver's reason."""


@dataclass(frozen=True)
class Program:
    """One source and its compiler options, such as `("-DROWS=64",)`; compiled for the current device."""

    source: str
    options: tuple[str, ...] = ()

    def function(self, name: str, arguments: Arguments) -> Function:
        """The kernel `extern "C" __global__ void name(...)` of `arguments`, loaded on the current device.

        Raises ValueError for a source that declares another kernel, CompileError with the compiler's log, and
        LaunchError when the kernel is not there.
        """
        declared = f"{name}(const __grid_constant__ {arguments.name} args)"
        if arguments.text not in self.source or declared not in self.source:
            raise ValueError(f"the source lacks the struct {arguments.name}, or the kernel {declared}")
        return _function(self, name, arguments, torch.cuda.current_device())


@dataclass(frozen=True, eq=False)
class Function:
    """A kernel that is loaded and can be launched."""

    name: str
    handle: Any
    arguments: Arguments

    def bound(self, given: Mapping[str, Argument]) -> Function:
        """Returns the kernel with some arguments given once; `launch` then takes the others."""
        return replace(self, arguments=self.arguments.bound(given))

    def launch(
        self,
        grid: Dim,
        block: Dim,
        given: Mapping[str, Argument],
        *,
        shared: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
        overlapped: bool = False,
    ) -> None:
        """Queues the kernel on torch's current stream; under capture it becomes part of the graph.

        `given` are the kernel's arguments by name. `shared` is in bytes, beyond 48 KiB too; `cluster` counts
        blocks along x; `cooperative` promises that all blocks run at once; `overlapped` that the kernel waits
        by itself for the launches before it, so that it may begin before they are over. Raises LaunchError,
        and what `Arguments.pack` raises for arguments that do not fit.
        """
        packed = self.arguments.pack(given)
        if shared > 48 << 10:
            self._allow(shared)
        how = _How(grid, block, shared, cluster, cooperative, overlapped, raw_stream())
        config = self._configs.get(how)
        if config is None:
            if len(self._configs) >= MOST_CONFIGS:
                self._configs.clear()
            config = self._configs[how] = _config(how)
        addresses = ctypes.c_void_p(ctypes.addressof(packed))
        _check(_driver().cuLaunchKernelEx(config, self.handle, ctypes.addressof(addresses), 0), self.name)

    def launch_holding(self, blocks: int, block: int, given: Mapping[str, Argument]) -> None:
        """Does as `launch` on a grid of one dimension, and keeps the interpreter meanwhile: where other
        threads want it, to get it back takes longer than the launch. Only for a stream to which little is
        queued, since one that is full has its caller wait for the device.
        """
        packed = self.arguments.pack(given)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        status = _holding().cuLaunchKernel(
            int(self.handle), blocks, 1, 1, block, 1, 1, 0, raw_stream(), parameters, None
        )
        if status:
            raise LaunchError(f"{self.name}: cuLaunchKernel: CUDA error {status}")

    def resident_blocks(self, block: int, shared: int = 0) -> int:
        """How many blocks of `block` threads a multiprocessor holds at once."""
        if shared > 48 << 10:
            self._allow(shared)
        driver = _driver()
        return int(
            _check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.handle, block, shared), self.name)
        )

    def _allow(self, shared: int) -> None:
        if shared > self._allowed[0]:
            attribute = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(_driver().cuFuncSetAttribute(self.handle, attribute, shared), self.name)
            self._allowed[0] = shared

    @cached_property
    def _allowed(self) -> list[int]:
        return [0]

    @cached_property
    def _configs(self) -> dict[_How, Any]:
        """Of earlier launches, by all that is in them: to make one takes longer than to launch the kernel."""
        return {}


def tensor_map(tensor: Tensor, box: tuple[int, int], swizzle: int = 128, *, dense: bool = False) -> TensorMap:
    """How bulk tensor copies read `tensor [rows, columns]` (contiguous) in boxes of `(rows, columns)`.

    `swizzle` is 0, 32, 64 or 128 bytes, and as wide as a box's row; elements out of bounds read as zero.
    A box that is `dense` in memory asks for no more than itself: others also for the rest of each 256 bytes.
    Raises ValueError for a tensor that such copies cannot read, LaunchError for the driver's refusal.
    """
    driver = _driver()
    if tensor.dim() != 2 or not tensor.is_contiguous():
        raise ValueError(f"a tensor map needs a contiguous matrix; found {list(tensor.shape)}")
    rows, columns = tensor.shape
    if tensor.data_ptr() % 16 or columns * tensor.itemsize % 16:
        raise ValueError(f"address and row ({columns} x {tensor.dtype}) must be multiples of 16 bytes")
    kinds, u32, u64 = driver.CUtensorMapDataType, driver.cuuint32_t, driver.cuuint64_t
    kind = {
        1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        4: kinds.CU_TENSOR_MAP_DATA_TYPE_INT32,
    }[tensor.itemsize]
    name = "NONE" if swizzle == 0 else f"{swizzle}B"
    made = driver.cuTensorMapEncodeTiled(
        kind,
        2,
        tensor.data_ptr(),
        [u64(columns), u64(rows)],
        [u64(columns * tensor.itemsize)],
        [u32(box[1]), u32(box[0])],
        [u32(1), u32(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{name}"),
        getattr(
            driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{'NONE' if dense else 'L2_256B'}"
        ),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return mapped(_check(made, f"tensor map of {list(tensor.shape)} in boxes of {list(box)}"), tensor)


def mapped(made: Any, tensor: Tensor) -> TensorMap:
    """The driver's `CUtensorMap` over `tensor`, as an argument."""
    return TensorMap(ctypes.string_at(int(made.getPtr()), MAP_BYTES), tensor)


def compiled(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """The cubin of `source` for `arch` (`sm_90a`), from disk where it was compiled before.

    Raises CompileError with the compiler's log.
    """
    from cuda.bindings import nvrtc

    _, *version = nvrtc.nvrtcVersion()
    key = hashlib.sha256(repr((source, arch, options, version)).encode()).hexdigest()
    path = cache_folder() / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    flags = [f"--gpu-architecture={arch}", "--std=c++17", "--extra-device-vectorization", *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CompileError(f"{status.name} for {arch} with {' '.join(options)}:\n{log.decode().strip()}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin: bytes = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    _store(path, cubin)
    return cubin


def cache_folder() -> Path:
    """Returns the folder of cubins: `kernels` in `MOESERVE_CACHE`, else in `moeserve` of the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("MOESERVE_CACHE") or Path(home) / "moeserve") / "kernels"


def _store(path: Path, cubin: bytes) -> None:
    """Whole or not at all: several ranks of a host compile at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)


@cache
def _function(program: Program, name: str, arguments: Arguments, device: int) -> Function:
    driver = _driver()
    torch.cuda.current_stream()  # torch's context is the current one from here on
    module = _module(program, device)
    return Function(name, _check(driver.cuModuleGetFunction(module, name.encode()), name), arguments)


@cache
def _module(program: Program, device: int) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    torch.cuda.synchronize(device)  # loading may wait for the device; a kernel that spins must not be on it
    return _check(_driver().cuModuleLoadData(compiled(program.source, arch, program.options)), arch)


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def _holding() -> Any:
    """The driver, for whose calls ctypes does not give the interpreter up. torch has loaded it."""
    found = ctypes.PyDLL("libcuda.so.1")
    address, count = ctypes.c_void_p, ctypes.c_uint
    found.cuLaunchKernel.argtypes = (address, *[count] * 7, address, address, address)
    return found


@cache
def _attributes(cluster: int, *, cooperative: bool, overlapped: bool) -> list[Any]:
    driver, attributes = _driver(), []
    if cluster > 1:
        size = driver.CUlaunchAttribute()
        size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
        attributes.append(size)
    if cooperative:
        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        together.value.cooperative = 1
        attributes.append(together)
    if overlapped:
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    return attributes


def _config(how: _How) -> Any:
    """The driver's own of how a kernel is launched; nothing changes it once it is made."""
    config = _driver().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _dim(how.grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _dim(how.block)
    config.sharedMemBytes, config.hStream = how.shared, how.stream
    attributes = _attributes(how.cluster, cooperative=how.cooperative, overlapped=how.overlapped)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _dim(dim: Dim) -> tuple[int, int, int]:
    return (dim, 1, 1) if isinstance(dim, int) else dim


def _check(answer: tuple[Any, ...], what: str) -> Any:
    """The driver's result without its status. Raises LaunchError."""
    status, *result = answer
    driver = _driver()
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else str(text)
        raise LaunchError(f"{what}: {status.name}: {reason}")
    return result[0] if result else None
