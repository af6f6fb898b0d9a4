"""The dashboard's metrics exist, and its panels answer from a real Prometheus that scrapes a live service."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from houses import Alone
from prometheus_server import NoPrometheus, Prometheus, binary

from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.telemetry.exporter import write_scrape_targets
from moeserve.runtime.telemetry.metrics import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "moeserve.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ANSWER_SECONDS = 30.0  # for the slowest panel, which needs a few scrapes


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The dashboard's module, as a script sees it."""
    monkeypatch.syspath_prepend(str(DEPLOY / "grafana"))
    return importlib.import_module("dashboard")


@pytest.fixture(scope="module")
def busy(house: LocalCluster, alone: Alone) -> Iterator[LocalCluster]:
    """A live service, rebalanced now and then; its caller also asks for a layer that does not exist."""
    done = threading.Event()
    failures: list[Exception] = []

    def call() -> None:
        batch = alone.batch(8, seed=1)
        try:
            with MoeClient(house.address, timeout=30) as client:
                for turn in itertools.count():
                    if done.wait(0.05):
                        break
                    for layer in (0, 1):
                        client.forward(layer, *batch)
                    if turn % 20 == 10:
                        client.rebalance(policy=("eplb", "even")[turn // 20 % 2])
                    with pytest.raises(MoeError):
                        client.forward(99, *batch)
        except Exception as error:
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    yield house
    done.set()
    caller.join()
    assert not failures


@pytest.fixture(scope="module")
def prometheus(busy: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the shipped configuration, scraping the service every second."""
    try:
        binary("prometheus")
    except NoPrometheus as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "rules.yml").write_text((DEPLOY / "prometheus" / "rules.yml").read_text())
    (folder / "targets").mkdir()
    names = ["coordinator", *(f"rank-{rank}" for rank in range(4))]
    write_scrape_targets(
        folder / "targets" / "service.json", dict(zip(names, busy.metrics_targets(), strict=True))
    )
    with Prometheus(folder / "prometheus.yml", folder) as server:
        yield server


@pytest.fixture(scope="module")
def model(prometheus: Prometheus) -> str:
    """What Grafana offers for the dashboard's variable of that name."""
    (variable,) = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "model"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
    names = _until(lambda: [series[label] for series in _numbers(prometheus.query(metric))])
    assert len(set(names)) == 1
    return str(names[0])


def test_the_committed_json_is_what_the_code_writes(code: ModuleType) -> None:
    assert code.text() == code.JSON_FILE.read_text(), "run `python deploy/grafana/dashboard.py`"


def test_panels_lie_side_by_side(code: ModuleType) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= code.COLUMNS, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_a_gain_that_is_a_loss_is_seen() -> None:
    (panel,) = [one for one in PANELS if one["title"] == "Expected and real gain"]
    assert "min" not in panel["fieldConfig"]["defaults"], "load moves on: the real gain is often below 0"


def test_it_names_no_machine() -> None:
    assert not re.search(r"localhost|https?://|\d+\.\d+\.\d+\.\d+|:\d{4}", json.dumps(DASHBOARD))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_its_metrics_and_their_labels_exist(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        names = re.findall(r"\bmoe_\w+", target["expr"])
        entries = [
            METRICS.get(name) or METRICS.get(re.sub(r"_(bucket|sum|count)$", "", name)) for name in names
        ]
        assert names and all(entries), target["expr"]
        by = re.findall(r"by \(([^)]*)\)", target["expr"])
        wanted = {label.strip() for labels in by for label in labels.split(",")} - {"le"}
        known = {"model_name", "rank"}.union(*(entry.labels for entry in entries if entry))
        assert wanted <= known, target["expr"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_an_idle_service_divides_by_nothing(panel: dict[str, Any]) -> None:
    """A rate is 0 while nobody calls: a panel then shows nothing, and not NaN."""
    for target in panel["targets"]:
        _, *by = target["expr"].split(" / ")
        for divisor in by:
            assert "rate(" not in divisor or re.fullmatch(r"\(.* > 0\)", divisor), target["expr"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_live_service_answers(panel: dict[str, Any], prometheus: Prometheus, model: str) -> None:
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", "5s").replace("$model", model)
        series = _until(lambda asked=expression: _numbers(prometheus.query(asked)))
        assert series, f"{panel['title']}: {expression} has no answer"
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert all(label in labels for labels in series), f"{expression} has no label {label}"


def test_what_it_shows_is_what_happened(prometheus: Prometheus) -> None:
    assert len(_until(lambda: prometheus.query("up == 1"), 5)) == 5
    (state,) = _until(lambda: prometheus.query("moe_service_state == 1"))
    assert state["metric"]["state"] == "serving"
    ranks = _until(lambda: prometheus.query("moe_rank_up == 1"), 4)
    assert {series["metric"]["rank"] for series in ranks} == {"0", "1", "2", "3"}
    codes = _until(lambda: prometheus.query("sum by (code) (moe_requests_total) > 0"), 2)
    assert {series["metric"]["code"] for series in codes} == {"OK", "NOT_FOUND"}
    # each token of a lane is routed to its top-2 experts, wherever they are
    ratio = "sum(moe_expert_rows_total) / sum(moe_tokens_total)"
    (rows,) = _until(lambda: prometheus.query(ratio))
    assert float(rows["value"][1]) == pytest.approx(2.0, rel=0.2)  # ranks are scraped one after the other


def _numbers(series: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Labels of the series that have a value."""
    return [one["metric"] for one in series if not math.isnan(float(one["value"][1]))]


def _until(ask: Callable[[], list[Any]], least: int = 1) -> list[Any]:
    """The first answer of at least so many series, or the last there was."""
    until = time.monotonic() + ANSWER_SECONDS
    while len(answer := ask()) < least and time.monotonic() < until:
        time.sleep(0.2)
    return answer
