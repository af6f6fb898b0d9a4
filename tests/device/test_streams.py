"""The current stream is told by its handle, and made anew only where it is another."""

from __future__ import annotations

import pytest
import torch

from moeserve.device.streams import CurrentStream, raw_stream, stream_for


class Streams:
    """In place of torch's: the current device, and the handle of its current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.handles, self.made = 0, [0, 0], list[tuple[int, int]]()
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        raw = "_cuda_getCurrentRawStream"
        monkeypatch.setattr(torch._C, raw, lambda index: self.handles[index], raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", self._make)

    def _make(self, index: int) -> tuple[int, int]:
        self.made.append((index, self.handles[index]))
        return self.made[-1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_a_stream_is_made_anew_where_it_is_another(streams: Streams) -> None:
    current = CurrentStream()
    assert [current.get() for _ in range(3)] == [(0, 0)] * 3 and len(streams.made) == 1
    streams.handles[0] = 77
    assert [current.get() for _ in range(2)] == [(0, 77)] * 2 and raw_stream() == 77
    streams.handles[0] = 0
    assert current.get() == (0, 0) and len(streams.made) == 3


def test_the_default_streams_of_two_devices_have_one_handle_and_are_not_one_stream(streams: Streams) -> None:
    current, second = CurrentStream(), CurrentStream(1)
    assert current.get() == (0, 0) and second.get() == (1, 0)
    streams.device = 1
    assert current.get() == (1, 0)
    streams.handles[1] = 5
    assert current.get() == second.get() == (1, 5) and raw_stream(0) == 0


class Made:
    """In place of a new stream of torch: which of its 32 it is, and of which device."""

    count = 0

    def __init__(self, index: int) -> None:
        self.index, self.number = index, Made.count % 32
        Made.count += 1


def test_work_of_one_kind_keeps_its_stream_and_meets_no_other(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Made)
    first, second = stream_for("test: one", "cuda:0"), stream_for("test: another", "cuda:0")
    for _ in range(40):
        assert stream_for("test: one", torch.device("cuda", 0)) is stream_for("test: one", "cuda") is first
    assert first.number != second.number
    streams.device = 1
    there = stream_for("test: one", "cuda")
    assert (there.index, there) == (1, stream_for("test: one", "cuda:1"))


@pytest.mark.gpu(1)
def test_it_is_torchs() -> None:
    current, other = CurrentStream(), torch.cuda.Stream()
    assert current.get() == torch.cuda.current_stream() and raw_stream() == current.get().cuda_stream
    with torch.cuda.stream(other):
        assert current.get() == other and raw_stream() == other.cuda_stream
    assert current.get() != other
