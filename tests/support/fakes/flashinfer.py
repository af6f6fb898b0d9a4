"""A stand-in for FlashInfer 0.7's one-sided all-to-all: `MoeAlltoAll` with its workspace, on CPU tensors."""

from dataclasses import dataclass

import torch

from fakes.wires import check, everyones, shuffled, stale

STANDS_FOR = {
    "flashinfer": (),
    "flashinfer.comm": (),
    "flashinfer.comm.trtllm_moe_alltoall": (
        "MoeAlltoAll.__init__",
        "MoeAlltoAll.dispatch",
        "MoeAlltoAll.combine",
    ),
    "flashinfer.comm.trtllm_alltoall": (
        "MnnvlMoe.mnnvl_moe_alltoallv_prepare_without_allgather",
        "MnnvlMoe.mnnvl_moe_alltoallv",
        "MnnvlMoe.mnnvl_moe_alltoallv_combine",
    ),
    "flashinfer.comm.mapping": (),
    "flashinfer.comm.mnnvl": (),
}
"""Modules that it answers for, each with the names that take what the library's own take."""

TOP_K = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)


@dataclass
class MnnvlConfig:
    comm_backend: object = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


class Mapping:
    def __init__(
        self,
        world_size=1,
        rank=0,
        gpus_per_node=8,
        *,
        cp_size=1,
        cp_config=None,
        tp_size=1,
        pp_size=1,
        moe_cluster_size=-1,
        moe_tp_size=-1,
        moe_ep_size=-1,
        attn_tp_size=-1,
        attn_cp_size=-1,
        auto_parallel=False,
        enable_attention_dp=False,
    ):
        check(tp_size * pp_size * cp_size == world_size, "world size")
        check(moe_tp_size * moe_ep_size == tp_size, "moe sizes")
        self.moe_ep_size, self.moe_ep_rank = moe_ep_size, rank % moe_ep_size


def joined(config: MnnvlConfig, mapping: Mapping) -> None:
    """Exchanges handles of memory as the library does: over the ranks of one pipeline stage."""
    comm = config.comm_backend.Split(0, mapping.moe_ep_rank)
    check((comm.Get_rank(), comm.Get_size()) == (mapping.moe_ep_rank, mapping.moe_ep_size), "ranks")
    check(comm.allgather(mapping.moe_ep_rank) == tuple(range(mapping.moe_ep_size)), "handles")
    check(comm.bcast(mapping.moe_ep_rank, 0) == 0, "the first rank's")
    comm.barrier()


