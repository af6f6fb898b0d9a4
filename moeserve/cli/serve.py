"""`moeserve serve`: starts the ranks and serves until it is told to stop."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from moeserve.cli.arguments.configured import add_config_flags, config_of
from moeserve.cli.shown.lines import say

if TYPE_CHECKING:
    from moeserve.runtime.config import Config

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_SECONDS = 1.0  # between looks at the group's state


class Cluster(Protocol):
    """A service that a launcher starts from a configuration."""

    @property
    def address(self) -> str:
        """`host:port` of the front door."""

    def start(self) -> object:
        """Starts the ranks and waits until the group serves."""

    def state(self) -> tuple[str, str]:
        """Returns the group's state and the reason for it."""

    def metrics_targets(self) -> list[str]:
        """Returns `host:port` of every exporter that is up."""

    def probes_address(self) -> str:
        """Returns `host:port` where probes are answered; empty where none are."""

    def stop(self) -> None:
        """Lets calls under way finish, and ends everything that was started."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `serve` and its arguments."""
    about = "serve a checkpoint's experts until told to stop (SIGINT, SIGTERM or SIGHUP)"
    parser = subparsers.add_parser("serve", help=about, description=about)
    add_config_flags(parser, serving=True)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, or until nobody reads stdout when there is something to print.

    Raises ValueError for bad input, OSError or RuntimeError, and BrokenPipeError for a closed stdout.
    """
    from moeserve.runtime.telemetry import logs

    signals = _Signals()
    try:
        with signals.interrupting():
            config = config_of(args)
            _say("\n".join(config.lines()))
            _check_served(config)
            logs.start(config.log, "launcher")
            cluster = _cluster(config)  # which has started processes
        with signals.interrupting():  # also where a library swallowed what the signal raised
            cluster.start()
    except (KeyboardInterrupt, SystemExit):  # Ray puts a handler in place of ours that exits
        logs.finish()  # what was logged before is read before
        _say("stopped while starting")
        return 0
    signals.listen()  # again: a launcher may have set handlers of its own
    try:
        if targets := cluster.metrics_targets():
            _say(f"metrics on {' '.join(targets)}")
        if probes := cluster.probes_address():
            _say(f"probes on {probes}")
        _say(f"serving on {cluster.address}")
        _tell_manager(f"READY=1\nSTATUS=serving on {cluster.address}")
        _watch(cluster, signals)
    finally:
        try:
            _tell_manager("STOPPING=1")
            _say("stopping")
        finally:  # also where stdout is closed: what was started is ended all the same
            cluster.stop()
    return 0


def _say(line: str) -> None:
    """Prints a line on stdout, where somebody reads that: a full pipe keeps no service from its stop."""
    say(sys.stdout, line)


def _tell_manager(state: str) -> None:
    """Tells systemd how the service is, where that has started it and wants to know (sd_notify)."""
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto(state.encode(), name)
    except OSError as error:
        say(sys.stderr, f"moeserve serve: NOTIFY_SOCKET={address} takes nothing: {error}")


class _Signals:
    """Turns SIGINT, SIGTERM and SIGHUP into a word that `wait` hears and, until a cluster has started, into
    KeyboardInterrupt.

    The handler takes no lock: it runs wherever the main thread is, also where that holds one. An event's
    lock, which `wait` holds now and then, would keep the process for ever.
    """

    def __init__(self) -> None:
        self._told_to_stop = False
        self._heard, self._word = os.pipe()
        os.set_blocking(self._word, False)
        self._interrupts = False
        self.listen()

    def listen(self) -> None:
        """Installs the handler of the signals; SIGHUP stays ignored where it is, as under `nohup`."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._told)

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come, as soon as it has, and after so many seconds at most."""
        return self._told_to_stop or bool(select.select([self._heard], [], [], seconds)[0])

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A context in which a signal raises KeyboardInterrupt; an earlier signal raises it at once."""
        self._interrupts = True
        try:
            if self._told_to_stop:
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupts = False

    def _told(self, number: int, frame: FrameType | None) -> None:
        first, self._told_to_stop = not self._told_to_stop, True
        with contextlib.suppress(BlockingIOError):  # the pipe is full of words already
            os.write(self._word, b"!")
        if self._interrupts and first:
            raise KeyboardInterrupt


def _check_served(config: Config) -> None:
    """Raises what is wrong with the checkpoint, the plan or the keys here, before any process starts."""
    import torch

    from moeserve.runtime.keys.keys import Keys
    from moeserve.runtime.launch.environment import machine_for
    from moeserve.runtime.planning.layers import first_epoch, plans_for
    from moeserve.runtime.sections import ConfigError
    from moeserve.runtime.served import served_from

    Keys(config.keys, "")
    served, ranks = served_from(config), config.parallel.mesh.ranks
    for layer in served.layers:
        served.checkpoint.gate(layer)
    first_epoch(served)
    if config.cluster.launcher == "ray":
        return  # its nodes may be of another kind than this machine
    machine = machine_for(config)
    plans_for(served, machine, config.plan.wanted)
    if machine.device == "cuda" and ranks > torch.cuda.device_count():
        found = f"{ranks} ranks need a GPU each, and this machine has {torch.cuda.device_count()}"
        raise ConfigError(f"{found}; use fewer ranks, plan.device = 'cpu', or a Ray cluster with more nodes")


def _cluster(config: Config) -> Cluster:
    if config.cluster.launcher == "local":
        from moeserve.runtime.launch.local_cluster import LocalService

        return LocalService(config)
    from moeserve.runtime.launch.on_ray.ray_cluster import RayCluster

    return RayCluster(config)


def _watch(cluster: Cluster, signals: _Signals) -> None:
    """Waits for a signal to stop. Raises RuntimeError when it gave up."""
    while not signals.wait(LOOK_SECONDS):
        state, reason = cluster.state()
        if state == "failed":
            raise RuntimeError(f"the group failed: {reason}")
