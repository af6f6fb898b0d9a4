"""Panels and PromQL expressions of the dashboard, as dictionaries of Grafana's dashboard schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Panel = dict[str, Any]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
MODEL = 'model_name="$model"'
RATE = "$__rate_interval"
COLUMNS = 24
STATE_COLORS = {
    "serving": "green",
    "forming": "orange",
    "preparing": "yellow",
    "joining": "yellow",
    "stopping": "purple",
    "failed": "red",
    "stopped": "dark-red",
}


@dataclass(frozen=True)
class Query:
    """One PromQL expression and how its series are called; `shape` is Grafana's format of the answer."""

    text: str
    legend: str = ""
    shape: str = "time_series"  # time_series, table, heatmap
    now: bool = False  # the latest value only


def metric(name: str, *matchers: str) -> str:
    """A selector of the chosen model's series."""
    return f"{name}{{{', '.join((MODEL, *matchers))}}}"


def rate(name: str, *matchers: str) -> str:
    """What a counter grows by in a second."""
    return f"rate({metric(name, *matchers)}[{RATE}])"


def rates(by: str, name: str, *matchers: str) -> str:
    """Returns the rate summed over all labels but `by`."""
    return f"sum by ({by}) ({rate(name, *matchers)})"


def quantile(q: float, by: str, histogram: str, *matchers: str) -> str:
    """A quantile of a histogram for each value of `by`."""
    return f"histogram_quantile({q}, {rates(f'le, {by}', f'{histogram}_bucket', *matchers)})"


def mean(by: str, histogram: str, *matchers: str) -> str:
    """A histogram's mean for each value of `by`; none where nothing was observed."""
    count = rates(by, f"{histogram}_count", *matchers)
    return f"{rates(by, f'{histogram}_sum', *matchers)} / ({count} > 0)"


def panel(kind: str, title: str, about: str, queries: tuple[Query, ...]) -> Panel:
    """A panel of one of Grafana's kinds, of half the dashboard's width."""
    targets = [
        {
            "refId": chr(ord("A") + at),
            "datasource": SOURCE,
            "expr": query.text,
            "legendFormat": query.legend,
            "format": query.shape,
            "instant": query.now,
            "range": not query.now,
        }
        for at, query in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": SOURCE,
        "targets": targets,
        "gridPos": {"w": COLUMNS // 2, "h": 8, "x": 0, "y": 0},
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {},
    }


def lines(
    title: str, unit: str, about: str, *queries: Query, stacked: str = "none", signed: bool = False
) -> Panel:
    """Series over time, from 0 on unless they are `signed`; `stacked` is none, normal or percent."""
    made = panel("timeseries", title, about, queries)
    made["fieldConfig"]["defaults"] = {
        "unit": unit,
        **({} if signed else {"min": 0}),
        "custom": {
            "fillOpacity": 0 if stacked == "none" else 40,
            "showPoints": "never",
            "stacking": {"mode": stacked, "group": "A"},
        },
    }
    made["options"] = {
        "legend": {"showLegend": True, "displayMode": "table", "placement": "right", "calcs": ["last"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return made


def number(title: str, about: str, query: Query, unit: str = "none", show: str = "value") -> Panel:
    """The latest value, an eighth of the width; `show` is value, name or value_and_name."""
    made = panel("stat", title, about, (query,))
    made["gridPos"] |= {"w": COLUMNS // 8, "h": 4}
    made["fieldConfig"]["defaults"] = {"unit": unit, "color": {"mode": "fixed", "fixedColor": "blue"}}
    made["options"] = {
        "textMode": show,
        "colorMode": "background",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"], "values": False},
    }
    return made


def state() -> Panel:
    """The state's name, in its colour."""
    current = Query(f"{metric('moe_service_state')} == 1", "{{state}}", now=True)
    made = number("State", "Callers are answered in `serving` only.", current, show="name")
    made["fieldConfig"]["overrides"] = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }
        for name, color in STATE_COLORS.items()
    ]
    return made


def bands(title: str, about: str, query: Query, yes: tuple[str, str], no: tuple[str, str]) -> Panel:
    """A series of 0 and 1 as coloured bands; `yes` and `no` are (text, colour)."""
    made = panel("state-timeline", title, about, (query,))
    words = {value: {"text": text, "color": color} for value, (text, color) in (("1", yes), ("0", no))}
    made["fieldConfig"]["defaults"] = {
        "mappings": [{"type": "value", "options": words}],
        "custom": {"fillOpacity": 80, "lineWidth": 0},
    }
    made["options"] = {"showValue": "never", "mergeValues": True, "rowHeight": 0.9}
    return made


def heat(title: str, unit: str, about: str, query: Query) -> Panel:
    """A histogram over time."""
    made = panel("heatmap", title, about, (query,))
    made["options"] = {
        "calculate": False,
        "yAxis": {"unit": unit},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "cellGap": 1,
        "legend": {"show": True},
        "tooltip": {"mode": "single"},
    }
    return made


def matrix(title: str, about: str, query: str, row: str, column: str) -> Panel:
    """The latest values as a table, label `row` down and label `column` across, coloured by size."""
    made = panel("table", title, about, (Query(query, shape="table", now=True),))
    made["transformations"] = [
        {"id": "groupingToMatrix", "options": {"rowField": row, "columnField": column, "valueField": "Value"}}
    ]
    made["fieldConfig"]["defaults"] = {
        "unit": "short",
        "color": {"mode": "continuous-BlYlRd"},
        "custom": {"cellOptions": {"type": "color-background"}, "align": "center"},
    }
    made["options"] = {"showHeader": True, "cellHeight": "sm"}
    return made
