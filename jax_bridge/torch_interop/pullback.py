"""A JAX function as two compiled programs: the forward pass, which returns the pullback, and the pullback.

Decides what is differentiated and how results are sharded. Knows arrays only, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bridge.torch_interop.devices import Ends
from jax_bridge.torch_interop.handover import named
from xshard import Layout, XshardError

Arrays = Sequence[jax.Array]


@dataclass(frozen=True, eq=False)
class VjpProgram:
    """The forward and backward programs of a function, for arguments of certain types.

    fn: leaves -> leaves. wrt: indices of the leaves that get a gradient. out_avals: types of the outputs.
    """

    fn: Callable[..., tuple[jax.Array, ...]]
    ends: Ends
    in_avals: tuple[Any, ...]
    in_layouts: tuple[Layout, ...]
    wrt: tuple[int, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]
    out_layouts: tuple[Layout, ...]

    @cached_property
    def smooth(self) -> tuple[int, ...]:
        """Indices of the outputs that have a cotangent: floats and complex numbers."""
        return tuple(i for i, aval in enumerate(self.out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact))

    @cached_property
    def cotangent_layouts(self) -> tuple[Layout, ...]:
        return tuple(self.out_layouts[i].dual for i in self.smooth)

    @cached_property
    def gradient_layouts(self) -> tuple[Layout, ...]:
        return tuple(self.in_layouts[i].dual for i in self.wrt)

    def forward(self, leaves: Arrays) -> tuple[tuple[jax.Array, ...], Any]:
        """The outputs, and the pullback for `backward`; None if nothing is differentiated."""
        with jax.set_mesh(self.ends.jax_mesh):  # for specs without a mesh; threads of autograd have none
            return self._with_pullback(*leaves) if self.wrt else (self._outputs(*leaves), None)

    def backward(self, pull: Any, cotangents: Arrays) -> tuple[jax.Array, ...]:
        """The gradients of the leaves `wrt`. Complex ones are torch's: the conjugates of JAX's."""
        with jax.set_mesh(self.ends.jax_mesh):
            return self._pulled(pull, list(cotangents))

    def gradients(self, leaves: Arrays, cotangents: Arrays) -> list[jax.Array]:
        """`backward` as a function of everything it depends on."""
        _, pull = self._vjp(*leaves)
        return list(self._pull(pull, cotangents))

    def borrowed(self, outputs: Arrays, pull: Any) -> tuple[int, ...]:
        """Indices of the outputs whose memory the pullback reads."""
        kept = {part for x in jax.tree.leaves(pull) for part in _memory(x)}
        return tuple(i for i, x in enumerate(outputs) if kept.intersection(_memory(x)))

    @cached_property
    def _outputs(self) -> Callable[..., tuple[jax.Array, ...]]:
        return jax.jit(self.fn, out_shardings=self._shardings(self.out_layouts, self.out_avals))

    @cached_property
    def _with_pullback(self) -> Callable[..., tuple[tuple[jax.Array, ...], Any]]:
        return jax.jit(self._vjp, out_shardings=(self._shardings(self.out_layouts, self.out_avals), None))

    @cached_property
    def _pulled(self) -> Callable[..., tuple[jax.Array, ...]]:
        avals = [self.in_avals[i] for i in self.wrt]
        return jax.jit(self._pull, out_shardings=self._shardings(self.gradient_layouts, avals))

    def _vjp(self, *leaves: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        def of_wrt(*some: jax.Array) -> tuple[jax.Array, ...]:
            given = dict(zip(self.wrt, some, strict=True))
            return self.fn(*(given.get(i, x) for i, x in enumerate(leaves)))

        return jax.vjp(of_wrt, *(leaves[i] for i in self.wrt))

    def _pull(self, pull: Any, cotangents: Arrays) -> tuple[jax.Array, ...]:
        given = dict(zip(self.smooth, map(_conjugate, cotangents), strict=True))
        zeros = (np.zeros(aval.shape, jax.dtypes.float0) for aval in self.out_avals)
        every = tuple(given.get(i, zero) for i, zero in enumerate(zeros))
        return tuple(map(_conjugate, pull(every)))

    def _shardings(self, layouts: Sequence[Layout], avals: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(named(x, self.ends, a.shape) for x, a in zip(layouts, avals, strict=True))


def make_vjp_program(
    fn: Callable[..., Any],
    ends: Ends,
    tree: Any,
    in_layouts: tuple[Layout, ...],
    out_layouts: Any,
    leaves: Arrays,
    wrt: tuple[int, ...],
) -> VjpProgram:
    """The program of a function for these leaves of its arguments; `tree` is their structure.

    Raises any error of the function while tracing; XshardError, ShapeError, NotationError for outputs that do
    not fit the layouts.
    """

    def of_leaves(*some: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(fn(*jax.tree.unflatten(tree, some))))

    with jax.set_mesh(ends.jax_mesh):
        out = jax.eval_shape(lambda *some: fn(*jax.tree.unflatten(tree, some)), *leaves)
    avals, out_tree = jax.tree.flatten(out)
    layouts = as_layouts(broadcast_layouts(out_layouts, out_tree, "out_layouts"))
    for layout, aval in zip(layouts, avals, strict=True):
        named(layout, ends, aval.shape)  # refused here, before anything runs
    return VjpProgram(
        of_leaves, ends, tuple(map(jax.typeof, leaves)), in_layouts, wrt, out_tree, tuple(avals), layouts
    )


def broadcast_layouts(layouts: Any, tree: Any, what: str) -> tuple[Any, ...]:
    """The layout of every leaf of a structure; `layouts` is a pytree prefix of it."""
    whole = jax.tree.unflatten(tree, range(tree.num_leaves))
    try:
        found = jax.tree.leaves(jax.tree.broadcast(layouts, whole))
    except ValueError as error:
        raise XshardError(
            f"{what} {layouts} do not fit {tree}: {error}",
            hint="pass one layout for all, or a pytree prefix with one for each",
        ) from None
    return tuple(found)


def as_layouts(given: Sequence[Layout | str]) -> tuple[Layout, ...]:
    """Parse the layouts that are text."""
    return tuple(Layout.parse(x) for x in given)


def _conjugate(x: jax.Array) -> jax.Array:
    return x.conj() if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _memory(x: Any) -> set[tuple[Any, int]]:
    if not isinstance(x, jax.Array) or not x.size:
        return set()
    return {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}
