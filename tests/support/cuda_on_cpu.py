"""CUDA C++ of this project on a CPU, by its compiler: a thread for each of a block, block after block.

What kernels of a GPU do at once, or in another order, is not seen so; what each block reads and writes is.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.nvrtc import Program

COMPILER = shutil.which("g++")
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w")
MOST_THREADS = 64  # of a block: kernels go by how many it has

BEFORE = """
#include <algorithm>
#include <barrier>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __shared__ static
using std::min;
using std::max;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Place { unsigned x; };
thread_local Place threadIdx, blockIdx;
Place blockDim, gridDim;
std::unique_ptr<std::barrier<>> meeting;
int votes[2];
inline void __syncthreads() { meeting->arrive_and_wait(); }
inline int __syncthreads_or(int own) {
  __syncthreads();
  if (threadIdx.x == 0) votes[0] = 0;
  __syncthreads();
  if (own) __atomic_store_n(votes, 1, __ATOMIC_SEQ_CST);
  __syncthreads();
  return votes[0];
}
inline int __syncthreads_and(int own) { return !__syncthreads_or(!own); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }
typedef unsigned long long Word64;
inline Word64 atomicAdd(Word64* at, Word64 more) { return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST); }
inline Word64 atomicCAS(Word64* at, Word64 before, Word64 then) {
  __atomic_compare_exchange_n(at, &before, then, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return before;
}
inline Word64 atomicMax(Word64* at, Word64 other) {
  Word64 before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  for (Word64 found; before < other && (found = atomicCAS(at, before, other)) != before;) before = found;
  return before;
}
"""

BODIES = {
    "nanoseconds": "return std::chrono::steady_clock::now().time_since_epoch().count();",
    "load_acquire": "return __atomic_load_n(at, __ATOMIC_ACQUIRE);",
    "load_relaxed": "return __atomic_load_n(at, __ATOMIC_RELAXED);",
    "store_release": "__atomic_store_n(at, value, __ATOMIC_RELEASE);",
    "store_relaxed": "__atomic_store_n(at, value, __ATOMIC_RELAXED);",
    "load_fresh": "return *at;",
    "store_whole": "*(uint4*)at = value;",
    "load_whole": "return *(const uint4*)at;",
    "ask_for": "",
    "await_launch": "",
    "begin_next": "",
}
"""Of the functions that have instructions of a GPU."""

AFTER = """
extern "C" void launch_{name}(const void* given, int blocks, int threads) {{
  const {arguments} args = *(const {arguments}*)given;
  gridDim = {{(unsigned)blocks}}, blockDim = {{(unsigned)threads}};
  std::barrier<> between(threads);
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread)
    all.emplace_back([&, thread] {{
      threadIdx = {{(unsigned)thread}};
      for (int block = 0; block < blocks; ++block) {{
        if (thread == 0) meeting = std::make_unique<std::barrier<>>(threads);
        blockIdx = {{(unsigned)block}};
        between.arrive_and_wait();
        {name}(args);
        meeting->arrive_and_drop();  // others may meet again that have not returned
        between.arrive_and_wait();
      }}
    }});
  for (auto& one : all) one.join();
}}
"""


def needs_compiler() -> None:
    """Skips a test where there is no g++, or one without the barriers of C++20."""
    if COMPILER is None:
        pytest.skip("needs g++")
    text = "#include <barrier>\nstd::barrier<> one(1);\n"
    command = [COMPILER, *FLAGS, "-x", "c++", "-", "-o", "/dev/null"]
    if subprocess.run(command, input=text, capture_output=True, text=True, timeout=60).returncode:
        pytest.skip("needs a g++ that has <barrier>, as from 11 on")


def on_cpu(program: Program, functions: Mapping[str, Arguments], folder: Path) -> ctypes.CDLL:
    """The kernels `functions` of a program, by name with their arguments, as a library in `folder`."""
    text = re.sub(r"static_assert\(.*?\);\n", "", program.source)

    def plain(found: re.Match[str]) -> str:
        return f"{found[1]}{{ {BODIES[found[2]]} }}\n" if "asm volatile" in found[0] else found[0]

    text = re.sub(r"(DEVICE [^\n;]*?(\w+)\([^\n;]*?\) )\{\n.*?\n\}\n", plain, text, flags=re.DOTALL)
    assert "asm volatile" not in text, "an instruction of a GPU that has no counterpart here"
    launches = (AFTER.format(name=name, arguments=one.name) for name, one in functions.items())
    source, made = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text("\n".join((BEFORE, text, *launches)))
    command = [COMPILER or "g++", *FLAGS, *program.options, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert not done.returncode, done.stderr[:4000]
    return ctypes.CDLL(str(made))


class HostFunction:
    """A kernel of such a library, launched as others are; it is over when `launch` returns."""

    def __init__(self, library: ctypes.CDLL, name: str, arguments: Arguments) -> None:
        self._library, self._name, self._arguments = library, name, arguments

    def bound(self, given: Mapping[str, Argument]) -> HostFunction:
        return HostFunction(self._library, self._name, self._arguments.bound(given))

    def launch(
        self, grid: int, block: int, given: Mapping[str, Argument], *, overlapped: bool = False
    ) -> None:
        packed = self._arguments.pack(given)
        getattr(self._library, f"launch_{self._name}")(packed, grid, min(block, MOST_THREADS))
