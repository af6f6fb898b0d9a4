"""NVRTC, which compiles CUDA C++ without a GPU; `make kernels` brings it, and CI runs that."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs_nvrtc() -> None:
    """Skips the rest of a test where it is not installed."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None or find_spec("nvidia") is None:
        pytest.skip("needs cuda-bindings and nvidia-cuda-nvrtc: make kernels has them")
