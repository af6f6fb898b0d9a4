"""Which kernel and which tile an H200's plan runs for how many tokens: what was measured, so that none moves.

`kernel_choices_h200.json` was written by the kernels themselves when each chose by constants of its own: by
model, kind of experts and ranks, the numbers of tokens of all lanes from which on another kernel or tile ran.
"""

from __future__ import annotations

import json
import random
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_experts import activation_named, fresh_seed

from moeserve.device.machine import machine_named
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.experts.batch import ExpertBatch, ExpertShape, Grouping
from moeserve.experts.kernel import KernelEntry, KernelRange, KernelSpec, Prepared, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.cuda import decode_codes, few, prefill_codes, prefill_wide
from moeserve.experts.kernels.tiles import kernel_ranges
from moeserve.experts.spans import together
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_E4M3
from moeserve.runtime.planning.plan import NoPlan, Plan, make_plan
from moeserve.runtime.sections import Wanted

pytest.importorskip("triton")

RUNS: dict[str, list[tuple[int, str]]] = json.loads(
    Path(__file__).with_name("kernel_choices_h200.json").read_text()
)
TOKENS = 16384

SILU, OAI = activation_named("silu"), activation_named("swigluoai")
MODELS = {
    "deepseek-v3": (256, 8, ExpertShape(7168, 2048, SILU)),
    "mixtral-8x7b": (8, 2, ExpertShape(4096, 14336, SILU)),
    "qwen3-235b": (128, 8, ExpertShape(4096, 1536, SILU)),
    "gpt-oss-120b": (128, 4, ExpertShape(2880, 2880, OAI, bias=True)),
    "inner 1440": (128, 4, ExpertShape(2880, 1440, OAI, bias=True)),
}
"""Experts, how many of them a token chooses, and their shape."""

SCHEMES = {
    "bf16": Scheme(BF16, BF16),
    "fp8": Scheme(FP8_BLOCK, FP8_GROUP),
    "nvfp4": Scheme(NVFP4, BF16),
    "mxfp4": Scheme(MXFP4, BF16),
    "nvfp4_fp8": Scheme(NVFP4, FP8_GROUP),
    "mxfp4_fp8": Scheme(MXFP4, FP8_GROUP),
    "nvfp4_e4m3_fp8": Scheme(NVFP4_E4M3, FP8_GROUP),
}


class Launched(Exception):
    """A kernel was about to be launched, with this tile."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU, kernels go as far as choosing their tile and say which."""
    from moeserve.experts.kernels.triton import grouped

    def launch(of: Any) -> Any:
        def noted(*given: Any) -> None:
            raise Launched(of(*given))

        return noted

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(few, "step", launch(lambda form, *_: words(form.tile)))
    monkeypatch.setattr(decode_codes, "step", launch(lambda form, *_: str(form.rows)))
    monkeypatch.setattr(grouped, "GroupedStep", launch(lambda batch, rows, tile: words(tile)))
    monkeypatch.setattr(prefill_wide, "WidePrefillStep", launch(lambda batch, rows, width: str(width.rows)))
    monkeypatch.setattr(prefill_codes, "CodesStep", launch(lambda batch, rows, plan: str(plan.most)))


def words(tile: Any) -> str:
    return "/".join(map(str, astuple(tile)))


def planned(name: str, **wanted: str) -> Plan:
    model, kind, ranks = name.split(", ")
    experts, top_k, shape = MODELS[model]
    count = int(ranks.split()[0])
    problem = Problem(SCHEMES[kind], BF16, shape, experts, count, count, top_k, TOKENS)
    return make_plan(problem, machine_named("h200"), KERNELS, DISPATCHERS, Wanted(**wanted))


def batch_of(plan: Plan, tokens: int) -> ExpertBatch:
    """What a step of so many tokens, of all lanes, brings to a rank that counts nothing on the host."""
    problem = plan.problem
    rows = BF16.empty((tokens * problem.top_k + 1, problem.shape.hidden), "meta")
    counts = torch.empty(problem.slots, dtype=torch.int32, device="meta")
    likely = tokens * problem.top_k / problem.experts
    return ExpertBatch(rows, Grouping.RAGGED, counts, counts, likely)


