"""`make fuzz`: the targets for as long as one likes, guided by atheris where it is installed.

    python tests/fuzz/guided.py [TARGET ...] [--seconds 60] [--seed 1] [--own]

Without atheris, or with --own, the small fuzzer of tests/support/fuzzing.py runs in its place. Each target
is run by a process of its own. An input that breaks the law is written to `.fuzz-found/TARGET-N`; the exit
status is 1 then.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

FOUND = ROOT / ".fuzz-found"
LONGEST_INPUT = 1 << 20
START_SECONDS = 600.0  # for a target to import what it needs, on a machine that does much else


def kept(name: str, data: bytes, text: str) -> None:
    """Writes an input that broke the law, and shows how."""
    FOUND.mkdir(exist_ok=True)
    path = FOUND / f"{name}-{len(list(FOUND.glob(f'{name}-*')))}"
    path.write_bytes(data)
    print(f"{path.relative_to(ROOT)}:\n{text[-3000:]}", flush=True)


def by_own(name: str, seconds: float, seed: int) -> int:
    """Runs a target with the fuzzer of our own."""
    from fuzz_targets import TARGETS
    from fuzzing import fuzz

    with tempfile.TemporaryDirectory() as folder:
        outcome = fuzz(TARGETS[name], Path(folder), seed, sys.maxsize, seconds)
    for data, text in outcome.broken:
        kept(name, data, text)
    print(
        f"{name}: {outcome.inputs} inputs, {outcome.corpus} kept, {outcome.lines} lines reached", flush=True
    )
    return len(outcome.broken)


def by_atheris(name: str, seconds: float, seed: int) -> int:
    """Runs a target with libFuzzer, which ends at the first input that breaks the law."""
    import atheris

    with atheris.instrument_imports(include=["moeserve"], enable_loader_override=False):
        from fuzz_targets import TARGETS
        from fuzzing import Broken

    from bench.lib.mutations import Mutations

    target, count, draw = TARGETS[name], [0], random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, target.opened(Path(folder)) as (seeds, run):
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for number, data in enumerate(seeds):
            (corpus / str(number)).write_bytes(data)

        def one(data: bytes) -> None:
            count[0] += 1
            try:
                target.check(run, data)
            except Broken as broken:
                kept(name, data, str(broken))
                raise

        def mutated(data: bytes, longest: int, given: int) -> bytes:
            if draw.random() < 0.5:
                return bytes(atheris.Mutate(data, longest))
            return target.mutate(Mutations(given), data, seeds)[:longest]

        words = [
            f"-max_total_time={int(seconds)}",
            f"-seed={seed}",
            f"-max_len={LONGEST_INPUT}",
            "-verbosity=0",
        ]
        words += ["-rss_limit_mb=8192", f"-artifact_prefix={folder}/", str(corpus)]
        atheris.Setup([sys.argv[0], *words], one, custom_mutator=mutated)
        atheris.Fuzz()  # ends the process
    return 0


def main() -> int:
    """Runs the targets one after the other, each in a process that has done nothing."""
    from fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--own", action="store_true", help="use no atheris")
    args = parser.parse_args()
    try:
        import atheris  # noqa: F401

        own = args.own
    except ImportError:
        print("atheris is not installed: our own fuzzer runs in its place")
        own = True
    found = len(list(FOUND.glob("*")))
    spawn = multiprocessing.get_context("spawn")
    for name in args.targets or TARGETS:
        process = spawn.Process(target=_one, args=(name, args.seconds, args.seed, own))
        process.start()
        process.join(args.seconds + START_SECONDS)
        if process.is_alive():
            process.kill()
            kept(name, b"", f"it did not end within {args.seconds + START_SECONDS:g} s: an input hangs")
        elif process.exitcode not in (0, 1, 77):
            print(f"{name} ended with {process.exitcode}")
    return int(len(list(FOUND.glob("*"))) > found)


def _one(name: str, seconds: float, seed: int, own: bool) -> None:
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    (by_own if own else by_atheris)(name, seconds, seed)


if __name__ == "__main__":
    sys.exit(main())
