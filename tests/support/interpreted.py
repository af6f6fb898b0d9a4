"""Runs `check_all` of a module of this folder under Triton's interpreter, which is for a whole process."""

import importlib
import os
import subprocess
import sys
from pathlib import Path


def run(module: str) -> None:
    """Runs `module.check_all("cpu")` in a process of its own. Raises AssertionError with what it printed."""
    command = [sys.executable, str(Path(__file__)), module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"checked {module}" in done.stdout


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("language_once")
    importlib.import_module(sys.argv[1]).check_all("cpu")
    print(f"checked {sys.argv[1]}")
