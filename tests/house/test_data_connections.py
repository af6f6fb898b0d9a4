"""Inline calls to a running service, past gRPC: right answers, and gRPC where a lane has no connection."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from failures import standing_still
from houses import Alone, house_config
from keyed import HOSTS, Keyring, code_of
from lane_calls import in_threads, requests
from made_certificates import replaced

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import AsyncMoeClient, Choice, Logits, MoeClient
from moeserve.proto.client.patience import Clock, Patience
from moeserve.proto.client.sync_link import Link
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, MoeError, NotFound
from moeserve.proto.tensors import encode_into, plain
from moeserve.proto.transports import data_connections
from moeserve.proto.transports.carried import Carried
from moeserve.proto.transports.tls import TlsSocket
from moeserve.runtime.keys.access import Role
from moeserve.runtime.keys.grants import LOOK_SECONDS
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SECONDS = 20.0
EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}


@pytest.fixture(scope="module")
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(checkpoint_path, cluster__stopped_seconds=0.0, **EP2)) as cluster:
        yield cluster


@pytest.fixture
def client(house: LocalCluster) -> Iterator[MoeClient]:
    with MoeClient(house.address, timeout=SECONDS, transport="inline") as made:
        yield made


def check(client: MoeClient, alone: Alone, rows: int, seed: int, **options: int) -> None:
    batch = alone.batch(rows, seed=seed)
    found = client.forward(seed % 2, *batch, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, alone.forward(seed % 2, *batch), **CLOSE)


def test_inline_calls_of_any_size_go_past_grpc(house: LocalCluster, client: MoeClient, alone: Alone) -> None:
    before = requests(house, method="DataConnection"), requests(house, method="Forward")
    for seed, rows in enumerate((1, 3, 16, 17, 40, 100, 900, 2500, 1, 5)):
        check(client, alone, rows, seed)
    none = client.forward(0, *(part[:0] for part in alone.batch(2, seed=1)))
    assert isinstance(none, torch.Tensor) and none.shape[0] == 0
    hidden, experts, weights = alone.batch(6, seed=1)
    as_numpy = client.forward(1, hidden.numpy(), experts.numpy(), weights.numpy())
    torch.testing.assert_close(
        torch.from_numpy(np.asarray(as_numpy)), alone.forward(1, hidden, experts, weights), **CLOSE
    )
    assert requests(house, method="DataConnection") >= before[0] + 12
    assert requests(house, method="Forward") == before[1], "none by gRPC"


def test_routes_of_any_kind_and_errors_are_those_of_other_calls(
    house: LocalCluster, client: MoeClient, alone: Alone
) -> None:
    hidden, experts, weights = alone.batch(4, seed=5)
    logits = torch.randn(4, alone.checkpoint.num_experts, generator=torch.Generator().manual_seed(1))
    with MoeClient(house.address, timeout=SECONDS, transport="shared_memory") as near:
        wanted = near.call(1, hidden, Logits(logits))
        found = client.call(1, hidden, Logits(logits))
        torch.testing.assert_close(found.hidden, wanted.hidden, **CLOSE)
        assert (found.epoch, found.weights_version) == (wanted.epoch, wanted.weights_version)
    torch.testing.assert_close(
        client.call(0, hidden.half(), Choice(experts.long(), weights.bfloat16())).hidden.float(),  # type: ignore[union-attr]
        alone.forward(0, hidden, experts, weights),
        rtol=2e-2,
        atol=2e-2,
    )
    with pytest.raises(NotFound):
        client.forward(77, hidden, experts, weights)
    with pytest.raises(InvalidArgument, match="is out of range"):
        client.forward(0, hidden, experts + 1000, weights)
    check(client, alone, 4, 2)


def test_calls_like_those_before_are_copies_with_their_own_values(
    house: LocalCluster, client: MoeClient, alone: Alone
) -> None:
    for seed in range(12):
        check(client, alone, 7, seed)
    assert len(client._inline._known) == 2, "of two layers"
    links = client._core.lanes._links.values()
    assert [len(link._data._kept._idle) for link in links] == [1], "a caller alone stays at a lane"
    hidden, experts, weights = alone.batch(7, seed=1)
    with pytest.raises(InvalidArgument, match="is out of range"):
        client.forward(1, hidden, experts + 1000, weights)
    with pytest.raises(InvalidArgument, match="is out of range"):
        client.forward(1, hidden, experts, weights, dtype="")
        client.forward(1, hidden, experts - 1000, weights)
    with pytest.raises(TypeError):
        client.forward(True, hidden, experts, weights)
    apart = torch.stack([hidden, hidden + 1], dim=2)[:, :, 0]
    assert not apart.is_contiguous()
    found = client.forward(1, apart, experts.long(), weights)
    torch.testing.assert_close(found, alone.forward(1, hidden, experts, weights), **CLOSE)
    for version in (1, 1):
        check(client, alone, 7, 3, weights_version=version)
    with pytest.raises(MoeError, match="wrong_version"):
        check(client, alone, 7, 3, weights_version=9)
    before = [lane.rank for lane in client.topology().lanes]
    assert before == [0, 1]
    check(client, alone, 7, 5)


def test_a_lane_without_connections_answers_all_the_same(
    house: LocalCluster, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MoeClient(house.address, timeout=SECONDS, transport="inline") as client:
        for seed in range(4):
            check(client, alone, 7, seed)
        links, asked = list(client._core.lanes._links.values()), []
        for link in links:
            monkeypatch.setattr(link, "connection", lambda clock: None)
            real = link._carry
            monkeypatch.setattr(
                link,
                "_carry",
                lambda *given, real=real, link=link, **more: (asked.append(link), real(*given, **more))[1],
            )
        for seed in range(8):
            check(client, alone, 7, seed)
        assert max(asked.count(link) for link in links) == len(asked) == 8, "a caller alone stays at one"


def test_threads_have_connections_of_their_own_and_keep_them(
    house: LocalCluster, client: MoeClient, alone: Alone
) -> None:
    def call(number: int) -> None:
        for turn in range(20):
            check(client, alone, 1 + (number + turn) % 40, number + turn, lane=turn % 2)

    in_threads(6, call)
    for link in client._core.lanes._links.values():
        assert 1 <= len(link._data._kept._idle) <= 6


def test_a_rank_that_stands_still_is_waited_for_no_longer_than_was_said(
    house: LocalCluster, alone: Alone
) -> None:
    batch = alone.batch(3, seed=1)
    with MoeClient(house.address, timeout=SECONDS, lane=0, transport="inline") as client:
        client.forward(1, *batch)
        with standing_still(house.pid(0)):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                client.forward(1, *batch, timeout=0.3)
            assert time.monotonic() - began < 3.0
        check(client, alone, 3, 1)
        (link,) = client._core.lanes._links.values()
        assert len(link._data._kept._idle) == 1, "the one whose call was given up is not used again"


def test_after_a_fork_the_child_has_connections_of_its_own(
    client: MoeClient, house: LocalCluster, alone: Alone
) -> None:
    check(client, alone, 3, 1, lane=0)
    (link,) = client._core.lanes._links.values()
    _, kept = link._data._kept._idle[-1]
    mine, child = os.pipe(), os.fork()
    if not child:
        os.write(mine[1], b"-" if kept.fresh else b"+")
        os._exit(0)
    assert os.read(mine[0], 1) == b"+"
    os.waitpid(child, 0)
    for one in mine:
        os.close(one)
    assert kept.fresh
    check(client, alone, 3, 2, lane=0)


@pytest.mark.timeout(120)
def test_calls_go_on_when_a_rank_is_killed_and_comes_back(checkpoint_path: Path, alone: Alone) -> None:
    with (
        LocalCluster(house_config(checkpoint_path, **EP2)) as house,
        MoeClient(house.address, timeout=60.0, transport="inline") as client,
    ):
        for seed in range(4):
            check(client, alone, 5, seed)
        os.kill(house.pid(1), signal.SIGKILL)
        for seed in range(40):
            check(client, alone, 5, seed)
        assert requests(house, method="DataConnection") > 0


@pytest.mark.parametrize("why", ["off", "out of reach", "an older rank"])
def test_calls_go_by_grpc_where_there_is_no_connection(
    checkpoint_path: Path, alone: Alone, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = dict[str, Any]()
    if why == "off":
        values["server__data_connections"] = False
    if why == "out of reach":

        def refuse(*given: object, **options: object) -> socket.socket:
            raise TimeoutError("timed out")

        monkeypatch.setattr(data_connections.socket, "create_connection", refuse)
    if why == "an older rank":

        def unknown(link: Link, timeout: float) -> moe_pb2.OpenDataConnectionReply:
            raise MoeError("UNIMPLEMENTED", "", "Method not found!")

        monkeypatch.setattr(Link, "_ask_connection", unknown)
    with (
        LocalCluster(house_config(checkpoint_path, **values)) as house,
        MoeClient(house.address, timeout=SECONDS, transport="inline") as client,
    ):
        for seed in range(5):
            check(client, alone, 5, seed)
        (link,) = client._core.lanes._links.values()
        assert not link._data.likely and not link._data._kept._idle
        if why == "off":
            with grpc.insecure_channel(client.topology().lanes[0].address) as channel:
                stub = moe_pb2_grpc.LaneServiceStub(channel)
                with pytest.raises(grpc.RpcError, match="calls by gRPC alone"):
                    stub.OpenDataConnection(moe_pb2.OpenDataConnectionRequest())


@pytest.mark.parametrize("mode", ["tls", "mutual"])
def test_with_tls_connections_are_encrypted_and_certificates_may_be_renewed(
    checkpoint_path: Path, tmp_path: Path, alone: Alone, mode: str
) -> None:
    ring = Keyring(tmp_path, mode)
    shown = ring.credentials(ring.shown("right", frozenset({Role.CALL})))
    values = ring.settings() | {"passes__connections": "always"}
    with LocalCluster(house_config(checkpoint_path, **values)) as house:
        for _ in range(2):
            with MoeClient(house.address, timeout=SECONDS, transport="inline", credentials=shown) as client:
                for seed, rows in enumerate((1, 40, 2500, 40, 40, 40, 40, 40, 40, 40, 40, 40, 3)):
                    check(client, alone, rows, seed)
                (link,) = client._core.lanes._links.values()
                ((_, kept),) = link._data._kept._idle
                assert isinstance(kept._connection, TlsSocket) and kept.fresh
                with pytest.raises(InvalidArgument, match="is out of range"):
                    hidden, experts, weights = alone.batch(40, seed=1)
                    client.forward(0, hidden, experts + 1000, weights)
                check(client, alone, 40, 1)
                port = link._ask_connection(SECONDS).port
                with socket.create_connection((link.address.split(":")[0], port), 5.0) as bare:
                    bare.sendall(bytes(32))
                    assert not bare.recv(1000).startswith(b"+"), "a secret is shown over TLS alone"
            ring.pair = ring.service.sign("moeserve", *HOSTS)  # in the same files


def test_with_grants_a_connection_is_for_who_may_call(
    checkpoint_path: Path, tmp_path: Path, alone: Alone
) -> None:
    ring = Keyring(tmp_path, "plain")
    shown = ring.credentials(ring.shown("right", frozenset({Role.CALL})))
    with LocalCluster(house_config(checkpoint_path, **ring.settings())) as house:
        with MoeClient(house.address, timeout=SECONDS, transport="inline", credentials=shown) as client:
            check(client, alone, 5, 1)
            address = client.topology().lanes[0].address
            (link,) = client._core.lanes._links.values()
            assert len(link._data._kept._idle) == 1
        for case in ("none", "wrong", "wrong role"):
            other = ring.shown(case, frozenset({Role.CALL}))
            code = code_of(
                ring.channel(address, other), "/moeserve.v1.LaneService/OpenDataConnection", b"", other
            )
            assert code == ("PERMISSION_DENIED" if case == "wrong role" else "UNAUTHENTICATED"), case


def test_what_is_granted_no_more_ends_connections_and_another_token_opens_others(
    checkpoint_path: Path, tmp_path: Path, alone: Alone
) -> None:
    ring, token = Keyring(tmp_path, "plain"), tmp_path / "token"
    others = "another-token-of-callers"
    token.write_text(ring.tokens[Role.CALL])
    shown = Credentials(token_file=str(token))
    with (
        LocalCluster(house_config(checkpoint_path, **ring.settings())) as house,
        MoeClient(house.address, timeout=SECONDS, transport="inline", credentials=shown) as client,
    ):
        for seed in range(4):
            check(client, alone, 5, seed)
        ring.write_grants(ring.tokens, f"call token {others}")
        replaced(token, others.encode())
        time.sleep(2 * LOOK_SECONDS)
        ring.write_grants({Role.OBSERVE: ring.tokens[Role.OBSERVE]}, f"call token {others}")
        time.sleep(2 * LOOK_SECONDS)
        for seed in range(4):  # over a connection that the former token has opened, and over another one
            check(client, alone, 5, seed)
        ring.write_grants({Role.OBSERVE: ring.tokens[Role.OBSERVE]})
        time.sleep(2 * LOOK_SECONDS)
        with pytest.raises(MoeError, match="UNAUTHENTICATED"):
            check(client, alone, 5, 1)


async def both(client: AsyncMoeClient, alone: Alone, rows: int, seed: int, **options: int) -> None:
    """One call of an asynchronous client."""
    batch = alone.batch(rows, seed=seed)
    found = await client.forward(seed % 2, *batch, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, alone.forward(seed % 2, *batch), **CLOSE)


def test_asynchronous_calls_go_past_grpc_too(house: LocalCluster, alone: Alone) -> None:
    before = requests(house, method="DataConnection"), requests(house, method="Forward")

    async def act() -> None:
        async with AsyncMoeClient(house.address, timeout=SECONDS, transport="inline") as client:
            for seed, rows in enumerate((1, 3, 40, 900, 2500, 1)):
                await both(client, alone, rows, seed)
            hidden, experts, weights = alone.batch(6, seed=1)
            with pytest.raises(InvalidArgument, match="is out of range"):
                await client.forward(0, hidden, experts + 1000, weights)
            with pytest.raises(DeadlineExceeded):
                await client.forward(0, *alone.batch(2000, seed=1), timeout=1e-4)
            await asyncio.gather(*[both(client, alone, 1 + seed, seed) for seed in range(12)])
            links = client._core.lanes._links.values()
            assert all(1 <= len(link._data._kept._idle) <= 12 for link in links)
            assert not any(link._data._used for link in links)
            leaving = asyncio.create_task(both(client, alone, 2500, 1))
            await asyncio.sleep(0.01)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await both(client, alone, 7, 3)
            under_way = [asyncio.create_task(both(client, alone, 2500, seed)) for seed in range(4)]
            await asyncio.sleep(0.01)
        ended = await asyncio.gather(*under_way, return_exceptions=True)
        assert all(one is None or isinstance(one, MoeError) for one in ended), ended

    asyncio.run(act())
    assert requests(house, method="DataConnection") >= before[0] + 20
    assert requests(house, method="Forward") == before[1], "none by gRPC"


@pytest.mark.parametrize("why", ["off", "tls", "killed"])
def test_asynchronous_calls_are_answered_whatever_a_lane_gives(
    checkpoint_path: Path, tmp_path: Path, alone: Alone, why: str
) -> None:
    ring, shown, values = None, None, dict[str, Any]()
    if why == "off":
        values["server__data_connections"] = False
    elif why == "tls":
        ring = Keyring(tmp_path, "mutual")
        shown = ring.credentials(ring.shown("right", frozenset({Role.CALL})))
        values = ring.settings()

    async def act(house: LocalCluster) -> None:
        async with AsyncMoeClient(
            house.address, timeout=60.0, transport="inline", credentials=shown
        ) as client:
            for seed in range(6):
                await both(client, alone, 5, seed)
            (link,) = client._core.lanes._links.values()
            assert bool(link._data._kept._idle) is (why != "off")
            if why == "killed":
                os.kill(house.pid(0), signal.SIGKILL)
                for seed in range(6):
                    await both(client, alone, 5, seed)

    with LocalCluster(house_config(checkpoint_path, **values)) as house:
        asyncio.run(act(house))


@pytest.mark.timeout(90)
def test_deadlines_hold_while_a_step_hangs(checkpoint_path: Path, alone: Alone) -> None:
    """For callers of any kind, also such as watch no clock of their own."""
    values = EP2 | {"cluster__stopped_seconds": 0.0, "step__late_seconds": 8.0}
    hidden, experts, weights = alone.batch(300, seed=3)
    with (
        LocalCluster(house_config(checkpoint_path, **values)) as house,
        MoeClient(house.address, timeout=30.0, transport="inline", lane=0) as client,
    ):
        right = client.forward(0, hidden, experts, weights)
        (link,) = client._core.lanes._links.values()
        connection = link.connection(Clock(Patience(5.0)))
        assert connection is not None
        request = moe_pb2.ForwardRequest(job_id="a", layer=0)
        encode_into(request.hidden, plain(hidden, "hidden"))
        encode_into(request.choice.ids, plain(experts, "ids"))
        encode_into(request.choice.weights, plain(weights, "weights"))
        with standing_still(house.pid(1)):
            for _ in range(2):
                connection.send(request, 0.3)
                connection._deadline = began = time.monotonic()
                connection._deadline += 20.0  # a client that waits for as long as it takes
                with pytest.raises(DeadlineExceeded, match="no answer within the deadline"):
                    connection.receive()
                assert 0.2 < time.monotonic() - began < 2.0
        request.timeout_ms = 0
        connection.send(request, 20.0)
        reply = connection.receive()
        found = reply.data if isinstance(reply, Carried) else reply.hidden.data
        torch.testing.assert_close(
            torch.frombuffer(bytearray(found or b""), dtype=torch.float32).view(300, -1), right, **CLOSE
        )
        connection.close()
