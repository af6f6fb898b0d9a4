"""Ranks are stopped, killed and hung in every state: the service comes back by itself and names the guilty.

    python -m bench.service.chaos [--launcher local|ray] [--ranks 3] [--seed 0] [--record]
        [--show states] [--show kills] [--show starts] [--show calm]
        [--shard 1/4] [--outcomes FILE] [--merge FILE ...]

`moeserve serve` runs in a process of its own. Callers in processes of theirs ask all the time, and every
answer is compared with what one process computes. What happens to a rank happens at a point of its code that
is armed from outside (`bench/service/faults/points.py`).

states: each rank, in each of `--states`, does each of `--actions` (stop, kill; also hang, a thread that
sleeps for ever, and hold, one that holds the interpreter meanwhile). Served again by itself, and after how
long; is the guilty named in the log, and nobody else; has every rank exactly one process afterwards.
kills: random ranks are killed, `--kills` in `--kill-seconds`, then nothing happens for `--quiet` seconds.
starts: a rank that cannot start, `--starts` times. calm: `--calm` seconds in which every rank's interpreter
is held for 6 s now and then, and nothing may happen.

The states may be shared out: `--shard 1/4` takes every fourth case of the seed's order, and `--outcomes`
appends what became of each to a file. `--merge` judges the cases of such files as one run's; it runs nothing.

Writes bench/results/chaos.jsonl with `--record`; exit status 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.lib.record import Result, write
from bench.service.faults.callers import Callers
from bench.service.faults.points import ACTIONS, ENTERED, INSIDE, STALLS, arm, fired
from bench.service.faults.service import Service
from bench.service.moves import Size, alone, make_batch, make_checkpoint
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.config import Config

SIZE = Size(hidden=64, inner=32, experts=12, layers=2, redundant=0, rows=24)
STATES = ("idle", *ENTERED, *INSIDE)
SHOWS = ("states", "kills", "starts", "calm")
CALLERS, WORKLOADS = 2, 6
FIRED_SECONDS, BACK_SECONDS = 60.0, 90.0
DRAIN_SECONDS, END_MORE_SECONDS = 5.0, 15.0
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
NAMED = r"is given up|is lost|is killed|has ended|ended with"


@dataclass(frozen=True)
class Case:
    """One rank that something happens to, in a state."""

    state: str
    rank: int
    action: str

    def __str__(self) -> str:
        return f"{self.state}: rank {self.rank}, {self.action}"


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    case: Case
    seconds: float  # until an answer to a call that was made afterwards; of draining, until the end
    missing: str = ""  # why it does not serve with one process a rank, or does not end; empty: it does
    unnamed: str = ""  # what the log lacks, or says of others; empty: the guilty alone is named

    def line(self) -> str:
        """As a line of a file that `outcomes_of` reads."""
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        said = self.missing or self.unnamed or f"{self.seconds:.2f} s"
        return f"{self.case}: {said}"


def outcomes_of(paths: list[Path]) -> list[Outcome]:
    """Those in the files, also of a case that was run more than once."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [Outcome(Case(**line.pop("case")), **line) for line in lines]


class Chaos:
    """One run: its options, the checkpoint that is served, and calls with their answers."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.random = random.Random(args.seed)
        self.checkpoints = [folder / "one", folder / "other"]
        self.checkpoints[0].mkdir()
        make_checkpoint(self.checkpoints[0], SIZE, "fp32")
        shutil.copytree(*self.checkpoints)  # the same weights: answers stay
        self.calls = []
        for number in range(WORKLOADS):
            layer, batch = number % SIZE.layers, make_batch(SIZE, number, args.seed + number)
            self.calls.append((layer, batch, alone(self.checkpoints[0], layer, batch)))
        self.right, self.wrong = 0, list[str]()
        self._services = 0

    def service(self) -> Service:
        """A service that is yet to be started."""
        self._services += 1
        values = {
            "model.checkpoint": str(self.checkpoints[0]),
            "parallel.data_parallel_size": self.args.ranks,
            "parallel.enable_expert_parallel": True,
            "plan.device": "cpu",
            "server.port": 0,
            "server.metrics_port": -1,
            "server.drain_seconds": DRAIN_SECONDS,
            "step.lane_rows": 256,
            "cluster.launcher": self.args.launcher,
            "cluster.threads_per_rank": 1,
            "cluster.cpus_per_rank": 0.1,
        }
        return Service(Config().with_values(values), self.folder / f"service {self._services}")

    def callers(self, service: Service) -> Callers:
        """Callers of a service; `count` takes what they found."""
        return Callers(service.address, self.calls, CALLERS, self.args.seed)

    def count(self, callers: Callers) -> None:
        """Adds up what callers that have ended found."""
        self.right += callers.right
        self.wrong += callers.wrong

    def cases(self, states: tuple[str, ...]) -> list[Case]:
        """Every rank in each of the states, with each action, in an order of the seed's."""
        ranks, actions = range(self.args.ranks), self.args.actions
        found = [Case(state, rank, action) for state in states for rank in ranks for action in actions]
        self.random.shuffle(found)
        number, count = self.args.shard
        return found[number - 1 :: count]

    def note(self, outcomes: list[Outcome], outcome: Outcome) -> None:
        """Adds what became of a case, prints it, and writes it to the file of outcomes where there is one."""
        outcomes.append(outcome)
        print(outcome, flush=True)
        if self.args.outcomes is not None:
            with self.args.outcomes.open("a") as lines:
                lines.write(outcome.line())


