"""What a process of a service finds on its host: its machine, and what libraries read of it."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
from pathlib import Path

import torch

from moeserve.device.machine import Machine, machine_named, this_machine, torch_device
from moeserve.device.residency import hold
from moeserve.device.waits import wait_at_most
from moeserve.dispatch.backends import dispatcher_named
from moeserve.proto.heap import Trimming, keep_freed_memory
from moeserve.runtime.config import Config
from moeserve.runtime.sections import AUTO, ConfigError


def machine_for(config: Config) -> Machine:
    """The machine ranks of `config` run on, seen from here."""
    machine = machine_named("cpu", ()) if config.plan.device == "cpu" else this_machine()
    if config.plan.device == "cuda" and machine.device != "cuda":
        raise ConfigError("plan.device = 'cuda', and this process sees no CUDA device")
    return machine


def own_device(config: Config, machine: Machine, at: int) -> str:
    """The device of this process's rank, the `at`-th of its host, made the calling thread's current one.

    On a GPU, the multiprocessors that others may hold are kept free of grids that must run at once. Raises
    ValueError where that leaves none, and RuntimeError where grids were sized with another number before.
    """
    device = torch_device(machine, at)
    if device != "cpu":
        torch.cuda.set_device(device)
        hold(device, config.members.held_multiprocessors)
    wait_at_most(config.step.blocks_seconds)
    return device


def group_backend(config: Config, machine: Machine, on_host: int) -> str:
    """What ranks on such machines form their process group with. on_host: ranks on this one.

    Dispatchers over peer memory only meet by it. Where one was named, gloo serves them: its groups form and
    end in milliseconds, and NCCL's in half a second, in which nothing is served. NCCL also refuses ranks of
    one GPU, which they may share for trials.
    """
    if machine.device == "cpu":
        return "gloo"
    one_host = on_host == config.parallel.mesh.ranks
    shared = config.passes.share_gpu and on_host > torch.cuda.device_count()
    named = config.plan.all2all_backend
    over_peers = named != AUTO and dispatcher_named(named).living  # which refuse ranks of several hosts
    return "gloo" if over_peers or (one_host and shared) else "nccl"


SWITCH_SECONDS = 0.0001
"""After which the interpreter lets another thread run, where 5 ms would hold up a step or an answer.

A thread that gives the interpreter up around each call of torch takes it again before a woken one has begun
to run: that one gets it only after this time, and a call passes through four threads. Much less would have
them change places in the middle of what each does for a call, and a change costs tens of microseconds.
"""


def tune_process() -> None:
    """Sets this process's allocator, thread switching and descriptors for serving; only its owner calls it.
    What it has imported is left out of the interpreter's collections: a full one looked at 200,000 objects,
    for 0.1 s in which no thread ran.

    A launcher calls it in the processes that it starts, and `moeserve serve` in its own; a program that runs
    a `LocalCluster` inside itself keeps its settings, unless it calls this too.
    """
    keep_freed_memory()
    _allow_descriptors()
    Trimming().start()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()


MOST_DESCRIPTORS = 1 << 16
"""Of a process of a service: shards of checkpoints stay open, and each caller has connections."""


def _allow_descriptors() -> None:
    """Lets this process have more descriptors than the 1024 that shells start processes with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def set_environment(host: str) -> None:
    """What libraries of a rank on `host` read from the environment, unless it is set already."""
    if host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast hangs on some hosts
    # streams that share a connection wait for one another, also for one that waits for a caller's rows
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
    )  # a timeout aborts the group, not the process


def name_process(name: str) -> None:
    """Sets what `ps -o comm` and /proc show of this process, 15 letters at most; the service's processes have
    one command line. Where there is no /proc, nothing changes.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
