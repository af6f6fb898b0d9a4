"""What all of it costs while nothing happens: two services on the same GPUs are asked by one client in turn.

A call takes a tenth more or less from one second to the next, of either service alike, so that they are asked
some calls each: a window's ratio is of calls that lie between one another.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path

from bench.service.passes.gpu.clock import Clock
from bench.service.serving_on.cost import interval
from bench.service.serving_on.gpu.asking import PAUSE, Asking, Order
from bench.service.serving_on.gpu.callers import in_turns
from bench.service.serving_on.gpu.service import (
    Call,
    GpuService,
    Place,
    Setup,
    Truths,
    config_of,
    known_calls,
)
from bench.service.serving_on.gpu.told import Told
from bench.service.serving_on.run import SWITCHES

SETTLE_SECONDS = 0.5  # whose answers do not count
SHORTEST_WINDOW, LONGEST_WINDOW = 0.25, 4.0
RESERVE_SECONDS = 8.0  # of the part, for the services to end
FEWEST_PAIRS = 4
AIM = 1.01


def cost(
    setup: Setup, place: Place, folders: tuple[Path, Path], told: Told, clock: tuple[Clock, int]
) -> None:
    """Windows, in each of which both are asked; on over off, by the median call. folders: of the checkpoint,
    and for what services write. clock: of the part, and how many windows are wanted.
    """
    checkpoint, folder = folders
    part, pairs = clock
    off = {key.replace(".", "__"): value for key, value in SWITCHES.items()}
    truths = Truths(setup.sizes)
    with ExitStack() as stack:
        stack.callback(truths.close)
        services = list[tuple[str, list[Call]]]()
        for on in (True, False):
            config = config_of(setup, place, checkpoint, **({} if on else off))
            service = stack.enter_context(GpuService(config, folder / f"cost, {'on' if on else 'off'}"))
            services.append((service.address, known_calls(service.address, setup.sizes, truths)))
        asking = stack.enter_context(Asking(in_turns, services))
        window = (part.left - RESERVE_SECONDS) / pairs
        window = min(LONGEST_WINDOW, max(SHORTEST_WINDOW, window))
        told.say(pairs=pairs, window=round(window, 2), left=round(part.left, 1))
        took = {True: list[float](), False: list[float]()}
        asking.order(Order(True))
        asking.answers(SETTLE_SECONDS)
        for pair in range(pairs):
            if part.left < RESERVE_SECONDS and pair >= FEWEST_PAIRS:
                break
            found = asking.answers(window)
            told.faults += [f"cost: {one.fault}" for one in found if one.fault]
            right = [one for one in found if not one.fault]
            for on, at in ((True, 0), (False, 1)):
                took[on].append(statistics.median(one.ended - one.began for one in right if one.lane == at))
            told.say(pair=pair, on_ms=took[True][-1] * 1e3, off_ms=took[False][-1] * 1e3)
            _tell(setup, took, told)
        asking.order(PAUSE)


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
