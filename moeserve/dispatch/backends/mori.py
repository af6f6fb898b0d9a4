"""MORI, AMD's dispatch and combine on ROCm: rows over xGMI into the peers' symmetric memory, within one host.

One copy of a row travels to each rank that holds one of its slots, with its choices and weights. Partial sums
come back and are added; the router's weights have gone into them before.
"""

from __future__ import annotations

from importlib import import_module
from math import inf
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.checks import local_slots
from moeserve.dispatch.dispatcher import DispatchEntry, DispatchSpec, Pace
from moeserve.dispatch.libraries.row_exchange import Arrived, RowExchange
from moeserve.dispatch.libraries.travel import only_first
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import Grouping


class Mori(RowExchange):
    """The dispatcher over `mori.ops.EpDispatchCombineOp`. Its buffers are the next step's too."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        super().__init__(spec, group, ENTRY)
        self._exchange = _opened(spec, self._group)

    def _send(self, hidden: Tensor, routing: Routing) -> Arrived:
        (codes, *scales), slots, weights = self._on_the_wire(hidden, routing)
        slots = slots.contiguous()
        received, weighed, scaled, chosen, came = self._exchange.dispatch(
            codes, weights, scales[0] if scales else None, slots
        )
        parts = (received, scaled) if scales else (received,)
        return Arrived(parts, only_first(came, local_slots(self._spec, chosen)), weighed, slots)

    def _bring_home(self, partials: Tensor, handle: Tensor) -> Tensor:
        """`handle` are the slots as sent, `[T or 1, K]`."""
        total: Tensor = self._exchange.combine(partials, None, handle)[0]
        return total[: handle.shape[0]].clone()  # the next step writes over it

    def close(self) -> None:
        """Drops the library's object, which frees its memory."""
        del self._exchange


_joined: set[tuple[int, int]] = set()
"""Rank and ranks that MORI's symmetric memory was joined as: once in a process."""


def _join(group: ProcessGroup) -> None:
    """Joins MORI's symmetric memory with the ranks of `group`, once in the life of a process. Collective.

    Its own way in from a process group asks for torch's default group, so an id is passed on here. Raises
    RuntimeError where this process has joined as another rank.
    """
    place = group.rank(), group.size()
    if _joined and place not in _joined:
        raise RuntimeError(f"MORI's memory was joined as (rank, ranks) {_joined}, and cannot be as {place}")
    memory: Any = import_module("mori.shmem")
    box = [memory.shmem_get_unique_id() if place[0] == 0 and not _joined else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if not _joined:
        memory.shmem_init_attr(memory.MORI_SHMEM_INIT_WITH_UNIQUEID, *place, box[0])
        _joined.add(place)


def _opened(spec: DispatchSpec, group: ProcessGroup) -> Any:
    """The library's object. Collective."""
    _join(group)
    operations: Any = import_module("mori.ops")
    scale = spec.wire.parts[1] if len(spec.wire.parts) > 1 else None
    config = operations.EpDispatchCombineConfig(
        data_type=spec.wire.dtype,
        rank=spec.rank,
        world_size=spec.ranks,
        hidden_dim=spec.hidden,
        scale_dim=scale.shape_of((1, spec.hidden))[1] if scale else 0,
        scale_type_size=scale.dtype.itemsize if scale else 0,
        max_token_type_size=spec.dtype.itemsize,
        max_num_inp_token_per_rank=max(spec.lane_rows, 1),
        num_experts_per_rank=spec.slots,
        num_experts_per_token=spec.top_k,
        gpu_per_node=spec.ranks,
        kernel_type=operations.EpDispatchCombineKernelType.IntraNode,
    )
    return operations.EpDispatchCombineOp(config)


ENTRY = DispatchEntry(
    name="mori",
    build=Mori,
    wires=frozenset({"bf16", "fp8_token", "fp8_group128"}),
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=frozenset({"gfx942", "gfx950"}),
    modules=frozenset({"mori"}),
    partial_sums="float32 sums of a rank travel in bf16 and are added by the library",
    ordered=False,
    limits=Limits(
        dtypes=frozenset({"bf16"}),
        ranks=frozenset({2, 4, 8}),
        hidden_multiple=8,
        one_host=True,
        waits=inf,
    ),
)
