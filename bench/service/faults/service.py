"""`Service`: `moeserve serve` in a process of its own, whose log is read and whose ranks have points."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.lib.children import end
from bench.lib.record import ROOT
from bench.service.faults.points import environment, rank_processes
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.config import Config

MAIN = "import sys; from moeserve.cli import main; sys.exit(main())"
START_SECONDS, END_SECONDS = 180.0, 60.0


class Service:
    """A context: the service runs inside it."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder, self.ranks = folder, config.parallel.mesh.ranks
        folder.mkdir()
        self._log, written = folder / "log", folder / "config.toml"
        written.write_text("\n".join(config.lines()) + "\n")
        self.address = ""
        self._command = [sys.executable, "-c", MAIN, "serve", str(written)]
        self._environment = environment(folder, ROOT) | {"RAY_DEDUP_LOGS": "0", "PYTHONUNBUFFERED": "1"}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Service:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=self._environment
            )
        until = time.monotonic() + START_SECONDS
        while not (found := re.search(r"^serving on (\S+)$", self.log(), re.MULTILINE)):
            if time.monotonic() > until or self._process.poll() is not None:
                self.__exit__()
                raise RuntimeError(f"{shlex.join(self._command)} does not serve:\n{self.log()[-4000:]}")
            time.sleep(0.1)
        self.address = found[1]
        return self

    def __exit__(self, *ended: object) -> None:
        self.end()
        for pids in self.living().values():  # each is one of ours, by the file that it wrote
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def end(self) -> float:
        """Tells the service to stop; seconds until its process has ended, which is killed if it does not."""
        assert self._process is not None
        began = time.monotonic()
        end(self._process, END_SECONDS)
        return time.monotonic() - began

    def log(self, after: int = 0) -> str:
        """What its processes have logged, from a number of bytes on."""
        with self._log.open("rb") as log:
            log.seek(after)
            return log.read().decode(errors="replace")

    def logged(self) -> int:
        """Bytes logged so far."""
        return self._log.stat().st_size

    def living(self) -> dict[int, list[int]]:
        """The processes that each rank has now, stopped ones too: one, where all is well."""
        return rank_processes(self.folder)

    def status(self) -> tuple[str, str, int]:
        """State, reason and generation; the reason why it does not answer in place of these."""
        try:
            with MoeClient(self.address, timeout=5.0) as client:
                found = client.status()
        except MoeError as error:
            return "unknown", str(error), -1
        return found.state, found.reason, int(found.generation)

    def wait_whole(self, after: int, seconds: float) -> str:
        """Waits until a generation after that one serves with one process a rank; why not, or nothing."""
        until = time.monotonic() + seconds
        while True:
            (state, reason, generation), living = self.status(), self.living()
            whole = len(living) == self.ranks and all(len(pids) == 1 for pids in living.values())
            if state == "serving" and generation > after and whole:
                return ""
            if time.monotonic() > until:
                return f"{state} ({reason}), generation {generation}, processes {living}"
            time.sleep(0.05)
