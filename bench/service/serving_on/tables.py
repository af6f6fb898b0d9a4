"""Tables and records of outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict

from bench.lib.record import Result
from bench.service.serving_on.events import FAULTS, KINDS, Outcome
from bench.service.serving_on.run import quantile

AIMS = {"kill": {"replicas": 0.3, "shadows": 1.0}, "stop": {"replicas": 2.3, "shadows": 3.0}}
"""Seconds of p95 by what covers a member; a stop adds its detection."""


SLOWEST = ("waits", "disk", "shadows", "replicas")
"""Where lost experts come from, the slowest first: a layer is served once all of its experts are there."""


def coverage(outcome: Outcome) -> str:
    """From where the last layer's experts came: `waits` where the group waited for the member itself."""
    return next((source for source in SLOWEST if source in outcome.covered), "unknown")


def table(outcomes: list[Outcome]) -> list[Result]:
    """Prints interruptions by setup, kind of event and where experts came from; and what was counted."""
    rows, results = defaultdict(list), []
    for one in outcomes:
        rows[one.setup, one.event.kind, coverage(one)].append(one)
    print(f"{'setup':<44} {'event':<7} {'from':<8} {'n':>3}  p50    p95    max    return  whole  faults")
    for (setup, kind, source), found in sorted(rows.items(), key=lambda row: (str(row[0][0]), row[0][1:])):
        seconds = [one.interruption for one in found if "missing" not in one.faults]
        faults = Counter(name for one in found for name in one.faults)
        said = ", ".join(f"{count} {name}" for name, count in faults.items()) or "none"
        if not seconds:
            print(f"{setup!s:<44} {kind:<7} {source:<8} {len(found):>3}  no member came back  {said}")
            continue
        p50, p95, most = quantile(seconds, 0.5), quantile(seconds, 0.95), max(seconds)
        back = quantile([one.returning for one in found], 0.95)
        whole = quantile([one.whole for one in found], 0.5)
        numbers = f"{p50:<6.3f} {p95:<6.3f} {most:<6.3f} {back:<7.3f} {whole:<6.2f}"
        print(f"{setup!s:<44} {kind:<7} {source:<8} {len(found):>3}  {numbers} {said}")
        case, aim = f"{setup}, {kind}, experts from {source}", AIMS.get(kind, {}).get(source)
        peers = {"p50": p50, "max": most, "p95 of the members' return": back, "all back after, p50": whole}
        peers["events"] = float(len(found))
        results.append(Result("serve_on", f"{case}: interruption, p95", p95, "s", "lower", aim, peers))
    for name in FAULTS:
        count = sum(len(one.faults.get(name, ())) for one in outcomes)
        case = f"{len(outcomes)} events on {', '.join(sorted({one.setup.launcher for one in outcomes}))}"
        results.append(Result("serve_on", f"{case}: {name}", count, "times", "lower", 0))
    right = sum(one.right for one in outcomes)
    counted = [f"{name} {sum(len(one.faults.get(name, ())) for one in outcomes)}" for name in FAULTS]
    print(f"{right} answers were right; {', '.join(counted)}")
    return results


def kinds_of(text: str) -> dict[str, int]:
    """`kill=50,stop=50,double=20` as numbers by kind. Raises ValueError."""
    counts = dict(part.split("=", 1) for part in text.split(",") if part)
    if unknown := sorted(counts.keys() - set(KINDS)):
        raise ValueError(f"{unknown} are no kinds of events; known: {', '.join(KINDS)}")
    return {kind: int(count) for kind, count in counts.items()}