def moe_a2a_get_workspace_size_per_rank(
    ep_size,
    max_num_tokens,
    total_dispatch_payload_size_per_token,
    combine_payload_size_per_token,
    eplb_stats_num_experts=0,
    *,
    backend="trtllm",
):
    payloads = (total_dispatch_payload_size_per_token, combine_payload_size_per_token)
    return sum(-(-ep_size * max_num_tokens * size // 128) * 128 for size in payloads)


class MoeAlltoAll:
    def __init__(
        self,
        mapping,
        max_num_tokens,
        top_k,
        num_experts,
        workspace_size_per_rank=None,
        hidden_size=None,
        mnnvl_config=None,
        eplb_stats_num_experts=0,
        enable_rank_mask=False,
        *,
        backend="trtllm",
    ):
        check(top_k in TOP_K and num_experts >= mapping.moe_ep_size, "top_k and experts")
        check(workspace_size_per_rank is not None, "workspace")
        joined(mnnvl_config, mapping)
        self.ranks, self.rank = mapping.moe_ep_size, mapping.moe_ep_rank
        self.max_num_tokens, self.top_k, self.held = max_num_tokens, top_k, num_experts // self.ranks
        check(num_experts % self.ranks == 0, "experts")
        self.nbytes, self.phase, self.steps = workspace_size_per_rank, "idle", 0

    def dispatch(
        self,
        token_selected_experts,
        input_payloads,
        runtime_max_tokens_per_rank,
        invalid_token_expert_id=None,
        expert_id_payload_index=None,
        eplb_local_stats=None,
        active_rank_mask=None,
    ):
        check(self.phase == "idle", "dispatch called twice without combine")
        check(0 < runtime_max_tokens_per_rank <= self.max_num_tokens, "runtime_max_tokens_per_rank")
        check(runtime_max_tokens_per_rank == self.max_num_tokens, "a slow rank may still read sums here")
        ids = token_selected_experts
        check(ids.dtype == torch.int32 and ids.is_contiguous() and ids.shape[1] == self.top_k, "experts")
        check(ids.numel() == 0 or int(ids.min()) >= 0, "an id of -1 is sent astray")
        check(
            all(p.is_contiguous() and p.dim() == 2 and p.shape[0] == ids.shape[0] for p in input_payloads),
            "payloads",
        )
        self.steps += 1
        self.lane = [sorted({slot // self.held for slot in row}) for row in ids.tolist()]
        shape = (self.ranks, runtime_max_tokens_per_rank)
        received = [stale((*shape, p.shape[1]), p.dtype) for p in input_payloads]
        used = sum(part.numel() * part.element_size() for part in received)
        self.payload_room = self.nbytes - -(-used // 128) * 128
        check(self.payload_room >= 0, "workspace size per rank insufficient")
        self.places, lanes = [], everyones((self.lane, input_payloads))
        for lane, (destinations, payloads) in enumerate(lanes):
            mine = [row for row, ranks in enumerate(destinations) if self.rank in ranks]
            self.places.append(shuffled(mine, self.steps * self.ranks + lane))
            for part, payload in zip(received, payloads, strict=True):
                part[lane, : len(mine)] = payload[self.places[-1]]
        if invalid_token_expert_id is not None:
            for lane, rows in enumerate(self.places):
                received[expert_id_payload_index][lane, len(rows) :] = invalid_token_expert_id
        self.phase, self.rows = "dispatched", runtime_max_tokens_per_rank
        return received

    def get_combine_payload_tensor_in_workspace(self, runtime_max_tokens_per_rank, hidden_size, dtype):
        check(self.phase == "dispatched" and runtime_max_tokens_per_rank == self.rows, "phase")
        self.payload = stale((self.ranks, self.rows, hidden_size), dtype)
        check(self.payload.numel() * self.payload.element_size() <= self.payload_room, "workspace")
        return self.payload

    def combine(
        self,
        payload,
        runtime_max_tokens_per_rank,
        payload_in_workspace=False,
        output_dtype=None,
        output_scales=None,
        output_scalar_scale=1.0,
        sf_layout=None,
        output=None,
        *,
        use_low_precision=False,
        active_rank_mask=None,
    ):
        check(self.phase == "dispatched" and payload_in_workspace and payload is self.payload, "payload")
        total = torch.zeros((len(self.lane), payload.shape[2]))
        for places, sums in everyones((self.places, payload)):
            for place, row in enumerate(places[self.rank]):
                total[row] += sums[self.rank, place].float()
        self.phase = "idle"
        return total.to(payload.dtype)


class MnnvlMemory:
    ready = False

    @staticmethod
    def initialize():
        MnnvlMemory.ready = True


@dataclass
class Way:
    """Rows that come here by lane, and this lane's by rank."""

    arrivals: list[list[int]]
    first_choice: list[dict[int, int]]  # of each row: rank -> the first choice that needs it
    room: int


class MnnvlMoe:
    @staticmethod
    def get_moe_workspaces(mapping, config=None):
        check(MnnvlMemory.ready, "memory is not initialized")
        joined(config, mapping)
        return torch.zeros((mapping.moe_ep_size, 1), dtype=torch.uint64)

    get_moe_prepare_workspace = get_moe_workspaces

    @staticmethod
    def mnnvl_moe_alltoallv_prepare_without_allgather(
        expert_ids,
        scales,
        expert_statics,
        workspace,
        max_token_count_per_rank,
        ep_rank,
        ep_size,
        expert_count,
        slot_count,
        top_k,
    ):
        check(expert_count % 4 == 0 and slot_count % 4 == 0 and expert_count % ep_size == 0, "counts")
        check(expert_ids.dtype == torch.int32 and expert_ids.is_contiguous(), "expert_ids")
        check(1 <= expert_ids.shape[0] <= max_token_count_per_rank, "tokens")
        check(expert_ids.shape[1] == top_k <= 32 and int(expert_ids.min()) >= 0, "choices")
        held = expert_count // ep_size
        lanes = everyones(expert_ids.tolist())
        arrivals = [
            shuffled([row for row, ids in enumerate(lane) if any(i // held == ep_rank for i in ids)], at)
            for at, lane in enumerate(lanes)
        ]
        first = [{i // held: k for k, i in reversed(list(enumerate(ids)))} for ids in lanes[ep_rank]]
        way = Way(arrivals, first, max_token_count_per_rank * ep_size)
        here = torch.full((way.room, top_k), slot_count, dtype=torch.int32)
        rows = [lanes[lane][row] for lane, mine in enumerate(arrivals) for row in mine]
        for place, ids in enumerate(rows):
            here[place] = torch.tensor([i if i // held == ep_rank else slot_count for i in ids])
        return way, here, None, None

    @staticmethod
    def mnnvl_moe_alltoallv(x, alltoall_info, workspace, ep_rank, ep_size):
        check(x.dim() == 2 and x.shape[1] * x.element_size() % 16 == 0, "only whole 16 bytes travel")
        received = stale((alltoall_info.room, x.shape[1]), x.dtype)
        lanes = everyones(x)
        rows = [lanes[lane][row] for lane, mine in enumerate(alltoall_info.arrivals) for row in mine]
        for place, row in enumerate(rows):
            received[place] = row
        return received

    @staticmethod
    def mnnvl_moe_alltoallv_combine(x, alltoall_info, workspace, ep_rank, ep_size, top_k, token_count):
        check(tuple(x.shape[:1]) == (alltoall_info.room,), "combine input")
        check(token_count == len(alltoall_info.first_choice), "token_count")
        total = torch.zeros((token_count, top_k, x.shape[1]), dtype=x.dtype)
        for rank, (arrivals, sums) in enumerate(everyones((alltoall_info.arrivals, x))):
            place = sum(map(len, arrivals[:ep_rank]))
            for at, row in enumerate(arrivals[ep_rank]):
                total[row, alltoall_info.first_choice[row][rank]] = sums[place + at]
        return total.sum(dim=1)
