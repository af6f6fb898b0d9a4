"""What `rebalance`, `reload` and `scale` print of each reply, and exit codes; the service is a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from proto_fake import FakeService

from moeserve.cli import main
from moeserve.proto import moe_pb2


class Saying(FakeService):
    """Answers operations with what the test says."""

    reply: Any = None

    def Rebalance(self, request: Any, context: Any) -> Any:
        self.asked_for = request
        return self.reply

    def Reload(self, request: Any, context: Any) -> Any:
        self.asked_for = request
        if self.reply is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "waiting for ranks [1]")
        return self.reply

    def Scale(self, request: Any, context: Any) -> Any:
        self.asked_for = request
        return self.reply


@pytest.fixture
def service() -> Iterator[Saying]:
    made = Saying(1)
    yield made
    made.stop()


MOVE = moe_pb2.MoveInfo(layer=3, expert=7, from_rank=1, from_slot=0, to_rank=0, to_slot=4)
PLAN = {
    "moves": [MOVE],
    "planned_bytes": 3 << 20,
    "layers": [moe_pb2.LayerGain(layer=3, before=1.5, after=1.0625, moves=1)],
    "gain": 0.4375,
}
SHOWN = """\
layer  expert  from rank  slot  to rank  slot
    3       7          1     0        0     4

layer  moves  largest over mean load   then
    3      1                     1.5  1.062

plan: 1 moves, 3.0 MiB; largest over mean load of a rank falls by 0.438, mean over layers
"""
DONE = {"committed_moves": 2, "epochs": 1, "moved_bytes": 1 << 20, "seconds": 0.25, "epoch": 5}


@pytest.mark.parametrize(
    ("fields", "code", "line"),
    [
        ({"outcome": "planned"}, 0, "dry run: nothing was moved"),
        ({"outcome": "even", "epoch": 4}, 0, "even: no move pays; epoch 4 stays"),
        (
            {"outcome": "moved", "corrupted": 3, **DONE},
            0,
            "moved: 2 copies, 1.0 MiB, in 1 epochs and 0.25 s; epoch 5 is served; "
            "3 copies came corrupted and were fetched again",
        ),
        (
            {"outcome": "abandoned", "reason": "rank 2 is lost", **DONE},
            1,
            "abandoned: rank 2 is lost: 2 copies, 1.0 MiB, in 1 epochs and 0.25 s; epoch 5 is served",
        ),
    ],
)
def test_rebalance(
    service: Saying, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], code: int, line: str
) -> None:
    service.reply = moe_pb2.RebalanceReply(**PLAN, **fields)
    words = ["--policy", "eplb", "--max-moves", "9", "--dry-run"]
    assert main(["rebalance", service.address, *words]) == code
    assert capsys.readouterr().out == f"{SHOWN}{line}\n"
    assert service.asked_for == moe_pb2.RebalanceRequest(policy="eplb", max_moves=9, dry_run=True)


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        (
            {"outcome": "reloaded", "epochs": 2, "weights_version": 2},
            0,
            "reloaded: 2 layers, 1.0 MiB, in 0.50 s; weights version 2 and epoch 9 are served\n",
        ),
        (
            {"outcome": "abandoned", "reason": "rank 0: no such file", "epochs": 1, "weights_version": 1},
            1,
            "abandoned: rank 0: no such file: 1 layers, 1.0 MiB, in 0.50 s; weights version 1 and epoch 9 are"
            " served; the layers that were reloaded stay so: reload again, or go back to the weights before"
            "\n",
        ),
    ],
)
def test_reload(
    service: Saying, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], code: int, text: str
) -> None:
    service.reply = moe_pb2.ReloadReply(nbytes=1 << 20, seconds=0.5, epoch=9, **fields)
    assert main(["reload", service.address, "new"]) == code
    assert capsys.readouterr().out == text
    assert service.asked_for.checkpoint == str(Path.cwd() / "new")


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        (
            {"outcome": "scaled", "seats": [0, 1, 2, 3], "joined": [3]},
            0,
            "scaled: ranks 3 joined, 0 experts moved, 1.0 MiB in 2 epochs, 0.50 s; "
            "ranks 0 1 2 3 serve; epoch 9, generation 4\n",
        ),
        (
            {"outcome": "scaled", "seats": [0, 1], "left": [2, 3], "moves": 7},
            0,
            "scaled: ranks 2 3 left, 7 experts moved, 1.0 MiB in 2 epochs, 0.50 s; "
            "ranks 0 1 serve; epoch 9, generation 4\n",
        ),
        (
            {"outcome": "abandoned", "reason": "ranks [3] have not joined", "seats": [0]},
            1,
            "abandoned: ranks [3] have not joined: 0 experts moved, 1.0 MiB in 2 epochs, 0.50 s; "
            "ranks 0 serve; epoch 9, generation 4\n",
        ),
    ],
)
def test_scale(
    service: Saying, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], code: int, text: str
) -> None:
    service.reply = moe_pb2.ScaleReply(nbytes=1 << 20, epochs=2, seconds=0.5, epoch=9, generation=4, **fields)
    assert main(["scale", service.address, "4"]) == code
    assert capsys.readouterr().out == text
    assert service.asked_for.ranks == 4


def test_a_service_is_not_scaled_to_nothing(service: Saying, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", service.address, "0"]) == 2
    assert "to end the service, stop `moeserve serve`" in capsys.readouterr().err


def test_a_repository_of_the_services_hub_cache_is_asked_for_by_its_name(
    service: Saying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    service.reply = moe_pb2.ReloadReply(outcome="reloaded")
    (tmp_path / "org" / "here").mkdir(parents=True)
    for given, asked in (
        ("org/name@v2", "org/name@v2"),
        ("org/here", str(tmp_path / "org" / "here")),
        ("./org/name", str(tmp_path / "org" / "name")),
    ):
        assert main(["reload", service.address, given]) == 0
        assert service.asked_for.checkpoint == asked


def test_a_service_that_does_not_serve_is_a_failure(
    service: Saying, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reload", service.address, "/new"]) == 1
    assert capsys.readouterr().err == "moeserve reload: UNAVAILABLE: waiting for ranks [1]\n"


@pytest.mark.parametrize("wait", ["-1", "nan", "inf"])
def test_a_wait_for_health_is_a_length_of_time(wait: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "127.0.0.1:9", f"--wait={wait}"]) == 2
    assert "must be 0 or more seconds" in capsys.readouterr().err
