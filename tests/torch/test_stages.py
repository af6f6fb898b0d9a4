"""Which stage of a device lane a call is of."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from moeserve.torch.stages import Stages


class Stream:
    """A stream that notes for which others it waited."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)

    def __ne__(self, other: object) -> bool:  # PyTorch's has it so, also as `None != stream`
        return other is not None and self is not other


class Caller:
    """Calls stages on the stream that is current, and waits for each answer at once."""

    def __init__(self, stages: int, layers: tuple[int, ...]) -> None:
        self.now = Stream()
        self._layers = layers
        self.stages = Stages(stages, lambda: cast(torch.cuda.Stream, self.now))

    def call(self, layer: int, on: Stream | None = None, *, busy: tuple[int, ...] = ()) -> int | None:
        self.now = on or self.now
        free = [at for at in range(len(self.stages)) if at not in busy]
        stage = self.stages.take(layer, free, self._layers)
        if stage is not None:
            self.stages.follow(stage, capturing=False)
        return stage

    def record(self, layer: int, on: Stream) -> int | None:
        self.now = on
        stage = self.stages.take_recorded(layer, range(len(self.stages)), self._layers)
        if stage is not None:
            self.stages.follow(stage, capturing=True)
        return stage


def test_calls_of_one_stream_are_of_the_first_free_stage_at_their_layer() -> None:
    caller = Caller(2, (5, 6, 7))
    assert [caller.call(layer) for layer in (5, 6, 7, 5, 6, 7)] == [0] * 6
    assert caller.call(5) == 0 and caller.call(5, busy=(0,)) == 1
    assert caller.call(6, busy=(1,)) == 0 and caller.call(6, busy=(0,)) == 1
    assert caller.call(5) is None and not caller.stages.fits(5, (0, 1), (5, 6, 7))
    assert not caller.stages.whole(3)
    caller.stages.begin()
    assert caller.stages.whole(3) and caller.call(5) == 0


@pytest.mark.parametrize("recorded", [False, True])
def test_a_micro_batch_with_a_stream_keeps_its_stage_where_a_layer_comes_twice(recorded: bool) -> None:
    """Where the last layer is the first of the next pass, a stage that is through would fit, too."""
    layers = (0, 1, 0)
    caller, streams = Caller(3, layers), [Stream() for _ in range(3)]
    call = caller.record if recorded else caller.call
    for _ in range(4):
        for layer in layers:
            assert [call(layer, stream) for stream in streams] == [0, 1, 2]
    assert not any(stream.waited for stream in streams)
    assert caller.stages.recorded() == [12 * recorded] * 3 and caller.stages.recorded() == [0] * 3


def test_without_streams_of_their_own_the_one_in_the_middle_of_its_pass_goes_first() -> None:
    layers = (0, 1, 0)
    caller = Caller(2, layers)
    for layer in layers[:2]:
        assert [caller.call(layer, Stream()) for _ in range(2)] == [0, 1]
    assert [caller.call(0, Stream()) for _ in range(2)] == [0, 1]


def test_in_a_graph_two_streams_have_a_stage_each_also_of_one_layer() -> None:
    caller, first, second = Caller(2, (3,)), Stream(), Stream()
    assert [caller.record(3, stream) for stream in (first, second, first, second)] == [0, 1, 0, 1]
    assert caller.record(4, first) is None
    third, fourth = Stream(), Stream()
    assert [caller.record(3, stream) for stream in (third, fourth)] == [0, 1], "another graph"
    caller.stages.recorded()
    assert [caller.record(3, first) for _ in range(3)] == [0, 0, 0]


def test_a_stage_that_was_never_called_is_on_no_stream() -> None:
    caller, first, second = Caller(2, (0, 1, 0)), Stream(), Stream()
    assert [caller.record(layer, first) for layer in (0, 1, 0) * 2] == [0] * 6
    assert [caller.call(layer, first) for layer in (0, 1, 0)] == [0] * 3
    assert [caller.call(layer, second) for layer in (0, 1, 0)] == [0] * 3


def test_calls_of_a_stage_follow_one_another_from_stream_to_stream() -> None:
    caller, first, second = Caller(1, (3,)), Stream(), Stream()
    for stream in (first, first, second, first):
        assert caller.call(3, stream) == 0
    assert first.waited == [second] and second.waited == [first]
