"""Clients used by many threads or tasks at once, and on the base install."""

import asyncio
import subprocess
import sys
import threading

import pytest
import torch
from proto_fake import FAR, FakeService, rows

from moeserve.proto.client import AsyncMoeClient, MoeClient
from moeserve.proto.client.batch import SPLIT_ROWS
from moeserve.proto.errors import (
    MoeError,
)


@pytest.mark.parametrize("host", [FAR, None], ids=["inline", "near"])
def test_many_threads_share_a_client(host):
    service = FakeService(2, host=host)
    wrong: list[object] = []

    def work(number: int) -> None:
        hidden, experts, weights = rows(2 * SPLIT_ROWS + 1 + number, 16)
        for step in range(10):
            scaled = hidden * (number * 100 + step)
            if not torch.equal(client.forward(3, scaled, experts, weights), scaled * 2):
                wrong.append((number, step))

    with MoeClient(service.address) as client:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and len(service.asked) == 160
    service.stop()


@pytest.mark.parametrize("host", [FAR, None], ids=["inline", "near"])
def test_many_tasks_share_an_async_client(host):
    service = FakeService(2, host=host)

    async def main() -> None:
        async with AsyncMoeClient(service.address) as client:

            async def one(number: int) -> None:
                hidden, experts, weights = rows(2 * SPLIT_ROWS + 1 + number, 16)
                assert torch.equal(
                    await client.forward(3, hidden * number, experts, weights), hidden * number * 2
                )

            await asyncio.gather(*(one(number) for number in range(32)))

    asyncio.run(main())
    assert len(service.asked) == 64
    service.stop()


def test_a_cancelled_task_gives_its_call_up():
    service, held = FakeService(1), threading.Event()
    service.lanes[0].scripts = [held]

    async def main() -> None:
        async with AsyncMoeClient(service.address) as client:
            task = asyncio.create_task(client.forward(3, *rows(8, 2048)))
            async with asyncio.timeout(10):
                while not service.asked:
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            held.set()
            hidden, experts, weights = rows(8, 2048)
            assert torch.equal(await client.forward(3, hidden * 5, experts, weights), hidden * 10)

    asyncio.run(main())
    service.stop()


def test_a_stream_of_one_s_own():
    from moeserve.proto import moe_pb2
    from moeserve.proto.tensors import encode, plain

    service = FakeService(2)
    with MoeClient(service.address) as client:
        stream = client.stream(1)
        hidden, experts, weights = (encode(plain(array, "x")) for array in rows(2))
        for number in range(3):
            choice = moe_pb2.Choice(ids=experts, weights=weights)
            asked = moe_pb2.ForwardRequest(layer=3, job_id=str(number), hidden=hidden, choice=choice)
            assert stream.ask(asked, 5).epoch == 8  # lane 1
        asked.layer, asked.job_id = 3, "wrong"
        asked.hidden.data = b""
        stream.close()
        with pytest.raises(MoeError):
            stream.ask(asked, 5)
    assert service.lanes[1].streams == 1
    service.stop()


BASE_INSTALL = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'torch', 'ray', 'transformers', 'safetensors', 'ml_dtypes', 'grpc_health',
                                  'grpc_reflection', 'grpc_status', 'grpc_tools', 'prometheus_client'}:
            raise ModuleNotFoundError(f'{name} is not in the base install')
sys.meta_path.insert(0, Blocker())
import numpy as np
from moeserve import MoeClient
with MoeClient(sys.argv[1]) as client:
    hidden = np.arange(65536, dtype=np.float32).reshape(8, 8192)
    for transport in ('stream', 'unary'):
        answer = client.forward(3, hidden, np.zeros((8, 2), np.int32), np.ones((8, 2), np.float32))
        assert (answer == hidden * 2).all()
        hidden = hidden[:, :4].copy()
    bits = client.allocate(0, (2, 2), 'bf16')
    assert bits.array.dtype == np.uint16
    assert client.health() == 'SERVING'
rooms = [name for name in sys.modules if name.split('.')[0] == 'moeserve']
wrong = [name for name in rooms if name.split('.')[1:2] and name.split('.')[1] != 'proto']
assert not wrong, wrong
assert not {'torch', 'ray'} & set(sys.modules)
"""


def test_a_client_runs_on_the_base_install_alone(service):
    subprocess.run([sys.executable, "-c", BASE_INSTALL, service.address], check=True, timeout=60)
    assert sorted(service.methods) == ["Forward", "ForwardStream"]