def chosen(plan: Plan, tokens: int) -> str:
    """The kernel that runs a step of so many tokens, and its tile."""
    problem, batch = plan.problem, batch_of(plan, tokens)
    parts = [f"{side}.{part}" for side in ("gate_up", "down") for part in ("codes", "scale", "row_scale")]
    prepared = Prepared({part: torch.empty(problem.slots, 1, 1, device="meta") for part in parts})
    kernel = plan.kernel.build(KernelSpec(problem.scheme, problem.shape, torch.bfloat16))
    with pytest.raises(Launched) as launched:
        kernel.apply(prepared, batch)
    name = plan.kernel.span_of(batch).kernel.name
    tile = str(launched.value)
    return f"{name} {tile.partition('/')[0] if name == 'cuda_fp8_many' else tile}"  # rows that are rounded


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", RUNS)
def test_every_step_runs_the_kernel_that_was_measured_for_it(name: str) -> None:
    plan, runs = planned(name), RUNS[name]
    ends = [*(first - 1 for first, _ in runs[1:]), TOKENS]
    drawn = random.Random(fresh_seed())
    for (first, expected), end in zip(runs, ends, strict=True):
        for tokens in {first, end, drawn.randint(first, end)}:
            assert chosen(plan, tokens) == expected, tokens


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_prints_a_line_for_every_kernel_that_runs(name: str) -> None:
    plan = planned(name)
    names = list(dict.fromkeys(label.split()[0] for _, label in RUNS[name]))
    shown = [line.split()[1] for line in plan.lines() if line.startswith("kernel ")]
    assert shown == [span.kernel.name for span in plan.kernels]
    assert names == [name for name in shown if name in names]
    assert plan.kernel_names == "+".join(dict.fromkeys(shown))


def test_spans_rise_up_to_full_lanes_and_the_last_takes_what_is_above() -> None:
    plan = planned("deepseek-v3, nvfp4, 4 ranks")
    assert [(span.kernel.name, span.up_to) for span in plan.kernels] == [
        ("cuda_fp4_few", 6),
        ("cuda_fp4_some", 640),
        ("triton_fp4", 4095),
        ("cuda_fp4_many", 4 * TOKENS),
    ]
    found = [plan.kernel.span(rows).kernel.name for rows in (0, 6, 7, 4095, 4096, 10**9)]
    assert found == [
        "cuda_fp4_few",
        "cuda_fp4_few",
        "cuda_fp4_some",
        "triton_fp4",
        "cuda_fp4_many",
        "cuda_fp4_many",
    ]
    assert {span.kernel.form for span in plan.kernels} == {"hopper_fp4"}


def test_kernels_that_no_step_reaches_are_not_in_the_plan() -> None:
    """Four lanes of 64 rows bring 256 at most; for one row alone there are too many slots on one rank."""
    few_rows = replace(planned("deepseek-v3, nvfp4, 4 ranks").problem, lane_rows=64)
    plan = make_plan(few_rows, machine_named("h200"), KERNELS, DISPATCHERS)
    assert plan.kernel_names == "cuda_fp4_few+cuda_fp4_some"
    assert dict(plan.refused)["cuda_fp4_many"] == "cuda_fp4_few+cuda_fp4_some stands before it"


