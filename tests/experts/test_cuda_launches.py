"""Launches of our CUDA kernels without a GPU: each gives the arguments that its kernel declares."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_experts import activation_named
from peer_ranks import spec
from torch import Tensor

from moeserve.device import nvrtc, residency, waits
from moeserve.device.arguments import MAP_BYTES, TensorMap
from moeserve.dispatch.members import Members
from moeserve.dispatch.peers import kernels as peers
from moeserve.dispatch.peers.layout import PeerLayout
from moeserve.dispatch.peers.liveness import PeerLiveness
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.peers.tables import PeerTables
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, ExpertShape, Grouping
from moeserve.experts.kernels.cuda import (
    decode_codes,
    few,
    prefill,
    prefill_codes,
    prefill_wide,
    rounded,
    steps,
)
from moeserve.experts.kernels.tiles import FewTile
from moeserve.quant.format import Packed
from moeserve.quant.formats import WIRES
from moeserve.quant.formats.floats import BF16

ROWS, HIDDEN, INNER, SLOTS = 6, 256, 128, 3
SHAPE = ExpertShape(HIDDEN, INNER, activation_named("swigluoai"), bias=True)
MODULES = (decode_codes, few, prefill, prefill_codes, prefill_wide)


class Launches(list[str]):
    """Names of kernels; `grids` are their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.grids: list[Any] = []


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Names of the kernels launched, each with arguments that packed; nothing is compiled."""
    names = Launches()

    def launch(self: nvrtc.Function, grid: Any, block: Any, given: Any, **how: Any) -> None:
        assert len(self.arguments.pack(given)) == self.arguments.nbytes
        names.append(self.name)
        names.grids.append(grid)

    def mapped(tensor: Tensor, *shape: Any, **how: Any) -> TensorMap:
        return TensorMap(bytes(MAP_BYTES), tensor)

    monkeypatch.setattr(nvrtc.Function, "launch", launch)
    monkeypatch.setattr(nvrtc, "_function", lambda program, name, made, device: nvrtc.Function(name, 0, made))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    for module in MODULES:
        for name in ("tensor_map", "map_of", "map_by_eights"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, mapped)
        function = getattr(module, "_function")  # noqa: B009
        monkeypatch.setattr(module, "_function", function.__wrapped__)
    monkeypatch.setattr(rounded, "function", rounded.function.__wrapped__)
    monkeypatch.setattr(steps, "_rows_function", steps._rows_function.__wrapped__)
    for module in (steps, decode_codes):
        monkeypatch.setattr(module, "resident_clusters", lambda function, block: 60)
    for table in ("_held", "_sized"):
        monkeypatch.setattr(residency, table, {})
    for module in (few, decode_codes):
        monkeypatch.setattr(module, "grid_wait", cache(waits.GridWait))
    return names


def batch(tokens: Packed) -> ExpertBatch:
    counts, offsets = torch.tensor([3, 0, 3]), torch.tensor([0, 3, 3, 6])
    return ExpertBatch(tokens, Grouping.RAGGED, counts.int(), offsets.int())


def side(codes: Tensor, *, scale: Tensor | None, words: Tensor | None = None, bias: bool = True) -> Any:
    added = torch.zeros(SLOTS, 2 * INNER) if bias else None
    return SimpleNamespace(codes=codes, scale=scale, scale_words=words, bias=added)


def few_step(kind: str, rounds: bool, bias: bool) -> Tensor:
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    tokens = BF16.quantize(x)
    scale = None
    if kind == "fp8" and not rounds:
        x, scale = x.to(torch.float8_e4m3fn), torch.ones(ROWS, HIDDEN // 128)
    words = torch.zeros(SLOTS, 4, 1, 64, 32, dtype=torch.int32)
    made = {
        "fp4": side(words, scale=torch.ones(SLOTS, 256), words=words, bias=bias),
        "fp8": side(torch.zeros(4, dtype=torch.uint8), scale=torch.ones(SLOTS, 2, 2), bias=bias),
        "bf16": side(torch.zeros(4, dtype=torch.bfloat16), scale=None, bias=bias),
    }[kind]
    form = few.FewForm(kind, FewTile(8, 4, 4, 8), bias=bias, rounds=rounds)
    few._turns.cache_clear()
    return few.step(form, (x, scale), batch(tokens), (made, made), SHAPE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "rounds"), [("fp4", False), ("fp8", False), ("fp8", True), ("bf16", False)])
def test_a_step_of_few_rows(kind: str, rounds: bool, bias: bool, launched: Launches) -> None:
    assert few_step(kind, rounds, bias).shape == (ROWS, HIDDEN)
    assert launched == ["few"] and launched.grids == [132]


def test_a_step_of_few_rows_leaves_held_multiprocessors_alone(launched: Launches) -> None:
    residency.hold("cpu", 5)
    few_step("bf16", rounds=False, bias=False)
    assert launched.grids == [127]


def four_bit(scale: bool = True, bias: bool = True) -> prefill_codes.PrefillCodesWeights:
    codes = torch.zeros(SLOTS, 4, 1, 64, 32, dtype=torch.int32)
    scales = torch.zeros(8, dtype=torch.int32) if scale else None
    return prefill_codes.PrefillCodesWeights(
        codes, scales, torch.ones(SLOTS, 256), torch.zeros(SLOTS, 256) if bias else None
    )


def some_step(bias: bool = True) -> Tensor:
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    form, weights = decode_codes.DecodeForm(16, bias=bias), four_bit(bias=bias)
    return decode_codes.step(form, x, batch(BF16.quantize(x)), (weights, weights), SHAPE)


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_of_some_rows_on_four_bit_weights(bias: bool, launched: Launches) -> None:
    assert some_step(bias).shape == (ROWS, HIDDEN)
    assert launched == ["decode_codes"] and launched.grids == [120]


WAITING = {
    "few": (few, lambda: few_step("bf16", rounds=False, bias=False)),
    "decode_codes": (decode_codes, some_step),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_step_after_one_whose_blocks_waited_in_vain_is_refused_once(name: str, launched: Launches) -> None:
    module, step = WAITING[name]
    step()
    expired: Any = module.grid_wait(name, torch.device("cpu")).arguments()["expired"]
    expired[0] = 1
    said = rf"{name}: .* up to 132 .*10 s .*cpu: raise members\.held_multiprocessors"
    with pytest.raises(RuntimeError, match=said):
        step()
    assert step().shape == (ROWS, HIDDEN)
    assert launched == [name] * 2


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_of_many_fp8_rows(bias: bool, launched: Launches) -> None:
    codes, scale = torch.zeros(ROWS, HIDDEN, dtype=torch.float8_e4m3fn), torch.ones(ROWS, 2)
    added = torch.zeros(SLOTS, 256) if bias else None
    weights = prefill.PrefillWeights(torch.zeros(4, dtype=torch.uint8), torch.ones(SLOTS, 2, 2), added)
    step = prefill.PrefillStep(batch(BF16.quantize(codes.bfloat16())), ROWS)
    inner = step.gate_up(step.rows(codes, scale), weights, SHAPE.activation, INNER)
    assert step.down(inner, weights, HIDDEN, torch.bfloat16).shape == (ROWS, HIDDEN)
    assert launched == ["list_groups", "group_scales", "prefill", "prefill"]


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_of_bf16_rows(bias: bool, launched: Launches) -> None:
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    weights = prefill_wide.WideWeights(x, torch.zeros(SLOTS, 256) if bias else None)
    step = prefill_wide.WidePrefillStep(batch(BF16.quantize(x)), ROWS)
    inner = step.gate_up(x, weights, SHAPE.activation, INNER)
    assert step.down(inner, weights, HIDDEN, torch.float32).shape == (ROWS, HIDDEN)
    assert launched == ["list_groups", "prefill_wide", "prefill_wide"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", prefill_codes.PLANS)
def test_a_step_of_many_rows_on_four_bit_weights(kind: str, bias: bool, launched: Launches) -> None:
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    made = batch(BF16.quantize(x))
    weights = four_bit(scale=not kind.startswith("fp8"), bias=bias)
    plans = [plan for _, plan in prefill_codes.PLANS[kind]]
    for plan in plans:
        step = prefill_codes.CodesStep(made, ROWS, plan)
        rows = step.round(x) if plan.scaled else prefill_codes.PrefillCodesRows(x)
        inner = step.gate_up(rows, weights, SHAPE.activation, INNER)
        assert step.down(inner, weights, HIDDEN, torch.bfloat16).shape == (ROWS, HIDDEN)
    assert launched.count("prefill_codes") == 2 * len(plans)
    assert launched.count("round_groups") == (len(plans) if kind != "bf16" else 0)


def test_rows_are_read_as_bf16(launched: Launches) -> None:
    codes = torch.zeros(ROWS, HIDDEN, dtype=torch.float8_e4m3fn)
    assert rounded.widen(codes, torch.ones(ROWS, 2)).shape == (ROWS, HIDDEN) and launched == ["widen"]


MEMBERS = {
    "both": (Members.of_ranks(2), 0, (ROWS, 2)),
    "lane": (Members.split(2, 3), 0, (ROWS, 2)),
    "owner": (Members.split(2, 3), 2, (ROWS, 2)),
    "reserved": (Members.of_ranks(2, 12, 8), 1, (2, ROWS, *(0,) * 10)),
}
"""Members of a group, one of them, and how many rows its lanes bring."""


@pytest.mark.parametrize("role", MEMBERS)
@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize("wire", ["bf16", "fp8_group128", "mxfp4"])
def test_a_dispatch_and_a_combine(
    wire: str, grouping: Grouping, role: str, launched: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(peers, "in_order", lambda device: None)
    members, seat, rows = MEMBERS[role]
    made = replace(
        spec(0, 2), members=members, seat=seat, dtype=torch.bfloat16, hidden=HIDDEN, wire=WIRES[wire]
    )
    layout, memory = PeerLayout(made, grouping), PeerMemory(PeerLayout(made, grouping).nbytes, "cpu")
    kernels = peers.PeerKernels(layout, PeerTables(layout, memory), PeerLiveness(members, "cpu"))
    own = made.own_rows(rows)
    slots = zeros(own, made.top_k, dtype=torch.int32)
    routing = Routing(slots, torch.ones(own, made.top_k), rows, 1)
    arrived = kernels.dispatch(zeros(own, HIDDEN, dtype=torch.bfloat16), routing)
    assert arrived.places.shape[0] == (0 if role == "lane" else ROWS + 2)
    outputs = zeros(*arrived.tokens.shape, dtype=torch.bfloat16).reshape(-1, HIDDEN)
    assert kernels.combine(outputs, arrived, routing).shape == (own, HIDDEN)
    assert launched == ["peer_dispatch", "peer_combine"]
    assert all(0 < blocks <= 132 for blocks in launched.grids)
    memory.close()
