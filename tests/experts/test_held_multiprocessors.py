"""Steps in one launch beside a kernel that holds multiprocessors: with their number told, and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from made_experts import Arrival, activation_named, fresh_seed, make_scheme
from torch import Tensor

from moeserve.device import nvrtc, residency, waits
from moeserve.device.arguments import Arguments
from moeserve.device.machine import this_machine
from moeserve.experts.batch import ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.cuda import decode_codes, few, steps
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.formats.nvfp4 import NVFP4

HELD = 6
LIMIT_SECONDS = 20.0
"""A holder ends by itself after so long, whatever fails here."""

SHORT_SECONDS = 0.2

HOLDER = Arguments("HolderArguments", begun="u32*", stop="u32*", over="u32*", bound="u64")
HOLDER_TEXT = f"""typedef unsigned int u32;
typedef unsigned long long u64;
{HOLDER.text}
__device__ u64 nanoseconds() {{
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}}
extern "C" __global__ void holder(const __grid_constant__ HolderArguments args) {{
  ((volatile u32*)args.begun)[blockIdx.x] = 1;
  __threadfence_system();
  const u64 end = nanoseconds() + args.bound;
  while (*(volatile u32*)args.stop == 0 && nanoseconds() < end) __nanosleep(1000);
  ((volatile u32*)args.over)[blockIdx.x] = 1;
}}
"""
ALL_SHARED = 227 << 10
"""Bytes of shared memory of a whole multiprocessor, beside which no block of a step finds room."""

STEPS = {
    "cuda_fp4_few": (Scheme(NVFP4, BF16), "few"),
    "cuda_fp8_few": (Scheme(FP8_BLOCK, FP8_GROUP), "few"),
    "cuda_bf16_few": (Scheme(BF16, BF16), "few"),
    "cuda_fp4_some": (Scheme(NVFP4, BF16), "decode_codes"),
}

Step = Callable[[], tuple[Tensor, torch.cuda.Event]]
"""Queues a step: its answer to come, and what says that it has come."""


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is held, no grid was sized, and no block has come to a barrier; again so afterwards."""
    if not torch.cuda.is_available() or this_machine().arch != "sm90":
        pytest.skip("needs a Hopper GPU: CUDA C++ has no interpreter")
    for table in ("_held", "_sized"):
        monkeypatch.setattr(residency, table, {})
    monkeypatch.setattr(waits, "_made", [])
    for module in (few, decode_codes):
        monkeypatch.setattr(module, "grid_wait", cache(waits.grid_wait.__wrapped__))
    counted = (few._turns, decode_codes._made, steps.resident_clusters)
    for cached in counted:
        cached.cache_clear()
    yield
    torch.cuda.synchronize()
    for cached in counted:
        cached.cache_clear()


def step_of(name: str) -> tuple[Step, Tensor]:
    """A step of the kernel `name` in which every block has work that others wait for; and its answer."""
    scheme, counts = STEPS[name][0], (5, 4, 8, 3, 1, 7, 2, 8) * 17
    generator = torch.Generator().manual_seed(fresh_seed())
    shape = ExpertShape(256, 256, activation_named("silu"), bias=False)
    made = make_scheme(shape, len(counts), scheme, generator).to("cuda")
    kernel = KERNELS[name].build(KernelSpec(scheme, shape, torch.bfloat16))
    prepared = kernel.prepare(made)
    arrival = Arrival(counts, Grouping.RAGGED)
    wire = FP8_GROUP if scheme.activations == FP8_GROUP else BF16
    batch = arrival.batch(arrival.rows(shape.hidden, generator), shape.hidden, wire)
    there = replace(
        batch, tokens=batch.tokens.to("cuda"), counts=batch.counts.cuda(), offsets=batch.offsets.cuda()
    )

    torch.cuda.synchronize()  # the weights are prepared on another stream
    stream = torch.cuda.Stream()

    def step() -> tuple[Tensor, torch.cuda.Event]:
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            answer = kernel.apply(prepared, there)
            done.record()
        return answer, done

    answers = [step()[0] for _ in range(4)]  # memory for as many as a test holds
    torch.cuda.synchronize()
    return step, answers[0]


@contextmanager
def holding(number: int) -> Iterator[Callable[[], bool]]:
    """A kernel holds `number` multiprocessors inside; yields whether it still holds all of them."""
    kernel = nvrtc.Program(HOLDER_TEXT).function("holder", HOLDER)
    begun, stop, over = (torch.zeros(n, dtype=torch.int32, pin_memory=True) for n in (number, 1, number))
    given: dict[str, Any] = {"begun": begun, "stop": stop, "over": over, "bound": int(LIMIT_SECONDS * 10**9)}
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel.launch(number, 32, given, shared=ALL_SHARED)
    try:
        until(lambda: bool(begun.all()))
        yield lambda: not over.any()
    finally:
        stop[0] = 1
        until(lambda: bool(over.all()))


def until(here: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits without a word to the device. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not here():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing within {seconds} s")
        time.sleep(0.001)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_beside_a_kernel_whose_multiprocessors_are_held(name: str) -> None:
    residency.hold("cuda", HELD)
    step, wanted = step_of(name)
    with holding(HELD) as still:
        for _ in range(20):
            answer, done = step()
            until(done.query)
            assert still()
    assert torch.equal(answer, wanted)
    waits.check_waits()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_whose_blocks_find_no_place_ends_with_an_error_and_the_next_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the attribute by which the driver itself may keep such a launch back.

    A step whose blocks wait for earlier ones only may well end without the others.
    """
    step, wanted = step_of(name)
    for module in (few, decode_codes):
        monkeypatch.setattr(module, "at_once", lambda: False)
    monkeypatch.setattr(waits, "_longest", SHORT_SECONDS)
    with holding(HELD) as still:
        begun = time.monotonic()
        begun_answer, done = step()
        until(done.query)
        took = time.monotonic() - begun
        assert still()
        if STEPS[name][1] == "few":  # a barrier of the grid: every block waits for every other
            assert SHORT_SECONDS * 0.9 <= took <= SHORT_SECONDS + 2.0
        if took < SHORT_SECONDS * 0.9:  # no block that ran waited for one that did not
            assert torch.equal(begun_answer, wanted)
            waits.check_waits()
            return
        with pytest.raises(
            RuntimeError, match=rf"{STEPS[name][1]}: .*{SHORT_SECONDS:g} s .*members\.held_multiprocessors"
        ):
            step()
    for _ in range(3):
        answer, done = step()
        until(done.query)
        assert torch.equal(answer, wanted)
    waits.check_waits()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_as_it_is_served_is_right_or_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may begin such a launch, or keep it back until all its blocks find a place."""
    step, wanted = step_of(name)
    monkeypatch.setattr(waits, "_longest", SHORT_SECONDS)
    with holding(HELD):
        answer, done = step()
        time.sleep(4 * SHORT_SECONDS)
    until(done.query)
    try:
        waits.check_waits()
    except RuntimeError as error:
        print(f"{name}: begun, and ended by the bound: {error}")
    else:
        print(f"{name}: kept back by the driver")
        assert torch.equal(answer, wanted)
    again, done = step()
    until(done.query)
    assert torch.equal(again, wanted)
