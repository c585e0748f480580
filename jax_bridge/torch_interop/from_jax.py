"""`from_jax`: a JAX function as a torch function; the forward pass saves the pullback of the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh as JaxMesh
from torch import Tensor
from torch.distributed.tensor import DTensor

from jax_bridge.arrays.stored import stored_as
from jax_bridge.torch_interop.devices import MeshPair, mesh_pair
from jax_bridge.torch_interop.hand_over import prepare_to_jax, prepare_to_torch
from jax_bridge.torch_interop.route import Options, array_sharding, layouts_of
from torch_bridge.dtensor.function import as_dtensor
from torch_bridge.dtensor.placements import local_of
from xshard import Layout
from xshard.errors import MeshError

Arrays = Sequence[jax.Array]
Group = list[Tensor]  # the tensors of one array, one for each device of this process
OPTIONS = Options()


def from_jax(
    fn: Callable[..., Any], in_layouts: Any, out_layouts: Any, mesh: JaxMesh
) -> Callable[..., Any]:
    """A function of global JAX arrays as a differentiable function of this process's tensors.

    fn: takes and returns arrays or pytrees of them; it may be a `jax.shard_map` or a `jit` over the mesh.
    in_layouts, out_layouts: layouts of the arguments and results: one for all, or a pytree prefix, such as a
    tuple with one per argument. The layout of a gradient is the dual of its tensor's: along a replicated axis
    every process gets the whole gradient.
    mesh: JAX's mesh, over the devices of torch's processes (`torch_interop.initialize`).

    The new function takes for every array a tensor, a list with one tensor per device if the process has
    several, or a DTensor; given a DTensor it returns DTensors. Other arguments (a jax.Array, a number, a key)
    are passed on to `fn` and have no gradient. All processes of the mesh call it. Memory is shared if
    possible; as with torch's own functions, the backward pass raises if a saved tensor was written to.
    Compiled once per shape, dtype and set of arguments with a gradient. torch.compile calls it between its
    graphs and does not trace it, nor does torch.func.

    Raises as `to_jax` and `to_torch` do, and any error of `fn`.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> layer = from_jax(lambda x, w: jax.numpy.tanh(x @ w), ("n i", "i o/tp"), "n o/tp", mesh)
    >>> w = torch.zeros(3, 2, requires_grad=True)
    >>> layer(torch.ones(4, 3), w).sum().backward()
    >>> w.grad[0]
    tensor([4., 4.])
    """
    function: Any = torch.compiler.disable(_JaxFunction(fn, in_layouts, out_layouts, mesh).__call__)
    function.__name__ = function.__qualname__ = getattr(fn, "__name__", "from_jax")
    function.__doc__ = fn.__doc__
    return function


class _JaxFunction:
    """A JAX function with its layouts, and the programs that are compiled for it."""

    def __init__(
        self, fn: Callable[..., Any], in_layouts: Any, out_layouts: Any, mesh: JaxMesh
    ) -> None:
        self.fn = fn
        self.in_layouts = in_layouts
        self.out_layouts = out_layouts
        self.mesh = mesh
        self._programs: dict[Any, VjpProgram] = {}

    def __call__(self, *args: Any) -> Any:
        meshes = mesh_pair(self.mesh)
        several = len(meshes.local) > 1

        def is_group(value: Any) -> bool:
            return several and isinstance(value, list) and any(isinstance(x, Tensor) for x in value)

        leaves, tree = jax.tree.flatten(args, is_group)
        layouts = tuple(map(Layout.parse, layouts_of("in_layouts", self.in_layouts, tree)))
        device_mesh = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
        both = mesh_pair(self.mesh, device_mesh)
        if (both.axes, both.devices) != (both.jax_axes, both.jax_devices):
            reason = f"the DTensor's mesh {both.axes!r} is not JAX's {both.jax_axes!r}"
            hint = "a function has one mesh: redistribute the DTensor, or make JAX's mesh equal to its mesh"
            raise MeshError(f"{reason} with the same order of devices", hint=hint)
        groups: list[Group | None] = []  # None: not of tensors
        for x, layout in zip(leaves, layouts, strict=True):
            if isinstance(x, Tensor):
                x = [local_of(x, layout, str(layout)) if isinstance(x, DTensor) else x]
            groups.append(x if isinstance(x, list) else None)
        records = torch.is_grad_enabled()
        wrt = [i for i, g in enumerate(groups) if records and any(x.requires_grad for x in g or ())]
        others = [x if group is None else None for x, group in zip(leaves, groups, strict=True)]
        parts = zip(groups, layouts, others, strict=True)
        arrays: list[Any] = [
            _to_jax(g, layout, self.mesh) if g else other for g, layout, other in parts
        ]
        program = self._program(meshes, tree, layouts, arrays, tuple(wrt))
        results = _Apply.apply(
            program, arrays, others, *(x for group in groups for x in group or ())
        )
        out: list[Any] = [group if several else group[0] for group in program.divided(results)]
        if device_mesh is not None:
            types = zip(out, program.out_layouts, program.out_avals, strict=True)
            out = [
                as_dtensor(block, layout, device_mesh, aval.shape) for block, layout, aval in types
            ]
        return jax.tree.unflatten(program.out_tree, out)

    def _program(
        self,
        meshes: MeshPair,
        tree: Any,
        layouts: tuple[Layout, ...],
        leaves: Arrays,
        wrt: tuple[int, ...],
    ) -> VjpProgram:
        """The program for such arguments, made on the first call."""
        fn = self.fn
        avals = tuple(map(jax.typeof, leaves))
        key = tree, layouts, avals, wrt
        if key in self._programs:
            return self._programs[key]

        def of_leaves(*some: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(jax.tree.leaves(fn(*jax.tree.unflatten(tree, some))))

        with jax.set_mesh(self.mesh):
            out = jax.eval_shape(lambda *some: fn(*jax.tree.unflatten(tree, some)), *leaves)
        out_avals, out_tree = jax.tree.flatten(out)
        out_layouts = tuple(
            map(Layout.parse, layouts_of("out_layouts", self.out_layouts, out_tree))
        )
        for layout, aval in zip(out_layouts, out_avals, strict=True):
            array_sharding(layout, meshes, aval.shape)  # raises before anything runs
        types = meshes, avals, layouts, wrt, out_tree, tuple(out_avals), out_layouts
        return self._programs.setdefault(key, VjpProgram(of_leaves, *types))


def _to_jax(group: Group, layout: Layout, mesh: JaxMesh) -> jax.Array:
    return prepare_to_jax(group, layout, mesh, None, OPTIONS)()


class _Apply(torch.autograd.Function):
    """The tensors of all outputs, differentiable. leaves: arrays; others: None for tensors; flat: these."""

    @staticmethod
    def forward(
        ctx: Any, program: VjpProgram, leaves: list[Any], others: list[Any], *flat: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, ctx.pull = program.forward(leaves)
        groups = list(map(program.to_torch, outputs, program.out_layouts))
        # An argument that the function returns unchanged must not be the caller's own tensor.
        arguments = {x.data_ptr() for x in flat}
        groups = [
            [x.clone() if x.data_ptr() in arguments else x for x in group] for group in groups
        ]
        config: Any = jax.config
        ctx.program, ctx.others, ctx.n_tensors = program, others, len(flat)
        ctx.x64 = config.jax_enable_x64
        ctx.precision = config.jax_default_matmul_precision
        if program.wrt:
            # Saved so that torch notices writes to memory that the pullback reads.
            ctx.save_for_backward(
                *flat, *(x for i in program.borrowed(outputs, ctx.pull) for x in groups[i])
            )
        rough = (group for i, group in enumerate(groups) if i not in program.smooth)
        ctx.mark_non_differentiable(*(x for group in rough for x in group))
        return tuple(x for group in groups for x in group)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        program = ctx.program
        flat = ctx.saved_tensors[: ctx.n_tensors]
        n = len(ctx.program.meshes.local)
        out_groups = program.divided(cotangents)
        smooth = [out_groups[i] for i in program.smooth]
        # Autograd runs the backward pass of a GPU in another thread, which has other settings.
        with jax.enable_x64(ctx.x64), jax.default_matmul_precision(ctx.precision):
            if torch.is_grad_enabled():  # the backward pass is recorded
                both = program.divided(flat), smooth
                inputs, of_outputs = (
                    iter([x if n > 1 else x[0] for x in groups]) for groups in both
                )
                leaves = [next(inputs) if other is None else other for other in ctx.others]
                gradients = [x if n > 1 else [x] for x in program.pullback(leaves, [*of_outputs])]
            else:
                pairs = zip(smooth, program.cotangent_layouts, strict=True)
                arrays = [
                    _to_jax(group, layout, program.meshes.jax_mesh) for group, layout in pairs
                ]
                results = program.backward(ctx.pull, arrays)
                gradients = list(map(program.to_torch, results, program.gradient_layouts))
        by_leaf = dict(zip(program.wrt, gradients, strict=True))
        of_tensors = (i for i, other in enumerate(ctx.others) if other is None)
        return None, None, None, *(x for i in of_tensors for x in by_leaf.get(i, [None] * n))


@dataclass(frozen=True, eq=False)
class VjpProgram:
    """The forward and backward programs of a function of leaves. wrt: leaves that get a gradient."""

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
        return tuple(
            i for i, aval in enumerate(self.out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact)
        )

    @cached_property
    def cotangent_layouts(self) -> tuple[Layout, ...]:
        return tuple(self.out_layouts[i].dual for i in self.smooth)

    @cached_property
    def gradient_layouts(self) -> tuple[Layout, ...]:
        return tuple(self.in_layouts[i].dual for i in self.wrt)

    def divided(self, flat: Sequence[Tensor]) -> list[Group]:
        """Tensors of several arrays, by array."""
        n = len(self.meshes.local)
        return [list(flat[i : i + n]) for i in range(0, len(flat), n)]

    def to_torch(self, array: jax.Array, layout: Layout) -> Group:
        array = stored_as(array, layout, self.meshes.jax_mesh)
        blocks: Any = prepare_to_torch(array, layout, self.meshes.jax_mesh, OPTIONS)()
        return blocks if isinstance(blocks, list) else [blocks]

    def forward(self, leaves: Arrays) -> tuple[tuple[jax.Array, ...], Any]:
        """The outputs, and the pullback for `backward`; None if nothing is differentiated."""
        with jax.set_mesh(
            self.meshes.jax_mesh
        ):  # for specs without a mesh; threads of autograd have none
            return self._run(*leaves)

    def backward(self, pull: Any, cotangents: Arrays) -> tuple[jax.Array, ...]:
        """The gradients of the leaves `wrt`. Complex gradients are torch's: the conjugates of JAX's."""
        with jax.set_mesh(self.meshes.jax_mesh):
            return self._pulled(pull, list(cotangents))

    @cached_property
    def pullback(self) -> _JaxFunction:
        """`backward` as a function of leaves and cotangents."""

        def gradients(leaves: Arrays, cotangents: Arrays) -> list[jax.Array]:
            return list(self._pull(self._vjp(*leaves)[1], cotangents))

        ins = list(self.in_layouts), list(self.cotangent_layouts)
        return _JaxFunction(gradients, ins, list(self.gradient_layouts), self.meshes.jax_mesh)

    def borrowed(self, outputs: Arrays, pull: Any) -> tuple[int, ...]:
        """Indices of the outputs that share memory with the pullback."""
        saved = {part for x in jax.tree.leaves(pull) for part in _memory(x)}
        return tuple(i for i, x in enumerate(outputs) if saved.intersection(_memory(x)))

    @cached_property
    def _run(self) -> Callable[..., tuple[tuple[jax.Array, ...], Any]]:
        return jax.jit(
            self._vjp, out_shardings=(self._shardings(self.out_layouts, self.out_avals), None)
        )

    @cached_property
    def _pulled(self) -> Callable[..., tuple[jax.Array, ...]]:
        avals = [self.in_avals[i] for i in self.wrt]
        return jax.jit(self._pull, out_shardings=self._shardings(self.gradient_layouts, avals))

    def _vjp(self, *leaves: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        if not self.wrt:
            return self.fn(*leaves), None

        def of_wrt(*some: jax.Array) -> tuple[jax.Array, ...]:
            return self.fn(
                *(dict(enumerate(leaves)) | dict(zip(self.wrt, some, strict=True))).values()
            )

        return jax.vjp(of_wrt, *(leaves[i] for i in self.wrt))

    def _pull(self, pull: Any, cotangents: Arrays) -> tuple[jax.Array, ...]:
        smooth = dict(zip(self.smooth, map(_conjugate, cotangents), strict=True))
        zeros = (np.zeros(aval.shape, jax.dtypes.float0) for aval in self.out_avals)
        return tuple(map(_conjugate, pull(tuple((dict(enumerate(zeros)) | smooth).values()))))

    def _shardings(self, layouts: Sequence[Layout], avals: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            array_sharding(x, self.meshes, a.shape) for x, a in zip(layouts, avals, strict=True)
        )


def _conjugate(x: jax.Array) -> jax.Array:
    return x.conj() if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _memory(x: Any) -> set[tuple[Any, int]]:
    if not isinstance(x, jax.Array) or not x.size:
        return set()
    return {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}
