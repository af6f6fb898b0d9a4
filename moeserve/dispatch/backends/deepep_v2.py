"""DeepEP's elastic buffers, its second generation: NVLink and RDMA, by kernels compiled at first use.

One copy of a row travels to each rank that holds one of its slots; partial sums come back and are added.
The dispatcher takes the worst number of rows, so nothing is read on the host.

Building compiles five kernels for the spec's sizes and wire, about 20 seconds, with nvcc and the headers of
the NCCL that is loaded: `EP_NCCL_ROOT_DIR` says where they are, `EP_JIT_CACHE_DIR` keeps kernels. `verified`
speaks of four H200 without RDMA adapters; over RDMA it has not run.
"""

from __future__ import annotations

import os
from importlib import import_module
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.dispatcher import DispatchEntry, DispatchSpec, Pace
from moeserve.dispatch.exchange import PARTIAL_SUMS
from moeserve.dispatch.libraries.probe import rdma_adapters
from moeserve.dispatch.libraries.row_exchange import Arrived, RowExchange
from moeserve.dispatch.libraries.travel import only_first
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import Grouping


class DeepEPElastic(RowExchange):
    """The dispatcher over `deep_ep.ElasticBuffer.dispatch` and `.combine`."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        super().__init__(spec, group, ENTRY)
        self._rows = max(spec.lane_rows, 1)
        self._buffer, self._id_dtype = _opened(spec, self._group, self._travelling)
        self._warm()

    def _send(self, hidden: Tensor, routing: Routing) -> Arrived:
        spec = self._spec
        parts, slots, weights = self._on_the_wire(hidden, routing)
        received, here, weights, handle, _ = self._buffer.dispatch(
            parts if len(parts) > 1 else parts[0],
            topk_idx=slots.to(self._id_dtype),
            topk_weights=weights,
            num_experts=spec.ranks * spec.slots,
            num_max_tokens_per_rank=self._rows,
            expert_alignment=1,
            do_cpu_sync=False,
        )
        here = only_first(handle.psum_num_recv_tokens_per_scaleup_rank[-1:], here)
        return Arrived(received if isinstance(received, tuple) else (received,), here, weights, handle)

    def _bring_home(self, partials: Tensor, handle: Any) -> Tensor:
        total: Tensor = self._buffer.combine(partials, handle)[0]
        return total

    def close(self) -> None:
        """Frees the library's buffer."""
        self._buffer.destroy()


def _opened(spec: DispatchSpec, group: ProcessGroup, travelling: int) -> tuple[Any, torch.dtype]:
    """The library's buffer, and the dtype it takes ids in. Collective.

    Without an RDMA adapter its kernels must not drive one: the library reads that from `EP_DISABLE_GIN`.
    """
    if not rdma_adapters():
        os.environ.setdefault("EP_DISABLE_GIN", "1")
    library: Any = import_module("deep_ep")
    buffer = library.ElasticBuffer(
        group,
        num_max_tokens_per_rank=max(spec.lane_rows, 1),
        hidden=travelling,
        num_topk=spec.top_k,
        use_fp8_dispatch=spec.wire.name != "bf16",
        num_cpu_timeout_secs=ceil(spec.patience),
        num_gpu_timeout_secs=ceil(spec.patience),
        explicitly_destroy=True,
    )
    return buffer, library.topk_idx_t


ENTRY = DispatchEntry(
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
        api=frozenset({"ElasticBuffer"}),  # the first generation's package has the same name
    ),
    verified=("sm90",),
)
