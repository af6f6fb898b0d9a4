"""`Mps`: processes that compute on one GPU at once, by NVIDIA's multi-process service, and not in turns."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
DRIVER = Path("/usr/local/nvidia/bin")  # of some containers, which have it on no path
SECONDS = 20.0


class Mps:
    """A context in which every process that begins to compute on a GPU is a client of the service. It has to
    be entered before this one does. percent: of the multiprocessors that each may use.

    Raises SystemExit where the service is not installed, does not start, or runs already: its share would be
    another one's.
    """

    def __init__(self, percent: int = 100) -> None:
        self._percent = percent
        self._path = os.pathsep.join((os.environ.get("PATH", ""), str(DRIVER)))

    def __enter__(self) -> Mps:
        self._run("-d")
        try:
            self._run(asks=f"set_default_active_thread_percentage {self._percent}\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *ended: object) -> None:
        self._run(asks="quit -t 5\n")

    def _run(self, *arguments: str, asks: str = "") -> None:
        """Its control program, with these arguments, and what it is asked for."""
        try:
            done = subprocess.run(
                [CONTROL, *arguments],
                input=asks,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env=os.environ | {"PATH": self._path},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"{CONTROL}, which has processes share a GPU: {error}") from error
        if done.returncode:
            told = (done.stdout + done.stderr).strip()
            raise SystemExit(f"{CONTROL} {' '.join(arguments)}{asks.strip()}: {done.returncode} {told}")