def test_redundant_experts_are_slots_that_rows_spread_over() -> None:
    problem = replace(planned("deepseek-v3, bf16, 4 ranks").problem, redundant=32)
    plan = make_plan(problem, machine_named("h200"), KERNELS, DISPATCHERS)
    assert problem.slots == 72
    assert [span.up_to for span in plan.kernels] == [1, 26 * 72 // 2 - 1, 4 * TOKENS]


def test_slices_get_the_rows_of_all_lanes() -> None:
    problem = replace(planned("deepseek-v3, bf16, 4 ranks").problem, sliced=True, redundant=0)
    assert (problem.slots, problem.pairs_a_row, problem.step_rows) == (256, 8, 4 * TOKENS)
    spans = make_plan(problem, machine_named("h200"), KERNELS, DISPATCHERS).kernels
    assert [(span.kernel.name, span.up_to) for span in spans] == [
        ("cuda_bf16_some", 26 * 256 // 8 - 1),
        ("cuda_bf16_many", 4 * TOKENS),
    ]


def test_a_pinned_family_serves_with_all_its_kernels_and_a_pinned_kernel_alone() -> None:
    name = "deepseek-v3, nvfp4, 4 ranks"
    assert planned(name, kernel="cuda_fp4").kernels == planned(name).kernels
    for kernel in ("triton_fp4", "cuda_fp4_few", "cuda_fp4_many"):
        alone = planned(name, kernel=kernel)
        assert [(span.kernel.name, span.up_to) for span in alone.kernels] == [(kernel, 4 * TOKENS)]
        assert dict(alone.refused)["cuda_fp4_some"] == f"kernel {kernel} was named"


@pytest.mark.parametrize("kind", ["bf16", "fp8", "nvfp4"])
def test_an_activation_that_is_not_fused_is_refused_and_the_portable_kernel_stands_alone(kind: str) -> None:
    """No kernel of ours hands weights or rows to another one."""
    weights = {"nvfp4": "fp4"}.get(kind, kind)
    plan = planned(f"deepseek-v3, {kind}, 4 ranks")
    shape = replace(plan.problem.shape, activation=activation_named("gelu"))
    problem, machine = replace(plan.problem, shape=shape), machine_named("h200")
    made = make_plan(problem, machine, KERNELS, DISPATCHERS)
    assert made.kernel_names == f"triton_{weights}"
    assert dict(made.refused)[f"cuda_{weights}_few"] == "has no activation gelu"
    with pytest.raises(NoPlan, match=f"cuda_{weights}_many: has no activation gelu"):
        make_plan(problem, machine, KERNELS, DISPATCHERS, Wanted(kernel=f"cuda_{weights}"))


def test_more_slots_than_a_kernel_lists_leave_it_out() -> None:
    problem = replace(planned("deepseek-v3, nvfp4, 1 ranks").problem, experts=513)
    plan = make_plan(problem, machine_named("h200"), KERNELS, DISPATCHERS)
    assert plan.kernel_names == "triton_fp4+cuda_fp4_many"
    assert dict(plan.refused)["cuda_fp4_few"] == "holds at most 512 experts a rank, not 513"


def families() -> dict[str, tuple[KernelRange, ...]]:
    return {
        entry.family.name: tuple(entry.family.ranges(device))
        for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
        for entry in KERNELS.values()
        if entry.family is not None
    }


@pytest.mark.parametrize("family", families())
def test_kernels_of_a_family_have_one_form_and_each_has_its_rows(family: str) -> None:
    ranges = families()[family]
    assert {one.kernel for one in ranges} <= KERNELS.keys()
    assert len({KERNELS[one.kernel].form for one in ranges}) == 1
    own = {entry.name for entry in KERNELS.values() if entry.pinned_as == family}
    assert own <= {one.kernel for one in ranges}
    assert family not in KERNELS


def problem_of(experts: int, ranks: int, top_k: int) -> Problem:
    shape = MODELS["mixtral-8x7b"][2]
    return Problem(SCHEMES["bf16"], BF16, shape, experts, ranks, ranks, top_k, lane_rows=3000)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize(("experts", "ranks", "top_k"), [(1, 1, 1), (8, 3, 2), (160, 8, 6), (512, 1, 8)])
def test_every_number_of_rows_is_somebodys(family: str, experts: int, ranks: int, top_k: int) -> None:
    problem, ranges = problem_of(experts, ranks, top_k), families()[family]
    found = together(family, ranges, KERNELS, problem)
    ends = [span.up_to for span in found.spans]
    assert ends == sorted(set(ends)) and ends[-1] == ranks * 3000
    for rows in {*range(1, ends[-1] + 1, 13), *ends, *(end + 1 for end in ends[:-1])}:
        pairs = rows * top_k / ranks
        kernel = next(
            one.kernel
            for one in ranges
            if one.bounds(problem.slots)[0] <= pairs <= one.bounds(problem.slots)[1]
        )
        assert found.span(rows).kernel.name == kernel, rows


def test_ranges_that_leave_rows_to_nobody_make_no_spans() -> None:
    entry: KernelEntry = KERNELS["torch_reference"]
    able = {"few": replace(entry, name="few"), "many": replace(entry, name="many")}
    ranges = [KernelRange("few", up_to_pairs=8), KernelRange("many", from_slot_pairs=4)]
    assert together("", ranges, able, problem_of(4, 1, 1)).spans == ()
    assert [span.up_to for span in together("", ranges, able, problem_of(2, 1, 1)).spans] == [8, 3000]


def test_a_device_that_was_never_measured_gets_what_was() -> None:
    assert kernel_ranges("cuda_fp8", "NVIDIA H20") == kernel_ranges("cuda_fp8", "NVIDIA H200")
