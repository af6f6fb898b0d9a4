"""Grouped GEMMs as they are launched beside the short track."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moeserve.device.streams import SPARED, sparing
from moeserve.experts.kernels.cuda import steps

CLUSTERS = 4 + SPARED


@contextmanager
def in_pieces() -> Iterator[None]:
    """Each GEMM of many rows is several launches of a few tiles."""
    with pytest.MonkeyPatch.context() as patch, sparing(SPARED):
        patch.setattr(steps, "resident_clusters", lambda *_: CLUSTERS)
        patch.setattr(steps, "PIECE_COLUMNS", 1)
        yield
