"""What an operator applies is accepted by who reads it, and its start commands bring a service up."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from houses import Alone, house_config
from prometheus_server import NoPrometheus, promtool
from served import Waiting, served

from moeserve.device.machine import machine_named
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.config import Config
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.served import served_from
from moeserve.runtime.telemetry.metrics import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.toml"))
CLUSTER = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
UP_SECONDS = 120.0
STOP_SECONDS = 15.0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_configuration_that_can_be_planned(example: Path, checkpoint_path: Path) -> None:
    config = Config.load(example).checked()
    assert config.parallel.mesh.ranks >= 4 and config.parallel.enable_expert_parallel
    machine = machine_named("cpu" if config.plan.device == "cpu" else "h200", ())
    served = served_from(config.with_values({"model.checkpoint": str(checkpoint_path)}))
    assert plans_for(served, machine, config.plan.wanted).keys() == {0, 1}


def test_ray_accepts_the_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())))


def test_the_cluster_starts_the_example_it_mounts() -> None:
    mounted = CLUSTER["file_mounts"]["~/moeserve/service.toml"]
    assert Config.load(DEPLOY / mounted).server.host == CLUSTER["provider"]["head_ip"]
    for command in CLUSTER["head_start_ray_commands"] + CLUSTER["worker_start_ray_commands"]:
        assert command == "ray stop" or "RAY_AUTH_MODE=token" in command


def test_the_pods_have_what_the_ranks_of_their_configuration_need(tmp_path: Path) -> None:
    settings, service, job = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    (name, text), *_ = settings["data"].items()
    (tmp_path / name).write_text(text)
    config, cluster = Config.load(tmp_path / name).checked(), job["spec"]["rayClusterSpec"]
    (workers,), first = cluster["workerGroupSpecs"], cluster["headGroupSpec"]["template"]
    (head,), (worker,) = first["spec"]["containers"], workers["template"]["spec"]["containers"]
    limits, ranks = worker["resources"]["limits"], config.parallel.mesh.ranks
    assert int(limits["nvidia.com/gpu"]) * workers["replicas"] == ranks
    assert int(limits["cpu"]) * workers["replicas"] >= config.cluster.cpus_per_rank * ranks
    (mounted,) = [mount["mountPath"] for mount in head["volumeMounts"] if mount["name"] == "service"]
    assert f"{mounted}/{name}" in job["spec"]["entrypoint"].split()
    ports = {port["port"] for port in service["spec"]["ports"]}
    assert ports == {config.server.port, config.server.metrics_port, config.server.health_port}
    assert service["spec"]["selector"].items() <= first["metadata"]["labels"].items()


def test_a_pod_is_probed_where_the_service_answers_probes(tmp_path: Path) -> None:
    settings, deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (name, text), *_ = settings["data"].items()
    (tmp_path / name).write_text(text)
    config, pod = Config.load(tmp_path / name).checked(), deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    paths = {"startupProbe": "/startupz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": config.server.health_port}
    patience = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    assert patience >= config.cluster.start_timeout_seconds
    server = config.server
    assert pod["spec"]["shareProcessNamespace"], "or each head that is killed leaves a zombie"
    assert pod["spec"]["terminationGracePeriodSeconds"] > server.drain_seconds + 15
    assert server.host != "127.0.0.1" and config.cluster.launcher == "local"
    (mounted,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "service"]
    assert f"{mounted}/{name}" in container["command"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.parallel.mesh.ranks
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {port["port"] for port in service["spec"]["ports"]} == {server.port, server.metrics_port}
    exporters = {port["containerPort"] for port in container["ports"] if port["name"].startswith("metrics")}
    assert exporters == {server.metrics_port + at for at in range(1 + config.parallel.mesh.ranks)}


def checked_by_promtool(*arguments: str) -> str:
    """What it said; it must be content."""
    try:
        done = promtool(*arguments, folder=DEPLOY / "prometheus")
    except NoPrometheus as reason:
        pytest.skip(str(reason))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_its_configuration() -> None:
    assert "SUCCESS: 1 rule files found" in checked_by_promtool("check", "config", "prometheus.yml")


def test_alerts_fire_on_their_cause_and_not_without() -> None:
    assert "SUCCESS" in checked_by_promtool("test", "rules", "rules_test.yml")
    tested = (DEPLOY / "prometheus" / "rules_test.yml").read_text()
    for rule in RULES["groups"][0]["rules"]:
        cases = re.findall(rf"alertname: {rule['alert']}\b(, exp_alerts: \[\])?", tested)
        assert "" in cases and cases.count("") < len(cases), f"{rule['alert']} needs a test of both kinds"


@pytest.mark.parametrize("rule", RULES["groups"][0]["rules"], ids=lambda rule: rule["alert"])
def test_alerts_speak_of_metrics_that_exist(rule: dict[str, Any]) -> None:
    names = re.findall(r"\bmoe_\w+", rule["expr"])
    assert names and all(re.sub(r"_(bucket|sum|count)$", "", name) in METRICS for name in names)
    assert set(rule["annotations"]) == {"summary", "action"}


class Hosts:
    """Two hosts' start commands run on this machine, in a home folder of their own.

    What differs from the file: a free port, one CPU a node so that no node holds both ranks, everything in
    the foreground so that it can be ended by its id, and no `ray stop`, which would end other clusters too.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._port = free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_TMPDIR": str(home / "ray"),
            "RAY_ADDRESS": f"127.0.0.1:{self._port}",
            "RAY_HEAD_IP": "127.0.0.1",
        }

    def run(self, command: str) -> subprocess.Popen[bytes]:
        """Starts one of the file's commands."""
        command = command.replace("6379", str(self._port)).replace(
            "--autoscaling-config=~/ray_bootstrap_config.yaml", ""
        )
        command = command.replace("setsid ", "").removesuffix("&")
        if "ray start" in command:
            command += " --block --num-cpus=1 --node-ip-address=127.0.0.1"
            command += "" if "--head" in command else f" --temp-dir={self.home / 'ray'}"
        with (self.home / f"log-{len(self._started)}").open("wb") as out:
            started = subprocess.Popen(
                ["bash", "-c", command],
                env=self._environment, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._started.append(started)
        return started

    def until_logged(self, words: str) -> None:
        """Returns once the service has logged `words`."""
        log, until = self.home / "moeserve" / "service.log", time.monotonic() + UP_SECONDS
        while not (log.exists() and words in log.read_text()):
            assert time.monotonic() < until, f"no {words!r} in the log:\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The end of each process's log."""
        logs = [*self.home.glob("log-*"), *self.home.glob("moeserve/*.log")]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)

    def stop(self) -> None:
        """Ends what was started, last first, and whatever is left of its session."""
        for started in reversed(self._started):
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait(STOP_SECONDS)