# -- states --------------------------------------------------------------------------------------------------


def states(chaos: Chaos) -> list[Outcome]:
    """Every case of the states, one after the other in one service; those of draining each in its own.

    Where a service did not serve again the other cases have one of their own.
    """
    outcomes: list[Outcome] = []
    serving = tuple(state for state in chaos.args.states if state != "draining")
    cases = chaos.cases(serving)
    while cases:
        with chaos.service() as service, chaos.callers(service) as callers:
            missing = ""
            while cases and not missing:
                chaos.note(outcomes, happen(chaos, service, callers, cases.pop(0)))
                if missing := outcomes[-1].missing:
                    print(service.log()[-6000:])
        chaos.count(callers)
    if "draining" in chaos.args.states:
        for case in chaos.cases(("draining",)):
            chaos.note(outcomes, drained(chaos, case))
    return outcomes


def happen(chaos: Chaos, service: Service, callers: Callers, case: Case) -> Outcome:
    """Has one case happen, and waits until the service is whole again."""
    generation, mark, before = service.status()[2], service.logged(), service.living()
    callers.answers(0.0)
    others = {pid for pids in before.values() for pid in pids}
    pid, at, others = provoke(chaos, service, callers, (case, others))
    if not pid:
        return Outcome(case, 0.0, f"the point was not reached within {FIRED_SECONDS:g} s")
    missing = service.wait_whole(generation, BACK_SECONDS)
    callers.go_on()
    until = time.monotonic() + BACK_SECONDS
    back = None
    while back is None and not missing and time.monotonic() < until:
        found = [one.ended for one in callers.answers(0.05) if one.began > at and not one.wrong]
        back = min(found, default=None)
    if back is None:
        return Outcome(case, 0.0, missing or "no answer came")
    return Outcome(case, back - at, "", unnamed(service.log(mark), case, pid, others))


def provoke(
    chaos: Chaos, service: Service, callers: Callers, what: tuple[Case, set[int]]
) -> tuple[int, float, set[int]]:
    """Brings the service into the state, in which the rank meets its end: its process, when, and which other
    processes are to be left alone. No process: it has not come there.
    """
    (case, others), living = what, service.living()
    own, another = living[case.rank][0], living[(case.rank + 1) % chaos.args.ranks][0]
    if case.state == "idle":
        callers.pause()
        callers.answers(0.5)
        os.kill(own, SIGNALS[case.action])
        return own, time.time(), others - {own}
    arm(service.folder, case.state, case.rank, case.action)
    if case.state == "forming":
        os.kill(own, signal.SIGKILL)  # its heir comes there
        others -= {own}
    elif case.state in ("preparing", "joining"):
        os.kill(another, signal.SIGKILL)
        others -= {another}
    elif case.state.endswith("a move"):
        threading.Thread(target=reload, args=(service, chaos.checkpoints), daemon=True).start()
    until = time.monotonic() + FIRED_SECONDS
    while (met := fired(service.folder, case.state, case.rank)) is None:
        if time.monotonic() > until:
            return 0, 0.0, others
        time.sleep(0.01)
    for path in service.folder.glob(f"fired.{case.state}.*"):
        path.unlink()
    return *met, others - {met[0]}


def reload(service: Service, checkpoints: list[Path]) -> None:
    """Has every layer change its weights, for the same ones of another folder; ends with the generation."""
    checkpoints.reverse()
    try:
        with MoeClient(service.address) as client:
            client.reload(str(checkpoints[0]), timeout=FIRED_SECONDS)
    except MoeError as error:
        print(f"a reload ended: {error}")


