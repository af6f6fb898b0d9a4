"""What tests of rows on a GPU have in common: a tiny checkpoint, and its experts in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_ways import tiny
from houses import Alone


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(path: Path) -> Alone:
    return Alone(path)
