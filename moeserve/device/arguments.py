"""`Arguments`: what a kernel takes, declared once for its C text, for the bytes of a launch and for checks.

A kernel has one parameter, `const __grid_constant__ NAME args`. The struct NAME is generated from the same
fields that a launch is packed by, so that no list is matched by hand.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

OPTIONAL = "?"
"""It ends the type of a pointer that may be None, which the kernel reads as a null pointer."""

MAP_BYTES, MAP_ALIGN = 128, 64
"""Size and alignment of a `CUtensorMap`."""

_OFFSET = "__INTADDR__(&(({0}*)0)->{1})"
"""What the macro offsetof of CUDA's headers expands to, which NVRTC does not include."""


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A `CUtensorMap`, handed over by value, and the tensor whose memory it describes."""

    image: bytes  # MAP_BYTES
    tensor: Tensor


Argument = Tensor | int | float | TensorMap | None


class _CType(NamedTuple):
    """One C type: its code in the module struct, its size and alignment, and how a value becomes one."""

    code: str
    nbytes: int
    align: int
    convert: Callable[[Any], Any]


_Entry = tuple[int, str, Callable[[Any], Any]]
"""A field that is not bound: its place, its name, and how its value is converted."""


class Arguments:
    """The fields of a kernel's only parameter, in order.

    `Arguments("CopyArguments", rows="const u8*", n="int")` is an example. Types are `int`, `u32`, `u64`,
    `float`, `TensorMap`, and pointers to `u8`, `void`, `uint4`, `u16`, `int`, `u32`, `u64` and `float`. A
    pointer is given as a tensor, whose dtype must be that of its elements; pointers to the first three take
    any dtype. A type that ends in `?` takes None too. Raises ValueError for an unknown type.
    """

    def __init__(self, name: str, /, **fields: str) -> None:
        self.name, self.fields = name, fields
        types = {field: _type_of(name, field, declared) for field, declared in fields.items()}
        self.offsets: dict[str, int] = {}
        self.nbytes, self.align, layout = 0, max(c_type.align for c_type in types.values()), "<"
        for field, c_type in types.items():
            gap = -self.nbytes % c_type.align
            self.offsets[field] = self.nbytes + gap
            self.nbytes += gap + c_type.nbytes
            layout += f"{gap}x{c_type.code}"
        gap = -self.nbytes % self.align
        self.nbytes += gap
        self._layout = struct.Struct(f"{layout}{gap}x")
        self._buffer = ctypes.c_char * self.nbytes
        self._values: list[Any] = [None] * len(types)  # those that are bound
        self._open = [(at, field, c_type.convert) for at, (field, c_type) in enumerate(types.items())]
        self._held: tuple[Argument, ...] = ()

    @property
    def text(self) -> str:
        """The struct in C++, with assertions that the compiler lays it out as `pack` does."""
        wrong = f'"{self.name} is laid out otherwise than its bytes"'
        fields = (f"  {declared.removesuffix(OPTIONAL)} {field};" for field, declared in self.fields.items())
        places = (
            f"static_assert({_OFFSET.format(self.name, field)} == {at}, {wrong});"
            for field, at in self.offsets.items()
        )
        size = f"static_assert(sizeof({self.name}) == {self.nbytes}, {wrong});"
        return "\n".join((f"struct {self.name} {{", *fields, "};", *places, size, ""))

    def bound(self, given: Mapping[str, Argument]) -> Arguments:
        """Returns the struct with the fields of `given` filled once: `pack` then takes the others.

        Raises as `pack` does, except that fields may be missing.
        """
        if given.keys() - {field for _, field, _ in self._open}:
            raise self._mismatch(given, partial=True)
        made = Arguments(self.name, **self.fields)
        made._values = self._values.copy()
        self._convert(made._values, [entry for entry in self._open if entry[1] in given], given)
        made._open = [entry for entry in self._open if entry[1] not in given]
        made._held = (*self._held, *given.values())
        return made

    def pack(self, given: Mapping[str, Argument]) -> ctypes.Array[ctypes.c_char]:
        """The struct's bytes.

        Raises TypeError for a field that is missing, unknown or of another type, and OverflowError for an
        integer that does not fit. All name the field.
        """
        if len(given) != len(self._open):
            raise self._mismatch(given)
        values = self._values.copy()
        self._convert(values, self._open, given)
        buffer = self._buffer()
        self._layout.pack_into(buffer, 0, *values)
        return buffer

    def _convert(self, values: list[Any], entries: list[_Entry], given: Mapping[str, Argument]) -> None:
        field = ""
        try:
            for at, field, convert in entries:
                values[at] = convert(given[field])
        except KeyError:
            raise self._mismatch(given) from None
        except (TypeError, OverflowError) as error:
            declared = self.fields[field]
            raise type(error)(f"{self.name}.{field} is declared {declared}; found {error}") from None

    def _mismatch(self, given: Mapping[str, Argument], *, partial: bool = False) -> TypeError:
        wanted = [field for _, field, _ in self._open]
        missing = [] if partial else [field for field in wanted if field not in given]
        extra = [field for field in given if field not in wanted]
        found = (("lacks", missing), ("has no field", extra))
        listed = (f"{verb} {', '.join(names)}" for verb, names in found if names)
        return TypeError(f"{self.name} {' and '.join(listed)}")


def _type_of(name: str, field: str, declared: str) -> _CType:
    if declared in _SCALARS:
        return _SCALARS[declared]
    element = declared.removesuffix(OPTIONAL).removeprefix("const ")
    if not element.endswith("*") or element[:-1] not in _ELEMENTS:
        raise ValueError(f"{name}.{field}: {declared!r} is not a type of arguments")
    return _CType("Q", 8, 8, _address(_ELEMENTS[element[:-1]], optional=declared.endswith(OPTIONAL)))


def _address(dtypes: frozenset[torch.dtype] | None, *, optional: bool) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if value is None and optional:
            return 0
        if not isinstance(value, Tensor):
            raise TypeError(_named(value))
        if dtypes is not None and value.dtype not in dtypes:
            raise TypeError(_named(value))
        return value.data_ptr()

    return convert


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if type(value) is not int:
            raise TypeError(_named(value))
        if not low <= value <= high:
            raise OverflowError(_named(value))
        return value

    return convert


def _real(value: Any) -> float:
    if type(value) is not float:
        raise TypeError(_named(value))
    return value


def _image(value: Any) -> bytes:
    if not isinstance(value, TensorMap):
        raise TypeError(_named(value))
    return value.image


def _named(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.40}"


_SCALARS = {
    "int": _CType("i", 4, 4, _integer(-(2**31), 2**31 - 1)),
    "u32": _CType("I", 4, 4, _integer(0, 2**32 - 1)),
    "u64": _CType("Q", 8, 8, _integer(0, 2**64 - 1)),
    "float": _CType("f", 4, 4, _real),
    "TensorMap": _CType(f"{MAP_BYTES}s", MAP_BYTES, MAP_ALIGN, _image),
}

_ELEMENTS: dict[str, frozenset[torch.dtype] | None] = {
    "u8": None,
    "void": None,
    "uint4": None,
    "u16": frozenset((torch.bfloat16, torch.float16, torch.int16, torch.uint16)),
    "int": frozenset((torch.int32,)),
    "u32": frozenset((torch.int32, torch.uint32)),
    "u64": frozenset((torch.int64, torch.uint64)),
    "float": frozenset((torch.float32,)),
}
