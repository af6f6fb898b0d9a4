"""The configuration file and the flags that override it, as `serve` and `plan` take them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from moeserve.cli.arguments.names import named

if TYPE_CHECKING:
    from moeserve.runtime.config import Config

CHECKPOINT = "model.checkpoint"

FLAGS: dict[str, tuple[str, type, str]] = {
    "--checkpoint": (CHECKPOINT, str, "folder with config.json and safetensors, or org/name of a hub"),
    "--load-as": ("model.load_as", str, "scheme to quantize experts to while they are loaded"),
    "--data-parallel-size": (
        "parallel.data_parallel_size",
        int,
        "number of groups of ranks, each with tokens of its own",
    ),
    "--tensor-parallel-size": ("parallel.tensor_parallel_size", int, "number of ranks in one such group"),
    "--all2all-backend": (
        "plan.all2all_backend",
        str,
        "all2all backend that carries tokens to experts; auto lets the plan choose",
    ),
    "--kernel": ("plan.kernel", str, "kernel that computes experts; auto lets the plan choose"),
    "--max-lanes": (
        "members.max_lanes",
        int,
        "number of lanes the group has room for, its ranks' own counted; 0: as many as ranks",
    ),
    "--max-owners": (
        "members.max_owners",
        int,
        "number of members that may hold experts, its ranks counted; 0: as many as ranks",
    ),
    "--device": ("plan.device", str, "where experts are computed: auto, cpu or cuda"),
}
SERVE_FLAGS: dict[str, tuple[str, type, str]] = {
    "--host": ("server.host", str, "address to listen on"),
    "--port": ("server.port", int, "port of the front door; 0 picks a free one"),
    "--metrics-port": (
        "server.metrics_port",
        int,
        "port of the head's metrics, and rank r takes this + 1 + r; 0 picks free ports, -1 turns metrics off",
    ),
    "--health-port": (
        "server.health_port",
        int,
        "port on which a process of its own answers probes; 0 picks a free one, -1 turns them off",
    ),
    "--held-multiprocessors": (
        "members.held_multiprocessors",
        int,
        "number of multiprocessors of each GPU that waiting kernels of others may hold",
    ),
    "--ray-address": (
        "cluster.ray_address",
        str,
        "address of an existing Ray cluster; by default RAY_ADDRESS, else one is started",
    ),
    "--launcher": (
        "cluster.launcher",
        str,
        "what starts the ranks: ray, or local for processes of this machine",
    ),
    "--log-level": ("log.level", str, "level from which on to log: debug, info, warning or error"),
    "--log-format": ("log.format", str, "format of the log: text, or json for one object a line"),
}
"""Flag -> (dotted key of the configuration, type, help)."""

LAST_LAYER = (1 << 16) - 1  # of a range, which is written out before any checkpoint is read

METAVARS = {"--load-as": "SCHEME"}
"""The name of a flag's value in the help, where it is not the flag's last word."""


def add_config_flags(parser: argparse.ArgumentParser, *, serving: bool) -> None:
    """Adds the words and the flags; `serving` adds those of where to listen and what starts the ranks."""
    parser.add_argument(
        "words",
        nargs="*",
        type=named,
        metavar="MODEL|CONFIG.toml",
        help="folder of a checkpoint or org/name of a hub, the same as --checkpoint; a file is the "
        "configuration, and flags override it",
    )
    for flag, (key, kind, text) in (FLAGS | (SERVE_FLAGS if serving else {})).items():
        name = METAVARS.get(flag, flag.rpartition("-")[2].upper())
        parser.add_argument(flag, dest=key, type=kind, metavar=name, help=text)
    parser.add_argument(
        "--enable-expert-parallel",
        dest="parallel.enable_expert_parallel",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="place every expert whole on one rank; without it every rank holds a slice of every expert",
    )
    if serving:
        parser.add_argument(
            "--allow-plaintext",
            dest="keys.allow_plaintext",
            action="store_true",
            default=None,
            help="listen beyond loopback although nothing is encrypted",
        )
    parser.add_argument(
        "--layers",
        dest="model.layers",
        type=numbers,
        metavar="0,2-5",
        help="decoder layers to serve; by default all that have experts",
    )


def config_of(args: argparse.Namespace, over_file: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """The configuration that a command line means. Raises ConfigError, naming key and value.

    `over_file` are dotted keys that override the file; flags override both. A hub's repository is downloaded
    where the cache lacks it, and named by its commit, so that every process opens the same files.
    """
    from moeserve.checkpoints.hub import pinned

    config = given(args, over_file).checked()
    return config.with_values({CHECKPOINT: pinned(config.model.checkpoint, folders=False)})


def given(args: argparse.Namespace, over_file: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Returns the same configuration, unchecked: it may lack a checkpoint.

    Relative paths of flags start at the working directory. Raises ConfigError, or ValueError for two files or
    two checkpoints.
    """
    from moeserve.runtime.config import Config

    files = [word for word in args.words if _is_file(word)]
    if len(files) > 1:
        raise ValueError(f"{' and '.join(files)} are two configurations: give one")
    config = Config.load(files[0]) if files else Config()
    flags = {key: value for key, value in vars(args).items() if "." in key and value is not None}
    models = [word for word in args.words if word not in files]
    if models:
        flags[CHECKPOINT] = one_checkpoint(models, flags.get(CHECKPOINT))
    chosen = dict(over_file) | flags
    resolved = config.with_values(chosen).resolved(Path.cwd())
    # the file's own was taken from the file's folder, also where org/name is a folder here
    return resolved if CHECKPOINT in chosen else resolved.with_values({CHECKPOINT: config.model.checkpoint})


def one_checkpoint(words: Sequence[str], flag: str | None) -> str:
    """The checkpoint that a command line names, as a word or by `--checkpoint`.

    ValueError: it names none, or two, with what it names.
    """
    named = [*words, *([f"--checkpoint {flag}"] if flag else [])]
    if not named:
        raise ValueError(
            "no checkpoint is named: give a folder with config.json and safetensors, or org/name of a hub"
        )
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} name {len(named)} checkpoints: give one")
    return flag or words[0]


def _is_file(word: str) -> bool:
    """Whether a word is a configuration: a file, a pipe, or a name that ends in .toml and is no folder."""
    path = Path(word)
    return (path.exists() or path.suffix == ".toml") and not path.is_dir()


def numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a text such as `0,2-5`, ascending. Raises ArgumentTypeError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise argparse.ArgumentTypeError(f"{text!r} must be numbers and ranges, such as 0,2-5")
        if int(last or first) > LAST_LAYER:
            raise argparse.ArgumentTypeError(
                f"{text!r} names a layer beyond {LAST_LAYER}, which no model has"
            )
        found += range(int(first), int(last or first) + 1)
    return tuple(sorted(set(found)))