def free_port() -> int:
    """Below 10002, where Ray's workers look for theirs."""
    for port in range(9800, 10001):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no free port from 9800 to 10000")


@pytest.fixture
def hosts(checkpoint_path: Path) -> Iterator[Hosts]:
    """Two hosts that have what the file mounts: a token, and the configuration of a small service."""
    home = Path(
        tempfile.mkdtemp(prefix="hosts-", dir="/tmp")
    )  # short: Ray's sockets have names of at most 107 bytes
    for folder in ("moeserve", ".ray", "ray"):
        (home / folder).mkdir()
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    ranks = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
    config = house_config(checkpoint_path, cluster__launcher="ray", **ranks)
    (home / "moeserve" / "service.toml").write_text("\n".join(config.lines()))
    made = Hosts(home)
    yield made
    made.stop()
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_its_start_commands_bring_the_service_up(hosts: Hosts, alone: Alone) -> None:
    stop, head, serve = CLUSTER["head_start_ray_commands"]
    assert stop == "ray stop"
    hosts.run(head)
    service = hosts.run(serve)
    hosts.until_logged("2 ranks need 2 CPUs, and the Ray cluster has 1")
    hosts.run(CLUSTER["worker_start_ray_commands"][1])
    hosts.until_logged("serving on ")
    address = (hosts.home / "moeserve" / "service.log").read_text().rpartition("serving on ")[2].split()[0]
    batch = alone.batch(8, seed=1)
    with MoeClient(address, timeout=30) as client:
        torch.testing.assert_close(client.forward(0, *batch), alone.forward(0, *batch), rtol=1e-4, atol=1e-4)
        assert len(client.topology().lanes) == 2
    (serving,) = [
        child for child in psutil.Process(service.pid).children(recursive=True) if "serve" in child.cmdline()
    ]
    serving.terminate()
    assert service.wait(UP_SECONDS) == 0, "told to stop, it does not start again"
    with pytest.raises(MoeError), MoeClient(address, timeout=2) as client:
        client.forward(0, *batch)


UNIT = DEPLOY / "moeserve.service"


def unit() -> dict[str, list[str]]:
    """The settings of the unit's service, by name: a name may stand several times."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0].splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/moeserve/bin/moeserve", sys.executable))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_the_unit_says_what_the_service_needs_of_systemd() -> None:
    settings = unit()
    assert settings["KillMode"] == ["mixed"], "else ranks get the signal to stop, which calls under way need"
    assert settings["OOMPolicy"] == ["continue"], "else one rank's end is the service's"
    assert settings["Type"] == ["notify"] and settings["TimeoutStartSec"] == ["infinity"]
    server = Config().server
    assert float(settings["TimeoutStopSec"][0]) >= server.drain_seconds + 40.0
    assert settings["RestartPreventExitStatus"] == ["2"]


def test_the_units_command_comes_up_outlives_its_head_and_stops_as_systemd_does_it(
    tmp_path: Path, checkpoint_path: Path, alone: Alone
) -> None:
    """This test is systemd: it waits for the word that the service is up, and signals the main process alone.

    It kills the head as the kernel would.
    """
    (command,) = unit()["ExecStart"]
    words = command.split()
    assert words[:2] == ["/opt/moeserve/bin/moeserve", "serve"]
    (tmp_path / "service.toml").write_text(
        "[parallel]\ndata_parallel_size = 2\nenable_expert_parallel = true\n"
    )
    flags = [str(tmp_path / Path(word).name) if word.endswith(".toml") else word for word in words[2:]]
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(UP_SECONDS)
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    with manager:
        with served(tmp_path, checkpoint_path, *flags, environment=told) as service:
            said = manager.recv(4096).decode()
            assert said.splitlines() == ["READY=1", f"STATUS=serving on {service.address}"]
            before, head = service.read(), service.head
            with Waiting(service.address, alone, clients=2) as clients:
                clients.after(time.monotonic(), UP_SECONDS)
                os.kill(head, signal.SIGKILL)
                clients.after(time.monotonic(), UP_SECONDS)
            service.serves()
            assert (clients.failed, clients.wrong, service.head != head) == ([], 0, True)
            assert service.read() == before
        assert manager.recv(4096) == b"STOPPING=1"
    assert service.process.returncode == 0
