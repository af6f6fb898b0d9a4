"""Arrays <-> messages: round trips of every dtype and kind of array, and every way a message can be wrong."""

import ml_dtypes
import numpy as np
import pytest
import torch

from moeserve.proto import moe_pb2
from moeserve.proto.client import MoeClient
from moeserve.proto.tensors import (
    DTYPES,
    FLOATS,
    Spec,
    TensorError,
    as_numpy,
    as_torch,
    encode,
    in_place,
    known,
    plain,
    restore,
    spec_named,
    spec_of,
)

ALL = tuple(dtype.name for dtype in DTYPES)
SHAPES = [(3, 5), (1, 1), (0, 4), (2, 0), (7,), (2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_torch_round_trip(dtype, shape):
    sent = torch.randn(shape).mul(100).to(getattr(torch, dtype.torch_name))
    message = encode(plain(sent, "hidden"))
    message = moe_pb2.Tensor.FromString(message.SerializeToString())
    spec = spec_of(message, "hidden", rank=len(shape), dtypes=ALL)
    assert spec == Spec(dtype, shape)
    got = as_torch(message.data, spec, "hidden")
    assert got.dtype == sent.dtype
    assert torch.equal(got, sent)
    back = restore(as_numpy(message.data, spec, "hidden"), sent)
    assert back.dtype == sent.dtype and torch.equal(back, sent)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int64])
def test_numpy_round_trip(kind, shape):
    sent = np.arange(np.prod(shape)).reshape(shape).astype(kind)
    message = encode(plain(sent, "hidden"))
    spec = spec_of(message, "hidden", rank=len(shape), dtypes=ALL)
    got = restore(as_numpy(message.data, spec, "hidden"), sent)
    assert got.dtype == sent.dtype and got.shape == shape
    assert np.array_equal(got, sent)


def test_bfloat16_bits_as_uint16_must_be_declared():
    bits = np.array([[0x3F80, 0x4000]], dtype=np.uint16)  # 1.0, 2.0
    with pytest.raises(TensorError, match=r"hidden: numpy uint16 .* dtype='bf16' declares bfloat16 bits"):
        plain(bits, "hidden")
    message = encode(plain(bits, "hidden", dtype="bf16"))
    assert message.data == bytes.fromhex("803f0040")
    spec = spec_of(message, "hidden", rank=2, dtypes=FLOATS)
    assert as_torch(message.data, spec, "hidden").tolist() == [[1.0, 2.0]]
    back = restore(as_numpy(message.data, spec, "hidden"), bits)
    assert back.dtype == np.uint16 and np.array_equal(back, bits)


def test_what_lies_densely_is_not_copied():
    array = np.ones((4, 8), np.float32)
    assert np.shares_memory(plain(array, "hidden").storage, array)
    tensor = torch.ones(4, 8, dtype=torch.bfloat16)
    assert plain(tensor, "hidden").storage.ctypes.data == tensor.data_ptr()
    data = bytearray(64)
    view = as_torch(data, Spec(known("x", "fp32"), (4, 4)), "x")
    data[:4] = np.float32(3).tobytes()
    assert view[0, 0] == 3


def test_strided_and_big_endian_arrays_are_made_dense_and_little_endian():
    strided = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    assert encode(plain(strided, "hidden")).data == strided.tobytes()
    assert encode(plain(torch.from_numpy(strided.copy()).t(), "hidden")).data == strided.T.tobytes()
    big = np.arange(3, dtype=">i4")
    assert encode(plain(big, "ids")).data == np.arange(3, dtype="<i4").tobytes()
    bits = np.array([0x3F80, 0x4000], ">u2")  # 1 and 2
    found = plain(bits, "hidden", dtype="bf16")
    assert encode(found).data == np.array([0x3F80, 0x4000], "<u2").tobytes()
    with pytest.raises(TensorError, match="written in place"):
        in_place(bits, "out", Spec(known("x", "bf16"), (2,)))
    of_a_file = np.frombuffer(bits.tobytes(), np.dtype(ml_dtypes.bfloat16).newbyteorder(">"))
    found = plain(of_a_file, "hidden")
    assert restore(found, of_a_file).astype(np.float32).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "array", [np.zeros(2, np.float64), torch.zeros(2, dtype=torch.float64)], ids=["numpy", "torch"]
)
def test_a_dtype_without_a_place_in_the_contract_is_named(array):
    with pytest.raises(TensorError, match=r"weights: .*float64 is not one of .*bfloat16"):
        plain(array, "weights")
    with pytest.raises(TensorError, match=r"'fp8' is not one of fp32, bf16, fp16, int32, int64"):
        known("dtype", "fp8")


