"""Multiprocessors that are held are no grid's, and the number stands once a grid was sized by it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moeserve.device import residency
from moeserve.experts.kernels.cuda import steps


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of 132 multiprocessors, the second one current; nothing is held yet."""
    for table in ("_held", "_sized"):
        monkeypatch.setattr(residency, table, {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
    )


def test_a_grid_has_what_is_not_held() -> None:
    residency.hold("cuda:0", 6)
    assert residency.resident_blocks(torch.device("cuda", 0)) == 126
    assert residency.held("cuda:0") == 6
    assert residency.resident_blocks("cuda:1") == 132 and residency.held("cuda:1") == 0


def test_a_device_without_an_index_is_the_current_one() -> None:
    residency.hold("cuda", 6)
    assert residency.resident_blocks("cuda:1") == residency.resident_blocks("cuda") == 126
    assert residency.resident_blocks("cuda:0") == 132


@pytest.mark.parametrize("ask", [residency.resident_blocks, residency.held])
def test_another_number_is_refused_once_a_grid_was_sized(ask) -> None:
    residency.hold("cuda:0", 6)
    residency.hold("cuda:0", 4)
    ask("cuda:0")
    residency.hold("cuda:0", 4)
    with pytest.raises(RuntimeError, match=r"cuda:0 has been sized with 4 multiprocessors held, so 6 cannot"):
        residency.hold("cuda:0", 6)
    assert residency.resident_blocks("cuda:0") == 128
    residency.hold("cuda:1", 6)


@pytest.mark.parametrize("number", [132, 200, -1])
def test_a_number_that_leaves_nothing_is_refused(number: int) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^{number} multiprocessors .* cuda:0 .* its 132; hold 0 to 131 \(members.held_multiproc",
    ):
        residency.hold("cuda:0", number)
    assert residency.resident_blocks("cuda:0") == 132


@pytest.mark.parametrize("number", [0, 6, 65])
def test_a_multiprocessor_that_is_held_costs_a_cluster(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be half of another one's."""
    clusters = fake_occupancy(monkeypatch, 66)
    residency.hold("cuda", number)
    assert clusters() == 66 - number
    assert residency.resident_blocks("cuda") == 132 - number


def test_a_kernel_whose_clusters_find_no_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = fake_occupancy(monkeypatch, 6)
    residency.hold("cuda", 6)
    with pytest.raises(steps.LaunchError, match=r"no cluster of 2 blocks .* beside 6 held multiprocessors"):
        clusters()


def fake_occupancy(monkeypatch: pytest.MonkeyPatch, answer: int):
    """`resident_clusters` of a kernel of which a driver runs `answer` clusters on an empty GPU."""
    driver = SimpleNamespace(
        CUlaunchAttribute=lambda: SimpleNamespace(
            id=0, value=SimpleNamespace(clusterDim=SimpleNamespace(x=0, y=0, z=0))
        ),
        CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4),
        CUlaunchConfig=SimpleNamespace,
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuOccupancyMaxActiveClusters=lambda handle, config: (0, answer),
    )
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    function = SimpleNamespace(handle=0, resident_blocks=lambda threads, shared: 1)
    block = steps.Block(384, 200 << 10)
    return lambda: steps.resident_clusters.__wrapped__(function, block)
