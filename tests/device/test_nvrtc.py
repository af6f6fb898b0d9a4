"""Sources compiled at first use: kept on disk, compiled anew when anything differs, refused with the log."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moeserve.device import nvrtc
from moeserve.device.arguments import Arguments


class FakeNvrtc(ModuleType):
    """The seven calls of the compiler's API that are used; a source with `wrong` in it does not compile."""

    nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=SimpleNamespace(name="NVRTC_SUCCESS"))

    def __init__(self) -> None:
        super().__init__("cuda.bindings.nvrtc")
        self.compiled: list[tuple[bytes, tuple[bytes, ...]]] = []
        self.version = (0, 13, 0)

    def nvrtcVersion(self) -> tuple[int, int, int]:
        return self.version

    def nvrtcCreateProgram(self, source, name, count, headers, names):
        return self.nvrtcResult.NVRTC_SUCCESS, source

    def nvrtcCompileProgram(self, program, count, options):
        assert count == len(options)
        self.compiled.append((program, tuple(options)))
        failed = SimpleNamespace(name="NVRTC_ERROR_COMPILATION")
        return (failed if b"wrong" in program else self.nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcGetProgramLogSize(self, program):
        return self.nvrtcResult.NVRTC_SUCCESS, 4

    def nvrtcGetProgramLog(self, program, log):
        memoryview(log)  # bytes are written in place by the real call; here the length is what is checked
        assert len(log) == 4

    def nvrtcGetCUBINSize(self, program):
        return self.nvrtcResult.NVRTC_SUCCESS, len(program)

    def nvrtcGetCUBIN(self, program, cubin):
        assert len(cubin) == len(program)

    def nvrtcDestroyProgram(self, program):
        return (self.nvrtcResult.NVRTC_SUCCESS,)


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> FakeNvrtc:
    fake = FakeNvrtc()
    package = ModuleType("cuda.bindings")
    package.nvrtc = fake
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", fake)
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    return fake


def test_a_source_is_compiled_once(compiler: FakeNvrtc) -> None:
    first = nvrtc.compiled("source", "sm_90a", ("-DROWS=64",))
    assert nvrtc.compiled("source", "sm_90a", ("-DROWS=64",)) == first
    assert len(compiler.compiled) == 1
    (_, options) = compiler.compiled[0]
    assert b"--gpu-architecture=sm_90a" in options and b"-DROWS=64" in options


@pytest.mark.parametrize("differs", ["source", "arch", "options", "version"])
def test_whatever_differs_is_compiled_anew(differs: str, compiler: FakeNvrtc) -> None:
    nvrtc.compiled("source", "sm_90a", ())
    if differs == "version":
        compiler.version = (0, 13, 1)
    other = {"source": ("other", "sm_90a", ()), "arch": ("source", "sm_100a", ())}
    nvrtc.compiled(*other.get(differs, ("source", "sm_90a", ("-DX",) if differs == "options" else ())))
    assert len(compiler.compiled) == 2


def test_a_source_that_does_not_compile_leaves_nothing_and_says_which(compiler: FakeNvrtc) -> None:
    with pytest.raises(nvrtc.CompileError, match="NVRTC_ERROR_COMPILATION for sm_90a with -DX=1"):
        nvrtc.compiled("wrong", "sm_90a", ("-DX=1",))
    assert not nvrtc.cache_folder().exists()


ADDED = Arguments("AddArguments", x="float*", by="float", n="int", seen="u64*", nothing="u8*?")
ADD = f"""typedef unsigned char u8;
typedef unsigned long long u64;
{ADDED.text}
extern "C" __global__ void add(const __grid_constant__ AddArguments args) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < args.n) args.x[i] += args.by;
  if (i == 0 && !args.nothing) *args.seen = (u64)args.x;
}}
// void missing(const __grid_constant__ AddArguments args)
"""


@pytest.mark.gpu(1)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_runs_and_is_captured() -> None:
    kernel = nvrtc.Program(ADD).function("add", ADDED)
    x, seen = torch.zeros(1000, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    kernel.launch(8, 128, {"x": x, "by": 2.5, "n": 1000, "seen": seen, "nothing": None})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.bound({"n": 1000, "x": x, "nothing": None}).launch((8, 1, 1), 128, {"by": 1.0, "seen": seen})
    graph.replay()
    assert x.eq(3.5).all() and int(seen) == x.data_ptr()
    with pytest.raises(nvrtc.LaunchError, match="missing"):
        nvrtc.Program(ADD).function("missing", ADDED)
    with pytest.raises(TypeError, match="AddArguments lacks seen"):
        kernel.launch(8, 128, {"x": x, "by": 2.5, "n": 1000, "nothing": None})


def test_a_kernel_of_other_arguments_is_refused() -> None:
    other = Arguments("AddArguments", x="float*", n="int")
    with pytest.raises(ValueError, match="lacks the struct AddArguments"):
        nvrtc.Program(ADD).function("add", other)
    with pytest.raises(ValueError, match=r"the kernel subtract\(const __grid_constant__ AddArguments args\)"):
        nvrtc.Program(ADD).function("subtract", ADDED)
