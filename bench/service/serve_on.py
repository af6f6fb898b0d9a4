"""Members and the head are lost, ranks come and go: how long do callers wait, does any call fail?

    python -m bench.service.serve_on [--show members] [--show head] [--show scale] [--show cost]
        [--launcher local ray] [--redundant 0 24 64] [--shadows off on] [--cold] [--spares 0]
        [--events kill=5,stop=5,double=0] [--seed 0] [--from 0] [--outcomes FILE] [--merge FILE ...]

`moeserve serve` runs 4 members with 300 MB of experts each, on a CPU. One client makes one call at a time;
beside it bare gRPC asks every lane by unary calls and by streams and tries nothing again. Every answer is
compared with what one process computes.

members: a member is killed or stopped, or two are killed, by a seed, in each of the setups. *Interruption* is
the longest gap between right answers of the client, less its median call, until all members are back; a
hang's detection is in it. Counted are answers that are wrong, requests answered twice, calls that failed with
default patience, bare calls that failed on lanes whose process lived, and processes left over. `--outcomes`
appends each event's outcome to a file, and a run with the same file goes on after those that it holds.
`--merge` judges such files; it runs nothing. `--cold` drops the checkpoint from the page cache first.
head: the head is killed `--kills` times. scale: one rank more and one fewer, `--rounds` times.
cost: the same calls with all of it on and off, `--pairs` times.

Writes bench/results/serve_on.jsonl with `--record`; exit status 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.lib.record import Result, write
from bench.service.serving_on.cost import cost
from bench.service.serving_on.events import Outcome, Setup, drawn, outcomes_of
from bench.service.serving_on.head import heads
from bench.service.serving_on.members import members
from bench.service.serving_on.run import Run
from bench.service.serving_on.scale import scales
from bench.service.serving_on.tables import kinds_of, table

SHOWS = ("members", "head", "scale", "cost")


def setups(args: argparse.Namespace) -> list[Setup]:
    """Every combination that is asked for."""
    shadows = [text == "on" for text in args.shadows]
    found = itertools.product(args.launcher, args.redundant, shadows)
    return [Setup(launcher, slots, shadow, args.cold, args.spares) for launcher, slots, shadow in found]


def run_members(run: Run) -> tuple[list[Result], list[str]]:
    """The events of every setup that are not in the file of outcomes yet."""
    args, outcomes = run.args, list[Outcome]()
    wanted = {setup: drawn(setup, args.seed, args.events, args.ranks) for setup in setups(args)}
    if args.outcomes is not None:
        kept = {(one.setup, one.event): one for one in outcomes_of([args.outcomes])}
        every = [(setup, event) for setup, events in wanted.items() for event in events]
        outcomes = [kept[key] for key in every if key in kept]
        done = {(one.setup, one.event) for one in outcomes}
        wanted = {s: [e for e in events if (s, e) not in done] for s, events in wanted.items()}
    for setup, events in wanted.items():
        for outcome in members(run, setup, [event for event in events if event.number >= args.first]):
            outcomes.append(outcome)
            print(outcome, flush=True)
            if args.outcomes is not None:
                with args.outcomes.open("a") as lines:
                    lines.write(outcome.line())
    return judged(outcomes)


def judged(outcomes: list[Outcome]) -> tuple[list[Result], list[str]]:
    """The tables, and what is not as it should be."""
    return table(outcomes), [str(one) for one in outcomes if one.faults]


def shown(run: Run) -> Iterator[tuple[list[Result], list[str]]]:
    """Runs what is asked for."""
    for show in run.args.show or ("members",):
        if show == "members":
            yield run_members(run)
            continue
        for setup in setups(run.args):
            print(f"-- {show}, {setup}", flush=True)
            yield {"head": heads, "scale": scales, "cost": cost}[show](run, setup)


def arguments() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--show", choices=SHOWS, action="append", help="members when none is given")
    parser.add_argument("--launcher", choices=("local", "ray"), nargs="+", default=["local"])
    parser.add_argument("--redundant", type=int, nargs="+", default=[0, 24, 64], help="slots beside 64")
    parser.add_argument("--shadows", choices=("off", "on"), nargs="+", default=["off"])
    parser.add_argument("--cold", action="store_true", help="drop the checkpoint from the page cache first")
    parser.add_argument("--spares", type=int, default=0, help="cluster.spares, of Ray")
    parser.add_argument("--events", type=kinds_of, default="kill=5,stop=5,double=0", help="of each setup")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=300.0, help="of experts on each member")
    parser.add_argument("--raw-pause", type=float, default=0.2, help="seconds between a lane's bare calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", type=int, default=0, dest="first", help="leave out a setup's first events")
    parser.add_argument("--outcomes", type=Path, help="append each outcome here; go on after those it holds")
    parser.add_argument("--merge", type=Path, nargs="+", help="judge the events of these files; run nothing")
    parser.add_argument("--kills", type=int, default=20, help="of the head")
    parser.add_argument("--rounds", type=int, default=3, help="of one rank more and one fewer")
    parser.add_argument("--pairs", type=int, default=20, help="of windows, on and off")
    parser.add_argument("--folder", type=Path, help="for the checkpoint and logs, kept; a temporary one")
    parser.add_argument("--wait-shadows", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--record", action="store_true", help="write bench/results/serve_on.jsonl")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be 2 or more: others have to be left")
    return args


def main() -> None:
    """Runs the shows that are asked for. What it has started ends with it, also where it is told to end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    args = arguments()
    if args.merge:
        found = [judged(outcomes_of(args.merge))]
    else:
        with tempfile.TemporaryDirectory(prefix="serve-on-") as temporary:
            folder = args.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            found = list(shown(Run(args, folder)))
    results, faults = [r for some, _ in found for r in some], [f for _, some in found for f in some]
    for result in results:
        print(f"{result.case}: {result.ours:.4g} {result.unit} (aim {result.aim})")
    if args.record:
        write(results)
    if faults:
        print("\n".join(faults[:20]))
        sys.exit(1)


if __name__ == "__main__":
    main()
