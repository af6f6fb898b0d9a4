"""DeepEP's high-throughput kernels within one host: rows over NVLink through queues, 20 multiprocessors.

One copy of a row travels to each rank that holds one of its slots. DeepEP adds partial sums and leaves the
weights to its caller, so a rank weighs and sums its own slots' outputs first. Where a plan allows for the
worst number of rows, as here, nothing is read on the host.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.dispatcher import DispatchEntry, DispatchSpec, Pace
from moeserve.dispatch.exchange import PARTIAL_SUMS
from moeserve.dispatch.libraries.row_exchange import Arrived, RowExchange
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import Grouping


class DeepEPHighThroughput(RowExchange):
    """The dispatcher over `deep_ep.Buffer.dispatch` and `.combine`."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        super().__init__(spec, group, ENTRY)
        self._buffer = _opened(spec, self._group, self._travelling)

    def _send(self, hidden: Tensor, routing: Routing) -> Arrived:
        spec = self._spec
        parts, slots, weights = self._on_the_wire(hidden, routing)
        ids = slots.long()
        per_rank, _, per_slot, bound, _ = self._buffer.get_dispatch_layout(ids, spec.ranks * spec.slots)
        received, here, weights, _, handle, _ = self._buffer.dispatch(
            parts if len(parts) > 1 else parts[0],
            num_tokens_per_rank=per_rank,
            is_token_in_rank=bound,
            num_tokens_per_expert=per_slot,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=sum(routing.lane_rows),
        )
        return Arrived(received if isinstance(received, tuple) else (received,), here, weights, handle)

    def _bring_home(self, partials: Tensor, handle: Any) -> Tensor:
        total: Tensor = self._buffer.combine(partials, handle)[0]
        return total

    def close(self) -> None:
        """Frees the library's queues."""
        self._buffer.destroy()


def _opened(spec: DispatchSpec, group: ProcessGroup, travelling: int) -> Any:
    """The library's buffer, with queues as large as its settings for so many ranks ask for. Collective."""
    Buffer: Any = import_module("deep_ep").Buffer
    settings = Buffer.get_dispatch_config(spec.ranks), Buffer.get_combine_config(spec.ranks)
    nbytes = max(s.get_nvl_buffer_size_hint(travelling * spec.dtype.itemsize, spec.ranks) for s in settings)
    return Buffer(group, num_nvl_bytes=nbytes, explicitly_destroy=True)


ENTRY = DispatchEntry(
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
        waits=100.0,  # built into its kernels
    ),
    verified=("sm90",),
)
