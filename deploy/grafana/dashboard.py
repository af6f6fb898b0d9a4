"""The Grafana dashboard of a service, as code: `python deploy/grafana/dashboard.py` writes moeserve.json.

The data source and the served model are variables, so the file names no machine. Its rows are in the order an
operator asks: does it serve and why not, what do callers see, where do steps spend their time, which rank and
layer is hot, what rebalancing does about it, what moves and what is held.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from panels import (
    COLUMNS,
    RATE,
    SOURCE,
    Panel,
    Query,
    bands,
    heat,
    lines,
    matrix,
    mean,
    metric,
    number,
    quantile,
    rate,
    rates,
    state,
)

JSON_FILE = Path(__file__).with_name("moeserve.json")

CALL = "moe_request_duration_seconds"
PHASE = "moe_step_phase_duration_seconds"
CYCLE = "moe_balance_cycle_duration_seconds"
FRONT = 'rank=""'  # series of the coordinator's process
OF_RANKS = 'rank!=""'
STEPS = rate("moe_group_steps_total")
ANSWERED = rate("moe_requests_total", 'code="OK"')
BY_DISPATCHER = rates("direction, all2all_backend", "moe_wire_bytes_total")
BY_LAYER_AND_RANK = rates("layer, rank", "moe_routed_rows_total")


def now(text: str, legend: str = "") -> Query:
    """Returns the query of the latest value."""
    return Query(text, legend, now=True)


def serving() -> list[Panel]:
    """Is it serving, and why not."""
    return [
        state(),
        number("Ranks up", "Connected to the coordinator.", now(f"sum({metric('moe_rank_up')})")),
        number("Ranks", "Of the mesh.", now(f"count({metric('moe_rank_up')})")),
        number("Generation", "Of the process group.", now(metric("moe_group_generation", FRONT))),
        number("Epoch", "As the slowest rank has it.", now(f"min({metric('moe_epoch', OF_RANKS)})")),
        number("Reforms", "Times it served again after a failure.", now(metric("moe_group_reforms_total"))),
        number(
            "Errors",
            "Share of calls that ended in another code than OK; none while there are no calls.",
            now(f"1 - (sum({ANSWERED}) or vector(0)) / (sum({rate('moe_requests_total')}) > 0)"),
            unit="percentunit",
        ),
        number(
            "Version",
            "Of the processes.",
            now(f"count by (version) ({metric('moe_build_info')})", "{{version}}"),
            show="name",
        ),
        bands(
            "State over time",
            "Which state the group was in.",
            Query(metric("moe_service_state"), "{{state}}"),
            ("in it", "blue"),
            ("not in it", "transparent"),
        ),
        bands(
            "Ranks over time",
            "Whether the coordinator is connected to the rank: look here when the group does not serve.",
            Query(metric("moe_rank_up"), "rank {{rank}}"),
            ("up", "green"),
            ("down", "red"),
        ),
        lines(
            "Places",
            "short",
            "Of lanes and owners: filled by a connected member, by one that is missing, or reserved.",
            Query(metric("moe_members"), "{{role}} {{state}}"),
        ),
    ]


def calls() -> list[Panel]:
    """The panels of what callers see."""
    return [
        lines("Calls by code", "reqps", "Ended.", Query(rates("code", "moe_requests_total"), "{{code}}")),
        lines(
            "Latency by transport",
            "s",
            "From a call's arrival to its answer, by how its tensors travel.",
            Query(quantile(0.5, "transport", CALL), "p50 {{transport}}"),
            Query(quantile(0.99, "transport", CALL), "p99 {{transport}}"),
        ),
        heat(
            "Latency of calls",
            "s",
            "How many calls took how long.",
            Query(f"sum by (le) (increase({metric(f'{CALL}_bucket')}[{RATE}]))", "{{le}}", "heatmap"),
        ),
        lines(
            "In flight and queued",
            "short",
            "Calls not yet answered at the lanes, jobs in no step yet, steps some rank has not finished.",
            Query(f"sum({metric('moe_requests_in_flight', OF_RANKS)})", "calls"),
            Query(metric("moe_jobs_queued"), "queued jobs"),
            Query(metric("moe_steps_in_flight"), "steps"),
        ),
    ]


def steps() -> list[Panel]:
    """The panels of the time of steps. On a GPU the phases are by its own clock."""
    return [
        lines(
            "Mean step by phase",
            "s",
            "wait: since its earliest job came. On a GPU all are by its own clock, of one step in 8.",
            Query(mean("phase", PHASE, 'phase!~"launch|reply"'), "{{phase}}"),
            stacked="normal",
        ),
        lines(
            "Mean launch and reply",
            "s",
            "What a rank's host does for a step, beside the phases: on a CPU a launch holds all of them.",
            Query(mean("phase", PHASE, 'phase=~"launch|reply"'), "{{phase}}"),
        ),
        lines("p99 by phase", "s", "Over all ranks.", Query(quantile(0.99, "phase", PHASE), "{{phase}}")),
        lines(
            "Mean compute by rank",
            "s",
            "The slowest rank holds up all others, who see it as a longer combine.",
            Query(mean("rank", PHASE, 'phase="compute"'), "rank {{rank}}"),
        ),
        lines(
            "Steps, and jobs in a step",
            "short",
            "More jobs in a step: concurrent calls of one layer share it.",
            Query(f"sum({STEPS})", "steps/s"),
            Query(
                f"sum({rate('moe_group_jobs_total')}) / (sum({STEPS}) > 0)",
                "jobs in a step",
            ),
        ),
        lines(
            "Steps by rank",
            "ops",
            "That it took part in.",
            Query(rates("rank", "moe_steps_total"), "rank {{rank}}"),
        ),
        lines(
            "Late ranks",
            "short",
            "Times a second that a step went on without a rank's rows; the alert names the rank.",
            Query(f"sum({rate('moe_late_peers_total')}) or vector(0)", "late"),
        ),
    ]


def experts() -> list[Panel]:
    """Which rank and which layer is hot."""
    return [
        lines(
            "Tokens by lane",
            "short",
            "Rows a second that callers bring to each rank's lane.",
            Query(rates("rank", "moe_tokens_total"), "rank {{rank}}"),
        ),
        lines(
            "Expert rows by rank",
            "short",
            "(token, expert) rows a second by the rank that owns the expert; the highest is hot.",
            Query(rates("rank", "moe_routed_rows_total"), "rank {{rank}}"),
        ),
        lines(
            "Expert rows computed by rank",
            "short",
            "(token, expert) rows a second as each rank counted them, whichever replica took them.",
            Query(rates("rank", "moe_expert_rows_total"), "rank {{rank}}"),
        ),
        matrix("Expert rows by layer and rank", "Rows a second.", BY_LAYER_AND_RANK, "layer", "rank"),
        lines(
            "Hottest experts",
            "short",
            "Tokens of an expert over its layer's mean in the last minute, of the hottest layers.",
            Query(f"topk(10, {metric('moe_expert_load_ratio')})", "layer {{layer}}, expert {{expert}}"),
        ),
    ]


def balance() -> list[Panel]:
    """What rebalancing sees, does, and gains."""
    age, interval = metric("moe_balance_cycle_age_seconds"), metric("moe_balance_interval_seconds")
    return [
        number("Mean balancedness", "Over layers.", now(f"avg({metric('moe_balancedness')})"), "percentunit"),
        number("Worst layer", "Balancedness.", now(f"min({metric('moe_balancedness')})"), "percentunit"),
        number("Watchdog age", "Since a cycle completed; 0: the policy is off.", now(age), unit="s"),
        number("Interval", "Between looks at the load; 0: the policy is off.", now(interval), unit="s"),
        number("Expert moves", "Since the start.", now(metric("moe_balance_moves_total"))),
        number("Bytes moved", "Since the start.", now(metric("moe_balance_moved_bytes_total")), unit="bytes"),
        number(
            "Corrupted copies",
            "Caught by their checksum and fetched again, since the start.",
            now(metric("moe_balance_corrupted_copies_total")),
        ),
        number("Weights version", "The oldest of any layer.", now(metric("moe_weights_version"))),
        lines(
            "Balancedness by layer",
            "percentunit",
            "Mean over largest rows of a rank in the last minute: at 50 % the hot rank does twice its share.",
            Query(metric("moe_balancedness"), "layer {{layer}}"),
        ),
        lines(
            "Hottest layers",
            "short",
            "Largest over mean rows of a rank in the last minute, 1: even.",
            Query(f"topk(10, 1 / {metric('moe_balancedness')})", "layer {{layer}}"),
        ),
        lines(
            "Cycles by outcome",
            "short",
            "In five minutes. even: no move pays; idle: too little load to tell.",
            Query(f"sum by (outcome) (increase({metric('moe_balance_cycles_total')}[5m]))", "{{outcome}}"),
        ),
        lines(
            "Reloads by outcome",
            "short",
            "Of weights, in five minutes.",
            Query(f"sum by (outcome) (increase({metric('moe_reloads_total')}[5m]))", "{{outcome}}"),
        ),
        lines(
            "Moves and epochs",
            "short",
            "Experts copied into a slot and committed, and the epochs that took, in five minutes.",
            Query(f"increase({metric('moe_balance_moves_total')}[5m])", "moves"),
            Query(f"increase({metric('moe_balance_epochs_total')}[5m])", "epochs"),
        ),
        lines(
            "Bytes moved a second",
            "Bps",
            "By all ranks.",
            Query(rate("moe_balance_moved_bytes_total"), "bytes"),
        ),
        lines(
            "Cycle time",
            "s",
            "Of cycles that had something to move; steps run on meanwhile.",
            Query(f"histogram_quantile(0.5, sum by (le) ({metric(f'{CYCLE}_bucket')}))", "p50"),
            Query(f"histogram_quantile(0.99, sum by (le) ({metric(f'{CYCLE}_bucket')}))", "p99"),
        ),
        lines(
            "Watchdog",
            "s",
            "Since a cycle completed. Over three intervals, it has stopped: the head's log says why.",
            Query(age, "age"),
            Query(f"3 * {interval}", "three intervals"),
        ),
        lines(
            "Expected and real gain",
            "short",
            "Drop of largest over mean load of a rank, mean over layers: as planned, and by the load since.",
            Query(metric("moe_balance_expected_gain"), "expected"),
            Query(metric("moe_balance_real_gain"), "real"),
            signed=True,
        ),
    ]


def memory() -> list[Panel]:
    """What moves and what is held."""
    return [
        lines(
            "Bytes on the wire",
            "Bps",
            "To other ranks.",
            Query(BY_DISPATCHER, "{{direction}} {{all2all_backend}}"),
        ),
        lines(
            "Bytes on the wire by rank",
            "Bps",
            "Sent to other ranks.",
            Query(rates("rank", "moe_wire_bytes_total"), "rank {{rank}}"),
        ),
        lines(
            "Shared-memory regions",
            "short",
            "Of callers, and those in which rows of data connections lie.",
            Query(metric("moe_shared_memory_regions"), "rank {{rank}}"),
        ),
        lines(
            "Bytes of shared-memory regions",
            "bytes",
            "Of callers, and those in which rows of data connections lie.",
            Query(metric("moe_shared_memory_bytes"), "rank {{rank}}"),
        ),
        lines(
            "Device lanes",
            "short",
            "Callers that are attached to a rank.",
            Query(metric("moe_device_lanes"), "rank {{rank}}"),
        ),
        lines(
            "Passes",
            "ops",
            "Of device lanes, by how they ended.",
            Query(rates("status", "moe_passes_total"), "{{status}}"),
        ),
        lines(
            "Expert weights",
            "bytes",
            "Prepared for the kernel, and held by the rank.",
            Query(metric("moe_weights_bytes"), "rank {{rank}}"),
        ),
        lines(
            "Device memory",
            "bytes",
            "Of each rank, by what it is for; CUDA's own context and libraries' memory are not in it.",
            Query(metric("moe_device_bytes"), "rank {{rank}} {{what}}"),
        ),
        lines(
            "Read from the checkpoint",
            "bytes",
            "Since the rank's process started.",
            Query(metric("moe_checkpoint_read_bytes"), "rank {{rank}}"),
        ),
        lines(
            "Shadows",
            "bytes",
            "Of experts that a rank keeps in host memory, for the loss of another.",
            Query(metric("moe_shadow_bytes"), "rank {{rank}}"),
        ),
        lines(
            "Were a rank lost",
            "short",
            "Layers by where its experts would come from; those that wait are served again when it is back.",
            Query(metric("moe_ready_layers"), "rank {{rank}} {{source}}"),
        ),
    ]


ROWS = {
    "Does it serve": serving,
    "Calls": calls,
    "Steps": steps,
    "Experts": experts,
    "Balance": balance,
    "Wire and memory": memory,
}


def placed() -> list[Panel]:
    """Returns all panels, numbered and laid out from left to right, wrapped at the dashboard's width."""
    panels: list[Panel] = []
    below = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": below},
            }
        )
        x, y, below = 0, below + 1, below + 1
        for made in row():
            place = made["gridPos"]
            if x + place["w"] > COLUMNS:
                x, y = 0, below
            place["x"], place["y"] = x, y
            x, below = x + place["w"], max(below, y + place["h"])
            panels.append(made)
    return [{"id": at, **made} for at, made in enumerate(panels, start=1)]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    variables = [
        {"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus"},
        {
            "name": "model",
            "type": "query",
            "label": "Model",
            "datasource": SOURCE,
            "query": "label_values(moe_build_info, model_name)",
            "refresh": 2,
        },
    ]
    return {
        "uid": "moeserve",
        "title": "moeserve",
        "description": "Mixture-of-experts layers as a service: state, calls, steps, experts, balance, wire",
        "tags": ["moeserve"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "annotations": {"list": []},
        "templating": {"list": variables},
        "panels": placed(),
    }


def text() -> str:
    """The dashboard as JSON."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    JSON_FILE.write_text(text())
