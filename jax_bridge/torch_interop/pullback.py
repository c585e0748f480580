"""A JAX function as two compiled programs: the forward pass, which returns the pullback, and the pullback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bridge.torch_interop.devices import MeshPair
from jax_bridge.torch_interop.route import array_sharding
from jax_bridge.trees import leaves_of
from xshard import Layout
from xshard.errors import located

Arrays = Sequence[jax.Array]


@dataclass(frozen=True, eq=False)
class VjpProgram:
    """The forward and backward programs of a function, for arguments of certain types.

    fn: leaves -> leaves. wrt: indices of the leaves that get a gradient. out_avals: the types of the outputs.
    """

    fn: Callable[..., tuple[jax.Array, ...]]
    meshes: MeshPair
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
        with jax.set_mesh(self.meshes.jax_mesh):  # for specs without a mesh; threads of autograd have none
            return self._with_pullback(*leaves) if self.wrt else (self._outputs(*leaves), None)

    def backward(self, pull: Any, cotangents: Arrays) -> tuple[jax.Array, ...]:
        """The gradients of the leaves `wrt`. Complex gradients are torch's: the conjugates of JAX's."""
        with jax.set_mesh(self.meshes.jax_mesh):
            return self._pulled(pull, list(cotangents))

    def gradients(self, leaves: Arrays, cotangents: Arrays) -> list[jax.Array]:
        """`backward` as a function of leaves and cotangents."""
        _, pull = self._vjp(*leaves)
        return list(self._pull(pull, cotangents))

    def borrowed(self, outputs: Arrays, pull: Any) -> tuple[int, ...]:
        """Indices of the outputs that share memory with the pullback."""
        saved = {part for x in jax.tree.leaves(pull) for part in _memory(x)}
        return tuple(i for i, x in enumerate(outputs) if saved.intersection(_memory(x)))

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
            replaced = dict(zip(self.wrt, some, strict=True))
            return self.fn(*(replaced.get(i, x) for i, x in enumerate(leaves)))

        return jax.vjp(of_wrt, *(leaves[i] for i in self.wrt))

    def _pull(self, pull: Any, cotangents: Arrays) -> tuple[jax.Array, ...]:
        smooth = dict(zip(self.smooth, map(_conjugate, cotangents), strict=True))
        zeros = (np.zeros(aval.shape, jax.dtypes.float0) for aval in self.out_avals)
        every = tuple(smooth.get(i, zero) for i, zero in enumerate(zeros))
        return tuple(map(_conjugate, pull(every)))

    def _shardings(self, layouts: Sequence[Layout], avals: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(array_sharding(x, self.meshes, a.shape) for x, a in zip(layouts, avals, strict=True))


def make_vjp_program(
    fn: Callable[..., Any],
    meshes: MeshPair,
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

    with jax.set_mesh(meshes.jax_mesh):
        out = jax.eval_shape(lambda *some: fn(*jax.tree.unflatten(tree, some)), *leaves)
    avals, out_tree = jax.tree.flatten(out)
    layouts = tuple(map(Layout.parse, layouts_of("out_layouts", out_layouts, out_tree)))
    for layout, aval in zip(layouts, avals, strict=True):
        array_sharding(layout, meshes, aval.shape)  # raises before anything runs
    return VjpProgram(
        of_leaves, meshes, tuple(map(jax.typeof, leaves)), in_layouts, wrt, out_tree, tuple(avals), layouts
    )


def layouts_of(what: str, layouts: Any, tree: Any) -> list[Any]:
    """The layout or expression of every leaf of a structure. layouts: one for all, or a pytree prefix."""
    with located(what):
        return [leaf.given for leaf in leaves_of(layouts, jax.tree.unflatten(tree, range(tree.num_leaves)))]


def _conjugate(x: jax.Array) -> jax.Array:
    return x.conj() if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _memory(x: Any) -> set[tuple[Any, int]]:
    if not isinstance(x, jax.Array) or not x.size:
        return set()
    return {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}
