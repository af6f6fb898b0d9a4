"""`Gathering`: whether a step starts now or waits for callers who are about to come back.

A caller whose job was answered usually announces its next one soon. A step costs its members time whatever
its rows, so it pays to wait for such callers where they come back faster than that; and while a step runs,
the next one need not start before it is about to end. Both are told from what was seen: how long steps take
by their rows (`StepCosts`), and how long callers stay away (`Returns`). Neither has a clock of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

WEIGHT = 0.125  # of a new observation in a moving average
MOST_WEIGHT = 16.0  # observations that a size of step counts for, in all
FORGET = 0.98  # what is left of a weight after each step
LEAST_WEIGHT = 0.01  # a size of less is forgotten
ENOUGH = 0.5  # of weights, for a word about steps that found members idle, or were there ahead
FIT_EVERY = 4  # steps, after the first ones
ALIKE = 0.05  # how much steps of sizes that differ little say about the cost of a row: less with more
OUTLIER = 4.0  # an observation over so many times the average, or under as small a part, is odd
MOST_ODD = 3  # odd ones in a row; then they are not
LIKELY = 0.5  # callers are waited for where at least so many of them came back lately


@dataclass(eq=False)
class _Size:
    """Steps of about as many rows: moving averages."""

    rows: float
    seconds: float
    weight: float = 1.0
    odd: int = 0  # observations since the last one that was like the average

    def observe(self, rows: int, seconds: float) -> None:
        """Takes note of a step, unless it is an odd one: word of one may come late, and so does the next
        one's word too soon.
        """
        if self.seconds <= OUTLIER * seconds and seconds <= OUTLIER * self.seconds:
            self.odd = 0
            self.weight = min(MOST_WEIGHT, self.weight + 1.0)
            share = max(WEIGHT, 1.0 / self.weight)
            self.rows += share * (rows - self.rows)
            self.seconds += share * (seconds - self.seconds)
            return
        self.odd += 1
        if self.odd >= MOST_ODD:  # those before were first steps, which take long, or the host is another
            self.rows, self.seconds, self.weight, self.odd = float(rows), seconds, 1.0, 0


class StepCosts:
    """Seconds of a step as seen by whoever orders it: `base + row * rows`, and `trips` more where it found
    the members idle: its header's way there, its launch, and the way back of the word that it has ended.

    A line is fitted through the averages of steps of like size, one for those that found members idle and one
    for those that were there ahead; both have the same slope.
    """

    def __init__(self) -> None:
        self.base = self.row = self.trips = 0.0
        self.known = False
        self._seen = 0
        self._sizes: tuple[dict[int, _Size], dict[int, _Size]] = ({}, {})  # of idle members, and ahead

    def observe(self, rows: int, seconds: float, *, ahead: bool) -> None:
        """Takes note of a step. seconds: since it was sent, or since the step before it ended if `ahead`."""
        sizes, size = self._sizes[ahead], rows.bit_length()
        if size in sizes:
            sizes[size].observe(rows, seconds)
        else:
            foretold = self.seconds(rows) + (0.0 if ahead else self.trips)
            odd = self.known and not foretold / OUTLIER <= seconds <= foretold * OUTLIER
            sizes[size] = _Size(float(rows), seconds, 4 * LEAST_WEIGHT if odd else 1.0)
        self.fade()

    def fade(self) -> None:
        """Trusts what was seen a little less: a step has ended, whether it told anything or not."""
        for sizes in self._sizes:
            for size in list(sizes.values()):
                size.weight *= FORGET
        self._seen += 1
        if self._seen < MOST_WEIGHT or not self._seen % FIT_EVERY:
            self._fit()

    def seconds(self, rows: int) -> float:
        """What a step of so many rows takes beside its trips."""
        return self.base + self.row * rows

    def _fit(self) -> None:
        """The slope by least squares over the averages, by their weights, and less where sizes differ little;
        then what is left, by the median: an average may be of first steps, which take long. No part is
        negative.
        """
        spread, common, per_row = 0.0, 0.0, math.inf
        for sizes in self._sizes:
            for old in [old for old, seen in sizes.items() if seen.weight < LEAST_WEIGHT]:
                del sizes[old]
            found = sizes.values()
            weight = sum(size.weight for size in found) or 1.0
            rows = sum(size.weight * size.rows for size in found) / weight
            seconds = sum(size.weight * size.seconds for size in found) / weight
            spread += ALIKE * weight * rows**2
            for size in found:
                spread += size.weight * (size.rows - rows) ** 2
                common += size.weight * (size.rows - rows) * (size.seconds - seconds)
                per_row = min(per_row, size.seconds / size.rows)
        if not spread:  # all was forgotten
            self.known = False
            return
        self.row = min(max(0.0, common / spread), per_row)
        rests = [_rest(sizes.values(), self.row) for sizes in self._sizes]
        (idle, sure), (ahead, surer) = rests
        both = min(sure, surer) >= ENOUGH
        self.known = max(sure, surer) > 0.0
        self.base = max(0.0, min(idle, ahead) if both else idle if sure >= surer else ahead)
        self.trips = max(0.0, idle - self.base) if both else 0.0


def _rest(sizes: Collection[_Size], row: float) -> tuple[float, float]:
    """The seconds that are not for rows, the median over sizes by their weights, and all these weights."""
    found = sorted((size.seconds - row * size.rows, size.weight) for size in sizes)
    whole = sum(weight for _, weight in found)
    half = whole / 2
    for seconds, weight in found:
        half -= weight
        if half <= 0.0:
            return seconds, whole
    return 0.0, 0.0


@dataclass(eq=False)
class _Answered:
    """Callers whose step has ended, and who are not back."""

    at: float
    layer: int
    callers: int
    left: int
    last: float = 0.0  # seconds until the last of those who are back


class Returns:
    """Callers who were answered, and how long it takes until all of a step are back: a moving average and
    the deviation from it. Nobody is known by name: who announces a job counts as one of the layer before, and
    of those as the one who has been away for longest.
    """

    def __init__(self, most: float) -> None:
        self.most = most  # seconds; who stays away for longer is not expected any more
        self._away: deque[_Answered] = deque()
        self._late: _Answered | None = None  # those who are expected no more; one may come yet
        self._ending = False  # some member has finished the oldest step: its callers may come
        self._early = 0  # who came since, before all members have finished it
        self._mean = self._deviation = 0.0
        self._faith = 1.0  # share of callers who came back, lately
        self._known = False
        self._next: dict[int, int] = {}  # the layer that callers came back for, by the one they were answered

    @property
    def seconds(self) -> float | None:
        """Within which all callers of a step are likely back; None: unknown, or longer than one waits."""
        likely = self._mean + 2 * self._deviation
        return likely if self._known and self._faith >= LIKELY and likely <= self.most else None

    def ending(self) -> None:
        """Some member has finished the oldest step, and its callers may come from now on."""
        self._ending = True

    def answered(self, layer: int, callers: int, now: float) -> None:
        """All members have finished a step of so many jobs."""
        self._forget(now, 1.0)  # or the callers of this step would be taken for those who are away
        early = min(self._early, callers)
        self._early, self._ending = 0, False
        if callers > early:
            self._away.append(_Answered(now, layer, callers, callers - early))
        else:
            self._learn(0.0, 1.0)

    def announced(self, layer: int, now: float) -> None:
        """A job has come."""
        self.forget(now)
        if not self._away:
            self._came_unexpected(now)
            return
        found = self._of(layer)
        self._next[found.layer] = layer
        found.left -= 1
        found.last = now - found.at
        if not found.left:
            self._away.remove(found)
            self._learn(found.last, 1.0)

    def _of(self, layer: int) -> _Answered:
        """Who is away that may have come back for `layer`: of the nearest layer before it, or where there is
        none, of the last; who was answered first of those.
        """
        before = [one.layer for one in self._away if one.layer < layer]
        nearest = max(before or [one.layer for one in self._away])
        return next(one for one in self._away if one.layer == nearest)

    def _came_unexpected(self, now: float) -> None:
        """A job has come, and nobody is away: its caller is new, or early, or late."""
        late = self._late
        if self._ending:
            self._early += 1
        elif late is not None and now - late.at <= self.most:
            late.left -= 1
            self._learn(now - late.at, 1.0)
            if not late.left:
                self._late = None

    def forget(self, now: float) -> None:
        """Expects nobody any more who has stayed away for much longer than others did."""
        self._forget(now, 2.0)

    def _forget(self, now: float, times: float) -> None:
        """Expects nobody any more who has stayed away for so many times as long as others did."""
        likely = times * (self._mean + 2 * self._deviation)
        patience = min(self.most, likely) if self._known else self.most
        while self._away and now - self._away[0].at > patience:
            self._late = gone = self._away.popleft()
            back = 1.0 - gone.left / gone.callers
            self._learn(gone.last if back >= LIKELY else None, back)

    def expected(self, layer: int) -> float | None:
        """When callers were answered who are away, and come back for `layer`: the latest. None: nobody is."""
        return max((one.at for one in self._away if self._next.get(one.layer) == layer), default=None)

    def leads(self, layer: int, to: int) -> bool:
        """Whether callers of `layer` come back for the layer `to`."""
        return self._next.get(layer) == to

    def _learn(self, seconds: float | None, back: float) -> None:
        self._faith += WEIGHT * (back - self._faith)
        if seconds is None:
            return
        if not self._known:
            self._mean, self._deviation, self._known = seconds, seconds / 4, True
            return
        off = seconds - self._mean
        self._mean += WEIGHT * off
        self._deviation += WEIGHT * (abs(off) - self._deviation)


@dataclass(frozen=True)
class Last:
    """The step that was sent last."""

    layer: int
    rows: int
    started: float
    running: bool


class Gathering:
    """When the next step should start, by what was seen so far.

    gather: seconds; callers who stay away for longer are not waited for, unless a step takes longer itself.
    0: nobody is.
    """

    def __init__(self, gather: float) -> None:
        self._gather = gather
        self.costs = StepCosts()
        self.returns = Returns(gather)

    def step_ended(self, rows: int, seconds: float, lead: float | None) -> None:
        """Takes note of a step. seconds: since it was sent, or since the step before it ended where that was
        later. lead: how long before that end it was sent; None: no step was under way.
        """
        if lead is None or lead >= self.costs.trips:
            self.costs.observe(rows, seconds, ahead=lead is not None)
        else:  # neither found the members idle nor was there ahead
            self.costs.fade()
        self.returns.most = max(self._gather, self.costs.base) if self._gather else 0.0

    def start_at(self, layer: int, last: Last | None, ended: float, now: float) -> float:
        """When a step of `layer`, whose jobs wait, should start; `now` or earlier means at once.

        last: the step that was sent last, None before the first. ended: when a step last ended.
        """
        costs, away = self.costs, self.returns.seconds
        if last is None or not costs.known or away is None:
            return now
        self.returns.forget(now)
        expected, took = self.returns.expected(layer), costs.seconds(last.rows)
        beyond, ends = costs.trips + away, max(last.started + costs.trips, ended) + took
        if beyond < costs.base and last.running and self.returns.leads(last.layer, layer):
            return ends + took + away  # sooner where the step ends: then it is seen who comes
        if expected is None:
            return now  # everybody who could come is in the step under way
        back = expected + away
        if back + costs.trips - (ends if last.running else ended) < costs.base:
            return back  # a step fewer is worth the time that members are idle
        groups = 2 + int((beyond - costs.base) / took) if took else 2
        return min(back, last.started + (took + beyond) / groups)
