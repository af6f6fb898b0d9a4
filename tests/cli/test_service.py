"""A service as an operator starts it: `serve` in its own process, asked by other commands, and stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint
from processes import descendants_of, gone, is_forkserver

from moeserve.cli import main, record
from moeserve.experts.load import read_trace
from moeserve.proto.client import MoeClient
from moeserve.runtime.config import Config, from_mapping

SERVE = (
    sys.executable,
    "-m",
    "moeserve",
    "serve",
    "--launcher",
    "local",
    "--metrics-port",
    "0",
    "--device",
    "cpu",
)
START_SECONDS = 90


@dataclass
class Served:
    """A `moeserve serve` under way, in a session of its own as under a terminal."""

    process: subprocess.Popen[str]
    printed: str
    address: str

    def ended(self) -> tuple[int, str]:
        """Its exit code, and all that it printed after it was up."""
        rest = self.process.stdout.read() if self.process.stdout else ""
        return self.process.wait(30), rest


def serve(*flags: str) -> Served:
    """Starts a service and waits until it serves."""
    process = subprocess.Popen(
        [*SERVE, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    late = threading.Timer(START_SECONDS, process.kill)
    late.start()
    printed = ""
    for line in process.stdout:
        if line.startswith("serving on "):
            late.cancel()
            return Served(process, printed, line.split()[-1])
        printed += line
    raise AssertionError(f"ended with {process.wait()}:\n{printed}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    """Two ranks with whole experts."""
    flags = ("--port", "0", "--data-parallel-size", "2", "--enable-expert-parallel")
    running = serve("--checkpoint", str(checkpoint), *flags)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait(30)


def test_the_resolved_configuration_is_printed_as_toml(served: Served, checkpoint: Path) -> None:
    lines = [line for line in served.printed.splitlines() if line.startswith("[") or " = " in line]
    config = from_mapping(Config, tomllib.loads("\n".join(lines)))
    assert config.model.checkpoint == str(checkpoint)
    assert config.parallel.mesh.ranks == 2
    assert config.step == Config().step  # what was not said is there too


def test_health(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", served.address]) == 0
    assert capsys.readouterr().out == "SERVING\n"


def test_bench_and_status(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "4", "--concurrency", "2", "--duration", "0.5"]
    assert main(["bench", served.address, *words, "--layer", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["layer"] == 1
    assert result["calls"] > 0 and result["errors"] == {}
    assert 0 < result["p50"] <= result["p90"] <= result["p99"] <= result["longest"]
    assert result["rows_per_second"] == pytest.approx(4 * result["calls"] / result["seconds"])

    deadline = time.monotonic() + 10  # ranks report about once a second
    while True:
        assert main(["status", served.address, "--experts", "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        tokens = [sum(map(int, layer["tokens"])) for layer in status["layers"]]
        if tokens[1] >= 4 * 2 * result["calls"] or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert status["state"] == "serving"
    assert [rank["up"] for rank in status["ranks"]] == [True, True]
    assert int(status["jobs"]) >= result["calls"]
    assert tokens[0] == 0 and tokens[1] >= 4 * 2 * result["calls"]  # 4 rows, top-2, and the warm-up

    assert main(["status", served.address]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("state  serving\ngroup  generation 1, epoch 1")
    assert re.search(r"^if lost +replicas +shadows +disk +waits ", shown, re.M)
    first = status["ranks"][0]
    assert re.search(
        rf"^ +0 +0 +0 +{first['member']['slots']} +yes +{re.escape(first['address'])} ", shown, re.M
    )


def counted(address: str) -> tuple[int, int]:
    """Pairs of a token and an expert that ranks have reported of layer 1: of prefill, and all."""
    with MoeClient(address) as client:
        layer = client.status(experts=True).layers[1]
    return sum(layer.prefill_tokens), sum(layer.tokens)


def test_load_is_recorded_by_phase(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window begins before the calls, and ends when ranks have told of all: they report once a second."""
    out, codes = tmp_path / "trace.jsonl", []
    begun, over, sleep = threading.Event(), threading.Event(), time.sleep
    monkeypatch.setattr(
        record,
        "time",
        SimpleNamespace(
            time=time.time, sleep=lambda seconds: (begun.set(), sleep(seconds), over.wait(START_SECONDS))
        ),
    )
    words = ["record", served.address, "--out", str(out), "--window", "4", "--windows", "1"]
    recording = threading.Thread(target=lambda: codes.append(main(words)))
    since = time.monotonic()
    recording.start()
    try:
        assert begun.wait(START_SECONDS)
        prefill, all_of_it = counted(served.address)
        for rows in ("400", "4"):  # 200 a lane: as in prefill
            assert main(["bench", served.address, "--layer", "1", "--rows", rows, "--duration", "0.3"]) == 0
        now, before = counted(served.address), (-1, -1)
        while now != before or now[0] == prefill or now[1] - now[0] == all_of_it - prefill:
            assert time.monotonic() - since < START_SECONDS
            time.sleep(2.0)
            now, before = counted(served.address), now
    finally:
        over.set()
        recording.join(30)
    assert codes == [0]
    trace = read_trace(out)
    assert (trace.layers, [window.phase for window in trace.windows]) == ((0, 1), ["decode", "prefill"])
    for window in trace.windows:
        assert not window.load.tokens[0].any() and window.load.tokens[1].sum() > 0
        assert 4 <= window.seconds <= time.monotonic() - since
    assert trace.windows[1].load.tokens.sum() % 800 == 0  # top-2 of 400 rows a call
    assert "2 windows in" in capsys.readouterr().out


