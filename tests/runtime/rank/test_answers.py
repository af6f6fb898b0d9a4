"""Answers on their way from a rank's device to its host memory."""

import threading
import time

import pytest
import torch

from moeserve.runtime.rank.answers import on_host

CYCLES = 3_000_000_000  # of a kernel that only waits: over a second on every GPU


def test_an_answer_on_the_host_stays_where_it_is() -> None:
    answer = torch.arange(6.0).view(2, 3)
    assert on_host(answer) is answer


@pytest.mark.gpu(1)
def test_a_waiting_answer_does_not_hold_up_copies_of_other_threads() -> None:
    answer, elsewhere = torch.arange(1 << 20, device="cuda").float(), torch.cuda.Stream()
    rows, room = torch.ones(1 << 20), torch.empty(1 << 20, device="cuda")
    on_host(answer)  # its memory is pinned by now, which takes a while the first time
    found: list[torch.Tensor] = []
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    waiting = threading.Thread(target=lambda: found.append(on_host(answer)))
    waiting.start()
    time.sleep(0.1)
    started = time.monotonic()
    with torch.cuda.stream(elsewhere):
        room.copy_(rows)
    elsewhere.synchronize()
    took, waited = time.monotonic() - started, not found
    waiting.join(timeout=30)
    assert waited and took < 0.3
    assert torch.equal(found[0], torch.arange(1 << 20).float())