def unnamed(log: str, case: Case, pid: int, others: set[int]) -> str:
    """What the log lacks of the guilty, or says of others; empty where it names the guilty alone."""
    found = {int(one) for one in re.findall(rf"rank \d+ \(pid (\d+)\)[^;\n]*? (?:{NAMED})", log)}
    if pid not in found:
        return f"the log does not name rank {case.rank} (pid {pid}):\n{log}"
    if blamed := found & others:
        return f"the log blames processes {sorted(blamed)}, and it was {pid}:\n{log}"
    return ""


def drained(chaos: Chaos, case: Case) -> Outcome:
    """One case while a service is told to stop: it ends in time, and leaves no process."""
    with chaos.service() as service, chaos.callers(service) as callers:
        callers.pause()
        callers.answers(1.0)  # those under way: nobody answers them afterwards
        arm(service.folder, case.state, case.rank, case.action)
        seconds = service.end()
        bound, left = DRAIN_SECONDS + END_MORE_SECONDS, service.living()
        if seconds > DRAIN_SECONDS:
            print(service.log()[-4000:])
        callers.answers(0.5)
        if fired(service.folder, case.state, case.rank) is None:
            return Outcome(case, seconds, "the point was not reached")
    chaos.count(callers)
    processes = [pid for pids in left.values() for pid in pids]
    missing = f"after {seconds:.1f} s it has left {processes}" if seconds > bound or processes else ""
    return Outcome(case, seconds, missing)


# -- kills, starts, calm -------------------------------------------------------------------------------------


def kills(chaos: Chaos) -> list[str]:
    """Random ranks are killed, evenly over the time; then nothing happens, and the service serves."""
    args, faults = chaos.args, []
    with chaos.service() as service, chaos.callers(service) as callers:
        began, killed = time.monotonic(), 0
        while killed < args.kills:
            time.sleep(max(0.0, began + killed * args.kill_seconds / args.kills - time.monotonic()))
            living = [pid for pids in service.living().values() for pid in pids]
            if living:
                os.kill(chaos.random.choice(sorted(living)), signal.SIGKILL)
                killed += 1
        took, quiet = time.monotonic() - began, time.monotonic()
        print(f"{killed} kills in {took:.1f} s; {len(callers.answers(0.0))} answers meanwhile", flush=True)
        if missing := service.wait_whole(0, args.quiet):
            faults.append(f"after {killed} kills: {missing}")
        back, generation = time.monotonic() - quiet, service.status()[2]
        time.sleep(max(0.0, quiet + args.quiet - time.monotonic()))
        if (now := service.status())[0] != "serving" or now[2] != generation:
            faults.append(f"after {args.quiet:g} s of quiet: {now}, and it was generation {generation}")
        if not callers.answers(5.0):
            faults.append(f"no answer after {args.quiet:g} s of quiet")
        print(f"serving again {back:.2f} s after the last kill", flush=True)
    chaos.count(callers)
    record(chaos.args, "kills", [(f"{killed} kills in {took:.0f} s: served again after", back, "s", "lower")])
    return faults


def starts(chaos: Chaos) -> list[str]:
    """A rank that cannot start again backs off and is reported, and comes back once it can."""
    args, faults = chaos.args, []
    with chaos.service() as service, chaos.callers(service) as callers:
        callers.answers(1.0)
        callers.pause()
        rank, mark, generation = chaos.random.randrange(args.ranks), service.logged(), service.status()[2]
        away = chaos.folder / "away"
        chaos.checkpoints[0].rename(away)
        began = time.monotonic()
        os.kill(service.living()[rank][0], signal.SIGKILL)
        text = rf"rank {rank} \(pid .* started again in (\S+) s \(failed starts in a row: (\d+)\)"
        while not (found := {int(n): float(s) for s, n in re.findall(text, service.log(mark))}).get(
            args.starts
        ):
            if time.monotonic() - began > 60.0 + 20.0 * args.starts:
                faults.append(f"{len(found)} failed starts of {args.starts}")
                break
            time.sleep(0.2)
        took, (state, reason, _) = time.monotonic() - began, service.status()
        pauses = [pause for number, pause in sorted(found.items()) if number]
        print(f"{len(pauses)} failed starts in {took:.1f} s, pauses {pauses}", flush=True)
        bounds = [min(10.0, 0.1 * 2.0**number) for number in range(len(pauses))]
        if not all(bound / 2 - 0.1 <= p <= bound + 0.1 for p, bound in zip(pauses, bounds, strict=True)):
            faults.append(f"pauses {pauses} are not those of {bounds}, less up to half")
        if state != "forming" or f"rank {rank} cannot start: " not in reason:
            faults.append(f"the status says {state}: {reason}")
        away.rename(chaos.checkpoints[0])
        if missing := service.wait_whole(generation, BACK_SECONDS):
            faults.append(f"after {args.starts} failed starts: {missing}\n{service.log(mark)[-6000:]}")
        callers.go_on()
        if not callers.answers(5.0):
            faults.append("no answer once it could start")
    chaos.count(callers)
    case = f"{len(pauses)} starts that cannot succeed took, with their pauses"
    record(chaos.args, "starts", [(case, took, "s", "higher")])
    return faults


