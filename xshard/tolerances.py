"""How equal arrays have to be: every tolerance of the project by name, relative to the largest value."""

from __future__ import annotations

import math
from collections.abc import Iterable

from xshard.dtypes import precision

EXACT = 0.0  # sums of whole numbers: plans on numpy, torch and JAX
SAME_SEED = 1e-6  # sums over parameters that every process has drawn from one seed
DERIVATIVE = 1e-4  # a gradient against differences of its function in double precision

# Rounding of a few hundred operations stays below.
_ROUNDING = {"float64": 1e-9, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
_ROUNDING_OF_SHORT_FLOATS = 0.1  # of 8 bits and fewer
_PARTS_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}


def rounding(dtypes: Iterable[str]) -> float:
    """Return the tolerance for one function computed in two ways: that of the shortest float.

    0 for whole numbers, which are exact.
    """
    tolerances = []
    for name in dtypes:
        real_name = _PARTS_OF_COMPLEX.get(name, name)
        default_tolerance = _ROUNDING_OF_SHORT_FLOATS if "float" in real_name else EXACT
        tolerances.append(_ROUNDING.get(real_name, default_tolerance))
    return max(tolerances)


def replicas(dtype: str) -> float:
    """Return the tolerance for replicas of one value, added up in different orders by kernels.

    It is the square root of the dtype's precision, because gradients of different work differ by
    as much as they are large. 0 for whole numbers.
    """
    return math.sqrt(precision(dtype))
