"""High throughput over peer memory of one host's GPUs: RAGGED, so that rows take no more room than they need.

What it is and does is `PeerDispatcher`'s.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from moeserve.dispatch.dispatcher import DispatchEntry, DispatchSpec, Pace
from moeserve.dispatch.exchange import PARTIAL_SUMS
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.peers.dispatcher import HIDDEN_MULTIPLE, MOST_CHOICES, PeerDispatcher
from moeserve.dispatch.peers.layout import PeerLayout
from moeserve.dispatch.peers.liveness import MOST_LANES, MOST_OWNERS
from moeserve.dispatch.peers.sequence import BUFFERS
from moeserve.dispatch.wire import ROW_WISE
from moeserve.experts.batch import Grouping


def build(spec: DispatchSpec, group: ProcessGroup | None) -> PeerDispatcher:
    """The dispatcher on GPUs, its twin on the CPU. Raises ValueError without a group."""
    return PeerDispatcher(spec, Grouping.RAGGED, group)


ENTRY = DispatchEntry(
    name="nvlink_ht",
    build=build,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=frozenset(("cpu", "sm90", "sm100", "sm103")),
    in_flight=BUFFERS,
    buffer_bytes=lambda spec: PeerLayout(spec, Grouping.RAGGED).nbytes,
    max_lanes=MOST_LANES,
    max_owners=MOST_OWNERS,
    unequal=True,
    permutes=False,
    sliced=True,
    partial_sums=PARTIAL_SUMS,
    living=True,
    outlives=True,
    limits=Limits(top_k=MOST_CHOICES, hidden_multiple=HIDDEN_MULTIPLE, one_host=True),
    only_named=frozenset(("cpu",)),
    verified=("cpu", "sm90"),
)
