"""The table of metrics: every one the service exports, as Prometheus shows it.

Every metric carries `model_name`, those of a rank's process `rank` too. No label has a value for each expert,
job or reason, so the mesh and the layers bound the number of series; of experts only the few hottest are
shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Upper bounds of duration buckets: a call of one layer takes from tens of microseconds to its deadline.
SECONDS = (
    *(50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)

CYCLE_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of a rebalancing cycle's buckets."""

ROLES = ("lane", "owner")
"""What a member is: it brings rows, or holds experts; a rank of expert parallelism does both."""

PLACES = ("present", "missing", "reserved")
"""A place is filled by a connected member, by one that is not connected, or by nobody yet."""

STATES = ("forming", "preparing", "joining", "serving", "stopping", "failed", "stopped")
"""What a coordinator's progress can be; `stopping` in place of any but the last two once callers are to come
no more.
"""

PHASES = ("wait", "dispatch", "compute", "combine", "launch", "reply")
"""The phases of a step, and beside them what the host does for it: it launches it, and answers callers."""

FAILURES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN")
"""Codes of calls that fail for the service's part, as the alert MoeserveErrors takes them."""

DIRECTIONS = ("dispatch", "combine")
"""The directions of bytes on the wire."""


@dataclass(frozen=True)
class Metric:
    """One metric. `labels` are those beside its process's own (model_name, and a rank's rank)."""

    name: str
    kind: str  # counter, gauge, histogram
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    computed: bool = False  # when scraped, from what the coordinator knows then


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "histogram", text, labels, SECONDS)


def _of_cycles(entry: Metric) -> Metric:
    return replace(entry, buckets=CYCLE_SECONDS)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels)


def _computed(entry: Metric) -> Metric:
    return replace(entry, computed=True)


PROCESS = (
    _gauge("moe_build_info", "Always 1; the version that runs.", "version"),
    _counter("moe_requests_total", "Calls that ended, by gRPC code.", "method", "transport", "code"),
    _histogram("moe_request_duration_seconds", "From a call's arrival to its answer.", "method", "transport"),
    _gauge("moe_requests_in_flight", "Calls that have arrived and are not answered."),
    _gauge("moe_group_generation", "Generation of the process group; of a rank 0 while it is in none."),
    _gauge("moe_epoch", "Epoch of the placement that is served; of a rank 0 while it is in no group."),
)
"""Metrics of every process."""

RANK = (
    _counter("moe_steps_total", "Steps this rank took part in.", "layer"),
    _counter(
        "moe_tokens_total",
        "Rows this rank's lane brought to steps, of device lanes on a GPU as it counted them a second ago.",
        "layer",
    ),
    _counter(
        "moe_expert_rows_total",
        "(token, expert) rows this rank computed, on a GPU as the device counted them a second ago.",
        "layer",
    ),
    _histogram(
        "moe_step_phase_duration_seconds",
        "A step's phases, on a GPU by its own clock and of one step in 8. wait: since its earliest job came.",
        "phase",
    ),
    _counter("moe_wire_bytes_total", "Bytes sent to other ranks.", "direction", "all2all_backend"),
    _counter(
        "moe_late_peers_total",
        "Times a rank was not waited for any longer, and a step went on without its rows.",
        "peer",
    ),
    _gauge("moe_shared_memory_regions", "Shared-memory regions that are registered."),
    _gauge("moe_shared_memory_bytes", "Bytes of registered shared-memory regions."),
    _gauge("moe_device_lanes", "Callers that are attached to this rank by a device lane."),
    _counter("moe_passes_total", "Passes of device lanes that ended, by how.", "status"),
    _gauge(
        "moe_weights_bytes",
        "Bytes of prepared expert weights this rank holds, with what it stages while experts move.",
    ),
    _gauge("moe_device_bytes", "Bytes of this rank's device that it holds, by what they are for.", "what"),
    _gauge("moe_checkpoint_read_bytes", "Bytes this rank has read from the checkpoint."),
    _gauge("moe_shadow_bytes", "Bytes of experts it keeps in host memory, for the loss of another rank."),
)
"""Metrics of a rank's process."""

COORDINATOR = (
    _gauge("moe_service_state", "1 for the state the service is in.", "state"),
    _counter("moe_group_reforms_total", "Times the group served again after a failure."),
    _computed(
        _gauge(
            "moe_rank_up",
            "1 when the coordinator is connected to the rank, which may yet load, by its seat.",
            "rank",
        )
    ),
    _computed(
        _gauge(
            "moe_members",
            "Places of the group that a connected member fills, and that are kept for members.",
            *("role", "state"),
        )
    ),
    _computed(
        _gauge(
            "moe_ready_layers",
            "Layers by where their experts would come from, were the rank lost; waits: from nowhere else.",
            *("rank", "source"),
        )
    ),
    _computed(_counter("moe_group_steps_total", "Steps sequenced for the group.")),
    _computed(_counter("moe_group_jobs_total", "Jobs announced by doors.")),
    _computed(_gauge("moe_jobs_queued", "Jobs announced and in no step yet.")),
    _computed(_gauge("moe_steps_in_flight", "Steps sent that some rank has not finished.")),
    _computed(
        _gauge(
            "moe_balancedness",
            "Mean over largest rows of a rank in the last minute, 1: even. A layer without traffic has none.",
            "layer",
        )
    ),
    _computed(
        _counter(
            "moe_routed_rows_total",
            "(token, expert) rows by the rank that owns the expert; replicas are taken to share evenly.",
            *("layer", "rank"),
        )
    ),
    _computed(
        _gauge(
            "moe_expert_load_ratio",
            "Tokens of an expert over its layer's mean in the last minute; the hottest of hot layers only.",
            *("layer", "expert"),
        )
    ),
    _gauge("moe_weights_version", "Of the weights that are served, the oldest of any layer."),
    _counter("moe_reloads_total", "Reloads of weights, by how they ended.", "outcome"),
    _counter("moe_balance_cycles_total", "Rebalancing cycles, by how they ended.", "outcome"),
    _counter("moe_balance_moves_total", "Experts that cycles copied and committed."),
    _counter("moe_balance_moved_bytes_total", "Bytes of those experts, as they were copied."),
    _counter("moe_balance_epochs_total", "Epochs that cycles committed."),
    _counter(
        "moe_balance_corrupted_copies_total",
        "Copies thrown away and fetched again because their checksum was not the owner's; reloads included.",
    ),
    _of_cycles(_histogram("moe_balance_cycle_duration_seconds", "Of cycles that had something to move.")),
    _gauge(
        "moe_balance_cycle_age_seconds",
        "Since a cycle completed, or since the start; 0 where the policy is off.",
    ),
    _gauge("moe_balance_interval_seconds", "Between looks at the load; 0 where the policy is off."),
    _gauge(
        "moe_balance_expected_gain",
        "Drop of largest over mean load of a rank, mean over layers, that the last cycle that moved planned.",
    ),
    _gauge("moe_balance_real_gain", "The same by the load that came after, seen at the next look."),
)
"""Metrics of the coordinator's process."""

METRICS: dict[str, Metric] = {entry.name: entry for entry in (*PROCESS, *RANK, *COORDINATOR)}
"""Every metric by its name."""
