"""Peer memory: what a rank stores into another's is there, one that cannot stops all, nothing is left."""

import pytest
import torch
from parallel import parallel_launch
from peer_memory_ranks import named_files, too_much_on_one, write_to_all


def test_every_rank_can_store_into_every_other() -> None:
    assert parallel_launch(3, write_to_all, "cpu") == [[1, 2, 3]] * 3


def test_a_name_does_not_outlive_the_opening() -> None:
    assert parallel_launch(2, named_files) == [[], []]


def test_one_rank_without_memory_stops_all_with_its_reason() -> None:
    heard = parallel_launch(2, too_much_on_one)
    assert all("rank 1 cannot allocate 1125899906842624 bytes" in text for text in heard)
    assert all(text.endswith("[]") for text in heard)  # and no file stays


@pytest.mark.gpu(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_two_gpus_store_into_each_other() -> None:
    assert parallel_launch(2, write_to_all, "cuda", device="cuda") == [[1, 2], [1, 2]]
