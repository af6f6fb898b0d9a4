"""Members on GPUs are killed and stopped under calls and under passes: how long do callers wait, and why?

    python -m bench.service.serving_on.gpu_serve_on [--sockets] [--kill] [--stop] [--passes] [--cost]
        [--ranks 2] [--shadows off on] [--redundant N ...] [--events 3] [--gigabytes 11] [--layers N]
        [--seconds 280] [--log-level info] [--folder FOLDER] [--out FILE]

`moeserve serve` runs owners of FP8 experts of 7168 x 2048 over peer memory, steps as captured graphs. Its
parts, all of them where none is named:

    sockets   a process with a GPU's memory is killed: when do its sockets close, when has it ended
    kill      a member is killed while clients make one call at a time: one asks a survivor's lane, one any;
    stop      or it is stopped. Bare gRPC asks every lane meanwhile, and tries nothing again
    passes    the same (kill and stop, unless one of them alone is named) under forward passes of a caller's
              GPU, a recorded graph; the member that has its lane, and the others, in turn. With no GPU more
              than owners it shares the last owner's, and they take turns of milliseconds: cases say so
    cost      the same calls with all of it on and off, some of each in turn, in --pairs windows

*Interruption* is the longest gap between right answers of a caller, less its median call, until all members
are back; a hang's detection is in it. `losing` and `returning` are the longest gaps until the lost member was
about to join again, and from then on. Every answer is compared with the call's first one, and two layers'
first ones with float32. With `--shadows off` the slots hold second replicas; with `on` they are empty, and
shadows in host memory cover a loss (with two owners the slots for the one are those for the other).

Behind each event stands what the service's log says, by seconds after it: where the time goes. A part takes
its share of --seconds, and leaves out events that would not fit. Prints a JSON line a case as it comes.
Writes bench/results/gpu_serve_on.jsonl after each, or FILE. Where ranks have no GPUs, all is tiny, and on the
CPU; that is written to FILE alone. Exit status 1 where an answer was wrong, or a member did not come back.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from bench.service.hops.service import checkpoint_folder
from bench.service.hops.sizes import Sizes, write_checkpoint
from bench.service.passes.gpu.clock import Clock
from bench.service.serving_on.gpu.asking import Asking
from bench.service.serving_on.gpu.callers import bare, by_client
from bench.service.serving_on.gpu.cost import cost
from bench.service.serving_on.gpu.events import Event, Scene, Tables, happen, ready
from bench.service.serving_on.gpu.passes import attached_at, by_passes
from bench.service.serving_on.gpu.service import (
    Call,
    GpuService,
    Place,
    Setup,
    Truths,
    config_of,
    known_calls,
    slot_bytes,
)
from bench.service.serving_on.gpu.sockets import sockets
from bench.service.serving_on.gpu.told import Told
from moeserve.experts.cover.slots import redundant_for

Lanes = Mapping[str, int | None]
"""To which lane each caller asks; None: any."""

Scenes = Callable[[], AbstractContextManager[Scene]]
Drawn = Callable[[Scene, int, str], tuple[Event, Lanes] | None]
"""The event of a number and a kind; None where this service would not cover it as the setup is to show."""

KINDS = ("kill", "stop")
PARTS = ("sockets", "kill", "stop", "passes", "cost")
LARGE, TINY = Sizes(7168, 2048, 64, 8, 0), Sizes(256, 128, 16, 2, 0)
SHARES = {"sockets": 1, "steps": 5, "passes": 3, "cost": 4}  # of the time, where all are run
GRACE = 60.0  # seconds that a run may take longer than it was told, before it is ended where it hangs
SURVIVOR, ANY, CALLER = "survivor's lane", "any lane", "its caller"
LOG_SHOWN = 4000  # characters, where a service fails


def setups(args: argparse.Namespace, place: Place) -> list[Setup]:
    """With replicas and with shadows, as asked for, each with as many layers as make an owner's bytes."""
    found = []
    for shadows in [text == "on" for text in args.shadows]:
        sizes = LARGE if place.gpus else TINY
        fewest = redundant_for(sizes.experts, args.ranks, replicas=not shadows)
        for redundant in args.redundant if args.redundant and place.gpus else [fewest]:
            one = Setup(_with_layers(sizes, 1), args.ranks, redundant, shadows)
            layers = round(args.gigabytes * 1e9 / one.owner_bytes) if place.gpus else 2
            sizes = _with_layers(sizes, args.layers or max(2, layers))
            found.append(Setup(sizes, args.ranks, redundant, shadows))
    return found


