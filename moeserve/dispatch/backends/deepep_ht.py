"""DeepEP's high-throughput kernels within one host: rows over NVLink through queues, 20 multiprocessors.

One copy of a row travels to each rank that holds one of its slots. DeepEP adds partial sums and leaves the
weights to its caller, so a rank weighs and sums its own slots' outputs first. Where a plan allows for the
worst number of rows, as here, nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
from moeserve.dispatch.permute import Homes, weigh_rows
from moeserve.dispatch.probe import probe
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.travel import (
    cropped,
    grouped,
    most_copies,
    nobody,
    parts_arrived,
    parts_travelling,
    presented,
    widened,
)
from moeserve.experts.batch import Grouping
from moeserve.quant.format import Packed

BF16_BYTES = 2  # of an element on the way home


@dataclass(frozen=True, eq=False)
class Ticket:
    """What brings a step home; `handle` is None where no lane brought a row."""

    homes: Homes
    handle: Any
    own: int  # rows of this lane


class DeepEPHighThroughput(Dispatcher):
    """The carrier over `deep_ep.Buffer.dispatch` and `.combine`."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        probe(ROW, spec)
        self._spec = spec
        self._travelling = ROW.limits.travelling(spec.hidden)
        self._buffer = _opened(spec, self._travelling)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Pending[Dispatched]:
        """Quantizes rows to the wire, queues each for the ranks it needs, and groups those that came here."""
        spec, total = self._spec, sum(routing.lane_rows)
        check_lane(spec, hidden, routing)
        if not total:
            arrived = nobody(spec, hidden)
            return Pending(lambda: Dispatched(arrived.batch, Ticket(arrived.ticket, None, 0)))
        rows, slots, weights = presented(hidden, routing)
        ids = slots.long()
        per_rank, _, per_slot, bound, _ = self._buffer.get_dispatch_layout(ids, spec.ranks * spec.slots)
        sent = parts_travelling(spec.wire.quantize(rows), self._travelling)
        received, here, weights, _, handle, _ = self._buffer.dispatch(
            sent if len(sent) > 1 else sent[0],
            num_tokens_per_rank=per_rank,
            is_token_in_rank=bound,
            num_tokens_per_expert=per_slot,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=total,
        )
        parts = parts_arrived(received if isinstance(received, tuple) else (received,), spec)
        tokens = Packed(spec.wire, torch.Size((total, spec.hidden)), parts)
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
        """Frees the queues."""
        self._buffer.destroy()


def _opened(spec: DispatchSpec, travelling: int) -> Any:
    """The library's buffer, with queues as large as its settings for so many ranks ask for. Collective."""
    Buffer: Any = import_module("deep_ep").Buffer
    settings = Buffer.get_dispatch_config(spec.ranks), Buffer.get_combine_config(spec.ranks)
    nbytes = max(s.get_nvl_buffer_size_hint(travelling * BF16_BYTES, spec.ranks) for s in settings)
    return Buffer(dist.group.WORLD, num_nvl_bytes=nbytes, explicitly_destroy=True)


ROW = DispatchRow(
    name="deepep_ht",
    build=DeepEPHighThroughput,
    wires=frozenset({"bf16", "fp8_group128"}),
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=frozenset({"sm90", "sm100", "sm103"}),
    modules=frozenset({"deep_ep"}),
    partial_sums=PARTIAL_SUMS,
    limits=Limits(
        dtypes=frozenset({"bf16"}),
        ranks=frozenset({2, 4, 8}),
        top_k=32,
        hidden_step=256,  # 512 bytes of bf16: 2880 travels as 3072
        one_host=True,
    ),
)