BF16, FP32 = moe_pb2.DTYPE_BF16, moe_pb2.DTYPE_FP32


def message(dtype=BF16, shape=(2, 2048), **payload):
    return moe_pb2.Tensor(dtype=dtype, shape=shape, **payload)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (message(dtype=9), "hidden: dtype number 9 is not one of fp32, bf16, fp16"),
        (message(dtype=0), "hidden: dtype number 0 is not one of"),
        (message(dtype=moe_pb2.DTYPE_INT32), "hidden: dtype int32 is not one of fp32, bf16, fp16"),
        (message(shape=(2,)), r"hidden: shape \[2\] has 1 dimensions, but hidden takes 2"),
        (
            message(shape=(2**63, 2)),
            r"hidden: shape \[9223372036854775808, 2\] has a dimension over 2147483647",
        ),
        (message(shape=(2**40, 0)), "has a dimension over"),
        (message(), r"hidden: no payload; bf16 \[2, 2048\] takes 8192 bytes of data or a region"),
        (
            message(region=moe_pb2.Region(name="r", size=4096)),
            r"hidden: a region of 4096 bytes, but bf16 \[2, 2048\] takes 8192",
        ),
    ],
)
def test_a_wrong_message_is_refused_by_field_and_value(wrong, text):
    with pytest.raises(TensorError, match=text) as raised:
        spec_of(wrong, "hidden", rank=2, dtypes=FLOATS)
    assert raised.value.field == "hidden"
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("length", [0, 4096, 8191, 8193])
@pytest.mark.parametrize("view", [as_numpy, as_torch])
def test_a_payload_shorter_or_longer_than_its_shape_is_refused(view, length):
    wrong = message(data=bytes(length))
    spec = spec_of(wrong, "hidden", rank=2, dtypes=FLOATS)
    with pytest.raises(
        TensorError, match=rf"^hidden: {length} bytes of data, but bf16 \[2, 2048\] takes 8192$"
    ):
        view(wrong.data, spec, "hidden")


def test_a_product_of_dimensions_that_would_overflow_64_bits_takes_its_true_size():
    spec = spec_of(message(shape=(2**31 - 1, 2**31 - 1), data=b""), "hidden", rank=2, dtypes=FLOATS)
    assert spec.nbytes == 2 * (2**31 - 1) ** 2
    with pytest.raises(TensorError, match=f"takes {spec.nbytes}"):
        as_torch(b"", spec, "hidden")


def test_what_is_written_in_place_has_to_be_what_is_wanted():
    spec = Spec(known("x", "bf16"), (3, 4))
    there = torch.zeros(3, 4, dtype=torch.bfloat16)
    in_place(there, "out", spec).storage[:] = 0x3F80
    assert torch.equal(there, torch.ones_like(there))
    bits = np.zeros((3, 4), np.uint16)
    assert np.shares_memory(in_place(bits, "out", spec).storage, bits)
    sealed = bits.copy()
    sealed.flags.writeable = False
    for wrong in (
        there[:2],
        there.float(),
        there.T.contiguous().T,
        bits[:, ::2],
        sealed,
        bits.astype(np.int32),
    ):
        with pytest.raises(TensorError, match=r"^out: "):
            in_place(wrong, "out", spec)


@pytest.mark.parametrize("shape", [(-6, 64), (0, 64), (4, -1)])
def test_a_tensor_of_no_size_is_not_made(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorError, match=r"shape: \[.*\] has a size below 1"):
        spec_named("bf16", shape)
    with pytest.raises(TensorError, match="shape"), MoeClient("127.0.0.1:1", timeout=0.1) as client:
        client.allocate(0, shape)


def test_a_tensor_to_be_made_has_a_known_dtype() -> None:
    assert spec_named("bf16", [4, 64]).nbytes == 512
    with pytest.raises(TensorError, match="dtype"):
        spec_named("bf17", (4, 64))
