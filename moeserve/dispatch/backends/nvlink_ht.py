"""High throughput over peer memory of one host's GPUs: RAGGED, so that rows take no more room than they need.

What it is and does is `PeerCarrier`'s.
"""

from __future__ import annotations

from moeserve.dispatch.dispatcher import DispatchRow, DispatchSpec, Pace
from moeserve.dispatch.exchange import PARTIAL_SUMS
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.peers.carrier import HIDDEN_MULTIPLE, MOST_CHOICES, PeerCarrier
from moeserve.dispatch.peers.epochs import BUFFERS
from moeserve.dispatch.peers.kernels import MOST_RANKS
from moeserve.dispatch.wire import ROW_WISE
from moeserve.experts.batch import Grouping


def build(spec: DispatchSpec) -> PeerCarrier:
    """The carrier on GPUs, its twin on the CPU."""
    return PeerCarrier(spec, Grouping.RAGGED)


ROW = DispatchRow(
    name="nvlink_ht",
    build=build,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=frozenset(("cpu", "sm90", "sm100", "sm103")),
    in_flight=BUFFERS,
    max_ranks=MOST_RANKS,
    sliced=True,
    partial_sums=PARTIAL_SUMS,
    limits=Limits(top_k=MOST_CHOICES, hidden_multiple=HIDDEN_MULTIPLE, one_host=True),
    only_named=frozenset(("cpu",)),
    verified=("cpu", "sm90"),
)
