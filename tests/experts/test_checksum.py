"""Checksums of experts: by their formula, on every size and alignment, and what they notice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeserve.experts.checksum import CHUNK, GOLDEN, WORD, slot_checksum, slot_checksums, word_sums


def by_formula(tensor: Tensor) -> int:
    """In Python's integers, word by word."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 4)
    words = (int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, len(data), 4))
    total = sum(word * (2 * GOLDEN * at + 1) for at, word in enumerate(words)) % WORD
    return total - WORD if total >= WORD // 2 else total


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1023, 4 * CHUNK, 4 * CHUNK + 7])
def test_sums_are_their_formula(size: int) -> None:
    tensor = random_bytes(size)
    assert word_sums([tensor]) == [by_formula(tensor)]


def test_alignment_strides_and_dtypes_do_not_matter() -> None:
    stored = random_bytes(4096)
    assert word_sums([stored[1:2049]]) == word_sums([stored[1:2049].clone()])
    turned = stored.view(64, 64).t()
    assert word_sums([turned]) == word_sums([turned.contiguous()])
    assert word_sums([stored.view(torch.float8_e4m3fn)]) == word_sums([stored])


@pytest.mark.parametrize("at", [0, 3, 500, 1023])
def test_one_flipped_bit_or_two_exchanged_words_are_seen(at: int) -> None:
    tensor = random_bytes(1024)
    flipped = tensor.clone()
    flipped[at] ^= 16
    assert word_sums([flipped]) != word_sums([tensor])
    words = torch.arange(256, dtype=torch.int32)
    exchanged = words.clone()
    exchanged[at // 4], exchanged[(at // 4 + 9) % 256] = words[(at // 4 + 9) % 256], words[at // 4]
    assert word_sums([exchanged]) != word_sums([words])


def test_many_slots_at_once_are_each_alone() -> None:
    slots = [{"down": random_bytes(99), "scale": random_bytes(8).view(torch.float32)} for _ in range(3)]
    assert slot_checksums(slots) == [slot_checksum(slot) for slot in slots]
    assert slot_checksums([]) == []


@pytest.mark.gpu(1)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_sums_the_same() -> None:
    tensors = [random_bytes(size) for size in (0, 1, 5, 4096, 123457)]
    assert word_sums([tensor.cuda() for tensor in tensors]) == word_sums(tensors)
