"""Memory for answers: the same again when nobody holds the answer in it, and never before."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from moeserve.proto.passes import answers as answers_module
from moeserve.proto.passes.answers import SMALLEST_BYTES, Answers
from moeserve.proto.tensors import Plain, known, restore

LIKE = np.zeros((2, SMALLEST_BYTES // 2), np.uint16)


def place(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_nobody_holds_what_was_made_of_it() -> None:
    answers = Answers(2)
    array = answers.empty_like(LIKE)
    assert array.shape == LIKE.shape and array.dtype == LIKE.dtype and array.flags.c_contiguous
    assert array.flags.writeable
    first = place(array)
    tensor = restore(Plain(known("hidden", "bf16"), array), torch.zeros(1))
    part = tensor[1:].float()[:, :3], tensor[1:, :3]
    del array, tensor
    other = answers.empty_like(LIKE)
    assert place(other) != first, "a part of a tensor of it is held"
    part[1].fill_(2.0)
    other[:] = 1
    assert bool((part[1] == 2.0).all())
    del part
    again = answers.empty_like(LIKE)
    assert place(again) == first
    less = LIKE[:1]
    del again
    assert place(answers.empty_like(less)) == first, "half as many bytes"


def test_small_answers_and_those_of_other_sizes_have_memory_of_their_own() -> None:
    answers = Answers(2)
    small = answers.empty_like(LIKE[:, :8])
    assert small.shape == (2, 8) and small.base is None
    del small
    held = answers.empty_like(LIKE)
    first = place(held)
    del held
    large = answers.empty_like(np.zeros((2, SMALLEST_BYTES), np.uint16))
    assert place(large) != first and len(answers._idle) == 1
    assert place(answers.empty_like(LIKE)) == first


def test_no_more_is_kept_than_was_said_and_nothing_when_closed() -> None:
    answers = Answers(2)
    held = [answers.empty_like(LIKE) for _ in range(5)]
    assert len({place(one) for one in held}) == 5
    one = held.pop()
    held.clear()
    assert len(answers._idle) == 2
    answers.close()
    assert not answers._idle
    del one
    assert not answers._idle


def test_memory_that_nobody_holds_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "MOST_IDLE_BYTES", 3 * LIKE.nbytes)
    kept = Answers(8)
    held = [kept.empty_like(LIKE) for _ in range(5)]
    held.clear()
    assert len(kept._idle) == 3 and kept.idle_bytes == 3 * LIKE.nbytes
    monkeypatch.setattr(answers_module, "IDLE_SECONDS", -1.0)
    kept.empty_like(np.zeros((6, SMALLEST_BYTES // 2), np.uint16))
    assert len(kept._idle) == 1, "what has waited goes with the next call of another size"
    kept.empty_like(np.zeros((7, SMALLEST_BYTES // 2), np.uint16))
    assert not kept._idle, "more than is kept at all"


def test_no_two_threads_get_the_same_memory() -> None:
    answers, wrong = Answers(4), []

    def write(number: int) -> None:
        for _ in range(200):
            mine = answers.empty_like(LIKE)
            mine[:] = number
            if (mine != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
