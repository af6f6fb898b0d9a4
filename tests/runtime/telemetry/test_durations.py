"""Durations are shown as prometheus_client shows those of its own histogram."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from moeserve.runtime.telemetry.durations import Durations
from moeserve.runtime.telemetry.metrics import SECONDS

SEEN = (0.0, 40e-6, 50e-6, 51e-6, 0.0123, 0.02, 29.9, 30.0, 31.0, 1e6)


def shown(ours: bool) -> bytes:
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as the exporter does
    registry, labels = CollectorRegistry(), ("model_name", "phase")
    said = "moe_seconds", 'How long "it" took.', labels
    made = (
        Durations(*said, registry, SECONDS) if ours else Histogram(*said, registry=registry, buckets=SECONDS)
    )
    for phase in ("wait", "reply"):
        child = made.labels(model_name='a "b"', phase=phase)
        for seconds in SEEN[: 4 if phase == "wait" else None]:
            child.observe(seconds)
    made.labels(model_name="none", phase="wait")
    return generate_latest(registry)


def test_a_scrape_says_the_same() -> None:
    assert shown(ours=True) == shown(ours=False)
    assert b'le="5e-05"' in shown(ours=True)


def test_none_is_lost_between_threads() -> None:
    registry = CollectorRegistry()
    made = Durations("moe_seconds", "text", ("phase",), registry, SECONDS)
    child = made.labels(phase="wait")
    assert made.labels(phase="wait") is child

    def observe() -> None:
        for _ in range(5000):
            child.observe(0.5)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.get_sample_value("moe_seconds_count", {"phase": "wait"}) == 20000
    assert registry.get_sample_value("moe_seconds_sum", {"phase": "wait"}) == 10000.0


@pytest.mark.parametrize("given", [{}, {"layer": "1"}, {"phase": "wait", "layer": "1"}])
def test_all_labels_must_be_given_and_no_others(given: dict[str, str]) -> None:
    made = Durations("moe_seconds", "text", ("phase",), CollectorRegistry(), SECONDS)
    with pytest.raises(ValueError, match="phase"):
        made.labels(**given)


def test_a_registry_knows_its_name() -> None:
    registry = CollectorRegistry()
    made = Durations("moe_seconds", "text", ("phase",), registry, SECONDS)
    made.labels(phase="wait").observe(1.0)
    some = registry.restricted_registry(["moe_seconds_count"])  # as of a scrape of some names
    assert [sample.value for family in some.collect() for sample in family.samples] == [1.0]
    with pytest.raises(ValueError, match="moe_seconds"):
        Durations("moe_seconds", "text", ("phase",), registry, SECONDS)
