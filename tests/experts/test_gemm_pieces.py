"""How many launches a grouped GEMM is beside the short track, and that they cover its tiles."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from moeserve.device.streams import SPARED, sparing
from moeserve.experts.kernels.cuda import prefill_wide, steps

ACROSS, COLUMNS = 16, 7168  # of a first GEMM


@pytest.mark.parametrize(("rows", "beside"), [(1, True), (4096, True), (65536, True), (65536, False)])
def test_pieces_cover_all_tiles_and_are_bounded(
    rows: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "resident_clusters", lambda *_: 66)
    launched = list[tuple[int, int]]()

    def launch(_blocks: int, _threads: int, given: dict[str, Any], **_how: Any) -> None:
        launched.append((given["first"], given["last"]))

    batch: Any = SimpleNamespace(slots=256)
    step = prefill_wide.WidePrefillStep(batch, rows, prefill_wide.NARROW)
    function: Any = SimpleNamespace(launch=launch)
    with sparing(SPARED if beside else 0):
        step.launch(function, prefill_wide.NARROW.block, {}, (ACROSS, COLUMNS))
    assert launched[0][0] == 0 and launched[-1][1] >= step.limit * ACROSS
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(launched))
    assert 1 <= len(launched) <= (steps.MOST_PIECES if beside else 1)
