"""What processes tell Prometheus: the numbers of the records they were fed, under the names of the table."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_server import NoPrometheus, binary

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.dispatch.members import Member, Members
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement
from moeserve.runtime.head.coordinator import Progress
from moeserve.runtime.head.generations.ready import SOURCES, Cover
from moeserve.runtime.head.rebalancer import OUTCOMES, Cycle
from moeserve.runtime.keys.sockets import CannotListen
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.served import Served
from moeserve.runtime.step import Phases, StepRecord
from moeserve.runtime.telemetry import http
from moeserve.runtime.telemetry.exporter import RankTelemetry, Telemetry, write_scrape_targets
from moeserve.runtime.telemetry.head import HOT_EXPERTS, HOT_LAYERS, CoordinatorTelemetry, RecentLoad
from moeserve.runtime.telemetry.metrics import (
    COORDINATOR,
    FAILURES,
    METRICS,
    PLACES,
    PROCESS,
    RANK,
    ROLES,
    SECONDS,
    STATES,
    Metric,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
MOVED = Cycle("moved", "", moves=3, nbytes=4096, epochs=2, seconds=0.2, expected=0.25, corrupted=1)
OBSERVE_SECONDS = 30e-6  # budget of one step's observation


def scrape(telemetry: Telemetry) -> str:
    """What a scrape of the process would read, without its HTTP server."""
    return generate_latest(telemetry._registry).decode()


def record(layer: int = 3, **values: float) -> StepRecord:
    """A step of 16 rows in two jobs."""
    phases = Phases(1e-3, 2e-3, 4e-3, int(values.get("expert_rows", 64)), 1000, 500, "all2allv")
    return StepRecord(1, layer, int(values.get("jobs", 2)), 16, values.get("wait", 7e-5), phases, (2,))


def samples(text: str) -> Samples:
    """Values by sample name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def at(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(({"model_name": "m"} | labels).items())


def filled_rank() -> RankTelemetry:
    """A rank that has seen everything once."""
    telemetry = RankTelemetry("m", 1, "0.1.0", {3: ["all2allv"], 5: ["all2allv"]})
    telemetry.observe_step(record())
    telemetry.request("Forward", "inline", "OK", 2e-3)
    telemetry.in_flight(lambda: 4)
    telemetry.set_group(2, 1)
    telemetry.regions(lambda: (3, 4096))
    telemetry.weights(lambda: (1 << 20, 1 << 21))
    telemetry.shadows(lambda: 1 << 19)
    return telemetry


def filled_coordinator() -> CoordinatorTelemetry:
    """A coordinator of four ranks, one of them away, that has seen everything once."""
    telemetry = CoordinatorTelemetry("m", "0.1.0", (3, 5))
    progress = Progress("serving", "", 2, 10, 30, 1, 2)
    telemetry.set_progress(progress)
    telemetry.progress(lambda: progress)
    telemetry.members(lambda: (Members.of_ranks(4, max_lanes=6), (0, 1, 3)))
    load = np.zeros((2, 8))
    load[0] = [4, 0, 1, 1, 1, 1, 0, 0]
    telemetry.loads(lambda: (Placement.even(2, 8, 4), Load(load)))
    telemetry.request("Forward", "inline", "UNAVAILABLE", 1e-3)
    telemetry.in_flight(lambda: 1)
    telemetry.set_group(2, 1)
    telemetry.weights_version(lambda: 3)
    telemetry.covers(lambda: {1: Cover(1, 0, 1), 3: Cover(waits=2)})
    telemetry.watch(60.0, lambda: 75.0)
    telemetry.observe_cycle(MOVED)
    telemetry.observe_gain(0.125)
    return telemetry


@pytest.mark.parametrize(
    ("filled", "entries"), [(filled_rank, PROCESS + RANK), (filled_coordinator, PROCESS + COORDINATOR)]
)
def test_a_process_exports_exactly_its_entries(
    filled: Callable[[], Telemetry], entries: tuple[Metric, ...]
) -> None:
    read = text_string_to_metric_families(scrape(filled()))
    families = {family.name: family for family in read if family.name.startswith("moe_")}
    # the parser takes _total off a counter's name
    assert families.keys() == {entry.name.removesuffix("_total") for entry in entries}
    for entry in entries:
        family = families[entry.name.removesuffix("_total")]
        assert family.type == entry.kind and family.documentation == entry.help
        own = {"model_name", "rank"} if filled is filled_rank else {"model_name"}
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == own | set(entry.labels), sample


@pytest.mark.parametrize("entry", METRICS.values(), ids=lambda entry: entry.name)
def test_entries_follow_the_naming_rules(entry: Metric) -> None:
    assert entry.name.startswith("moe_") and entry.help.endswith(".")
    assert (entry.kind == "counter") == entry.name.endswith("_total")
    assert (entry.kind == "histogram") == bool(entry.buckets) == entry.name.endswith("_duration_seconds")
    assert not {"job", "reason", "model_name"} & set(entry.labels)
    assert "expert" not in entry.labels or entry.name == "moe_expert_load_ratio"  # the hottest only


def test_buckets_begin_at_50_microseconds() -> None:
    assert SECONDS[0] == 50e-6 and list(SECONDS) == sorted(set(SECONDS)) and SECONDS[-1] == 30.0


def test_a_step_is_counted_once_in_every_metric() -> None:
    seen = samples(scrape(filled_rank()))
    own = {"rank": "1"}
    assert seen[at("moe_steps_total", layer="3", **own)] == 1
    assert (
        seen[at("moe_steps_total", layer="5", **own)] == 0
    )  # there from the start, so that rates begin at 0
    assert seen[at("moe_tokens_total", layer="3", **own)] == 16
    assert seen[at("moe_expert_rows_total", layer="3", **own)] == 64
    assert seen[at("moe_wire_bytes_total", direction="dispatch", all2all_backend="all2allv", **own)] == 1000
    assert seen[at("moe_wire_bytes_total", direction="combine", all2all_backend="all2allv", **own)] == 500
    for phase, seconds in {"wait": 7e-5, "dispatch": 1e-3, "compute": 2e-3, "combine": 4e-3}.items():
        assert seen[at("moe_step_phase_duration_seconds_sum", phase=phase, **own)] == pytest.approx(seconds)
    assert seen[at("moe_step_phase_duration_seconds_bucket", phase="wait", le="5e-05", **own)] == 0
    assert seen[at("moe_step_phase_duration_seconds_bucket", phase="wait", le="0.0001", **own)] == 1


def test_a_step_without_jobs_of_this_lane_waited_for_nobody() -> None:
    telemetry = RankTelemetry("m", 0, "0.1.0", {3: ["local"]})
    telemetry.observe_step(record(jobs=0, wait=0.0))
    seen = samples(scrape(telemetry))
    assert seen[at("moe_step_phase_duration_seconds_count", phase="wait", rank="0")] == 0
    assert seen[at("moe_step_phase_duration_seconds_count", phase="compute", rank="0")] == 1


def test_rows_that_only_the_device_knows_are_counted_when_it_has_told_them() -> None:
    telemetry = RankTelemetry("m", 0, "0.1.0", {3: ["local"]})
    telemetry.observe_step(record(expert_rows=-1))
    seen = samples(scrape(telemetry))
    assert seen[at("moe_expert_rows_total", layer="3", rank="0")] == 0
    telemetry.observe_rows(3, 80, 10)
    then = samples(scrape(telemetry))
    assert then[at("moe_expert_rows_total", layer="3", rank="0")] == 80
    tokens = at("moe_tokens_total", layer="3", rank="0")
    assert then[tokens] == seen[tokens] + 10


def test_gauges_are_read_when_scraped() -> None:
    telemetry, calls = RankTelemetry("m", 0, "0.1.0", {}), [1, 2]
    telemetry.in_flight(lambda: calls.pop())
    assert samples(scrape(telemetry))[at("moe_requests_in_flight", rank="0")] == 2
    assert samples(scrape(telemetry))[at("moe_requests_in_flight", rank="0")] == 1


def test_the_coordinator_shows_state_ranks_and_balance() -> None:
    seen = samples(scrape(filled_coordinator()))
    assert {state for state in STATES if seen[at("moe_service_state", state=state)]} == {"serving"}
    assert [seen[at("moe_rank_up", rank=str(rank))] for rank in range(4)] == [1, 1, 0, 1]
    places = {role: [seen[at("moe_members", role=role, state=state)] for state in PLACES] for role in ROLES}
    assert places == {"lane": [3, 1, 2], "owner": [3, 1, 0]}
    sources = [[seen[at("moe_ready_layers", rank=r, source=one)] for one in SOURCES] for r in ("1", "3")]
    assert sources == [[1, 0, 1, 0], [0, 0, 0, 2]]
    assert seen[at("moe_group_jobs_total")] == 30 and seen[at("moe_jobs_queued")] == 1
    # ranks hold experts 0-1, 2-3, 4-5, 6-7: rows 4, 2, 2, 0, so mean 2 over largest 4
    assert [seen[at("moe_routed_rows_total", layer="3", rank=str(rank))] for rank in range(4)] == [4, 2, 2, 0]
    assert seen[at("moe_balancedness", layer="3")] == 0.5
    assert at("moe_balancedness", layer="5") not in seen  # no traffic is neither even nor uneven


def test_rows_are_told_by_the_seats_of_those_who_hold_the_experts() -> None:
    telemetry = filled_coordinator()
    members = Members((Member(0, lane=0), Member(3, owner=1), Member(5, owner=0)), 2, 4)
    telemetry.members(lambda: (members, (0, 3, 5)))
    load = np.zeros((2, 8))
    load[0] = [4, 0, 1, 1, 1, 1, 0, 0]
    telemetry.loads(lambda: (Placement.even(2, 8, 2, reserved=2), Load(load)))
    seen = samples(scrape(telemetry))
    ranks = {dict(labels)["rank"] for name, labels in seen if name == "moe_routed_rows_total"}
    assert ranks == {"3", "5"}, "reserved places and lanes hold none"
    assert [seen[at("moe_routed_rows_total", layer="3", rank=seat)] for seat in ("5", "3")] == [6, 2]
    assert {dict(labels)["rank"] for name, labels in seen if name == "moe_rank_up"} == {"0", "3", "5"}


def test_the_hottest_experts_of_the_hottest_layers_are_shown_and_no_others() -> None:
    layers, experts = 3 * HOT_LAYERS, 16
    telemetry = CoordinatorTelemetry("m", "0.1.0", tuple(range(100, 100 + layers)))
    load = np.ones((layers, experts))
    load[-1, 5] = 8.0  # of 23 tokens: the hottest layer
    load[0] = 0.0
    telemetry.loads(lambda: (Placement.even(layers, experts, 4), Load(load)))
    seen = {
        key: value for key, value in samples(scrape(telemetry)).items() if key[0] == "moe_expert_load_ratio"
    }
    assert seen[at("moe_expert_load_ratio", layer=str(99 + layers), expert="5")] == pytest.approx(8 * 16 / 23)
    assert len(seen) == HOT_LAYERS * HOT_EXPERTS
    assert not [labels for _, labels in seen if ("layer", "100") in labels]  # without traffic


def test_a_cycle_is_counted_in_every_metric_of_balance() -> None:
    telemetry = filled_coordinator()
    seen = samples(scrape(telemetry))
    cycles = {outcome: seen[at("moe_balance_cycles_total", outcome=outcome)] for outcome in OUTCOMES}
    assert cycles == dict.fromkeys(OUTCOMES, 0.0) | {"moved": 1.0}
    assert seen[at("moe_balance_moves_total")] == 3 and seen[at("moe_balance_epochs_total")] == 2
    assert seen[at("moe_balance_moved_bytes_total")] == 4096
    assert seen[at("moe_balance_corrupted_copies_total")] == 1
    assert seen[at("moe_balance_cycle_duration_seconds_sum")] == pytest.approx(0.2)
    assert (seen[at("moe_balance_expected_gain")], seen[at("moe_balance_real_gain")]) == (0.25, 0.125)
    assert (seen[at("moe_balance_cycle_age_seconds")], seen[at("moe_balance_interval_seconds")]) == (75, 60)
    assert seen[at("moe_weights_version")] == 3

    telemetry.observe_cycle(Cycle("even", "no move pays"))
    telemetry.observe_cycle(Cycle("abandoned", "rank 2 is lost", 1, 10, 1, 0.1, 0.5))
    seen = samples(scrape(telemetry))
    assert seen[at("moe_balance_cycle_duration_seconds_count")] == 2  # one had nothing to move
    assert seen[at("moe_balance_moves_total")] == 4  # what was committed stays
    assert seen[at("moe_balance_expected_gain")] == 0.25  # of the last that moved all


def test_a_reload_is_no_cycle_but_its_corrupted_copies_count() -> None:
    telemetry = filled_coordinator()
    telemetry.observe_reload(Cycle("reloaded", "", 16, 4096, 2, 1.0, corrupted=2))
    seen = samples(scrape(telemetry))
    assert seen[at("moe_reloads_total", outcome="reloaded")] == 1
    assert seen[at("moe_reloads_total", outcome="abandoned")] == 0
    assert seen[at("moe_balance_corrupted_copies_total")] == 3 and seen[at("moe_balance_moves_total")] == 3


def test_a_watchdog_of_no_policy_has_no_age() -> None:
    telemetry = CoordinatorTelemetry("m", "0.1.0", (3,))
    telemetry.watch(0.0, lambda: 75.0)
    seen = samples(scrape(telemetry))
    assert (seen[at("moe_balance_cycle_age_seconds")], seen[at("moe_balance_interval_seconds")]) == (0, 0)


def test_reforms_count_returns_to_serving_not_the_first() -> None:
    telemetry = CoordinatorTelemetry("m", "0.1.0", (3,))
    for state in ("forming", "preparing", "serving", "serving", "forming", "serving", "forming", "failed"):
        telemetry.set_progress(Progress(state, "", 1, 0, 0, 0, 0, broken=state != "preparing"))
    seen = samples(scrape(telemetry))
    assert seen[at("moe_group_reforms_total")] == 1
    assert seen[at("moe_service_state", state="failed")] == 1


def test_who_comes_or_leaves_as_told_is_no_reform() -> None:
    telemetry = CoordinatorTelemetry("m", "0.1.0", (3,))
    for state in ("serving", "forming", "joining", "serving"):
        telemetry.set_progress(Progress(state, "", 1, 0, 0, 0, 0))
    assert samples(scrape(telemetry))[at("moe_group_reforms_total")] == 0


class TestLoadWindow:
    """Two experts on two ranks, one layer."""

    placement = Placement.even(1, 2, 2)

    def add(self, window: RecentLoad, now: float, *tokens: float) -> tuple[list[float], list[float]]:
        recent, routed = window.add(now, self.placement, Load(np.array([tokens], dtype=np.float64)))
        return recent[0].tolist(), routed[0].tolist()

    def test_old_load_leaves_it(self) -> None:
        window = RecentLoad(seconds=60, step=5)
        assert self.add(window, 0, 10, 0) == ([10, 0], [10, 0])
        assert self.add(window, 30, 10, 5)[0] == [10, 5]
        assert self.add(window, 61, 12, 5)[0] == [12, 5]
        assert self.add(window, 91, 12, 5)[0] == [2, 0]  # what came after the reading at 30
        assert self.add(window, 200, 12, 5)[0] == [0, 0]

    def test_frequent_scrapes_remember_few_readings(self) -> None:
        window = RecentLoad(seconds=60, step=5)
        for at_second in range(600):
            self.add(window, at_second, at_second, 0)
        assert len(window._readings) <= 60 / 5 + 2

    def test_a_rank_that_starts_again_begins_it_anew_and_counters_never_fall(self) -> None:
        window = RecentLoad(seconds=60, step=5)
        self.add(window, 0, 10, 10)
        recent, routed = self.add(window, 6, 4, 12)
        assert recent == [0, 2] and routed == [10, 12]
        assert self.add(window, 12, 7, 12) == ([3, 2], [13, 12])

    def test_a_new_placement_is_judged_by_its_own_load(self) -> None:
        window = RecentLoad(seconds=60, step=5)
        self.add(window, 0, 10, 0)
        swapped = Placement(np.array([[1, 0]]), 2, 2)
        recent, routed = window.add(6, swapped, Load(np.array([[11.0, 3.0]])))
        assert recent.tolist() == [[1, 3]] and routed.tolist() == [[13, 1]]


def test_it_answers_over_http_and_processes_share_no_registry() -> None:
    ranks = [filled_rank(), filled_rank()]
    ranks[1].observe_step(record())
    for count, rank in enumerate(ranks, start=1):
        port = rank.serve("127.0.0.1", 0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        rank.close()
        assert samples(text)[at("moe_steps_total", layer="3", rank="1")] == count


def test_a_port_in_use_names_the_port_and_the_key() -> None:
    first, second = filled_rank(), filled_rank()
    port = first.serve("127.0.0.1", 0)
    try:
        with pytest.raises(CannotListen, match=rf"127\.0\.0\.1:{port}: .*in use.*server\.metrics_port"):
            second.serve("127.0.0.1", port)
    finally:
        first.close()
    assert second.serve("127.0.0.1", port) == port  # free again, at once
    second.close()
    second.close()


def test_a_row_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="moe_x is of kind 'summary'; known: counter, gauge, histogram"):
        Telemetry((Metric("moe_x", "summary", "X."),), {}, "0.1.0")


def test_the_first_time_that_a_peer_is_late_is_an_increase() -> None:
    telemetry = RankTelemetry("m", 0, "0.1.0", {3: ["local"]}, [1, 2])
    name = "moe_late_peers_total"
    before = samples(scrape(telemetry))
    telemetry.observe_step(replace(record(), late=(2,)))
    after = samples(scrape(telemetry))
    assert [before[at(name, rank="0", peer=peer)] for peer in "12"] == [0, 0]
    assert [after[at(name, rank="0", peer=peer)] for peer in "12"] == [0, 1]


@pytest.mark.parametrize(("on_late", "seats"), [("drop", (0, 2, 3)), ("fail", ())])
def test_steps_go_on_without_any_other_seat_where_they_are_to(on_late: str, seats: tuple[int, ...]) -> None:
    mesh = Mesh.flatten(1, 2, expert_parallel=True)
    checkpoint = cast(Checkpoint, None)  # of which nothing is asked
    served = Served(checkpoint, (3,), mesh, torch.bfloat16, 8, on_late=on_late, max_owners=4)
    assert served.droppable(1) == seats


@pytest.mark.timed
def test_observing_a_step_is_cheap() -> None:
    telemetry, step = RankTelemetry("m", 0, "0.1.0", {3: ["local"]}), record()
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            telemetry.observe_step(step)
        best = min(best, (time.perf_counter() - started) / 100)
    assert best < OBSERVE_SECONDS


def test_scrape_targets_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    write_scrape_targets(path, {"coordinator": "127.0.0.1:9400", "rank-0": "127.0.0.1:9401"})
    write_scrape_targets(path, {"coordinator": "127.0.0.1:9500"})
    (group,) = json.loads(path.read_text())
    assert group == {"targets": ["127.0.0.1:9500"], "labels": {"process": "coordinator"}}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("filled", [filled_rank, filled_coordinator])
def test_promtool_finds_nothing_to_say(filled: Callable[[], Telemetry]) -> None:
    try:
        promtool = binary("promtool")
    except NoPrometheus as reason:
        pytest.skip(str(reason))
    text = scrape(filled())
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, text=True, capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def probed(port: int, path: str) -> tuple[int, str]:
    """Status and text of what is at `path`."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_probes_say_whether_layers_can_be_served() -> None:
    made = RankTelemetry("m", 0, "1", {})
    port = made.serve("127.0.0.1", 0)
    try:
        assert probed(port, "/readyz") == (503, "not serving: it is starting\n")
        made.why_not = lambda: "rank 1 is lost: " + "x" * 10_000
        for path in ("/readyz", "/health"):
            code, text = probed(port, path)
            assert code == 503 and text.startswith("not serving: rank 1 is lost") and len(text) < 1100
        made.why_not = lambda: ""
        assert probed(port, "/readyz") == probed(port, "/health") == (200, "serving\n")
        assert probed(port, "/livez")[0] == 200
        assert "moe_build_info" in probed(port, "/metrics")[1]
        assert probed(port, "/")[0] == probed(port, "/metric")[0] == 404
    finally:
        made.close()


def test_the_first_burst_of_failures_is_an_increase() -> None:
    telemetry = RankTelemetry("m", 0, "1", {})
    telemetry.request("Forward", "inline", "OK", 1e-3)
    seen = samples(scrape(telemetry))
    for code in FAILURES:
        assert seen[at("moe_requests_total", rank="0", method="Forward", transport="inline", code=code)] == 0


def test_who_sends_no_request_holds_up_no_probe() -> None:
    made = RankTelemetry("m", 0, "1", {})
    made.why_not = lambda: ""
    port = made.serve("127.0.0.1", 0)
    silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(50)]
    try:
        assert probed(port, "/readyz")[0] == 200
    finally:
        for one in silent:
            one.close()
        made.close()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 8)
    server, thread = http.serve_http("127.0.0.1", 0, CollectorRegistry(), lambda: "")
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_exporter_is_reached_beside_many_that_ask_nothing(exporter: int) -> None:
    """They keep so many threads of its process and no more: who has been there for longest goes."""
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", exporter), 5.0) for _ in range(40)]
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter}/livez", timeout=5) as answer:
        assert answer.status == 200
    assert threading.active_count() <= before + 8 + 2
    silent[0].settimeout(5.0)
    assert silent[0].recv(1) == b""
    for one in silent:
        one.close()


def test_a_request_has_to_arrive_in_time_however_often_a_byte_of_it_does(exporter: int) -> None:
    with socket.create_connection(("127.0.0.1", exporter), 5.0) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < began + 5:
                slow.sendall(b"G")
                time.sleep(0.1)
        assert time.monotonic() < began + 3


def test_a_service_that_is_to_stop_shows_that_it_does_though_its_group_serves() -> None:
    telemetry, stops = CoordinatorTelemetry("m", "0.1.0", (3,)), list[bool]()
    telemetry.stops = lambda: bool(stops)

    def shown() -> set[str]:
        seen = samples(scrape(telemetry))
        return {state for state in STATES if seen[at("moe_service_state", state=state)]}

    telemetry.set_progress(Progress("serving", "", 1, 0, 0, 0, 0))
    assert shown() == {"serving"}
    stops.append(True)
    assert shown() == {"stopping"}
    telemetry.set_progress(Progress("forming", "rank 1 is lost", 2, 0, 0, 0, 0))
    assert shown() == {"stopping"}
    telemetry.set_progress(Progress("stopped", "", 2, 0, 0, 0, 0))
    assert shown() == {"stopped"}


def test_every_rank_has_the_rows_of_sliced_experts() -> None:
    telemetry = CoordinatorTelemetry("m", "0.1.0", (3,))
    telemetry.members(lambda: (Members.of_ranks(2), (0, 1)))
    telemetry.loads(lambda: (Placement.even(1, 4, 1), Load(np.array([[5.0, 1.0, 2.0, 0.0]]))))
    seen = samples(scrape(telemetry))
    assert [seen[at("moe_routed_rows_total", layer="3", rank=str(rank))] for rank in (0, 1)] == [8, 8]


def test_a_cycle_that_moves_nothing_has_no_time_though_it_was_asked_for() -> None:
    """As a rebalance by hand that finds nothing, and the moves of a scale that needs none."""
    telemetry = CoordinatorTelemetry("m", "0.1.0", (3,))
    telemetry.observe_cycle(Cycle("even", seconds=0.001))
    telemetry.observe_cycle(Cycle("abandoned", "rank 1 is lost", seconds=2.0))
    seen = samples(scrape(telemetry))
    assert seen[at("moe_balance_cycle_duration_seconds_count")] == 1
    assert seen[at("moe_balance_cycle_duration_seconds_sum")] == 2
