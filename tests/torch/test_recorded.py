"""A block with experts in process, in the caller's CUDA graph: the bits of eager, between eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import Alone, house_config
from parallel import parallel_launch
from torch_blocks import Block
from torch_ranks import recorded

from moeserve.runtime.launch.torchrun import join_torchrun
from moeserve.torch.in_process import InProcess


@pytest.mark.gpu(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_recorded_block_has_the_bits_of_the_eager_one(compiled: bool, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, hidden=256, inner=256)
    for equal in parallel_launch(2, recorded, tmp_path, compiled, timeout=280, device="cuda"):
        assert len(equal) == 14 and all(equal), equal


@pytest.mark.gpu(1)
@torch.no_grad()
def test_one_rank_alone_is_recorded_too(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, hidden=256, inner=256)
    alone, way = Alone(tmp_path), InProcess(join_torchrun(house_config(tmp_path, plan__device="cuda")))
    block = Block(way, alone)
    static, graph = torch.zeros(6, 256, dtype=torch.bfloat16, device="cuda"), torch.cuda.CUDAGraph()
    for _ in range(3):
        block(static)
    torch.cuda.synchronize()
    with way.recording(6) as steps, torch.cuda.graph(graph):
        out = block(static)
    for turn in range(10):
        fresh = alone.batch(6, seed=turn)[0].bfloat16().cuda()
        static.copy_(fresh)
        steps.expect()
        graph.replay()
        way.check()
        replayed = out.clone()
        assert torch.equal(replayed, block(fresh)), turn
        way.follow()
    way.close()


def test_without_a_gpu_nothing_is_recorded(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    way = InProcess(join_torchrun(house_config(tmp_path)))
    with pytest.raises(RuntimeError, match="device 'cpu' has no CUDA graphs"), way.recording(4):
        pass
    way.close()
