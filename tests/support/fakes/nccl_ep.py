"""A stand-in for NCCL EP (nccl-extensions 0.1), its `nccl.ep` and `nccl.core`, on CPU tensors."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from fakes.wires import check, everyones, needed, shuffled

STANDS_FOR = {
    "nccl.ep": ("Group.create_handle", "Handle.dispatch", "Handle.combine", "Tensor"),
    "nccl.core": (),
}
"""Modules that it answers for, each with the names that take what the library's own take."""


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(IntEnum):
    FWD = 0
    BWD = 1


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuantizationRecipe(IntEnum):
    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


class CombineQuantizationRecipe(IntEnum):
    NONE = 0
    NVFP4 = 1


class Tensor:
    def __init__(self, buffer, *, dtype=None, shape=None, window=None, window_offset=None) -> None:
        check(isinstance(buffer, torch.Tensor) and buffer.is_contiguous() and buffer.dim() > 0, "buffer")
        self.buffer = buffer


@dataclass(kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    rdma_buffer_size: int = 0
    num_qp_per_rank: int = 0
    num_channels: int = 0
    max_num_sms: int = 0
    alloc: Any = field(default=None)
    enable_mask: bool = False
    timeout_ns: int = 0
    zero_copy: int = 0
    overflow_policy: int = 0
    num_topk: int = 0


@dataclass(kw_only=True)
class HandleConfig:
    dispatch_output_per_expert_alignment: int = 0


@dataclass(kw_only=True)
class DispatchConfig:
    send_only: int = 0
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE


@dataclass(kw_only=True)
class CombineConfig:
    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: CombineQuantizationRecipe = CombineQuantizationRecipe.NONE


@dataclass(kw_only=True)
class LayoutInfo:
    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    expert_offsets: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(kw_only=True)
class CombineInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class CombineOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None


class UniqueId:
    def __init__(self, made: bytes) -> None:
        self.as_bytes = made

    @staticmethod
    def from_bytes(made: bytes) -> "UniqueId":
        check(len(made) == 128, "a NCCL id has 128 bytes")
        return UniqueId(made)


def get_unique_id(empty=False) -> UniqueId:
    return UniqueId(bytes(128) if empty else b"i" * 128)


class Communicator:
    def __init__(self, nranks: int, rank: int) -> None:
        self.alive, self.nranks, self.rank = True, nranks, rank

    @classmethod
    def init(cls, nranks, rank, unique_id) -> "Communicator":
        check(unique_id.as_bytes == b"i" * 128, "the id of the first rank")
        return cls(nranks, rank)

    def destroy(self) -> None:
        self.alive = False


class Group:
    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        self.comm, self.config, self.alive = comm, config, True

    @classmethod
    def create(cls, comm, config):
        check(config.num_experts % comm.nranks == 0 and config.num_experts > 0, "num_experts")
        check(config.timeout_ns == 30_000_000_000, "waits as long as the plan says")
        check(config.max_dispatch_tokens_per_rank > 0 and config.max_token_bytes % 16 == 0, "sizes")
        whole = config.max_dispatch_tokens_per_rank % 4 == 0 == config.num_experts % 4
        check(config.algorithm is Algorithm.LOW_LATENCY or whole, "tensor copies of 16 bytes")
        return cls(comm, config)

    def create_handle(self, layout, topk_idx, *, layout_info=None, config=None, stream):
        low = self.config.algorithm is Algorithm.LOW_LATENCY
        check(layout is (Layout.RANK_MAJOR if low else Layout.FLAT), "layout")
        handle = Handle(self)
        handle.update(topk_idx, layout_info=layout_info, stream=stream)
        return handle

    def destroy(self) -> None:
        check(self.comm.alive, "the group outlives its communicator")
        self.alive = False


class Handle:
    def __init__(self, group: Group) -> None:
        self.group, self.steps = group, 0
        self.low = group.config.algorithm is Algorithm.LOW_LATENCY
        self.rank, self.ranks = group.comm.rank, group.comm.nranks
        self.held = group.config.num_experts // self.ranks

    def update(self, topk_idx, *, layout_info=None, stream) -> None:
        ids = topk_idx.buffer
        check(ids.dtype == torch.int64 and isinstance(stream, int), "topk_idx and stream")
        check(1 <= ids.shape[0] <= self.group.config.max_dispatch_tokens_per_rank, "tokens")
        check((layout_info is None) == self.low, "layout_info at handle time")
        self.ids, self.kind, self.steps = topk_idx, layout_info, self.steps + 1
        self.origins = [
            shuffled(
                [(lane, row) for row, slots in enumerate(rows) if needed(slots, self.rank, self.held)],
                self.steps + lane,
            )
            for lane, rows in enumerate(everyones(ids.tolist()))
        ]
        if not self.low:
            layout_info.recv_total_counter.buffer.fill_(sum(map(len, self.origins)))

    def dispatch(self, inputs, outputs, *, layout_info=None, config=None, stream) -> None:
        info = layout_info if self.low else self.kind
        check(info is not None and (layout_info is not None) == self.low, "layout_info at dispatch time")
        check(info.recv_topk_idx_kind is ExpertIdKind.LOCAL, "numbering of slots")
        scaled = config.quantization_recipe is DispatchQuantizationRecipe.FWD
        check((inputs.scales is not None) == (outputs.scales is not None) == scaled, "scales")
        named = ("tokens", "scales", "topk_weights") if scaled else ("tokens", "topk_weights")
        sent = [getattr(inputs, name).buffer for name in named]
        into = [getattr(outputs, name).buffer for name in named]
        check(sum(t.shape[1] * t.element_size() for t in sent[:-1]) <= self.group.config.max_token_bytes, "")
        lead = self._lead()
        check(
            all(t.dtype == s.dtype and tuple(t.shape[:-1]) == lead for t, s in zip(into, sent, strict=True)),
            "shapes",
        )
        lanes = everyones((self.ids.buffer.tolist(), [tensor.view(torch.uint8) for tensor in sent]))
        here = outputs.topk_idx.buffer
        check(here.dtype == (torch.int32 if self.low else torch.int64), "topk_idx")
        here.fill_(0)  # what was there
        for at, (lane, row) in self._places():
            for tensor, raw in zip(into, lanes[lane][1], strict=True):
                tensor[at].view(torch.uint8)[:] = raw[row]
            own = [s - self.rank * self.held for s in lanes[lane][0][row]]
            here[at] = torch.tensor([slot if 0 <= slot < self.held else -1 for slot in own])
        if self.low:
            counts = torch.tensor([len(rows) for rows in self.origins], dtype=torch.int32)
            info.src_rank_counters.buffer.copy_(counts)

    def combine(self, inputs, outputs, *, config=None, stream) -> None:
        sums, total = inputs.tokens.buffer, outputs.tokens.buffer
        check(tuple(sums.shape[:-1]) == self._lead() and inputs.topk_weights is None, "combine input")
        check(total.shape[0] == self.ids.buffer.shape[0], "combine output")
        added = torch.zeros(total.shape)
        for theirs in everyones([(home, sums[at].float()) for at, home in self._places()]):
            for (lane, row), partial in theirs:
                if lane == self.rank:
                    added[row] += partial
        total.copy_(added)

    def _lead(self) -> tuple[int, ...]:
        config = self.group.config
        blocks = (self.ranks, config.max_dispatch_tokens_per_rank)
        return blocks if self.low else (config.max_recv_tokens_per_rank,)

    def _places(self):
        """Where each arrived row stands, and its lane and row."""
        if self.low:
            return [((lane, at), h) for lane, rows in enumerate(self.origins) for at, h in enumerate(rows)]
        return [((at,), home) for at, home in enumerate(home for rows in self.origins for home in rows)]

    def destroy(self) -> None:
        check(self.group.alive, "the handle outlives its group")
