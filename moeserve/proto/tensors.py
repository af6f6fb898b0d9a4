"""Tensors of the contract: numpy and torch arrays in host memory <-> dtype, shape and little-endian bytes.

numpy has no bfloat16. Without torch, bfloat16 rides as `ml_dtypes.bfloat16`, or as numpy uint16 bits that
the caller declares (`dtype="bf16"`). torch is looked at only when the caller's program has imported it
already.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moeserve.proto import moe_pb2
from moeserve.proto.texts import listed

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "NDArray[Any] | torch.Tensor"
Buffer: TypeAlias = bytes | bytearray | memoryview

LARGEST_DIM = 2**31 - 1


class TensorError(ValueError):
    """A tensor that is not what the contract takes; `field` names it in the request, e.g. `choice.ids`."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}")
        self.field = field


@dataclass(frozen=True, eq=False)  # there is one of each, and calls look for its specs
class DType:
    """A number type of the contract: its short name, its torch name, the numpy type that holds its bytes."""

    name: str
    code: moe_pb2.DType
    torch_name: str
    storage: np.dtype[Any]

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.storage.itemsize


DTYPES: tuple[DType, ...] = (
    DType("fp32", moe_pb2.DTYPE_FP32, "float32", np.dtype("<f4")),
    DType("bf16", moe_pb2.DTYPE_BF16, "bfloat16", np.dtype("<u2")),
    DType("fp16", moe_pb2.DTYPE_FP16, "float16", np.dtype("<f2")),
    DType("int32", moe_pb2.DTYPE_INT32, "int32", np.dtype("<i4")),
    DType("int64", moe_pb2.DTYPE_INT64, "int64", np.dtype("<i8")),
)

FLOATS = ("fp32", "bf16", "fp16")
INTEGERS = ("int32", "int64")

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {int(dtype.code): dtype for dtype in DTYPES}
_BY_TORCH_NAME = {f"torch.{dtype.torch_name}": dtype for dtype in DTYPES}
_BY_NUMPY_NAME = {dtype.torch_name: dtype for dtype in DTYPES}


def of_torch(name: str) -> DType:
    """The dtype that torch calls so, such as `torch.bfloat16`. KeyError where the contract has none."""
    return _BY_TORCH_NAME[name]


def known(field: str, name: str) -> DType:
    """The dtype called `name` (`bf16`); TensorError when there is none."""
    if name not in _BY_NAME:
        raise TensorError(field, f"dtype {name!r} is not one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a dense row-major tensor, and so the bytes that it takes."""

    dtype: DType
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name} {list(self.shape)}"


def spec_named(dtype: str, shape: Sequence[int]) -> Spec:
    """Of a tensor that is to be made. Raises TensorError for an unknown dtype, and for sizes below 1."""
    sizes = tuple(int(size) for size in shape)
    if any(size < 1 for size in sizes):
        raise TensorError("shape", f"{list(sizes)} has a size below 1")
    return Spec(known("dtype", dtype), sizes)


@dataclass(frozen=True, eq=False)
class Plain:
    """A dense array in host memory: `storage` is C-contiguous, of `dtype.storage` (bfloat16 as uint16)."""

    dtype: DType
    storage: NDArray[Any]

    @cached_property
    def spec(self) -> Spec:
        """The dtype and the shape of the tensor."""
        return Spec(self.dtype, self.storage.shape)

    @property
    def address(self) -> int:
        """Where it begins in memory."""
        return int(self.storage.__array_interface__["data"][0])

    def rows(self, start: int, stop: int) -> Plain:
        """Rows [start, stop) as a view."""
        if start == 0 and stop == len(self.storage):
            return self
        return Plain(self.dtype, self.storage[start:stop])


def is_torch(array: object) -> bool:
    """Whether `array` is a torch tensor, found out without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def plain(array: Array, field: str, *, dtype: str = "") -> Plain:
    """`array` in host memory, without a copy where it lies there densely already.

    `dtype="bf16"` declares numpy uint16 to be bfloat16 bits; other arrays say their dtype themselves. Raises
    TensorError for a dtype that the contract has not.
    """
    if is_torch(array):
        return _plain_of_torch(array, field)
    array = np.asarray(array)
    name = array.dtype.name
    if name == "uint16" and dtype == "bf16":
        name = "bfloat16"
    elif name == "uint16":
        raise TensorError(
            field, "numpy uint16 is no dtype of the contract; dtype='bf16' declares bfloat16 bits"
        )
    if name not in _BY_NUMPY_NAME:
        raise TensorError(field, f"numpy dtype {array.dtype} is not one of {', '.join(_BY_NUMPY_NAME)}")
    found = _BY_NUMPY_NAME[name]
    dense = np.ascontiguousarray(array).reshape(array.shape)
    if name == "bfloat16":  # of either byte order, as the others
        dense = dense.view(np.dtype(np.uint16).newbyteorder(array.dtype.byteorder))
    return Plain(found, dense.astype(found.storage, copy=False))


def in_place(array: Array, field: str, spec: Spec) -> Plain:
    """`array` itself, to be written: dense host memory of this dtype and shape, or TensorError.

    numpy uint16 counts as bfloat16 bits where these are wanted.
    """
    found = plain(array, field, dtype="bf16" if spec.dtype.name == "bf16" else "")
    if found.spec != spec:
        raise TensorError(field, f"{found.spec}; {spec} is written there")
    there = array.data_ptr() if is_torch(array) else np.asarray(array).ctypes.data  # type: ignore[union-attr]
    if not found.storage.flags.writeable or (found.storage.size and found.storage.ctypes.data != there):
        raise TensorError(
            field, "it is written in place, and has to be dense host memory that may be written"
        )
    return found


def _plain_of_torch(array: Any, field: str) -> Plain:
    torch = sys.modules["torch"]
    if str(array.dtype) not in _BY_TORCH_NAME:
        raise TensorError(field, f"torch dtype {array.dtype} is not one of {', '.join(_BY_TORCH_NAME)}")
    found = _BY_TORCH_NAME[str(array.dtype)]
    if array.layout != torch.strided or array.device.type == "meta":
        text = f"a tensor of layout {array.layout} on {array.device} has no dense values; give a dense one"
        raise TensorError(field, text)
    dense = array.detach() if array.requires_grad else array
    if dense.is_neg():
        dense = dense.resolve_neg()
    if not (dense.is_cpu and dense.is_contiguous()):
        dense = dense.cpu().contiguous()
    if found.name == "bf16":
        return Plain(found, dense.view(torch.int16).numpy().view(found.storage))
    return Plain(found, dense.numpy())


def restore(made: Plain, like: Array) -> Array:
    """`made` as the kind of array that `like` is (torch on the CPU, ml_dtypes or plain numpy), not copied."""
    if is_torch(like):
        return as_torch(made.storage.data, made.spec)
    kind = np.asarray(like).dtype.newbyteorder("=")
    return made.storage.view(kind) if kind.name == "bfloat16" else made.storage


def encode(array: Plain) -> moe_pb2.Tensor:
    """The message with `array`'s bytes inline."""
    message = moe_pb2.Tensor()
    encode_into(message, array)
    return message


