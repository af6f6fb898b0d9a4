"""What tests of several folders ask for by name, how many threads they compute with, who waits for whom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests are small, and ranks share the cores
# before gRPC: tests serve in the process that starts Ray's, and one in twenty died of its fork handlers
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import torch
from turns import Turns


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist have folders beside each other."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(Path(config.option.basetemp).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file of those that take turns for Ray goes first: beside the next one of them, which is its
    neighbour by name, a worker waited for it and did nothing.
    """
    items.sort(key=lambda item: item.path.name != "test_ray.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `gpu(n)` runs where there are n CUDA devices."""
    if (mark := item.get_closest_marker("gpu")) and torch.cuda.device_count() < mark.args[0]:
        pytest.skip(f"needs {mark.args[0]} CUDA devices")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
