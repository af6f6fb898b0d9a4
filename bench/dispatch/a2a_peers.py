"""What dispatchers over peer memory are measured beside: plain stores to all peers, NCCL, FlashInfer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from moeserve.device.arguments import Arguments
from moeserve.device.nvrtc import Program
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Member
from moeserve.dispatch.peers.memory import MemoryRequest, join_memory
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.dispatch.routing import Routing

Step = Callable[[], object]

CEILING_BYTES = 64 << 20  # to each peer

STORED = Arguments(
    "StoreArguments", memory="const u64*", rows="const uint4*", rank="int", ranks="int", words="u64"
)
STORES = (
    f"typedef unsigned long long u64;\n{STORED.text}"
    + r"""
extern "C" __global__ void store_to_all(const __grid_constant__ StoreArguments args) {
  const int rank = args.rank, ranks = args.ranks;
  const u64 words = args.words;
  for (u64 i = blockIdx.x * 4096ull + threadIdx.x; i < words; i += gridDim.x * 4096ull) {
    uint4 word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + 1024 * j < words) word[j] = args.rows[i + 1024 * j];
    for (int step = 1; step < ranks; ++step) {
      const int to = (rank + step) % ranks;
      uint4* at = (uint4*)args.memory[to] + rank * words;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + 1024 * j < words) at[i + 1024 * j] = word[j];
    }
  }
}
"""
)


def ceiling(rank: int, ranks: int, timed: Callable[[Step], float]) -> float:
    """GB/s that each GPU stores to its peers while all of them do."""
    here = dist.group.WORLD
    assert here is not None
    memory = join_memory(MemoryRequest(Member(rank, rank, rank), ranks * CEILING_BYTES, "cuda"), here)
    views = [memory.mine if at == rank else memory.views[at] for at in range(ranks)]
    addresses = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device="cuda")
    source = torch.zeros(CEILING_BYTES, dtype=torch.uint8, device="cuda")
    function = Program(STORES).function("store_to_all", STORED)
    blocks = torch.cuda.get_device_properties(rank).multi_processor_count
    given = {
        "memory": addresses,
        "rows": source,
        "rank": rank,
        "ranks": ranks,
        "words": CEILING_BYTES // 16,
    }
    microseconds = timed(lambda: function.launch(blocks, 1024, given))
    dist.barrier()
    memory.close()
    return (ranks - 1) * CEILING_BYTES / microseconds / 1e3


def nccl_steps(spec: DispatchSpec, sent: list[int]) -> tuple[Step, Step]:
    """Returns all-to-alls of the bytes out and back, `sent[r]` rows to rank r; sizes are known."""
    gathered: list[list[int]] = [[]] * spec.ranks
    dist.all_gather_object(gathered, sent)
    received = [row[spec.rank] for row in gathered]
    record = RowRecord(spec.wire, spec.hidden).nbytes
    answer = spec.hidden * spec.dtype.itemsize

    def rows(count: int, width: int) -> torch.Tensor:
        return torch.zeros((count, width), dtype=torch.uint8, device="cuda")

    out, here = rows(sum(sent), record), rows(sum(received), record)
    back, home = rows(sum(received), answer), rows(sum(sent), answer)
    return (
        lambda: dist.all_to_all_single(here, out, received, sent),
        lambda: dist.all_to_all_single(home, back, sent, received),
    )


def flashinfer_step(spec: DispatchSpec, routing: Routing, hidden: torch.Tensor) -> Step | str:
    """FlashInfer's one-sided dispatch and combine, or why it cannot run.

    Rows are quantized before; those that arrive stay as they came, and what goes home are sums made before:
    neither grouping by expert nor weighing is in it.
    """
    try:
        from flashinfer.comm import MoeAlltoAll
        from flashinfer.comm.comm_backend import TorchDistBackend
        from flashinfer.comm.mapping import Mapping
        from flashinfer.comm.mnnvl import MnnvlConfig
    except (ImportError, OSError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    tokens = hidden.shape[0]
    ranks = spec.ranks
    mapping = Mapping(
        world_size=ranks,
        rank=spec.rank,
        gpus_per_node=ranks,
        tp_size=ranks,
        moe_ep_size=ranks,
        moe_tp_size=1,
    )
    config = MnnvlConfig(comm_backend=TorchDistBackend(dist.group.WORLD))
    dispatcher = MoeAlltoAll(
        mapping, tokens, spec.top_k, spec.slots * ranks, hidden_size=spec.hidden, mnnvl_config=config
    )
    parts = [part.view(torch.uint8) for part in spec.wire.quantize(hidden).parts]
    payload = [*parts, routing.slots, routing.weights]
    outputs = torch.zeros((ranks, tokens, spec.hidden), dtype=spec.dtype, device="cuda")

    def step() -> object:
        dispatcher.dispatch(routing.slots, payload, tokens)
        return dispatcher.combine(outputs, tokens)

    return step