def _with_layers(sizes: Sizes, layers: int) -> Sizes:
    return Sizes(sizes.hidden, sizes.inner, sizes.experts, sizes.top_k, layers)


class Run:
    """One run: its options and time, and what it has told."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.place = Place.of(args.ranks, args.dispatcher)
        self.told = Told(args.out, recorded=self.place.gpus or args.out is not None)
        self.clock = Clock(args.seconds)
        self._kinds = args.kinds
        self._left = list[str]()  # of the parts, by what their shares are called

    def __call__(self) -> None:
        """Runs what is asked for; where a part fails the next one is run."""
        asked, wanted = self.args, setups(self.args, self.place)
        parts = {"steps": asked.kill or asked.stop, "passes": asked.passes, "cost": asked.cost}
        each = {"steps": self._under_steps, "passes": self._under_passes, "cost": self._cost}
        chosen = [name for name, is_wanted in parts.items() if is_wanted]
        self._left = ["sockets"] * asked.sockets + chosen * len(wanted)
        if asked.sockets:
            self._guarded("sockets", lambda: sockets(self.told, self._part("sockets"), gpus=self.place.gpus))
        for setup in wanted if chosen else ():
            slots = f"{slot_bytes(setup) / 1e9:.1f} GB"
            self.told.say(setup=str(setup), layers=setup.sizes.layers, slots=slots, left=self._seconds_left)
            with checkpoint_folder(setup.sizes) as checkpoint:
                write_checkpoint(checkpoint, setup.sizes)
                self.told.say(written=str(checkpoint), left=self._seconds_left)
                for name in chosen:
                    act = each[name]
                    self._guarded(f"{setup}: {name}", lambda: act(setup, checkpoint))  # noqa: B023

    @property
    def _seconds_left(self) -> float:
        return round(self.clock.left, 1)

    def _part(self, name: str) -> Clock:
        """A part's time: its share of what is left, among the parts that are left."""
        weights = sum(SHARES[one] for one in self._left)
        self._left.remove(name)
        return Clock(self.clock.left * SHARES[name] / weights)

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except (RuntimeError, OSError, AssertionError, LookupError, ValueError) as error:
            text = f"{what} failed: {type(error).__name__}: {error}"
            self.told.say(failed=text[-LOG_SHOWN:])
            self.told.faults.append(text[:300])

    @contextmanager
    def _serving(self, setup: Setup, checkpoint: Path) -> Iterator[tuple[GpuService, list[Call]]]:
        """A service, and calls with known answers. Where something fails, what it logged last is printed."""
        values = {"log__level": self.args.log_level, "log__repeat_seconds": 0.0, "log__bytes_per_minute": 0}
        truths, began = Truths(setup.sizes), time.monotonic()
        folder = self.folder / f"{setup}, {time.strftime('%H%M%S')}"
        with ExitStack() as stack:
            stack.callback(truths.close)
            service = GpuService(config_of(setup, self.place, checkpoint, **values), folder)
            stack.enter_context(service)
            serving = time.monotonic() - began
            calls = known_calls(service.address, setup.sizes, truths)
            answered = time.monotonic() - began
            self.told.say(serving_after=round(serving, 1), answered_after=round(answered, 1))
            try:
                yield service, calls
            except BaseException:
                print(service.log()[-LOG_SHOWN:], flush=True)
                raise

    def _under_steps(self, setup: Setup, checkpoint: Path) -> None:
        tables = Tables(setup, self.told, "steps", failing=False)

        @contextmanager
        def scenes() -> Iterator[Scene]:
            with (
                self._serving(setup, checkpoint) as (service, calls),
                Asking(by_client, service.address, calls) as survivor,
                Asking(by_client, service.address, calls) as anywhere,
                Asking(bare, service.address, calls) as raw,
            ):
                yield Scene(setup, service, {SURVIVOR: survivor, ANY: anywhere}, raw)

        def drawn(scene: Scene, number: int, kind: str) -> tuple[Event, Lanes] | None:
            for turn in range(setup.ranks):
                rank = (number + number // len(self._kinds) + turn) % setup.ranks
                if ready(scene, rank):
                    return Event(kind, rank), {SURVIVOR: (rank + 1) % setup.ranks, ANY: None}
            return None

        self._series(tables, self._part("steps"), scenes, drawn)

    def _under_passes(self, setup: Setup, checkpoint: Path) -> None:
        shared = " of a GPU that it shares with an owner" if self.place.shared else ""
        how = f"passes{shared}" if self.place.gpus else "passes from the CPU"
        tables = Tables(setup, self.told, how, failing=True)

        @contextmanager
        def scenes() -> Iterator[Scene]:
            with (
                self._serving(setup, checkpoint) as (service, calls),
                Asking(by_passes, service.address, calls, self.place.caller) as caller,
            ):
                yield Scene(setup, service, {CALLER: caller}, None)

        def drawn(scene: Scene, number: int, kind: str) -> tuple[Event, Lanes] | None:
            there = max(0, attached_at(scene.service.address))
            own = (number + number // len(self._kinds)) % 2 == 0
            rank = there if own else (there + 1) % setup.ranks
            whom = "the lane's own member" if own else "another member"
            return (Event(kind, rank, whom), {CALLER: None}) if ready(scene, rank) else None

        self._series(tables, self._part("passes"), scenes, drawn)

    def _series(self, tables: Tables, part: Clock, scenes: Scenes, drawn: Drawn) -> None:
        """Events of each kind in turn while there is time; in a fresh service where the one before would
        cover the next loss otherwise than is to be shown.
        """
        todo, number = self._kinds * self.args.events, 0
        whole, longest = 0.0, 0.0  # seconds of a service's start with an event, and of an event
        while number < len(todo) and part.left > whole:
            first, began = number, time.monotonic()
            with scenes() as scene:
                while number < len(todo) and (number == first or part.left > longest):
                    since = time.monotonic()
                    if (event := drawn(scene, number, todo[number])) is None:
                        break
                    outcome = happen(scene, *event, self.told)
                    tables.add(event[0], outcome)
                    if number == first:
                        whole = max(whole, time.monotonic() - began)
                    number, longest = number + 1, max(longest, time.monotonic() - since)
                    if "missing" in outcome.faults:
                        raise RuntimeError(outcome.faults["missing"][0])
            if number == first:
                raise RuntimeError(f"no loss was covered as it is to be shown: {tables}")
        if number < len(todo):
            self.told.say(left_out=f"{len(todo) - number} of {len(todo)} events", left=self._seconds_left)

    def _cost(self, setup: Setup, checkpoint: Path) -> None:
        folder = self.folder / f"{setup}, cost"
        folder.mkdir()
        cost(setup, self.place, (checkpoint, folder), self.told, (self._part("cost"), self.args.pairs))


def _over(*_: object) -> None:
    raise SystemExit("the run has taken longer than it was told, and is ended")  # no part goes on after it


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part, and others that are named")
    parser.add_argument(
        "--seconds", type=float, default=280.0, help="of the whole run, about; 280 by default"
    )
    parser.add_argument("--events", type=int, default=3, help="of each kind and setup; 3 by default")
    parser.add_argument("--ranks", type=int, default=2, help="owners, a GPU each; 2 by default")
    parser.add_argument("--redundant", type=int, nargs="+", help="slots beside 64; as few as cover a loss")
    parser.add_argument("--shadows", choices=("off", "on"), nargs="+", default=["off", "on"])
    parser.add_argument("--gigabytes", type=float, default=11.0, help="of experts on an owner; 11 by default")
    parser.add_argument("--layers", type=int, help="instead of --gigabytes")
    parser.add_argument(
        "--pairs", type=int, default=20, help="windows of calls, on and off in turn; 20 by default"
    )
    parser.add_argument("--dispatcher", default="nvlink_ll", help="plan.all2all_backend")
    parser.add_argument("--log-level", choices=("info", "debug"), default="info", help="of the service")
    parser.add_argument("--folder", type=Path, help="for logs, kept; a temporary one")
    parser.add_argument("--out", type=Path, help="where results go; by default into the record")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be 2 or more: others have to be left")
    if not any(getattr(args, part) for part in PARTS):
        for part in PARTS:
            setattr(args, part, True)
    args.kinds = [kind for kind in KINDS if getattr(args, kind)] or list(KINDS)
    return args


def main() -> None:
    """Runs what was asked for; all that it has started ends with it."""
    args = arguments()
    signal.signal(signal.SIGALRM, _over)
    signal.setitimer(signal.ITIMER_REAL, args.seconds + GRACE)
    with tempfile.TemporaryDirectory(prefix="gpu-serve-on-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(args, folder)
        run()
        run.told.say(left=round(run.clock.left, 1), faults=len(run.told.faults))
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if run.told.faults:
        raise SystemExit("\n".join(run.told.faults[:20]))


if __name__ == "__main__":
    main()
