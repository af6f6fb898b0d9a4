"""The four commands of docs/vllm.md and docs/sglang.md, from install to the first token, as they stand there.

Only names are replaced: MODEL, the package by this checkout, and both ports by free ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import ROOT, free_port
from processes import descendants_of, gone

from bench.lib.children import end
from moeserve.proto.client import MoeClient

INSTALL_SECONDS, START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 900.0, 600.0, 120.0, 30.0
PAGES = {"vllm": "vllm.md", "sglang": "sglang.md"}


def commands(page: str, model: Path) -> list[str]:
    """The commands of a page's first block."""
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[:1]
    front, engine = str(free_port()), str(free_port())
    lines = [line.replace("MODEL", str(model)).replace("8000", engine) for line in block.splitlines()]
    assert len(lines) == 4
    lines = [line.replace("127.0.0.1:50051", f"127.0.0.1:{front}") for line in lines]
    lines[0] = lines[0].replace("'moeserve[", f"--editable '{ROOT}[")
    lines[1] += f" --port {front} --metrics-port -1 --health-port -1"  # beside other services of this machine
    return lines


def environment() -> dict[str, str]:
    """Where a shell finds this environment's programs."""
    left_out = ("MOESERVE_EXPERTS", "OMP_NUM_THREADS", "PYTHONPATH", "VLLM_PLUGINS")
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return kept | {"PATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def run(command: str, seconds: float) -> str:
    """What a command that ends prints; it must end well."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@contextlib.contextmanager
def running(command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that serves until it is told to stop, with all that it starts."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            f"exec {command}" if "=" not in command.split()[0] else f"exec env {command}",
            shell=True,
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        children = descendants_of(process.pid)
        end(process, STOP_SECONDS)
        if not gone(children, STOP_SECONDS):
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), 9)


def wait(process: subprocess.Popen[bytes], log: Path, ready: Any) -> None:
    """Until `ready()`; the process must live on."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(0.3)


def healthy(address: str) -> bool:
    """Whether an engine's server answers."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2):
            return True
    except OSError:
        return False


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", PAGES)
def test_the_four_commands_of_a_page_lead_to_a_first_token(
    engine_model: Any, tmp_path: Path, engine: str
) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    model = engine_model("qwen3_moe", "bfloat16").path
    install, serve, server, ask = commands(PAGES[engine], model)
    run(install, INSTALL_SECONDS)
    address, front = re.search(r"http://[\d.:]+", ask), re.search(r"MOESERVE_EXPERTS=(\S+)", server)
    assert address is not None and front is not None
    service, engines = tmp_path / "service.log", tmp_path / "engine.log"
    with running(serve, service) as process:
        wait(process, service, lambda: "serving on " in service.read_text())
        with running(server, engines) as started:
            wait(started, engines, lambda: healthy(address[0]))
            began = time.monotonic()
            answer = json.loads(run(ask, ANSWER_SECONDS))
            seconds = time.monotonic() - began
        with MoeClient(front[1], timeout=60) as client:
            computed = sum(rank.tokens for rank in client.status().ranks)
    assert answer["usage"]["completion_tokens"] >= 1 and answer["choices"][0]["text"]
    assert computed > 0, "the service computed its experts"
    print(f"{engine}: {answer['usage']} in {seconds:.1f} s")
