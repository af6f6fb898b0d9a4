"""The kernels that choose replicas on a GPU, without one: Triton's interpreter beside the torch splits."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from moeserve.experts.routing.device_splitter import DeviceSplitter, served_on
from moeserve.experts.routing.replicas import Size, transport


def test_tables_hold_every_slot_that_can_get_rows() -> None:
    splitter = DeviceSplitter(Size(2, 4, 8, 2), transport, 1, "cpu")
    splitter.update_layer(1, np.array([0, 2, 2, -1, 2, 3, 1, 0], dtype=np.int32))  # 2 twice on the first rank
    assert splitter.home[1, :4].tolist() == [-1, 6, -2, 5]
    cells = splitter.cells[1]
    assert cells[0, :2].tolist() == [7, 0]  # the lane's own rank first
    assert cells[1, :2].tolist() == [4, 1]
    assert int((cells >= 0).sum()) == 4
    assert not splitter.home[0].any()


@pytest.mark.parametrize(
    ("device", "size"),
    [("cpu", Size(1, 256, 264, 4)), ("cuda", Size(1, 256, 392, 4)), ("cuda", Size(1, 256, 325, 65))],
)
def test_other_devices_and_larger_splits_are_left_to_torch(device: str, size: Size) -> None:
    assert not served_on(device, size)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_replica_kernels_agree_with_the_torch_splits_under_the_interpreter() -> None:
    script = Path(__file__).parents[1] / "support" / "interpreted_replicas.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "checked" in done.stderr
