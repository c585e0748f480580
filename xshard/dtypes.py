"""Dtypes by their shared names: sizes, precision and allowed operations."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.errors import DtypeError
from xshard.signatures import did_you_mean

_NAME = re.compile(r"[<>=|]?[A-Za-z]\w{0,19}", re.ASCII)
# Floats that numpy does not know without ml_dtypes, with the distance from 1 to the next larger number.
_PRECISION = {
    "bfloat16": 2**-7,
    "float8_e4m3fn": 2**-3,
    "float8_e5m2": 2**-2,
    "float8_e4m3fnuz": 2**-3,
    "float8_e5m2fnuz": 2**-2,
    "float8_e8m0fnu": 1.0,
    "float4_e2m1fn": 2**-1,
    "float4_e2m1fn_x2": 2**-1,
}
# All names that numpy does not know without ml_dtypes, with their item sizes in bytes. Numbers of 4 bits
# fill a byte each, in numpy and on CPUs; two of torch's are one element.
_ITEMSIZES_BEYOND_NUMPY = {**dict.fromkeys(_PRECISION, 1), "bfloat16": 2, "int4": 1, "uint4": 1}
_FOUR_BITS = ("float4_e2m1fn", "float4_e2m1fn_x2", "int4", "uint4")
# Floats without infinities: their smallest and largest numbers. Numbers beyond become NaN.
_FINITE = {
    "float8_e4m3fn": (-448.0, 448.0),
    "float8_e4m3fnuz": (-240.0, 240.0),
    "float8_e5m2fnuz": (-57344.0, 57344.0),
    "float8_e8m0fnu": (2.0**-127, 2.0**127),  # powers of two
}
# No framework adds or negates these.
_ONLY_MOVED = _ITEMSIZES_BEYOND_NUMPY.keys() - {"bfloat16"}
# Names of dtypes in other systems, with the shared names for hints. They are refused, since numpy does not
# know them, or takes them for another: its "f16" has 16 bytes.
_FOREIGN_NAMES = {
    "bf16": "bfloat16",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"fp{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"s{bits}": f"int{bits}" for bits in (16, 32, 64)},
    **{f"i{bits}": f"int{bits}" for bits in (16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (16, 32, 64)},
}
# The names from which a hint takes the one that is most like an unknown name.
_NAMES_TO_SUGGEST = ("float32", "bfloat16", "int64", "complex64", *_ITEMSIZES_BEYOND_NUMPY)


# ---- names and sizes


def name_of(dtype: object) -> str:
    """Return the name of a dtype of any kind: `np.float32`, `torch.float32`, `"float32"` -> `"float32"`.

    Raises:
        DtypeError: There is no such dtype.
    """
    if isinstance(dtype, type):  # a class, as `np.float32` is
        name = dtype.__name__
    elif isinstance(dtype, str):
        name = dtype
    else:
        name = str(getattr(dtype, "name", dtype))
    name = name.rpartition(".")[2]  # `torch.float32` -> `float32`
    itemsize(name)  # raises if there is no such dtype
    return name if name in _ITEMSIZES_BEYOND_NUMPY else np.dtype(name).name


@lru_cache(maxsize=64)
def itemsize(name: str) -> int:
    """Return the bytes of one element: `"float32"` -> 4.

    Raises:
        DtypeError: There is no dtype of this name.
    """
    if name in _ITEMSIZES_BEYOND_NUMPY:
        return _ITEMSIZES_BEYOND_NUMPY[name]
    dtype = _number_dtype_of_numpy(name)
    if dtype is None:
        meant = did_you_mean(name, _NAMES_TO_SUGGEST, _FOREIGN_NAMES)
        hint = f"{meant}as in float32, bfloat16, int64, bool, complex64"
        raise DtypeError(f"unknown dtype {name!r}", hint=hint)
    return dtype.itemsize


def _number_dtype_of_numpy(name: str) -> np.dtype[Any] | None:
    """Return numpy's dtype of this name; None if there is none, or not one of numbers or bool.

    None as well for names that numpy takes for another dtype than other systems do, such as "f16".
    """
    # numpy would read texts that are no names as records or Python expressions.
    if name in _FOREIGN_NAMES or not _NAME.fullmatch(name):
        return None
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    is_number_or_bool = dtype.kind in "fiubc"
    return dtype if is_number_or_bool else None


def n_bytes(shape: Sequence[int], name: str) -> int:
    """Return the bytes of an array."""
    return math.prod(shape) * itemsize(name)


def precision(name: str) -> float:
    """Return the distance from 1 to the next larger number of a dtype: `"float16"` -> 2**-10.

    0 for integers, which are exact.
    """
    if name in _ITEMSIZES_BEYOND_NUMPY:
        return _PRECISION.get(name, 0.0)
    if np.dtype(name).kind in "fc":
        return float(np.finfo(name).eps)
    return 0.0


# ---- what a dtype allows


def check_reduction(name: str, op: str) -> None:
    """Raise DtypeError if values of a dtype cannot be reduced by `op`: sum, mean, max or min.

    Refused are any reduction of 8-bit and 4-bit formats, a sum or mean of bool, a mean of integers,
    and max or min of complex numbers.
    """
    if name in _ONLY_MOVED:
        hint = "it can only be moved: cast before the reduction"
        raise DtypeError(f"dtype {name} cannot be reduced", hint=hint)
    numpy_kind = "f" if name in _ITEMSIZES_BEYOND_NUMPY else np.dtype(name).kind
    if op in ("sum", "mean") and numpy_kind == "b":
        hint = "cast to an integer, or use max (any) or min (all)"
        raise DtypeError(f"dtype bool lacks a {op}", hint=hint)
    if op == "mean" and numpy_kind in "iu":
        hint = "the mean of integers need not be an integer: cast, or use sum"
        raise DtypeError(f"dtype {name} lacks a mean", hint=hint)
    if op in ("max", "min") and numpy_kind == "c":
        raise DtypeError(f"dtype {name} lacks a {op}", hint="complex numbers are not ordered")


def check_value(name: str, value: float) -> None:
    """Raise DtypeError if a dtype cannot hold a constant to be written: -1 or 0.5 in uint8.

    Floats and complex numbers take any value, rounded, unless it would be NaN: 8-bit floats without
    infinities take those in their range. Of 4-bit dtypes only 0 is written.
    """
    if name in _FOUR_BITS and value:
        hint = "only zeros are written in 4 bits: cast"
        raise DtypeError(f"dtype {name} cannot hold {value}", hint=hint)
    if name in _FINITE and not math.isnan(value):
        smallest, largest = _FINITE[name]
        if not smallest <= value <= largest:
            hint = f"its values are from {smallest:g} to {largest:g}, without infinities: cast"
            raise DtypeError(f"dtype {name} cannot hold {value}", hint=hint)
    if name in _ITEMSIZES_BEYOND_NUMPY or np.dtype(name).kind in "fc":
        return
    if name == "bool":
        low = 0
        high = 1
    else:
        low = np.iinfo(name).min
        high = np.iinfo(name).max
    if not float(value).is_integer() or not low <= value <= high:
        hint = f"its values are whole numbers from {low} to {high}"
        raise DtypeError(f"dtype {name} cannot hold {value}", hint=hint)


def check_signed(name: str) -> None:
    """Raise DtypeError if values of the dtype cannot be negated."""
    if name in _ONLY_MOVED:
        raise DtypeError(f"dtype {name} cannot be negated", hint="it can only be moved: cast first")
    if name not in _ITEMSIZES_BEYOND_NUMPY and np.dtype(name).kind in "bu":
        raise DtypeError(f"dtype {name} lacks negative values", hint="cast to a signed dtype")


# ---- numpy's dtypes


def carrier(name: str) -> np.dtype[Any]:
    """Return the dtype under which numpy alone has the same bytes: `"bfloat16"` -> uint16.

    It is the dtype itself where numpy knows it.
    """
    if name in _ITEMSIZES_BEYOND_NUMPY:
        return np.dtype(f"u{itemsize(name)}")
    return np.dtype(name)


def recast(x: NDArray[Any], src: str, dst: str) -> NDArray[Any]:
    """Cast values of dtype `src`, held under its `carrier`, to dtype `dst` under its own.

    Raises:
        DtypeError: ml_dtypes is needed and not installed.
    """
    if src == dst:
        return x
    values = x.view(numpy_dtype(src)).astype(numpy_dtype(dst))
    return values.view(carrier(dst))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of this name, from ml_dtypes if numpy itself lacks it.

    Raises:
        DtypeError: ml_dtypes is needed and not installed.
    """
    with contextlib.suppress(ImportError):
        import_module("ml_dtypes")  # optional; importing it registers its names with numpy
    try:
        return np.dtype(name)
    except TypeError:
        reason = f"numpy has no {name} without ml_dtypes"
        raise DtypeError(reason, hint="pip install 'xshard[jax]' installs it") from None
