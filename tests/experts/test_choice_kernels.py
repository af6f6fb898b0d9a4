"""The kernels that choose, merge and count on a GPU agree with torch under the interpreter."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_kernels_of_choices_agree_with_torch_under_the_interpreter() -> None:
    script = Path(__file__).parents[1] / "support" / "interpreted_choices.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "checked" in done.stderr
