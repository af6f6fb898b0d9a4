"""Where a service's processes come from: one that has imported everything and has done nothing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from moeserve.runtime.launch import openmp


def warm_processes(imported: Sequence[str]) -> ForkServerContext:
    """Where a service's processes come from: one that has imported these modules, those that are installed.

    They have the environment of the first use here, and `openmp.environment`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    with openmp.for_ranks():
        forkserver.ensure_running()
    return context
