"""A stand-in for DeepEP: `Buffer` (1.2) in both modes and `ElasticBuffer` (2.1), on CPU tensors."""

from typing import Any

import torch
from deepep_rounding import rounded_by_deepep

from fakes.wires import check, everyones, needed, shuffled, stale

STANDS_FOR = {"deep_ep": ("Buffer.__init__", "Buffer.dispatch", "Buffer.combine")}
"""Modules that it answers for, each with the names that take what the library's own take."""

topk_idx_t = torch.int64
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


class Config:
    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        check(num_ranks < 8 or num_ranks % 8 == 0, "ranks")
        return self.num_sms // 2 * num_ranks * 256 * hidden_bytes


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
        comm=None,
    ):
        check(low_latency_mode or group.size() in (2, 4, 8), "Unsupported ranks")
        check(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "alignment of buffers")
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self.nvl_bytes, self.rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency, self.qps = low_latency_mode, num_qps_per_rank
        self.explicitly_destroy = explicitly_destroy
        self.alive, self.steps = True, 0

    def destroy(self):
        check(self.explicitly_destroy, "`explicitly_destroy` flag must be set")
        self.alive = False

    @staticmethod
    def get_dispatch_config(num_ranks):
        check(num_ranks in (2, 4, 8, 16), f"Unsupported number of EP ranks: {num_ranks}")
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        check(topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous() and topk_idx.dim() == 2, "topk_idx")
        held = num_experts // self.ranks
        bound = torch.tensor(
            [[needed(row, rank, held) for rank in range(self.ranks)] for row in topk_idx.tolist()]
        ).view(-1, self.ranks)
        per_expert = torch.stack([(topk_idx == e).sum() for e in range(num_experts)]).int()
        return bound.sum(dim=0).int(), None, per_expert, bound, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        check(self.alive and not self.low_latency, "no high-throughput buffer")
        parts = x if isinstance(x, tuple) else (x,)
        experts = num_tokens_per_expert.numel()
        _check_rows(parts, topk_idx, topk_weights)
        check(parts[0].shape[1] * parts[0].element_size() % 512 == 0 or len(parts) == 2, "row bytes")
        check(num_worst_tokens > 0, "the host would wait for counts")
        check(self.nvl_bytes >= 10 * self.ranks * 256 * parts[0].shape[1] * parts[0].element_size(), "buffer")
        ids = topk_idx.tolist()
        for rank in range(self.ranks):
            here = [needed(row, rank, experts // self.ranks) for row in ids]
            check(is_token_in_rank[:, rank].tolist() == here, "is_token_in_rank")
            check(int(num_tokens_per_rank[rank]) == sum(here), "num_tokens_per_rank")
        rows = _arrivals(self.rank, experts // self.ranks, parts, topk_idx, topk_weights)
        check(len(rows) <= num_worst_tokens, "more rows than num_worst_tokens")
        received, here, weights = _laid_out(rows, num_worst_tokens, parts, topk_idx.shape[1])
        handle = (_homes(rows), ids)
        return received if len(parts) > 1 else received[0], here, weights, [], handle, None

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        check(x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] % 256 == 0, "combine input")
        return _summed(x, handle, self.rank), None, None

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        return num_experts * num_max_dispatch_tokens_per_rank * (2 * hidden + 128) // 128 * 128

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=False,
    ):
        check(self.alive and self.low_latency, "no low-latency buffer")
        check(self.qps == num_experts // self.ranks, "a queue pair for each local expert")
        return _low_latency_dispatch(
            self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale
        )

    def low_latency_combine(
        self,
        x,
        topk_idx,
        topk_weights,
        handle,
        use_logfmt=False,
        zero_copy=False,
        async_finish=False,
        return_recv_hook=False,
        out=None,
        combine_wait_recv_cost_stats=None,
    ):
        return _low_latency_combine(self, x, topk_idx, topk_weights, handle)


class EPHandle:
    def __init__(self, came: int, ranks: int, homes: Any) -> None:
        self.psum_num_recv_tokens_per_scaleup_rank = torch.tensor([0] * (ranks - 1) + [came]).int()
        self.homes = homes


class ElasticBuffer:
    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        check(num_max_tokens_per_rank > 0 and hidden > 0, "sizes")
        check(num_gpu_timeout_secs == num_cpu_timeout_secs == 30, "waits as long as the plan says")
        self.ranks, self.rank, self.hidden = group.size(), group.rank(), hidden
        self.explicitly_destroy, self.steps = explicitly_destroy, 0

    def destroy(self):
        check(self.explicitly_destroy, "explicitly_destroy")

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        parts = x if isinstance(x, tuple) else (x,)
        _check_rows(parts, topk_idx, topk_weights)
        check(do_cpu_sync is False and num_experts % self.ranks == 0, "experts")
        check(parts[0].shape[0] <= num_max_tokens_per_rank and parts[0].shape[1] == self.hidden, "rows")
        self.steps += 1
        rows = _arrivals(self.rank, num_experts // self.ranks, parts, topk_idx, topk_weights)
        rows = shuffled(rows, self.steps + self.rank)
        worst = self.ranks * num_max_tokens_per_rank
        received, here, weights = _laid_out(rows, worst, parts, topk_idx.shape[1])
        here[len(rows) :] = 0  # what was there
        handle = EPHandle(len(rows), self.ranks, (_homes(rows), topk_idx.tolist()))
        return received if len(parts) > 1 else received[0], here, weights, handle, None

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        check(x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == self.hidden, "combine input")
        return _summed(x, handle.homes, self.rank), None, None


def _check_rows(parts, topk_idx, topk_weights):
    codes = parts[0]
    check(codes.dtype == (torch.bfloat16 if len(parts) == 1 else torch.float8_e4m3fn), "dtype of rows")
    check(all(part.is_contiguous() and part.shape[0] == topk_idx.shape[0] for part in parts), "rows")
    check(topk_idx.dtype == topk_idx_t and topk_weights.dtype == torch.float32, "dtypes of choices")
    check(topk_idx.shape[0] >= 1 and not topk_weights[topk_idx < 0].isnan().any(), "rows and weights")
    if len(parts) > 1:
        scales = (codes.shape[0], -(-codes.shape[1] // 128))
        check(parts[1].dtype == torch.float32 and tuple(parts[1].shape) == scales, "scales")


def _arrivals(rank, held, parts, topk_idx, topk_weights):
    """Rows that come to `rank`, by lane and row: (lane, row, part bytes, own slots, weights)."""
    rows = []
    for lane, (ids, weights, sent) in enumerate(
        everyones((topk_idx.tolist(), topk_weights, [part.view(torch.uint8) for part in parts]))
    ):
        for row, slots in enumerate(ids):
            if needed(slots, rank, held):
                own = [s - rank * held if s >= 0 and s // held == rank else -1 for s in slots]
                rows.append((lane, row, [part[row] for part in sent], own, weights[row]))
    return rows


def _homes(rows):
    return [(lane, row) for lane, row, *_ in rows]


def _laid_out(rows, worst, parts, top_k):
    """Arrived rows in tensors for `worst`, what is past them old, without a slot."""
    received = tuple(stale((worst, part.shape[1]), part.dtype) for part in parts)
    here, weights = torch.full((worst, top_k), -1, dtype=topk_idx_t), stale((worst, top_k), torch.float32)
    for place, (_, _, sent, own, weighed) in enumerate(rows):
        for part, raw in zip(received, sent, strict=True):
            part.view(torch.uint8)[place] = raw
        here[place], weights[place] = torch.tensor(own), weighed
    return received, here, weights


def _summed(x, homes_and_ids, rank):
    """Sums of every rank's rows for this lane, in float32 and in rank order."""
    homes, ids = homes_and_ids
    total = torch.zeros((len(ids), x.shape[1]))
    for theirs, rows in everyones((homes, x[: len(homes)])):
        for (lane, row), partial in zip(theirs, rows, strict=True):
            if lane == rank:
                total[row] += partial
    return total.bfloat16()


def _low_latency_dispatch(buffer, x, topk_idx, rows, experts, use_fp8, round_scale):
    check(x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] in LOW_LATENCY_HIDDEN, "rows")
    check(topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous() and topk_idx.shape[1] <= 11, "topk_idx")
    check(x.shape[0] == topk_idx.shape[0] <= rows and rows * buffer.ranks % 4 == 0, "number of rows")
    check(experts % buffer.ranks == 0, "experts")
    held = experts // buffer.ranks
    parts = rounded_by_deepep(x.float(), round_scale) if use_fp8 else (x,)
    buffer.steps += 1
    received = [stale((held, buffer.ranks * rows, part.shape[1]), part.dtype) for part in parts]
    origins: list[list[tuple[int, int]]] = []
    lanes = everyones((topk_idx.tolist(), [part.view(torch.uint8) for part in parts]))
    for slot in range(held):
        pairs = [
            (lane, row)
            for lane, (ids, _) in enumerate(lanes)
            for row, slots in enumerate(ids)
            if buffer.rank * held + slot in slots
        ]
        origins.append(shuffled(pairs, buffer.steps * held + slot))
        for place, (lane, row) in enumerate(origins[-1]):
            for part, raw in zip(received, lanes[lane][1], strict=True):
                part[slot].view(torch.uint8)[place] = raw[row]
    counts = torch.tensor([len(pairs) for pairs in origins], dtype=torch.int32)
    if use_fp8:  # scales stand column by column
        received[1] = received[1].transpose(1, 2).contiguous().transpose(1, 2)
    handle = (origins, rows, experts)
    return tuple(received) if use_fp8 else received[0], counts, handle, None, None


def _low_latency_combine(buffer, x, topk_idx, topk_weights, handle):
    origins, rows, experts = handle
    held = experts // buffer.ranks
    check(x.dtype == torch.bfloat16 and x.is_contiguous(), "combine input")
    check(tuple(x.shape[:2]) == (held, buffer.ranks * rows), "shape of combine input")
    check(topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "weights")
    outputs = {}
    for rank, (theirs, rows_of) in enumerate(everyones((origins, x))):
        for slot, pairs in enumerate(theirs):
            for place, (lane, row) in enumerate(pairs):
                if lane == buffer.rank:
                    outputs[row, rank * held + slot] = rows_of[slot, place]
    total = torch.zeros((topk_idx.shape[0], x.shape[2]))
    for row, slots in enumerate(topk_idx.tolist()):
        for column, slot in enumerate(slots):
            if slot >= 0:
                total[row] += topk_weights[row, column] * outputs[row, slot].float()
    return total.bfloat16(), None, None
