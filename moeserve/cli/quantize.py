"""`moeserve quantize SRC DST --to FORMAT`: writes a checkpoint with its experts in another format."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.cli.arguments.names import named
from moeserve.cli.shown.errors import explain
from moeserve.cli.shown.units import human

if TYPE_CHECKING:
    from moeserve.checkpoints.writing.rewrite import Done, Rewrite

UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
SHARD_SIZE = "4GiB"

EPILOG = """formats, with the names of llm-compressor's presets, which are accepted too:
{formats}

Rounded to nearest, without calibration: NVFP4 activations would need calibrated scales, so nvfp4 keeps the
activations as they are. A run that was interrupted goes on where it was when the same command runs again.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand; its `func` is `run`."""
    about = "write a checkpoint with its experts in another format, as compressed-tensors stores it"
    parser = subparsers.add_parser(
        "quantize",
        help=about,
        description=about,
        epilog=EPILOG.format(formats=_formats()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", type=named, help="folder with config.json and safetensors; quantized ones are decoded"
    )
    parser.add_argument(
        "destination", type=named, help="folder to write, empty or not there yet, or one to go on with"
    )
    parser.add_argument("--to", required=True, metavar="FORMAT", help="see below")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="columns that share a scale in int4 and int4_asym: 32, 64, 128 (default), or -1 for whole rows",
    )
    parser.add_argument(
        "--shard-size",
        default=SHARD_SIZE,
        metavar="SIZE",
        help=f"about the size of a file (default {SHARD_SIZE})",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Writes the checkpoint, or the files that it lacks. Raises ValueError and OSError as `Rewrite.run`."""
    from moeserve.checkpoints.checkpoint import Checkpoint
    from moeserve.checkpoints.writing.rewrite import Rewrite
    from moeserve.checkpoints.writing.targets import target_named

    source = Checkpoint(args.source)
    target = target_named(args.to, source.dtype, args.group_size)
    work = Rewrite(source, Path(args.destination), target, size_of(args.shard_size))
    began = time.monotonic()
    try:
        done = _with_bar(work, quiet=args.quiet)
    except KeyboardInterrupt:
        print(
            f"\nmoeserve quantize: interrupted; run it again to go on with {args.destination}",
            file=sys.stderr,
        )
        raise
    if not args.quiet:
        print(_summary(work, done, time.monotonic() - began))
    return 0


def size_of(text: str) -> int:
    """Returns the bytes of `500MiB`, `4GiB`, `5GB` or a positive number. Raises ValueError for others."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    size = 0.0 if found is None else float(found[1]) * UNITS.get(found[2].upper(), 0)
    if not 1 <= size < math.inf:
        raise ValueError(f"--shard-size={text!r} must be a size, as 500MiB or {SHARD_SIZE}")
    return int(size)


def _formats() -> str:
    """Returns the table of formats for the help, or the extra that installs torch where it is missing."""
    try:
        from moeserve.checkpoints.writing.targets import TARGETS
    except ModuleNotFoundError as error:
        return f"  (not shown: {explain(error)})"
    return "\n".join(f"  {name:<11} {entry.preset:<12} {entry.about}" for name, entry in TARGETS.items())


def _with_bar(work: Rewrite, *, quiet: bool) -> Done:
    from tqdm import tqdm

    hidden = quiet or not sys.stderr.isatty()
    with tqdm(total=work.plan.nbytes, unit="B", unit_scale=True, desc="quantize", disable=hidden) as bar:
        return work.run(bar.update)


def _summary(work: Rewrite, done: Done, seconds: float) -> str:
    source = work.source
    read = sorted({source.scheme(layer).name for layer in source.layers})
    files = len(done.written) + len(done.kept)
    lines = [
        f"{work.destination}: {human(done.nbytes)} in {files} files, {seconds:.1f} s",
        f"experts: {', '.join(read)} -> {work.target.form}, as compressed-tensors {work.target.entry.preset}",
    ]
    if source.quantization is not None:
        lines.append("the source was quantized already: its rounding stays, the new one comes on top")
    if source.family.interleaved:  # gpt-oss: its class in transformers has no per-expert names to load from
        lines.append(
            f"experts stand one by one: transformers' own {source.model_type} does not look for them so"
        )
    if work.plan.decoded:
        lines.append(f"{work.plan.decoded} FP8 matrices beside the experts were decoded to {source.dtype}")
    if done.kept:
        lines.append(f"{len(done.kept)} files of an earlier run were kept")
    if done.broken:
        lines.append(f"other bytes than recorded, written anew: {', '.join(done.broken)}")
    return "\n".join(lines)
