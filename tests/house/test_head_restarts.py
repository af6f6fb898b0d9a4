"""The head is killed and starts again at its address: ranks keep what they hold, and clients only wait."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from attached_callers import answer_of
from failures import stand_still
from houses import Alone
from processes import descendants_of, gone
from served import Service, Waiting, served

from moeserve.proto.client import Choice, MoeClient
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.runtime.sections import ClusterConfig

EP4 = ("--data-parallel-size", "4", "--enable-expert-parallel")
EP2 = ("--data-parallel-size", "2", "--enable-expert-parallel")
LOCAL = ("--launcher", "local")
KILLS = 3
STOPPED_SECONDS = ClusterConfig().stopped_seconds
AGAIN_SECONDS = 30.0  # for a loaded host; what is wanted is measured by the bench


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_killed_head_comes_back_at_its_address_and_nothing_is_read_again(
    tmp_path: Path, checkpoint_path: Path, alone: Alone, launcher: str
) -> None:
    spare = tmp_path / "service.toml"
    spare.write_text("[balance]\nredundant_experts = 4\n")
    with served(tmp_path, checkpoint_path, str(spare), "--launcher", launcher, *EP4) as service:
        generation = service.serves()
        with Waiting(service.address, alone) as clients:
            epoch = rebalanced(service)
            before = service.read()
            assert len(before) == 4 and all(before.values())
            for _ in range(KILLS):
                clients.after(time.monotonic(), AGAIN_SECONDS)
                head, killed = service.head, time.monotonic()
                os.kill(head, signal.SIGKILL)
                lasted = clients.after(killed, AGAIN_SECONDS)
                generation = service.serves(generation)
                assert service.head != head
                assert service.read() == before, "a rank was started again, or has read experts"
                print(f"answers again after {lasted:.2f} s")
        assert (clients.failed, clients.wrong) == ([], 0)
        with MoeClient(service.address) as client:
            assert client.status().epoch == epoch
        said = {line.split()[0]: line.split()[2] for line in service.printed() if " on " in line[:12]}
        assert "moe_" in fetched(f"http://{said['metrics']}/metrics"), "at the address that was printed"
        assert fetched(f"http://{said['probes']}/readyz").startswith("serving")


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=AGAIN_SECONDS) as answer:
        return str(answer.read().decode())


def rebalanced(service: Service) -> int:
    """Has experts moved, so that the group's epoch is not the one that it starts with; returns it."""
    until, reply = time.monotonic() + AGAIN_SECONDS, None
    with MoeClient(service.address) as client:
        while time.monotonic() < until:  # ranks tell of their load about once a second
            if (reply := client.rebalance(policy="eplb")).outcome == "moved":
                epoch = int(client.status().epoch)
                assert epoch > 1
                return epoch
            time.sleep(0.2)
    raise AssertionError(reply)


def test_a_pass_under_way_goes_on_to_its_end(tmp_path: Path, checkpoint_path: Path, alone: Alone) -> None:
    """The head dies between its layers, and while a step of it waits to be ordered."""
    with served(tmp_path, checkpoint_path, *LOCAL, *EP2) as service:
        generation = service.serves()
        wanted = Wanted("a_pass", dtype="fp32", rows=8, stages=1, rank=0, timeout=60.0)
        batches = [alone.batch(5, seed=layer) for layer in (0, 1)]
        with AttachedLane.attach(service.address, wanted) as lane:
            for between in (True, False):
                with lane.begin([0, 1]) as run:
                    for layer, (hidden, ids, weights) in enumerate(batches):
                        if layer == 1 and not between:
                            os.kill(service.head, signal.SIGKILL)
                        run.post(0, hidden, Choice(ids, weights))
                        expected = alone.forward(layer, hidden, ids, weights)
                        torch.testing.assert_close(answer_of(run, 0), expected, rtol=1e-4, atol=1e-4)
                        if layer == 0 and between:
                            os.kill(service.head, signal.SIGKILL)
                generation = service.serves(generation)


def test_a_stopped_head_is_killed_and_replaced(tmp_path: Path, checkpoint_path: Path, alone: Alone) -> None:
    with served(tmp_path, checkpoint_path, *LOCAL, *EP2) as service:
        before, head = service.read(), service.head
        with Waiting(service.address, alone, clients=2) as clients:
            clients.after(time.monotonic(), AGAIN_SECONDS)
            stand_still(head)
            assert gone([str(head)], AGAIN_SECONDS)
            clients.after(time.monotonic(), AGAIN_SECONDS)
        service.serves()
        assert service.read() == before
        assert (clients.failed, clients.wrong) == ([], 0)
        found = re.search(
            rf"the head \(pid {head}\) is killed: it is stopped \(state T\) for (\d+\.\d) s",
            service.log.read_text(),
        )
        assert found is not None and float(found[1]) >= STOPPED_SECONDS


def test_a_rank_that_dies_with_the_head_is_started_again_beside_those_that_come_back(
    tmp_path: Path, checkpoint_path: Path, alone: Alone
) -> None:
    with served(tmp_path, checkpoint_path, *LOCAL, *EP2) as service:
        before = service.read()
        lost = service.named("moeserve-rank1")
        with Waiting(service.address, alone, clients=2) as clients:
            clients.after(time.monotonic(), AGAIN_SECONDS)
            for pid in (service.head, lost):
                os.kill(pid, signal.SIGKILL)
            clients.after(time.monotonic(), AGAIN_SECONDS)
        service.serves()
        assert (clients.failed, clients.wrong) == ([], 0)
        after = service.read()
        kept = next(pid for pid in before if pid != lost)
        assert after[kept] == before[kept] and lost not in after and len(after) == 2


def test_head_and_ranks_end_with_their_launcher(tmp_path: Path, checkpoint_path: Path) -> None:
    """They would look for a head, hold their GPUs meanwhile, and nobody would start one."""
    with served(tmp_path, checkpoint_path, *LOCAL, *EP2) as service:
        started = descendants_of(service.pid)
        assert len(started) >= 3
        os.kill(service.pid, signal.SIGKILL)
        assert gone(started, AGAIN_SECONDS)


@pytest.mark.parametrize("kind", ["front door", "metrics"])
def test_nobody_else_gets_a_port_of_the_service(tmp_path: Path, checkpoint_path: Path, kind: str) -> None:
    """Another service of the same user would share it unseen."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with served(first, checkpoint_path, *LOCAL, *EP2) as service:
        taken = service.address.rsplit(":", 1)[1]
        if kind == "metrics":
            taken = (
                next(one for one in service.printed() if one.startswith("metrics on"))
                .split()[2]
                .rsplit(":", 1)[1]
            )
        flags = ("--port", taken) if kind == "front door" else ("--metrics-port", taken)
        with pytest.raises(AssertionError) as failed, served(second, checkpoint_path, *LOCAL, *EP2, *flags):
            pass
        key = "server.port" if kind == "front door" else "server.metrics_port"
        assert f"set {key}" in str(failed.value)
        assert service.serves()
