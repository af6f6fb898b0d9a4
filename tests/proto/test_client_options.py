"""What a caller may say wrongly: options that are not there, and timeouts that no clock takes."""

import asyncio
import math
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from proto_fake import rows

from moeserve.proto import moe_pb2
from moeserve.proto.client import AsyncMoeClient, Choice, Logits, MoeClient, Patience
from moeserve.proto.client.batch import SPLIT_ROWS
from moeserve.proto.tensors import encode, plain

NAMES = "timeout, lane, dtype, output, weights_version"
ROOT = Path(__file__).parents[2]


def calls(client, **options):
    """Every way to call, not yet awaited."""
    hidden, experts, weights = rows(2)
    yield lambda: client.forward(3, hidden, experts, weights, **options)
    yield lambda: client.forward_logits(3, hidden, torch.ones(2, 8), **options)
    yield lambda: client.call(3, hidden, Choice(experts, weights), **options)
    yield lambda: client.call(3, hidden, Logits(torch.ones(2, 8)), **options)


@pytest.mark.parametrize("kind", [MoeClient, AsyncMoeClient])
def test_an_option_with_a_typing_error_is_refused_at_once_by_name(kind, far):
    wrong = {"weight_version": 99, "timout": 1}

    async def run() -> None:
        client = kind(far.address)
        for call in calls(client, **wrong):
            with pytest.raises(TypeError, match=f"no option timout, weight_version; its options are {NAMES}"):
                call()  # of an async client too: nothing is awaited
        if kind is AsyncMoeClient:
            await client.close()
        else:
            client.close()

    asyncio.run(run())
    assert far.topologies == 0


@pytest.mark.parametrize("kind", [MoeClient, AsyncMoeClient])
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"timeout": "5"}, "timeout='5' must be a number of seconds"),
        ({"timeout": True}, "timeout=True must be a number of seconds"),
        ({"lane": "0"}, "lane='0' must be the rank of a lane, a whole number, or None"),
        ({"lane": 1.0}, "lane=1.0 must be the rank of a lane, a whole number, or None"),
        ({"output": 3}, "output=3 must be a tensor that `allocate` made, or None"),
        ({"output": torch.ones(1000)}, "output=a Tensor must be a tensor that `allocate` made, or None"),
        ({"dtype": 16}, "dtype=16 must be 'bf16', or ''"),
        ({"weights_version": "1"}, "weights_version='1' must be a whole number"),
    ],
)
def test_an_option_of_another_type_is_refused_at_once_by_name_and_value(kind, option, text, far):
    async def run() -> None:
        client = kind(far.address)
        for call in calls(client, **option):
            with pytest.raises(TypeError) as refused:
                call()
            assert str(refused.value) == text
        if kind is AsyncMoeClient:
            await client.close()
        else:
            client.close()

    asyncio.run(run())
    assert far.topologies == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"timeout": "5"}, "timeout='5' must be a number of seconds"),
        ({"lane": "0"}, "lane='0' must be the rank of a lane, a whole number, or None"),
        ({"model": None}, "model=None must be a name, or ''"),
    ],
)
def test_a_client_s_own_settings_are_checked_alike(client_of, settings, text):
    with pytest.raises(TypeError) as refused:
        client_of("127.0.0.1:1", **settings)
    assert str(refused.value) == text


def test_numbers_of_numpy_are_numbers(client_of, far):
    hidden, experts, weights = rows(2)
    with client_of(far.address) as client:
        options = {"timeout": np.float32(5), "lane": np.int64(1), "weights_version": np.uint64(1)}
        assert torch.equal(client.forward(3, hidden, experts, weights, **options), hidden * 2)


def test_every_option_that_is_named_is_taken(client_of, far):
    hidden, experts, weights = rows(2)
    with client_of(far.address) as client:
        options = {"timeout": 5.0, "lane": 1, "dtype": "", "output": None, "weights_version": 1}
        assert ", ".join(options) == NAMES
        assert torch.equal(client.forward(3, hidden, experts, weights, **options), hidden * 2)


def test_a_dtype_that_declares_nothing_is_refused(client_of, far):
    with client_of(far.address) as client, pytest.raises(ValueError, match="dtype='bf61' must be 'bf16'"):
        client.forward(3, *rows(2), dtype="bf61")


@pytest.mark.parametrize("seconds", [3e6, 5e6, 7e9, 8e9, 1e300, math.inf], ids=str)
@pytest.mark.parametrize("way", ["whole", "parts", "shared"])
def test_a_timeout_over_what_grpc_takes_is_a_long_one(client_of, service, way, seconds):
    hidden, experts, weights = rows(*{"whole": (2,), "parts": (4 * SPLIT_ROWS,), "shared": (8, 2048)}[way])
    with client_of(service.address, timeout=seconds) as client:
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
        assert torch.equal(client.forward(3, hidden, experts, weights, timeout=seconds), hidden * 2)
        assert client.status().state == "serving"
        assert client.health() == "SERVING"
        assert client.rebalance(timeout=seconds).outcome == "moved"
        assert client.reload("/new", timeout=seconds).outcome == "reloaded"
        client.allocate(0, (2, 2)).close()


def test_a_stream_of_one_s_own_takes_any_timeout(service):
    hidden, experts, weights = (encode(plain(array, "x")) for array in rows(2))
    choice = moe_pb2.Choice(ids=experts, weights=weights)
    with MoeClient(service.address) as client:
        stream = client.stream(0)
        asked = moe_pb2.ForwardRequest(layer=3, job_id="a", hidden=hidden, choice=choice)
        assert stream.ask(asked, math.inf).epoch == 7
        stream.close()


def test_a_timeout_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="timeout=nan must be more than 0 seconds"):
        Patience(timeout=math.nan)


def test_the_package_says_that_it_is_typed():
    """In the tree; the wheel takes all files of the package, but for those that git ignores."""
    assert (ROOT / "moeserve" / "py.typed").is_file()
    ignored = subprocess.run(["git", "check-ignore", "-q", "moeserve/py.typed"], cwd=ROOT, check=False)
    assert ignored.returncode != 0
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["moeserve"] and not wheel.keys() & {"exclude", "include", "only-include"}
