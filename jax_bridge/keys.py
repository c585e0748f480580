"""PRNG keys (`jax.random.key`), which travel as the words that they are made of.

Decides which layouts an array of keys may have. Knows no plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from xshard import Layout
from xshard.errors import DtypeError
from xshard.notation.parser import Dim
from xshard.plans.expression import Sides


def are_keys(x: jax.Array) -> bool:
    """True for an array of keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def as_words(keys: jax.Array, parsed: Sides) -> tuple[jax.Array, Sides, Callable[[jax.Array], jax.Array]]:
    """Keys -> their words, `[..., words]`, the expression with that dim, and what makes keys of words again.

    Raises DtypeError for layouts under which keys would be added or filled in.
    """
    src, dst = (_wider(layout.resolved(keys.ndim), parsed.text) for layout in parsed[:2])
    back = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(keys))
    return jax.random.key_data(keys), Sides(src, dst, parsed.text), back


def _wider(layout: Layout, text: str) -> Layout:
    if any(dim.overlap for dim in layout.dims) or any(kind != "copy" for kind, _ in layout.tags):
        raise DtypeError(
            f"PRNG keys under '{layout}'",
            text=text,
            hint="keys are moved as they are: no tag but copy, no overlap",
        )
    name = next(f"words{i}" for i in range(len(layout.names) + 1) if f"words{i}" not in layout.names)
    return replace(layout, dims=(*layout.dims, Dim(name)))
