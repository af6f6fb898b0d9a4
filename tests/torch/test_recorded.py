"""A block with experts in process, in the caller's CUDA graph: the bits of eager, between eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import house_config
from parallel import parallel_launch
from torch_ranks import recorded

from moeserve.runtime.launch.torchrun import join_torchrun
from moeserve.torch.in_process import InProcess


@pytest.mark.gpu(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_recorded_block_has_the_bits_of_the_eager_one(compiled: bool, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, hidden=256, inner=256)
    for equal in parallel_launch(2, recorded, tmp_path, compiled, timeout=280, device="cuda"):
        assert len(equal) == 14 and all(equal), equal


def test_without_a_gpu_nothing_is_recorded(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    way = InProcess(join_torchrun(house_config(tmp_path)))
    with pytest.raises(RuntimeError, match="device 'cpu' has no CUDA graphs"), way.recording(4):
        pass
    way.close()
