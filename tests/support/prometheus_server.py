"""A real Prometheus for tests: from PATH, or Debian's package unpacked into a cache; nothing is installed.

with Prometheus(config, folder) as prometheus:
    prometheus.query("up")
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from bench.lib.children import end

CACHE = Path(__file__).parents[2] / ".cache" / "prometheus"
APT_SECONDS = 120
READY_SECONDS = 20


class NoPrometheus(RuntimeError):
    """Prometheus can neither be found nor fetched here."""


def binary(name: str) -> Path:
    """`prometheus` or `promtool`. Raises NoPrometheus with the reason there is none."""
    if found := shutil.which(name):
        return Path(found)
    unpacked = CACHE / "usr" / "bin" / name
    if not unpacked.exists():
        _unpack()
    return unpacked


def promtool(*arguments: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs promtool in `folder`; its output is text."""
    command = [binary("promtool"), *arguments]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=60, check=False)


def _unpack() -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise NoPrometheus("no prometheus on PATH, and no apt-get and dpkg to fetch Debian's package with")
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as made:
        folder = Path(made)
        try:
            _download(folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise NoPrometheus(f"apt-get cannot download prometheus: {error.stderr!s} ({error})") from error
        package = next(folder.glob("prometheus_*.deb"))
        subprocess.run(["dpkg", "-x", package, folder / "root"], check=True, timeout=APT_SECONDS)
        with contextlib.suppress(OSError):  # another run was first
            os.rename(folder / "root", CACHE)


def _download(folder: Path) -> None:
    """Of the version the system's package lists name; lists that are missing or old are updated first."""

    def apt(*arguments: str) -> None:
        command = ["apt-get", "-qq", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=APT_SECONDS)

    try:
        apt("download", "prometheus")
    except subprocess.CalledProcessError:
        apt("update")
        apt("download", "prometheus")


class Prometheus:
    """A context: a server of its own on a free loopback port, with its data in `folder`."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression. Raises ValueError with Prometheus' own words for a bad one."""
        question = urllib.parse.urlencode({"query": expression})
        try:
            answer = self._get(f"/api/v1/query?{question}")
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {json.load(error).get('error')}") from error
        return list(json.loads(answer)["data"]["result"])

    def __enter__(self) -> Prometheus:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.url = f"http://{address}"
        log = self._folder / "prometheus.log"
        command = [
            str(binary("prometheus")),
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={address}",
        ]
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        until = time.monotonic() + READY_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError(f"Prometheus did not become ready:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, *ended: object) -> None:
        if self._process is not None:
            end(self._process, 10)

    def _ready(self) -> bool:
        try:
            self._get("/-/ready")
        except OSError:
            return False
        return True

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return bytes(answer.read())
