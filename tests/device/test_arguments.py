"""A kernel's arguments: one declaration for the C text, the bytes and the check of what is given."""

import re
import struct
import time
from pathlib import Path

import pytest
import torch
from compiler import needs_nvrtc

from moeserve.device.arguments import Argument, Arguments, TensorMap
from moeserve.dispatch.mail import kernels as mail
from moeserve.dispatch.peers.arguments import COMBINE, DISPATCH
from moeserve.experts.kernels.cuda import (
    decode_codes,
    few,
    prefill,
    prefill_codes,
    prefill_wide,
    rounded,
    steps,
)

MADE = Arguments(
    "MadeArguments",
    n="int",
    map="TensorMap",
    rows="const u16*",
    scale="const float*?",
    bytes="u64",
    by="float",
)
ALL = {
    made.name + str(len(made.fields)): made
    for made in (
        MADE,
        DISPATCH,
        COMBINE,
        *(mail.BRING, mail.FETCH, mail.TAKE, mail.POST, mail.AWAIT),
        few.CODES,
        few.PANELS,
        steps.LIST,
        steps.SCALES,
        rounded.ROUND,
        rounded.WIDEN,
        *(module.ARGUMENTS for module in (decode_codes, prefill, prefill_codes, prefill_wide)),
    )
}
TYPES = """typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };
"""


def given() -> dict[str, Argument]:
    rows = torch.zeros(4, 8, dtype=torch.bfloat16)
    image = bytes(range(128))
    return {
        "n": -7,
        "map": TensorMap(image, rows),
        "rows": rows,
        "scale": None,
        "bytes": 2**64 - 1,
        "by": 0.5,
    }


def test_fields_stand_where_c_aligns_them() -> None:
    values = given()
    packed = bytes(MADE.pack(values))
    assert MADE.offsets == {"n": 0, "map": 64, "rows": 192, "scale": 200, "bytes": 208, "by": 216}
    assert len(packed) == MADE.nbytes == 256 and MADE.align == 64
    assert struct.unpack_from("<i", packed, 0) == (-7,)
    assert packed[64:192] == bytes(range(128))
    assert struct.unpack_from("<QQQf", packed, 192) == (values["rows"].data_ptr(), 0, 2**64 - 1, 0.5)


def test_the_order_in_which_fields_are_given_does_not_matter() -> None:
    values = given()
    backwards = dict(reversed(values.items()))
    assert bytes(MADE.pack(backwards)) == bytes(MADE.pack(values))


def test_what_is_bound_once_is_not_given_again() -> None:
    values = given()
    once = MADE.bound({"n": values["n"], "rows": values["rows"]})
    rest = {field: value for field, value in values.items() if field not in ("n", "rows")}
    assert bytes(once.pack(rest)) == bytes(MADE.pack(values))
    twice = once.bound({"by": 0.5})
    del rest["by"]
    assert bytes(twice.pack(rest)) == bytes(MADE.pack(values))
    with pytest.raises(TypeError, match="MadeArguments has no field n"):
        once.bound({"n": 1})
    with pytest.raises(TypeError, match="MadeArguments has no field by"):
        twice.pack(rest | {"by": 0.5})
    with pytest.raises(TypeError, match=r"MadeArguments\.n is declared int; found str 'one'"):
        MADE.bound({"n": "one"})  # type: ignore[dict-item]
    assert once.text == MADE.text


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"rows": None}, TypeError, r"MadeArguments\.rows is declared const u16\*; found NoneType None"),
        (
            {"rows": torch.zeros(2)},
            TypeError,
            r"MadeArguments\.rows is declared .*; found a tensor of float32 \[2\]",
        ),
        ({"scale": 1.0}, TypeError, r"MadeArguments\.scale is declared const float\*\?; found float 1\.0"),
        ({"map": torch.zeros(2)}, TypeError, r"MadeArguments\.map is declared TensorMap; found a tensor"),
        ({"n": 1.0}, TypeError, r"MadeArguments\.n is declared int; found float 1\.0"),
        ({"n": True}, TypeError, r"MadeArguments\.n is declared int; found bool True"),
        ({"by": 1}, TypeError, r"MadeArguments\.by is declared float; found int 1"),
        ({"n": 2**31}, OverflowError, r"MadeArguments\.n is declared int; found int 2147483648"),
        ({"bytes": -1}, OverflowError, r"MadeArguments\.bytes is declared u64; found int -1"),
        ({"more": 1}, TypeError, "MadeArguments has no field more"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change: dict[str, Argument], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        MADE.pack(given() | change)


def test_what_is_missing_is_named() -> None:
    values = given()
    del values["n"], values["by"]
    with pytest.raises(TypeError, match=r"MadeArguments lacks n, by$"):
        MADE.pack(values)
    values = given() | {"m": 1}
    del values["n"]
    with pytest.raises(TypeError, match=r"MadeArguments lacks n and has no field m$"):
        MADE.pack(values)


@pytest.mark.parametrize("declared", ["long", "const double*", "float?", "TensorMap*", "u8", "float *"])
def test_a_type_that_is_not_known_is_refused(declared: str) -> None:
    with pytest.raises(ValueError, match=rf"Made\.field: {re.escape(repr(declared))} is not a type"):
        Arguments("Made", field=declared)


@pytest.mark.parametrize("name", ALL)
def test_the_compiler_lays_a_struct_out_as_it_is_packed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ALL[name]
    assert made.text.count("static_assert") == len(made.fields) + 1
    needs_nvrtc()
    from moeserve.device import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    assert nvrtc.compiled(TYPES + made.text, "sm_90a")
    field = list(made.fields)[-1]
    place = f"->{field}) == {made.offsets[field]}"
    wrong = made.text.replace(place, f"{place} + 4")
    assert wrong != made.text
    with pytest.raises(nvrtc.CompileError, match="is laid out otherwise than its bytes"):
        nvrtc.compiled(TYPES + wrong, "sm_90a")


def test_packing_takes_microseconds() -> None:
    """It stands on the path of a decode step's launch; the bound is wide enough for a loaded machine."""
    values = given()
    took = []
    for _ in range(200):
        began = time.perf_counter()
        MADE.pack(values)
        took.append(time.perf_counter() - began)
    assert sorted(took)[20] < 50e-6
