"""A stand-in for NIXL EP's `Buffer` in its low-latency mode, on CPU tensors."""

import torch
from parallel import group as workers

from fakes.deep_ep import _low_latency_combine, _low_latency_dispatch
from fakes.wires import check

STANDS_FOR = {"nixl_ep": ("Buffer.__init__", "Buffer.low_latency_dispatch")}
"""Modules that it answers for, each with the names that take what the library's own take."""

topk_idx_t = torch.int64


class Buffer:
    def __init__(
        self,
        disable_ll_nvlink=False,
        explicitly_destroy=False,
        rank=0,
        low_latency_mode=True,
        group=None,
        comm=None,
        tcp_store_group=None,
        timeout_ms=30_000,
    ):
        check(low_latency_mode and tcp_store_group is not None and timeout_ms > 0, "mode, store, timeout")
        tcp_store_group.set(f"NIXL_EP/{rank}", b"here")
        self.rank, self.store, self.explicitly_destroy = rank, tcp_store_group, explicitly_destroy
        self.ranks, self.steps, self.connected = 0, 0, set()

    @staticmethod
    def get_low_latency_buffer_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        check(num_ranks * num_max_dispatch_tokens_per_rank % 4 == 0, "a multiple of 4")
        return num_experts * num_max_dispatch_tokens_per_rank * hidden * 2

    def update_memory_buffers(self, num_ranks, num_experts_per_rank, num_rdma_bytes, num_nvl_bytes=0):
        check(num_rdma_bytes > 0, "no memory")
        self.ranks = num_ranks

    def connect_ranks(self, remote_ranks, activate=True):
        for rank in remote_ranks:
            check(self.store.get(f"NIXL_EP/{rank}") == b"here", "no such rank")
        self.connected |= set(remote_ranks)

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts=None,
        cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=False,
    ):
        check(len(self.connected) == workers().size() - 1, "not connected to all ranks")
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

    def destroy(self):
        check(self.explicitly_destroy, "`explicitly_destroy` flag must be set")
