"""What all of it costs while nothing happens: two services on the same GPUs are asked in turn."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from bench.service.passes.gpu.clock import Clock
from bench.service.serving_on.cost import interval
from bench.service.serving_on.gpu.asking import PAUSE, Asking, Order
from bench.service.serving_on.gpu.callers import by_client
from bench.service.serving_on.gpu.service import GpuService, Place, Setup, Truths, config_of, known_calls
from bench.service.serving_on.gpu.told import Told
from bench.service.serving_on.run import SWITCHES

SETTLE_SECONDS = 0.15  # after the callers of the other one have paused, and once more with one's own
SHORTEST_WINDOW, LONGEST_WINDOW = 0.25, 4.0
RESERVE_SECONDS = 8.0  # of the part, for the services to end
FEWEST_PAIRS = 4
AIM = 1.01


def cost(
    setup: Setup, place: Place, folders: tuple[Path, Path], told: Told, clock: tuple[Clock, int]
) -> None:
    """Windows of each service, one after the other; on over off, by the median call. folders: of the
    checkpoint, and for what services write. clock: of the part, and how many pairs are wanted.
    """
    checkpoint, folder = folders
    part, pairs = clock
    off = {key.replace(".", "__"): value for key, value in SWITCHES.items()}
    truths = Truths(setup.sizes)
    with ExitStack() as stack:
        stack.callback(truths.close)
        askings = dict[bool, Asking]()
        for on in (True, False):
            config = config_of(setup, place, checkpoint, **({} if on else off))
            service = stack.enter_context(GpuService(config, folder / f"cost, {'on' if on else 'off'}"))
            calls = known_calls(service.address, setup.sizes, truths)
            askings[on] = stack.enter_context(Asking(by_client, service.address, calls))
        window = (part.left - RESERVE_SECONDS) / (2 * pairs) - 2 * SETTLE_SECONDS
        window = min(LONGEST_WINDOW, max(SHORTEST_WINDOW, window))
        told.say(pairs=pairs, window=round(window, 2), left=round(part.left, 1))
        took = {True: list[float](), False: list[float]()}
        for pair in range(pairs):
            if part.left < RESERVE_SECONDS and pair >= FEWEST_PAIRS:
                break
            for on in (True, False) if pair % 2 else (False, True):
                took[on].append(_window(askings[on], window, told))
            told.say(pair=pair, on_ms=took[True][-1] * 1e3, off_ms=took[False][-1] * 1e3)
            _tell(setup, took, told)


def _window(asking: Asking, seconds: float, told: Told) -> float:
    """The median call of a window."""
    asking.order(Order(True))
    time.sleep(SETTLE_SECONDS)
    first = asking.answers()
    time.sleep(seconds)
    found = asking.answers()
    asking.order(PAUSE)
    time.sleep(SETTLE_SECONDS)
    told.faults += [f"cost: {one.fault}" for one in first + found + asking.answers() if one.fault]
    return statistics.median(one.ended - one.began for one in found if not one.fault)


def _tell(setup: Setup, took: dict[bool, list[float]], told: Told) -> None:
    """The pairs so far: they stand in the record if no more come."""
    ratios = [on / off for on, off in zip(took[True], took[False], strict=True)]
    if len(ratios) < FEWEST_PAIRS:
        return
    low, high = interval(ratios, 0)
    told.add(
        f"{setup}: steady call, on over off ({', '.join(SWITCHES)})",
        statistics.median(ratios),
        "x",
        AIM,
        low=low,
        high=high,
        on_ms=statistics.median(took[True]) * 1e3,
        off_ms=statistics.median(took[False]) * 1e3,
        pairs=len(ratios),
    )
