"""`moeserve serve`: starts the ranks and serves until it is told to stop."""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any

FLAGS: dict[str, tuple[str, Any, str]] = {
    "--checkpoint": ("model.checkpoint", str, "folder with config.json and safetensors"),
    "--data-parallel-size": ("parallel.data_parallel_size", int, "ranks with tokens of their own"),
    "--tensor-parallel-size": ("parallel.tensor_parallel_size", int, "ranks of one engine"),
    "--all2all-backend": ("plan.all2all_backend", str, "carrier; auto lets the plan choose"),
    "--host": ("server.host", str, "address to listen on"),
    "--port": ("server.port", int, "of the front door; 0 picks a free one"),
    "--metrics-port": ("server.metrics_port", int, "of the head's exporter; -1 turns metrics off"),
    "--ray-address": ("cluster.ray_address", str, "an existing Ray cluster"),
    "--launcher": ("cluster.launcher", str, "ray or local"),
}


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser("serve", help="serve a checkpoint's experts", description=__doc__)
    add_config_flags(parser)
    parser.set_defaults(func=run)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """The configuration file and the flags that override it."""
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration; flags override it")
    for flag, (key, kind, text) in FLAGS.items():
        parser.add_argument(flag, dest=key, type=kind, help=text)
    parser.add_argument("--enable-expert-parallel", dest="parallel.enable_expert_parallel", action="store_true", default=None, help="whole experts on each rank instead of slices")
    parser.add_argument("--layers", dest="model.layers", type=_numbers, metavar="N,N", help="decoder layers to serve; all by default")


def config_of(args: argparse.Namespace) -> Any:
    """The configuration that a command line means. Raises ConfigError."""
    from moeserve.runtime.config import Config

    config = Config.load(args.config) if args.config else Config()
    given = {key: value for key, value in vars(args).items() if "." in key and value is not None}
    return config.with_values(given).checked()


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; 1 when the group failed."""
    config = config_of(args)
    print("\n".join(config.lines()), flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    cluster: Any
    if config.cluster.launcher == "local":
        from moeserve.runtime.local_cluster import LocalCluster as Cluster
    else:
        from moeserve.runtime.cluster import RayCluster as Cluster  # type: ignore[assignment]
    with Cluster(config) as cluster:
        print(f"serving on {cluster.address}", flush=True)
        while not stop.wait(1.0):
            state, reason = cluster.state()
            if state == "failed":
                raise RuntimeError(f"the group failed: {reason}")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