def calm(chaos: Chaos) -> list[str]:
    """Interpreters are held up now and then, and nobody is to blame for anything."""
    faults = []
    with chaos.service() as service, chaos.callers(service) as callers:
        generation, mark = service.status()[2], service.logged()
        (service.folder / STALLS).touch()
        until = time.monotonic() + chaos.args.calm
        while time.monotonic() < until:
            callers.answers(1.0)
        stalls = len((service.folder / "stalled").read_text().splitlines())
        alarms = re.findall(rf".*(?:{NAMED}|aborts|is late).*", service.log(mark))
        if alarms or service.status()[2] != generation:
            faults.append(f"false alarms: {alarms}")
        if not stalls:
            faults.append("no interpreter was held up")
    chaos.count(callers)
    case = f"false alarms in {chaos.args.calm:g} s with {stalls} stalls of 6 s"
    record(chaos.args, "calm", [(case, float(len(alarms)), "alarms", "lower")])
    return faults


# -- records -------------------------------------------------------------------------------------------------


def record(args: argparse.Namespace, show: str, numbers: list[tuple[str, float, str, str]]) -> None:
    """Writes numbers, each with what it is, its unit and which is better; only where asked to."""
    if args.record:
        cases = ((f"{args.launcher}, {show}: {case}", *rest) for case, *rest in numbers)
        write(Result("chaos", case, *rest) for case, *rest in cases)  # type: ignore[arg-type]


def judge(args: argparse.Namespace, outcomes: list[Outcome]) -> list[str]:
    """What is not as it should be in the states, and the record of it."""
    served = [one for one in outcomes if not one.missing]
    named = [one for one in served if not one.unnamed and one.case.state != "draining"]
    judged = [one for one in outcomes if one.case.state != "draining"]
    numbers = [
        (f"served again with one process a rank, of {len(outcomes)} cases", len(served), "cases", "higher"),
        (f"the guilty alone named, of {len(judged)} cases", len(named), "cases", "higher"),
    ]
    for state in STATES:
        for action in ACTIONS:
            seconds = [o.seconds for o in served if (o.case.state, o.case.action) == (state, action)]
            if seconds:
                numbers.append((f"{state}, {action}: longest time back", max(seconds), "s", "lower"))
    for case, value, unit, _ in numbers:
        print(f"{case}: {value:.4g} {unit}")
    record(args, "states", numbers)
    return [str(one) for one in outcomes if one.missing or one.unnamed]


def shown(chaos: Chaos) -> Iterator[str]:
    """Runs what is asked for; what is not as it should be."""
    for show in chaos.args.show or SHOWS:
        print(f"-- {show}, {chaos.args.launcher} launcher", flush=True)
        if show == "states":
            yield from judge(chaos.args, states(chaos))
        elif show == "kills":
            yield from kills(chaos)
        elif show == "starts":
            yield from starts(chaos)
        else:
            yield from calm(chaos)


def shard(text: str) -> tuple[int, int]:
    """`2/4` as the second of four. Raises ValueError."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"{text}: the first number must be 1 to {count}")
    return number, count


def main() -> None:
    """Runs the shows that are asked for, all by default."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--launcher", choices=("local", "ray"), default="local")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", choices=SHOWS, action="append", help="all when none is given")
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--actions", nargs="+", choices=ACTIONS, default=("stop", "kill"))
    parser.add_argument("--shard", type=shard, default=(1, 1), help="of the states' cases, such as 2/4")
    parser.add_argument("--outcomes", type=Path, help="append what became of each state's case to this file")
    parser.add_argument("--merge", type=Path, nargs="+", help="judge the cases of these files; run nothing")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kill-seconds", type=float, default=200.0)
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds after the kills")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--calm", type=float, default=600.0, help="seconds")
    parser.add_argument("--record", action="store_true", help="write bench/results/chaos.jsonl")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be 2 or more: others have to be left alone")
    if args.merge:
        faults = judge(args, outcomes_of(args.merge))
        print("\n".join(faults))
        sys.exit(bool(faults))
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(args, Path(folder))
        faults = list(shown(chaos))
    print(f"{chaos.right} answers were right, {len(chaos.wrong)} were not")
    if faults or chaos.wrong:
        print("\n".join([*faults, *chaos.wrong[:10]]))
        sys.exit(1)


if __name__ == "__main__":
    main()