def encode_into(message: moe_pb2.Tensor, array: Plain) -> None:
    """Fills an empty `message` with `array`, its bytes inline; a submessage is so filled in place."""
    describe_into(message, array.spec)
    message.data = array.storage.tobytes()


def describe_into(message: moe_pb2.Tensor, spec: Spec) -> None:
    """Fills an empty `message` with dtype and shape, but no payload."""
    message.dtype = spec.dtype.code
    message.shape.extend(spec.shape)


def dtype_of(message: moe_pb2.Tensor) -> DType | None:
    """The dtype that `message` names; None for one that the contract has not."""
    return _BY_CODE.get(message.dtype)


def spec_of(message: moe_pb2.Tensor, field: str, *, rank: int, dtypes: tuple[str, ...]) -> Spec:
    """Dtype and shape of `message`, checked against the `rank` and `dtypes` that `field` takes.

    Raises TensorError for an unknown or wrong dtype, another rank, a dimension over 2^31 - 1, no payload,
    or a payload of another size than dtype and shape take.
    """
    dtype = _BY_CODE.get(message.dtype)
    if dtype is None or dtype.name not in dtypes:
        name = dtype.name if dtype else f"number {message.dtype}"
        raise TensorError(field, f"dtype {name} is not one of {', '.join(dtypes)}")
    if len(message.shape) != rank:
        found = f"shape {listed(message.shape)} has {len(message.shape)} dimensions"
        raise TensorError(field, f"{found}, but {field} takes {rank}")
    shape = tuple(message.shape)
    if max(shape, default=0) > LARGEST_DIM:
        raise TensorError(field, f"shape {list(shape)} has a dimension over {LARGEST_DIM}")
    spec = _spec(dtype, shape)
    payload = message.WhichOneof("payload")
    if payload is None:
        raise TensorError(field, f"no payload; {spec} takes {spec.nbytes} bytes of data or a region")
    if payload == "region" and message.region.size != spec.nbytes:
        raise TensorError(field, f"a region of {message.region.size} bytes, but {spec} takes {spec.nbytes}")
    return spec


@lru_cache(maxsize=1024)
def _spec(dtype: DType, shape: tuple[int, ...]) -> Spec:
    """The same for calls of the same shapes, which counts its bytes once."""
    return Spec(dtype, shape)


def as_numpy(data: Buffer, spec: Spec, field: str) -> Plain:
    """A view of `data` (read-only over bytes); TensorError when it is longer or shorter than `spec` takes."""
    _check_length(data, spec, field)
    return Plain(spec.dtype, np.frombuffer(data, spec.dtype.storage).reshape(spec.shape))


def as_torch(data: Buffer, spec: Spec, field: str = "tensor") -> torch.Tensor:
    """A CPU tensor over `data` without a copy, which keeps `data` alive.

    Over bytes it must not be written.
    """
    _check_length(data, spec, field)
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype.torch_name)
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    _quiet_frombuffer()
    if (
        spec.dtype.name != "bf16"
    ):  # which numpy lacks; a torch view gives the interpreter up, and may wait for it
        return torch.from_numpy(np.frombuffer(data, spec.dtype.storage).reshape(spec.shape))
    return torch.frombuffer(data, dtype=dtype).view(spec.shape)


def _check_length(data: Buffer, spec: Spec, field: str) -> None:
    length = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
    if length != spec.nbytes:
        raise TensorError(field, f"{length} bytes of data, but {spec} takes {spec.nbytes}")


_QUIET = threading.Lock()


@cache
def _quiet_frombuffer() -> None:
    """Spends torch's once-a-process warning about read-only buffers: views of received bytes always are."""
    import torch

    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
        torch.from_numpy(np.frombuffer(b"\0", np.uint8))
