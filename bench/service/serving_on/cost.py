"""What all of it costs while nothing happens: two services, on and off, are asked in turn.

A call takes a tenth more or less from one second to the next, of either service alike, so that both are asked
some calls each by one client; and some hundredths from one start of a service to the next, for as long as it
runs, so that one start says little.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack

from bench.lib.record import Result
from bench.service.faults.callers import BOUND, Call
from bench.service.serving_on.events import Setup
from bench.service.serving_on.run import SWITCHES, Run
from moeserve.proto.client import MoeClient

WINDOW_SECONDS, SETTLE_SECONDS = 8.0, 2.0
TURN_CALLS, FIRST_CALLS = 16, 2  # to one service before the other has its turn; the first do not count
PATIENCE_SECONDS = 60.0  # of a call
DRAWS = 4000  # of the pairs with replacement, for the interval
AIM = 1.03  # on a CPU


def cost(run: Run, setup: Setup) -> tuple[list[Result], list[str]]:
    """`--pairs` pairs of services, in a window of which both are asked; on over off, by the median call."""
    off = {key.replace(".", "__"): value for key, value in SWITCHES.items()}
    named = ", ".join(SWITCHES)
    ratios, medians, wrong = [], {True: list[float](), False: list[float]()}, list[str]()
    for pair in range(run.args.pairs):
        clients = dict[bool, MoeClient]()
        with ExitStack() as stack:
            for on in (True, False) if pair % 2 else (False, True):
                service = stack.enter_context(run.service(setup, **({} if on else off)))
                client = MoeClient(service.address, timeout=PATIENCE_SECONDS)
                clients[on] = stack.enter_context(client)
            _window(clients, run.calls, SETTLE_SECONDS, wrong)
            took = _window(clients, run.calls, WINDOW_SECONDS, wrong)
        for on, seconds in took.items():
            medians[on].append(statistics.median(seconds))
        ratios.append(medians[True][-1] / medians[False][-1])
        ms = {on: found[-1] * 1e3 for on, found in medians.items()}
        print(f"pair {pair}: {ms[True]:.3f} ms on, {ms[False]:.3f} ms off", flush=True)
    low, high = interval(ratios, run.args.seed)
    middle = statistics.median(ratios)
    print(f"on over off ({named}), median of {len(ratios)} pairs: {middle:.4f} ({low:.4f} to {high:.4f})")
    peers = {"low, 95 %": low, "high, 95 %": high, "on, ms": statistics.median(medians[True]) * 1e3}
    case = f"{setup}: steady call, on over off ({named}), {len(ratios)} pairs"
    return [Result("serve_on", case, middle, "x", "lower", AIM, peers)], wrong


def _window(
    clients: dict[bool, MoeClient], calls: list[Call], seconds: float, wrong: list[str]
) -> dict[bool, list[float]]:
    """How long calls took, by service, in whole turns of both; wrong answers are told to `wrong`."""
    took = {True: list[float](), False: list[float]()}
    until, turn = time.monotonic() + seconds, 0
    while True:
        for on in (True, False) if turn % 2 else (False, True):
            for number in range(TURN_CALLS):
                layer, batch, right = calls[(turn * TURN_CALLS + number) % len(calls)]
                began = time.perf_counter()
                answer = clients[on].forward(layer, *batch)
                spent = time.perf_counter() - began
                error = float((answer.float() - right).norm() / right.norm())
                if not error <= BOUND:
                    wrong.append(f"relative error {error:.2e} is over {BOUND:g}")
                if number >= FIRST_CALLS:
                    took[on].append(spent)
        turn += 1
        if time.monotonic() > until and turn % 2 == 0:
            return took


def interval(ratios: list[float], seed: int) -> tuple[float, float]:
    """Where the median of the pairs lies in 95 of 100 draws with replacement."""
    draw = random.Random(seed)
    found = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]
