"""Errors repeat a little of what a caller sent, however much it was."""

from __future__ import annotations

import time
from typing import Any

import pytest

from moeserve.proto import moe_pb2
from moeserve.proto.tensors import FLOATS, TensorError, spec_of
from moeserve.proto.texts import LONGEST_TEXT, clipped, listed, quoted
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.payloads import Payloads, RegionLimits, Regions
from moeserve.runtime.doors.request import RequestReader


@pytest.mark.parametrize("letter", ["x", "\u00fc", "\U0001f600", "\udcff"])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 511, 512, 1023, 1024, 1025, 100_000])
def test_a_text_has_a_kibibyte_at_most(letter: str, count: int) -> None:
    text = letter * count
    found = clipped(text)
    assert len(found.encode(errors="replace")) <= LONGEST_TEXT
    if len(text.encode(errors="replace")) <= LONGEST_TEXT:
        assert found == text
    else:
        assert found.endswith("...") and len(found.encode()) > LONGEST_TEXT - 8


def test_names_and_lists_are_cut_and_counted() -> None:
    assert quoted("a'b") == repr("a'b")
    assert quoted("x" * 1000) == f"'{'x' * 100}'... (1000 characters)"
    assert listed([1, 2]) == "[1, 2]"
    assert listed(range(20)) == "[0, 1, 2, 3, 4, 5, 6, 7, ...] (20 numbers)"


def refusals(large: int) -> dict[str, Any]:
    """What raises for input of about `large` bytes, by name."""
    regions = Regions(RegionLimits(allow_named=True))
    served: Any = None
    reader = object.__new__(RequestReader)
    reader._name = "served"
    reader._served = served
    shape = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=range(large), data=b"")
    name = "n" * large
    unknown = moe_pb2.ForwardRequest(output=moe_pb2.Region(name=name, size=0))
    unknown.hidden.CopyFrom(moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=[0, 1], data=b""))
    return {
        "shape": lambda: spec_of(shape, "hidden", rank=2, dtypes=FLOATS),
        "model": lambda: reader.read(moe_pb2.ForwardRequest(model=name)),
        "region": lambda: Payloads(regions).open(unknown),
        "release": lambda: regions.release(name),
        "name": lambda: regions.register(name, "key", 0, 1),
        "key": lambda: regions.register("name", name, 0, 1),
        "close": regions.close,
    }


def test_a_refusal_of_large_input_is_short_and_quick() -> None:
    asked = refusals(4_000_000)
    close = asked.pop("close")
    try:
        for name, ask in asked.items():
            began = time.thread_time()
            with pytest.raises((TensorError, LookupError)) as refused:
                ask()
            assert time.thread_time() - began < 0.1, name
            assert len(str(refused.value)) <= LONGEST_TEXT, name
    finally:
        close()


def test_a_status_cuts_what_anything_else_says() -> None:
    assert len(status_of(RuntimeError("x" * 5000)).message) <= LONGEST_TEXT
