"""Regions that are registered with a device: within a bound, and for as long as a call holds them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from moeserve.proto import moe_pb2
from moeserve.proto.tensors import TensorError, encode, plain
from moeserve.runtime.doors.payloads import Payloads, Regions
from moeserve.runtime.doors.payloads.regions import RegionLimits
from moeserve.runtime.doors.payloads.registration import CudaDriver, Registrar, registrar_of

PAGE = 4096
SECONDS = 5.0


class FakeDriver:
    """What a device knows of host memory."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.refusal = ""
        self.may_end = threading.Event()
        self.may_end.set()

    def register(self, address: int, nbytes: int) -> str:
        if not self.refusal:
            self.held[address] = nbytes
        return self.refusal

    def unregister(self, address: int) -> str:
        assert self.may_end.wait(SECONDS)
        return "" if self.held.pop(address, None) else "not registered"


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def regions(driver: FakeDriver) -> Iterator[Regions]:
    made = Regions(RegionLimits(max_bytes=8 * PAGE), Registrar(driver, 3 * PAGE))
    yield made
    driver.may_end.set()
    made.close()


def soon(true: object) -> bool:
    until = time.monotonic() + SECONDS
    while not true() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.001)
    return bool(true())  # type: ignore[operator]


def test_a_region_is_registered_until_it_ends_and_its_bytes_count_till_then(
    driver: FakeDriver, regions: Regions
) -> None:
    name, size = regions.create(2 * PAGE)
    assert list(driver.held.values()) == [size]
    hold = regions.hold(name, 0, 16)
    assert hold.reached
    driver.may_end.clear()
    regions.release(name)
    assert driver.held, "a call holds it"
    hold.close()
    assert driver.held and regions.bytes == size, "the device has not let go of it"
    driver.may_end.set()
    assert soon(lambda: not driver.held and regions.bytes == 0)


def test_memory_past_the_bound_is_used_without_registration(
    driver: FakeDriver, regions: Regions, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        names = [regions.create(2 * PAGE)[0] for _ in range(3)]
    assert [regions.hold(name, 0, 16).reached for name in names] == [True, False, False]
    assert len(driver.held) == 1
    (warned,) = caplog.records  # once, however many follow
    assert "8192 of server.registered_bytes = 12288 are taken" in warned.getMessage()


def test_what_the_device_refuses_is_used_all_the_same(
    driver: FakeDriver, regions: Regions, caplog: pytest.LogCaptureFixture
) -> None:
    driver.refusal = "out of resources"
    name, _ = regions.create(PAGE)
    assert not regions.hold(name, 0, 16).reached
    assert "a region of 4096 bytes is not registered with the device: out of resources" in caplog.text
    driver.refusal = ""
    other, _ = regions.create(3 * PAGE)  # what was refused takes no room
    assert regions.hold(other, 0, 16).reached


def test_the_end_of_all_regions_is_waited_for(driver: FakeDriver) -> None:
    made = Regions(RegionLimits(), Registrar(driver, 1 << 20))
    for _ in range(3):
        made.create(PAGE)
    made.close()
    assert not driver.held and made.bytes == 0


def request_in(regions: Regions, offset: int) -> moe_pb2.ForwardRequest:
    """Two rows of four fp32 at 0 of a new region, whose answer goes to `offset` of the same."""
    name, _ = regions.create(PAGE)
    ids = encode(plain(torch.zeros(2, 1, dtype=torch.int32), "x"))
    choice = moe_pb2.Choice(ids=ids, weights=encode(plain(torch.ones(2, 1), "x")))
    hidden = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4))
    hidden.region.CopyFrom(moe_pb2.Region(name=name, offset=0, size=32))
    request = moe_pb2.ForwardRequest(hidden=hidden, choice=choice)
    request.output.CopyFrom(moe_pb2.Region(name=name, offset=offset, size=32))
    return request


@pytest.mark.parametrize("offset", [0, 16])
def test_an_answer_over_its_own_rows_is_refused(regions: Regions, offset: int) -> None:
    """A step may be run again until the answer is there."""
    with pytest.raises(TensorError, match=rf"output: bytes {offset} to {offset + 32} .* the rows' 0 to 32"):
        Payloads(regions).open(request_in(regions, offset))


def test_an_answer_in_its_place_is_not_copied_again(regions: Regions) -> None:
    with Payloads(regions).open(request_in(regions, 32)) as opened:
        assert opened.home is not None
        opened.home.fill_(3.0)
        reply = opened.reply(opened.home, epoch=1, weights_version=1)
        assert reply.hidden.region.offset == 32
        assert opened.home.tolist() == [[3.0] * 4] * 2


def test_a_rank_on_a_cpu_registers_nothing() -> None:
    assert registrar_of("cpu", 1 << 30) is None and registrar_of("cuda:0", 0) is None


@pytest.mark.gpu(1)
def test_the_device_reads_and_writes_registered_regions_in_place() -> None:
    regions = Regions(RegionLimits(), Registrar(CudaDriver("cuda:0"), 1 << 30))
    name, size = regions.create(1 << 20)
    hold = regions.hold(name, 0, size)
    assert hold.reached
    there = torch.frombuffer(hold.memory, dtype=torch.int32)
    there.copy_(torch.arange(there.numel(), dtype=torch.int32))
    assert there.is_pinned()
    moved = there.to("cuda:0", non_blocking=True)
    there[: there.numel() // 2].copy_(moved[there.numel() // 2 :], non_blocking=True)
    torch.cuda.synchronize()
    half = torch.arange(there.numel() // 2, dtype=torch.int32) + there.numel() // 2
    assert torch.equal(there[: half.numel()], half)
    hold.close()
    regions.close()
