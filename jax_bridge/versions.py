"""What is used of JAX without its promise to keep it: how a primitive is made, types along manual axes,
callbacks on memory.

Written for 0.10, and the only file to change when another release has it otherwise. Knows no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import jet
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

OLDEST = (0, 10)

if jax.__version_info__ < OLDEST:
    raise ImportError(
        f"jax_bridge needs jax {'.'.join(map(str, OLDEST))} or later, this is {jax.__version__}: "
        "earlier ones tell nothing but `varying` of a value along manual axes"
    )


def linear_primitive(
    name: str,
    *,
    run: Callable[..., jax.Array],
    abstract_eval: Callable[..., Any],
    transpose: Callable[..., jax.Array],
    batch: Callable[..., tuple[jax.Array, int | None]],
    on_platforms: Mapping[str, Callable[..., jax.Array]] | None = None,
) -> Callable[..., jax.Array]:
    """A linear operation of one array, with parameters as keywords, under every transformation of JAX.

    run: what it does, made of other operations; on_platforms: where something else is done.
    abstract_eval: the type of the array -> that of the result, and its effects. transpose: the cotangent.
    batch: the array, its batch dim or None, the batch's size and name -> the result and its batch dim.
    """
    made = Primitive(name)
    made.def_impl(run)
    made.def_effectful_abstract_eval(abstract_eval)

    def transposed(cotangent: jax.Array, _: object, **params: object) -> list[jax.Array]:
        return [transpose(cotangent, **params)]

    def batched(axis_data: Any, arrays: Any, dims: Any, **params: object) -> tuple[jax.Array, int | None]:
        return batch(*arrays, *dims, axis_data.size, axis_data.name, **params)

    ad.deflinear2(made, transposed)
    jet.deflinear(made)
    batching.fancy_primitive_batchers[made] = batched
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=False))
    for platform, runs_there in (on_platforms or {}).items():
        mlir.register_lowering(made, mlir.lower_fun(runs_there, multiple_results=False), platform=platform)
    return made.bind


def batch_first(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    """The array with its batch dim first; repeated where it has none."""
    return batching.bdim_at_front(x, dim, size)


def manual_type(x: Any) -> Any:
    """What a value or its aval is along the manual axes: sets `varying`, `unreduced`, `reduced`, and `vur`,
    all of them; None under `vmap`."""
    return getattr(jax.typeof(x) if isinstance(x, jax.Array) else x, "manual_axis_type", None)


def with_manual_type(aval: Any, manual: Any) -> Any:
    """The same type of array with another type along the manual axes."""
    return aval.update(manual_axis_type=manual)


def changed_type(manual: Any, **axes: frozenset[str]) -> Any:
    """The type along manual axes with these sets of axes: `varying`, `unreduced` and `reduced`."""
    kind = getattr(manual, "unreduced_kind", None)
    return type(manual)(**axes, **({"unreduced_kind": kind} if axes["unreduced"] and kind else {}))


def unreduced_kind(typed: Any) -> str:
    """How addends that are unreduced add up, in a type along manual axes or a spec.

    By "sum" where JAX has nothing else; since 0.12 also by "max" and "min".
    """
    kind = getattr(typed, "unreduced_kind", None)
    return "sum" if kind is None else str(kind.name)


def cuts_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """The entries of a spec; JAX refuses to iterate over one with tags."""
    kind = {"unreduced_kind": None} if hasattr(spec, "unreduced_kind") else {}
    return tuple(spec.update(unreduced=frozenset(), reduced=frozenset(), **kind))


def cotangent_type(manual: Any) -> Any:
    """What the cotangent is along the manual axes: unreduced and reduced change places."""
    return manual.to_ct_mat()


def host_callback(function: Callable[..., None], types: Any) -> Callable[..., Any]:
    """`function(context, results, *arguments)`, called by XLA on the memory of its device.

    `jax.pure_callback` has its arguments copied by XLA's own threads, while it holds one of them: on as many
    devices as there are threads it waits for ever.
    """
    return buffer_callback(function, types, vmap_method="sequential")
