"""What all of it costs while nothing happens: two services, on and off, are asked in turn."""

from __future__ import annotations

import random
import statistics

from bench.lib.record import Result
from bench.service.serving_on.events import Setup
from bench.service.serving_on.run import SWITCHES, Run, median_call

WINDOW_SECONDS, SETTLE_SECONDS = 4.0, 0.5
DRAWS = 4000  # of the pairs with replacement, for the interval
AIM = 1.03  # on a CPU


def cost(run: Run, setup: Setup) -> tuple[list[Result], list[str]]:
    """`--pairs` windows of each service, one after the other; on over off, by the median call."""
    off = {key.replace(".", "__"): value for key, value in SWITCHES.items()}
    named = ", ".join(SWITCHES)
    ratios, calls = [], {True: list[float](), False: list[float]()}
    with (
        run.service(setup) as one,
        run.service(setup, **off) as other,
        run.callers(one) as asking_one,
        run.callers(other) as asking_other,
    ):
        both = {True: asking_one, False: asking_other}
        for callers in both.values():
            callers.pause()
        for pair in range(run.args.pairs):
            took = {}
            for on in (True, False) if pair % 2 else (False, True):
                both[on].go_on()
                both[on].answers(SETTLE_SECONDS)
                took[on] = median_call(both[on].answers(WINDOW_SECONDS))
                both[on].pause()
                both[on].answers(SETTLE_SECONDS)
                calls[on].append(took[on])
            ratios.append(took[True] / took[False])
            print(f"pair {pair}: {took[True] * 1e3:.3f} ms on, {took[False] * 1e3:.3f} ms off", flush=True)
    low, high = interval(ratios, run.args.seed)
    middle = statistics.median(ratios)
    print(f"on over off ({named}), median of {len(ratios)} pairs: {middle:.4f} ({low:.4f} to {high:.4f})")
    peers = {"low, 95 %": low, "high, 95 %": high, "on, ms": statistics.median(calls[True]) * 1e3}
    case = f"{setup}: steady call, on over off ({named}), {len(ratios)} pairs"
    wrong = asking_one.wrong + asking_other.wrong
    return [Result("serve_on", case, middle, "x", "lower", AIM, peers)], wrong


def interval(ratios: list[float], seed: int) -> tuple[float, float]:
    """Where the median of the pairs lies in 95 of 100 draws with replacement."""
    draw = random.Random(seed)
    found = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]
