"""NIXL EP: DeepEP's low-latency kernels over NIXL, whose ranks can join and leave a running group."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moeserve.dispatch.backends import deepep_ll
from moeserve.dispatch.dispatcher import DispatchSpec


class NixlLowLatency(deepep_ll.LowLatency):
    """The dispatcher over `nixl_ep.Buffer` in its low-latency mode."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        super().__init__(spec, group, ENTRY)

    def _opened(self) -> Any:
        """The library's buffer, connected to all ranks. Collective."""
        Buffer: Any = import_module("nixl_ep").Buffer
        spec = self._spec
        nbytes = Buffer.get_low_latency_buffer_size_hint(
            self._rows, self._travelling, spec.ranks, spec.ranks * spec.slots
        )
        buffer = Buffer(
            rank=spec.rank,
            low_latency_mode=True,
            explicitly_destroy=True,
            tcp_store_group=_store(self._group),
            timeout_ms=int(spec.patience * 1000),
        )
        buffer.update_memory_buffers(spec.ranks, spec.slots, nbytes)
        buffer.connect_ranks([rank for rank in range(spec.ranks) if rank != spec.rank])
        dist.barrier(group=self._group)  # nobody sends to a rank that is not yet connected
        return buffer

    def _id_dtype(self) -> torch.dtype:
        dtype: torch.dtype = import_module("nixl_ep").topk_idx_t
        return dtype


def _store(group: ProcessGroup) -> Any:
    """A store of rank 0's, through which the ranks exchange where their memory is. Collective."""
    store: Any = import_module("torch.distributed").TCPStore
    mine = store(gethostname(), 0, is_master=True, wait_for_workers=False) if group.rank() == 0 else None
    address: list[Any] = [None if mine is None else (mine.host, mine.port)]
    dist.broadcast_object_list(address, group=group, group_src=0)
    return store(*address[0], is_master=False) if mine is None else mine


ENTRY = replace(
    deepep_ll.ENTRY,
    name="nixl_ep",
    build=NixlLowLatency,
    modules=frozenset({"nixl_ep"}),
    limits=replace(deepep_ll.ENTRY.limits, waits=None),
    verified=(),
)
