"""The configuration file and the flags that override it, as `serve` and `plan` take them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeserve.runtime.config import Config

FLAGS: dict[str, tuple[str, type, str]] = {
    "--checkpoint": ("model.checkpoint", str, "folder with config.json and safetensors"),
    "--load-as": ("model.load_as", str, "scheme to quantize experts to while they are loaded"),
    "--data-parallel-size": ("parallel.data_parallel_size", int, "groups of ranks with tokens of their own"),
    "--tensor-parallel-size": ("parallel.tensor_parallel_size", int, "ranks of one such group"),
    "--all2all-backend": ("plan.all2all_backend", str, "dispatcher of tokens; auto lets the plan choose"),
    "--kernel": ("plan.kernel", str, "kernel of the experts; auto lets the plan choose"),
    "--device": ("plan.device", str, "auto, cpu or cuda"),
}
SERVE_FLAGS: dict[str, tuple[str, type, str]] = {
    "--host": ("server.host", str, "address to listen on"),
    "--port": ("server.port", int, "of the front door; 0 picks a free one"),
    "--metrics-port": ("server.metrics_port", int, "of the head's exporter; 0 picks free ones, -1 has none"),
    "--ray-address": ("cluster.ray_address", str, "an existing Ray cluster"),
    "--launcher": ("cluster.launcher", str, "ray or local"),
}
"""Flag -> (dotted key of the configuration, type, help)."""

METAVARS = {"--load-as": "SCHEME"}
"""What stands for a flag's value in the help, where the flag's last word does not say it."""


def add_config_flags(parser: argparse.ArgumentParser, *, serving: bool) -> None:
    """Adds the file and the flags; with `serving` also where to listen and who starts the ranks."""
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG.toml", help="configuration; the flags override it"
    )
    for flag, (key, kind, text) in (FLAGS | (SERVE_FLAGS if serving else {})).items():
        name = METAVARS.get(flag, flag.rpartition("-")[2].upper())
        parser.add_argument(flag, dest=key, type=kind, metavar=name, help=text)
    parser.add_argument(
        "--enable-expert-parallel",
        dest="parallel.enable_expert_parallel",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whole experts on each rank instead of a slice of every expert",
    )
    parser.add_argument(
        "--layers",
        dest="model.layers",
        type=numbers,
        metavar="0,2-5",
        help="decoder layers to serve; all that have experts by default",
    )


def config_of(args: argparse.Namespace, over_file: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """The configuration that a command line means. Raises ConfigError, naming key and value.

    `over_file` are dotted keys that override the file; flags override both.
    """
    return given(args, over_file).checked()


def given(args: argparse.Namespace, over_file: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """The same, unchecked: it may lack a checkpoint."""
    from moeserve.runtime.config import Config

    config = Config.load(args.config) if args.config else Config()
    flags = {key: value for key, value in vars(args).items() if "." in key and value is not None}
    return config.with_values(dict(over_file) | flags)


def numbers(text: str) -> tuple[int, ...]:
    """`0,2-5` as numbers."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise argparse.ArgumentTypeError(f"{text!r} must be numbers and ranges, such as 0,2-5")
        found += range(int(first), int(last or first) + 1)
    return tuple(sorted(set(found)))
