"""A stand-in for MORI's `EpDispatchCombineOp` within a host, and its `shmem`, on CPU tensors."""

from dataclasses import dataclass
from enum import Enum

import torch

from fakes.wires import check, everyones, needed, shuffled, stale

STANDS_FOR = {
    "mori": (),
    "mori.ops": ("EpDispatchCombineOp.dispatch", "EpDispatchCombineOp.combine"),
    "mori.shmem": (),
}
"""Modules that it answers for, each with the names that take what the library's own take."""


class EpDispatchCombineKernelType(Enum):
    IntraNode = 0
    InterNode = 1


@dataclass
class EpDispatchCombineConfig:
    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: str = "none"


_joined: list[bytes] = []

MORI_SHMEM_INIT_WITH_UNIQUEID = 1
UNIQUE_ID = b"u" * 128


def shmem_get_unique_id() -> bytes:
    return UNIQUE_ID


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
    check(not _joined and unique_id == UNIQUE_ID, "one group, once a process, with the id of its first rank")
    check(flags == MORI_SHMEM_INIT_WITH_UNIQUEID and 0 <= rank < nranks, "flags and ranks")
    _joined.append(unique_id)
    return 0


class EpDispatchCombineOp:
    def __init__(self, config):
        check(bool(_joined), "symmetric memory is not there yet")
        check(config.gpu_per_node == config.world_size, "one host")
        self.config, self.steps = config, 0
        self.out = stale((config.max_num_inp_token_per_rank, config.hidden_dim), torch.bfloat16)

    def dispatch(
        self,
        input,
        weights,
        scales,
        indices,
        block_num=-1,
        rdma_block_num=-1,
        warp_per_block=-1,
        call_local_expert_count=False,
        *,
        routing=None,
        return_routing=False,
    ):
        config = self.config
        check(input.dtype == config.data_type and input.shape[1] == config.hidden_dim, "input")
        check(indices.dtype == torch.int32 and indices.shape[1] == config.num_experts_per_token, "indices")
        check((scales is not None) == (config.scale_dim > 0), "scales")
        check(scales is None or tuple(scales.shape[1:]) == (config.scale_dim,), "width of scales")
        check(all(t is None or t.is_contiguous() for t in (input, weights, scales, indices)), "strides")
        self.steps += 1
        sent = [tensor for tensor in (input, weights, scales, indices) if tensor is not None]
        raw = [tensor.view(torch.uint8) for tensor in sent]
        lanes = everyones((indices.tolist(), raw))
        held = config.num_experts_per_rank
        pairs = [
            (lane, row)
            for lane, (ids, _) in enumerate(lanes)
            for row, slots in enumerate(ids)
            if needed(slots, config.rank, held)
        ]
        self.origins = shuffled(pairs, self.steps)
        worst = config.world_size * config.max_num_inp_token_per_rank
        received = [stale((worst, tensor.shape[1]), tensor.dtype) for tensor in sent]
        received[-1].fill_(config.rank * held)  # what was there
        for place, (lane, row) in enumerate(self.origins):
            for tensor, theirs in zip(received, lanes[lane][1], strict=True):
                tensor.view(torch.uint8)[place] = theirs[row]
        out, weighed, *scaled, chosen = received
        self.indices = indices
        count = torch.tensor([len(self.origins)], dtype=torch.int32)
        return out, weighed, scaled[0] if scaled else None, chosen, count

    def combine(
        self,
        input,
        weights,
        indices,
        block_num=-1,
        rdma_block_num=-1,
        warp_per_block=-1,
        use_external_inp_buf=-1,
        call_reset=False,
        *,
        routing=None,
    ):
        check(indices.shape[0] == self.indices.shape[0], "combine() takes this rank's own routing")
        check(input.dtype == torch.bfloat16 and input.is_contiguous(), "combine input")
        total = torch.zeros(self.out.shape)
        for origins, sums in everyones((self.origins, input)):
            for place, (lane, row) in enumerate(origins):
                if lane == self.config.rank:
                    total[row] += sums[place].float()
        self.out.copy_(total)  # the same memory every time
        return self.out, None
