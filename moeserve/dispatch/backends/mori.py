"""MORI, AMD's dispatch and combine on ROCm: rows over xGMI into the peers' symmetric memory, within one host.

One copy of a row travels to each rank that holds one of its slots, with its choices and weights. Partial sums
come back and are added; the router's weights have gone into them before.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeserve.dispatch.backends.deepep_ht import Ticket
from moeserve.dispatch.dispatcher import (
    Dispatched,
    Dispatcher,
    DispatchRow,
    DispatchSpec,
    Pace,
    Pending,
    Traffic,
)
from moeserve.dispatch.exchange import check_group
from moeserve.dispatch.lane import check_lane, check_spec, local_slots
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.permute import weigh_rows
from moeserve.dispatch.probe import probe
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.travel import grouped, most_copies, nobody, only_first, presented
from moeserve.experts.batch import Grouping
from moeserve.quant.format import Packed


class Mori(Dispatcher):
    """The carrier over `mori.ops.EpDispatchCombineOp`. Its buffers are the next step's too."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        probe(ROW, spec)
        self._spec = spec
        self._exchange = _opened(spec)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Pending[Dispatched]:
        """Quantizes rows to the wire, stores each at every rank it needs, and groups those that came here."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        if not sum(routing.lane_rows):
            arrived = nobody(spec, hidden)
            return Pending(lambda: Dispatched(arrived.batch, Ticket(arrived.ticket, None, 0)))
        rows, slots, weights = presented(hidden, routing)
        codes, *scales = spec.wire.quantize(rows).parts
        received, weighed, scaled, chosen, came = self._exchange.dispatch(
            codes, weights, scales[0].contiguous() if scales else None, slots.contiguous()
        )
        parts = (received, scaled) if scales else (received,)
        tokens = Packed(spec.wire, torch.Size((chosen.shape[0], spec.hidden)), parts)
        batch, homes = grouped(spec, tokens, only_first(came, local_slots(spec, chosen)), weighed)
        nbytes = spec.wire.nbytes((1, spec.hidden))
        self._traffic = self._traffic.plus(dispatched=most_copies(spec, routing) * nbytes)
        ticket = Ticket(homes, slots, hidden.shape[0])
        return Pending(lambda: Dispatched(batch, ticket))

    def combine(self, outputs: Tensor, ticket: Ticket) -> Pending[Tensor]:
        """Sends this rank's weighted sums to the rows' own ranks, which add them: `[T, H]`."""
        spec = self._spec
        partials = weigh_rows(outputs, ticket.homes, spec.dtype)
        if ticket.handle is None:
            return Pending(lambda: partials)
        total, _ = self._exchange.combine(partials, None, ticket.handle)
        answer = total[: ticket.own].clone()  # the next step writes over it
        received = ticket.own * min(spec.top_k, spec.ranks - 1) * spec.hidden * spec.dtype.itemsize
        self._traffic = self._traffic.plus(combined=received)
        return Pending(lambda: answer)

    @property
    def traffic(self) -> Traffic:
        """Bytes moved between ranks, counting every row once for each rank it may need."""
        return self._traffic

    def close(self) -> None:
        """Drops the library's object, which frees its memory."""
        del self._exchange


_joined: set[str] = set()
"""Groups that MORI's symmetric memory has joined: once in a process."""


def _opened(spec: DispatchSpec) -> Any:
    """The library's object. Collective."""
    memory: Any = import_module("mori.shmem")
    operations: Any = import_module("mori.ops")
    group: Any = dist.group.WORLD
    name = str(group.group_name)
    if name not in _joined:
        memory.shmem_torch_process_group_init(name)
        _joined.add(name)
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


ROW = DispatchRow(
    name="mori",
    build=Mori,
    wires=frozenset({"bf16", "fp8_token", "fp8_group128"}),
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=frozenset({"gfx942", "gfx950"}),
    modules=frozenset({"mori"}),
    partial_sums="float32 sums of a rank travel in bf16 and are added by the library",
    ordered=False,
    limits=Limits(dtypes=frozenset({"bf16"}), ranks=frozenset({2, 4, 8}), hidden_multiple=8, one_host=True),
)
