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
_COMPLEX = {"complex64": "float32", "complex128": "float64"}


def rounding(dtypes: Iterable[str]) -> float:
    """One function computed in two ways: the tolerance of the shortest float; 0 for whole numbers."""
    names = [_COMPLEX.get(name, name) for name in dtypes]
    return max(_ROUNDING.get(name, 0.1 if "float" in name else EXACT) for name in names)


def replicas(dtype: str) -> float:
    """Replicas of one value, added up in different orders by kernels; 0 for whole numbers. The square root of
    the dtype's precision: gradients of different work differ by as much as they are large.
    """
    return math.sqrt(precision(dtype))
