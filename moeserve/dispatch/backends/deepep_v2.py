"""DeepEP's elastic buffers, its second generation: NVLink and RDMA, by kernels compiled at first use.

One copy of a row travels to each rank that holds one of its slots; partial sums come back and are added.
The carrier takes the worst number of rows, so nothing is read on the host.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeserve.dispatch.backends.deepep_ht import BF16_BYTES, Ticket
from moeserve.dispatch.dispatcher import (
    Dispatched,
    Dispatcher,
    DispatchRow,
    DispatchSpec,
    Pace,
    Pending,
    Traffic,
)
from moeserve.dispatch.exchange import PARTIAL_SUMS, check_group
from moeserve.dispatch.lane import check_lane, check_spec
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.permute import weigh_rows
from moeserve.dispatch.probe import probe, rdma_adapters
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.travel import (
    cropped,
    grouped,
    most_copies,
    nobody,
    only_first,
    parts_arrived,
    parts_travelling,
    presented,
    widened,
)
from moeserve.experts.batch import Grouping
from moeserve.quant.format import Packed


class DeepEPElastic(Dispatcher):
    """The carrier over `deep_ep.ElasticBuffer.dispatch` and `.combine`."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        probe(ROW, spec)
        self._spec = spec
        self._travelling = ROW.limits.travelling(spec.hidden)
        self._rows = max(spec.lane_rows, 1)
        self._buffer, self._id_dtype = _opened(spec, self._travelling, self._rows)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Pending[Dispatched]:
        """Quantizes rows to the wire, sends each to every rank it needs, and groups those that came here."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        if not sum(routing.lane_rows):
            arrived = nobody(spec, hidden)
            return Pending(lambda: Dispatched(arrived.batch, Ticket(arrived.ticket, None, 0)))
        rows, slots, weights = presented(hidden, routing)
        sent = parts_travelling(spec.wire.quantize(rows), self._travelling)
        received, here, weights, handle, _ = self._buffer.dispatch(
            sent if len(sent) > 1 else sent[0],
            topk_idx=slots.to(self._id_dtype),
            topk_weights=weights,
            num_experts=spec.ranks * spec.slots,
            num_max_tokens_per_rank=self._rows,
            expert_alignment=1,
            do_cpu_sync=False,
        )
        here = only_first(handle.psum_num_recv_tokens_per_scaleup_rank[-1:], here)
        parts = parts_arrived(received if isinstance(received, tuple) else (received,), spec)
        tokens = Packed(spec.wire, torch.Size((here.shape[0], spec.hidden)), parts)
        batch, homes = grouped(spec, tokens, here, weights)
        nbytes = spec.wire.nbytes((1, self._travelling))
        self._traffic = self._traffic.plus(dispatched=most_copies(spec, routing) * nbytes)
        ticket = Ticket(homes, handle, hidden.shape[0])
        return Pending(lambda: Dispatched(batch, ticket))

    def combine(self, outputs: Tensor, ticket: Ticket) -> Pending[Tensor]:
        """Sends this rank's weighted sums to the rows' own ranks, which add them: `[T, H]`."""
        spec = self._spec
        partials = weigh_rows(outputs, ticket.homes, spec.dtype)
        if ticket.handle is None:
            return Pending(lambda: partials)
        total, _, _ = self._buffer.combine(widened(partials, self._travelling), ticket.handle)
        answer = cropped(total[: ticket.own], spec.hidden).contiguous()
        received = ticket.own * min(spec.top_k, spec.ranks - 1) * self._travelling * BF16_BYTES
        self._traffic = self._traffic.plus(combined=received)
        return Pending(lambda: answer)

    @property
    def traffic(self) -> Traffic:
        """Bytes moved between ranks, counting every row once for each rank it may need."""
        return self._traffic

    def close(self) -> None:
        """Frees the buffer."""
        self._buffer.destroy()


def _opened(spec: DispatchSpec, travelling: int, rows: int) -> tuple[Any, torch.dtype]:
    """The library's buffer, and the dtype it takes ids in. Collective.

    Without an RDMA adapter its kernels must not drive one: the library reads that from `EP_DISABLE_GIN`.
    """
    if not rdma_adapters():
        os.environ.setdefault("EP_DISABLE_GIN", "1")
    library: Any = import_module("deep_ep")
    buffer = library.ElasticBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=rows,
        hidden=travelling,
        num_topk=spec.top_k,
        use_fp8_dispatch=spec.wire.name != "bf16",
        explicitly_destroy=True,
    )
    return buffer, library.topk_idx_t


ROW = DispatchRow(
    name="deepep_v2",
    build=DeepEPElastic,
    wires=frozenset({"bf16", "fp8_group128"}),
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=frozenset({"sm90", "sm100", "sm103"}),
    modules=frozenset({"deep_ep"}),
    partial_sums=PARTIAL_SUMS,
    ordered=False,
    limits=Limits(
        dtypes=frozenset({"bf16"}),
        top_k=32,
        hidden_step=256,  # 512 bytes of bf16, as the first generation
        nccl=(2, 30, 4),
    ),
)
