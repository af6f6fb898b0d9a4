"""How many threads compute a step on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moeserve.runtime.rank.cpu_threads import SMALL_BYTES, SMALL_ELEMENTS, alone, is_small


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_small_step_is_alone_and_the_next_one_is_not() -> None:
    with pytest.raises(RuntimeError, match="of the step"), alone():
        assert torch.get_num_threads() == 1
        raise RuntimeError("of the step")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("elements", "weights", "small"),
    [
        (SMALL_ELEMENTS, SMALL_BYTES, True),
        (SMALL_ELEMENTS + 1, 0, False),  # many rows
        (1, SMALL_BYTES + 1, False),  # few rows over large experts, which two threads read sooner
    ],
)
def test_rows_and_experts_both_have_to_be_small(elements: int, weights: int, small: bool) -> None:
    assert is_small(elements, weights) is small
