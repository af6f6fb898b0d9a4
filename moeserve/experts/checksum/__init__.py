"""`slot_checksum`: one number that an expert's copies agree on, taken where the bytes are.

A move is proved by it, so it has to keep up with a link between GPUs: one pass over the words, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Slot = Mapping[str, Tensor]
"""The tensors of one slot by name, as `Prepared.slot` gives them."""

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
WORD = 1 << 64
CHUNK = 1 << 16  # words summed at a time on the host: they stay in its cache


def slot_checksum(tensors: Slot) -> str:
    """Names, dtypes, shapes and one of `word_sums` of every tensor (codes, scales, biases), as 32 hex digits.

    Equal on every device and host for equal bytes. A single changed word is always seen. Not a signature: it
    does not resist somebody who wants to fool it. Waits for the device.
    """
    return slot_checksums([tensors])[0]


def slot_checksums(slots: Sequence[Slot]) -> list[str]:
    """`slot_checksum` of each, all on one device; waits for it once."""
    named = [(at, name) for at, tensors in enumerate(slots) for name in sorted(tensors)]
    values = word_sums([slots[at][name] for at, name in named])
    digests = [blake2b(digest_size=16) for _ in slots]
    for (at, name), value in zip(named, values, strict=True):
        tensor = slots[at][name]
        digests[at].update(f"{name} {tensor.dtype} {list(tensor.shape)} {value}\n".encode())
    return [digest.hexdigest() for digest in digests]


def word_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Each tensor's sum of w_i * (2 * GOLDEN * i + 1) over the 32-bit words w_i of its bytes, modulo 2^64.

    The factors are odd, so a change of one word changes the sum; they differ, so an exchange does too. The
    last word is filled up with zero bytes. On a GPU one kernel sums all of them.
    """
    words = [_words(tensor) for tensor in tensors]
    if not words or not words[0].is_cuda:
        return [_sum_on_host(each.numpy()) for each in words]
    from moeserve.experts.checksum.kernel import sum_words

    return sum_words(words, _signed(2 * GOLDEN))  # type: ignore[no-any-return, no-untyped-call]


def _words(tensor: Tensor) -> Tensor:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 4 or data.numel() % 4:
        filled = torch.zeros(-(-data.numel() // 4) * 4, dtype=torch.uint8, device=data.device)
        filled[: data.numel()] = data
        data = filled
    return data.view(torch.int32)


def _sum_on_host(words: NDArray[np.int32]) -> int:
    plain = by_index = 0
    index = np.arange(min(CHUNK, len(words)), dtype=np.int64)
    for start in range(0, len(words), CHUNK):
        chunk = words[start : start + CHUNK].astype(np.int64)
        here = int(chunk.sum())
        plain += here
        by_index += start * here + int(np.dot(index[: len(chunk)], chunk))
    return _signed(plain + 2 * GOLDEN * by_index)


def _signed(number: int) -> int:
    """Modulo 2^64, as an int64 holds it."""
    return (number + WORD // 2) % WORD - WORD // 2