def test_rows_in_shared_memory_go_over_the_lease_of_their_region(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = re.findall(r"^metrics on (.*)$", served.printed, re.MULTILINE)[0].split()[1:]  # after the head's
    assert len(ranks) == 2
    words = ["--duration", "0.3", "--transport", "shared_memory", "--lane", "1", "--json"]
    assert main(["bench", served.address, *words]) == 0
    result = json.loads(capsys.readouterr().out)
    with urllib.request.urlopen(f"http://{ranks[1]}/metrics", timeout=10) as answer:
        found = re.findall(r'moe_requests_total\{(.*method="RegionCall".*)\} (\S+)', answer.read().decode())
    ((labels, count),) = [one for one in found if float(one[1])]
    assert 'transport="shared_memory"' in labels and 'code="OK"' in labels
    assert float(count) >= result["calls"] > 0


def test_rebalance(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rebalance", served.address, "--policy", "eplb", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)  # by the load of the benches before
    assert (plan["outcome"], plan["epoch"], plan["epochs"]) == ("planned", "1", 0)
    assert int(plan["planned_bytes"]) > 0
    assert sum(layer["moves"] for layer in plan["layers"]) == len(plan["moves"]) > 0
    assert all(layer["after"] <= layer["before"] for layer in plan["layers"])

    assert main(["rebalance", served.address, "--policy", "eplb"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("layer  expert  from rank  slot  to rank  slot\n")
    assert re.search(r"^plan: \d+ moves, .* MiB; largest over mean load of a rank falls by \d", shown, re.M)
    assert re.search(r"^moved: \d+ copies, .* MiB, in \d+ epochs and .* s; epoch \d+ is served$", shown, re.M)
    assert main(["rebalance", served.address, "--policy", "even", "--dry-run", "--max-moves", "1"]) == 0
    assert capsys.readouterr().out.endswith("\ndry run: nothing was moved\n")


def test_a_rebalance_that_cannot_be_is_bad_input(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rebalance", served.address, "--policy", "wish"]) == 2
    assert "policy: unknown balancing policy 'wish'; known: even, eplb" in capsys.readouterr().err
    assert main(["rebalance", served.address, "--max-moves", "-1"]) == 2
    assert "--max-moves=-1 must be 0 to" in capsys.readouterr().err


def test_reload(served: Served, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reload", served.address, str(checkpoint)]) == 0
    assert re.match(r"reloaded: 2 layers, .* MiB, in .* s; weights version 2 and ", capsys.readouterr().out)
    assert main(["reload", served.address, str(checkpoint / "nowhere")]) == 2
    assert f"{checkpoint / 'nowhere'}" in capsys.readouterr().err
    assert main(["reload", served.address, str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_version"] == "3"


def test_bench_of_a_layer_that_is_not_served(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", served.address, "--layer", "9"]) == 2
    assert "--layer=9 is not served; served: 0, 1" in capsys.readouterr().err
    assert main(["bench", served.address, "--rows", "0"]) == 2
    assert "--rows=0 must be more than 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "doing"),
    [
        ("port", "listen"),
        ("metrics-port", "serve metrics"),
        ("health-port", "answer probes"),
    ],
)
def test_a_port_in_use_is_no_bad_input_and_is_named_with_its_key(
    served: Served, checkpoint: Path, flag: str, doing: str
) -> None:
    port = served.address.rpartition(":")[2]
    code, said = refused_start(checkpoint, f"--{flag}", port)
    assert code == 1, "systemd starts it again"
    why, key = "Address already in use", f"server.{flag.replace('-', '_')}"
    assert f"moeserve serve: cannot {doing} on 127.0.0.1:{port}: {why}; set {key}" in said
    assert main(["health", served.address]) == 0


def test_a_host_that_is_none_of_this_machine_is_said_to_be_so(checkpoint: Path) -> None:
    code, said = refused_start(checkpoint, "--host", "192.0.2.1", "--allow-plaintext")  # TEST-NET-1
    assert code == 1 and "192.0.2.1:50051: Cannot assign requested address; set server.host (--host)" in said


def refused_start(checkpoint: Path, *flags: str) -> tuple[int, str]:
    """How a service that cannot start ends, and what it says."""
    done = subprocess.run(
        [*SERVE, "--checkpoint", str(checkpoint), *flags],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_ctrl_c_stops_head_and_ranks_without_a_traceback(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", served.address, "--json"]) == 0
    pids = [rank["pid"] for rank in json.loads(capsys.readouterr().out)["ranks"]]
    os.killpg(served.process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches all processes
    code, rest = served.ended()
    logged = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (INFO|WARNING) +(head|door|rank \d) generation ")
    printed = [line for line in rest.splitlines() if not logged.match(line)]
    assert (code, printed) == (0, ["stopping"]), rest
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert main(["health", served.address, "--timeout", "2"]) == 1
    assert capsys.readouterr().out.startswith("UNREACHABLE: ")
    assert main(["status", served.address, "--timeout", "2"]) == 1
    assert "moeserve status: UNAVAILABLE: " in capsys.readouterr().err


@pytest.mark.parametrize("after", [0.0, 1.0], ids=["at once", "a second later"])
def test_sigterm_while_starting_ends_everything(checkpoint: Path, after: float) -> None:
    process = subprocess.Popen(
        [*SERVE, "--checkpoint", str(checkpoint), "--port", "0", "--data-parallel-size", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started: list[str] = []
    deadline = time.monotonic() + START_SECONDS
    while not any(map(is_forkserver, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
        started = descendants_of(process.pid)
    time.sleep(after)
    started = descendants_of(process.pid)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    logged = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (INFO|WARNING) +launcher generation ")
    said = [line for line in printed.splitlines() if not logged.match(line)]
    assert said[-1] == "stopped while starting", "a thread may log something behind it"
    assert "Traceback" not in printed
    # what ranks are forked from ends when it sees that its starter is gone
    assert started and gone(started, deadline - time.monotonic())


def test_sigterm_before_anything_has_started_is_no_crash(checkpoint: Path) -> None:
    process = subprocess.Popen(
        [*SERVE, "--checkpoint", str(checkpoint), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[model]\n"  # the checkpoint is read next, then processes start
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=30)
    assert (process.returncode, printed.splitlines()[-1]) == (0, "stopped while starting")
