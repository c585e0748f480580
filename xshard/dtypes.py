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

from xshard.arguments import did_you_mean
from xshard.errors import DtypeError

_NAME = re.compile(r"[<>=|]?[A-Za-z]\w{0,19}", re.ASCII)
# Floats that numpy does not know without ml_dtypes, with the distance from 1 to the next larger number.
_PRECISION = {
    "bfloat16": 2**-7,
    "float8_e4m3fn": 2**-3,
    "float8_e5m2": 2**-2,
    "float8_e4m3fnuz": 2**-3,
}
_PRECISION |= {"float8_e5m2fnuz": 2**-2, "float8_e8m0fnu": 1.0}
_PRECISION |= {"float4_e2m1fn": 2**-1, "float4_e2m1fn_x2": 2**-1}
# All such names, with their item sizes in bytes. Numbers of 4 bits fill a byte each, in numpy and on CPUs;
# two of torch's are one element.
_EXTENDED = {**dict.fromkeys(_PRECISION, 1), "bfloat16": 2, "int4": 1, "uint4": 1}
_FOUR_BITS = ("float4_e2m1fn", "float4_e2m1fn_x2", "int4", "uint4")
# No framework adds or negates these.
_ONLY_MOVED = _EXTENDED.keys() - {"bfloat16"}
# Names of dtypes in other systems, which numpy does not know, or takes for another: its "f16" has 16 bytes.
_ELSEWHERE = {"bf16": "bfloat16"} | {
    f"{short}{bits}": f"{name}{bits}"
    for short, name in (("f", "float"), ("fp", "float"), ("s", "int"), ("i", "int"), ("u", "uint"))
    for bits in (16, 32, 64)
}


def name_of(dtype: object) -> str:
    """`np.float32`, `np.dtype("float32")`, `torch.float32`, `"float32"` -> `"float32"`. Raises DtypeError."""
    if isinstance(dtype, type):
        name = dtype.__name__
    else:
        name = dtype if isinstance(dtype, str) else str(getattr(dtype, "name", dtype))
    name = name.rpartition(".")[2]
    itemsize(name)
    return name if name in _EXTENDED else np.dtype(name).name


@lru_cache(maxsize=64)
def itemsize(name: str) -> int:
    """Bytes of one element. Raises DtypeError for an unknown name."""
    if name in _EXTENDED:
        return _EXTENDED[name]
    try:
        # numpy would read other texts as records or Python expressions.
        dtype = np.dtype(name if name not in _ELSEWHERE and _NAME.fullmatch(name) else object)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiubc":
        meant = did_you_mean(
            name, ("float32", "bfloat16", "int64", "complex64", *_EXTENDED), _ELSEWHERE
        )
        hint = f"{meant}as in float32, bfloat16, int64, bool, complex64"
        raise DtypeError(f"unknown dtype {name!r}", hint=hint)
    return dtype.itemsize


def precision(name: str) -> float:
    """Distance from 1 to the next larger number of the dtype; 0 for integers, which are exact."""
    if name in _EXTENDED:
        return _PRECISION.get(name, 0.0)
    return float(np.finfo(name).eps) if np.dtype(name).kind in "fc" else 0.0


def check_reduction(name: str, op: str) -> None:
    """Raise DtypeError if the dtype does not allow the reduction `op`: sum, mean, max or min."""
    if name in _ONLY_MOVED:
        hint = "it can only be moved: cast before the reduction"
        raise DtypeError(f"dtype {name} cannot be reduced", hint=hint)
    kind = "f" if name in _EXTENDED else np.dtype(name).kind
    if op in ("sum", "mean") and kind == "b":
        raise DtypeError(
            f"dtype bool lacks a {op}", hint="cast to an integer, or use max (any) or min (all)"
        )
    if op == "mean" and kind in "iu":
        hint = "the mean of integers need not be an integer: cast, or use sum"
        raise DtypeError(f"dtype {name} lacks a mean", hint=hint)
    if op in ("max", "min") and kind == "c":
        raise DtypeError(f"dtype {name} lacks a {op}", hint="complex numbers are not ordered")


def check_value(name: str, value: float) -> None:
    """Raise DtypeError if the dtype cannot represent the value."""
    if name in _FOUR_BITS and value:
        raise DtypeError(
            f"dtype {name} cannot hold {value}", hint="only zeros are written in 4 bits: cast"
        )
    if name in _EXTENDED or np.dtype(name).kind in "fc":
        return
    low, high = (0, 1) if name == "bool" else (np.iinfo(name).min, np.iinfo(name).max)
    if not (float(value).is_integer() and low <= value <= high):
        hint = f"its values are whole numbers from {low} to {high}"
        raise DtypeError(f"dtype {name} cannot hold {value}", hint=hint)


def check_signed(name: str) -> None:
    """Raise DtypeError if values of the dtype cannot be negated."""
    if name in _ONLY_MOVED:
        raise DtypeError(f"dtype {name} cannot be negated", hint="it can only be moved: cast first")
    if name not in _EXTENDED and np.dtype(name).kind in "bu":
        raise DtypeError(f"dtype {name} lacks negative values", hint="cast to a signed dtype")


def n_bytes(shape: Sequence[int], name: str) -> int:
    """Bytes of an array."""
    return math.prod(shape) * itemsize(name)


def carrier(name: str) -> np.dtype[Any]:
    """Name -> the dtype under which numpy alone has the same bytes: unsigned integers where it knows none."""
    return np.dtype(f"u{itemsize(name)}" if name in _EXTENDED else name)


def recast(x: NDArray[Any], src: str, dst: str) -> NDArray[Any]:
    """Values of dtype `src`, under its carrier -> of dtype `dst`, under its own. Raises DtypeError."""
    return x if src == dst else x.view(numpy_dtype(src)).astype(numpy_dtype(dst)).view(carrier(dst))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Name -> numpy dtype, from ml_dtypes if numpy itself lacks it. Raises DtypeError."""
    with contextlib.suppress(ImportError):
        import_module("ml_dtypes")  # optional; importing it registers its names with numpy
    try:
        return np.dtype(name)
    except TypeError:
        reason = f"numpy has no {name} without ml_dtypes"
        raise DtypeError(reason, hint="pip install 'xshard[jax]' installs it") from None
