"""`from_jax`: a JAX function on sharded arrays as a differentiable torch function on sharded tensors.

Decides how torch's autograd and `jax.vjp` meet. The forward pass runs the function and keeps its pullback;
the backward pass runs the pullback. Each is one program, compiled once. If torch records the backward pass,
for second derivatives, the pullback becomes another such function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import torch
from jax.sharding import Mesh as JaxMesh
from torch import Tensor
from torch.distributed.tensor import DTensor

from jax_bridge.arrays.order import stored_as
from jax_bridge.torch_interop.devices import Ends, ends_of
from jax_bridge.torch_interop.handover import Options
from jax_bridge.torch_interop.pullback import VjpProgram, as_layouts, broadcast_layouts, make_vjp_program
from jax_bridge.torch_interop.to_jax import prepare_to_jax
from jax_bridge.torch_interop.to_torch import prepare_to_torch
from torch_bridge.dtensor.function import as_dtensor
from torch_bridge.dtensor.placements import local_of
from xshard import Layout
from xshard.errors import MeshError

Group = list[Tensor]  # one tensor for each device of this process
OPTIONS = Options()


def from_jax(fn: Callable[..., Any], in_layouts: Any, out_layouts: Any, mesh: JaxMesh) -> Callable[..., Any]:
    """A function of global arrays in JAX -> the same function of this process's tensors, differentiable.

    fn: takes and returns arrays or pytrees of them; it may be a `jax.shard_map` or a `jit` over the mesh.
    in_layouts, out_layouts: of its arguments and results: one for all, or a pytree prefix of them, such as a
    tuple with one per argument. The layout of a gradient is the dual of its tensor's: along a replicated axis
    every process gets the whole gradient.
    mesh: JAX's, over the devices of torch's processes (`torch_interop.initialize`).

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
    call = JaxCall(fn, in_layouts, out_layouts, mesh)

    @torch.compiler.disable
    def function(*args: Any) -> Any:
        return call(*args)

    function.__name__ = function.__qualname__ = getattr(fn, "__name__", "from_jax")
    function.__doc__ = fn.__doc__
    return function


class JaxCall:
    """A JAX function with its layouts, and the programs compiled for it so far."""

    def __init__(self, fn: Callable[..., Any], in_layouts: Any, out_layouts: Any, mesh: JaxMesh) -> None:
        self.fn, self.in_layouts, self.out_layouts, self.mesh = fn, in_layouts, out_layouts, mesh
        self._programs: dict[Any, VjpProgram] = {}
        self._pullbacks: dict[VjpProgram, JaxCall] = {}

    def __call__(self, *args: Any) -> Any:
        ends = ends_of(self.mesh)
        several = len(ends.local) > 1

        def is_group(value: Any) -> bool:
            return several and isinstance(value, list) and any(isinstance(x, Tensor) for x in value)

        leaves, tree = jax.tree.flatten(args, is_group)
        layouts = as_layouts(broadcast_layouts(self.in_layouts, tree, "in_layouts"))
        device_mesh = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
        if device_mesh is not None:
            _check_mesh(ends_of(self.mesh, device_mesh))
        groups: list[Group | None] = []
        for x, layout in zip(leaves, layouts, strict=True):
            if isinstance(x, Tensor):
                x = [local_of(x, layout, str(layout)) if isinstance(x, DTensor) else x]
            groups.append(x if isinstance(x, list) else None)
        flat = [x for group in groups for x in group or ()]
        wanted = torch.is_grad_enabled()
        wrt = [i for i, g in enumerate(groups) if wanted and any(x.requires_grad for x in g or ())]
        others = [x if group is None else None for x, group in zip(leaves, groups, strict=True)]
        sizes = [0 if group is None else len(group) for group in groups]
        invocation = Invocation(self, ends, tree, layouts, others, sizes, tuple(wrt))
        results = Apply.apply(invocation, *flat)
        program = invocation.program
        assert program is not None  # the call has made it
        out_groups = _divided(results, [len(ends.local)] * len(program.out_avals))
        if device_mesh is not None:
            made: list[Any] = [
                as_dtensor(group[0], layout, device_mesh, aval.shape)
                for group, layout, aval in zip(
                    out_groups, program.out_layouts, program.out_avals, strict=True
                )
            ]
        else:
            made = [group if several else group[0] for group in out_groups]
        return jax.tree.unflatten(program.out_tree, made)

    def program(self, invocation: Invocation, leaves: Sequence[Any]) -> VjpProgram:
        """The program for such arguments, made on the first call."""
        key = invocation.tree, invocation.layouts, tuple(map(jax.typeof, leaves)), invocation.wrt
        if key not in self._programs:
            self._programs[key] = make_vjp_program(
                *(
                    self.fn,
                    invocation.ends,
                    invocation.tree,
                    invocation.layouts,
                    self.out_layouts,
                    leaves,
                    invocation.wrt,
                )
            )
        return self._programs[key]

    def pullback(self, program: VjpProgram) -> JaxCall:
        """The gradients as a function of the leaves and the cotangents."""
        if program not in self._pullbacks:
            ins = list(program.in_layouts), list(program.cotangent_layouts)
            self._pullbacks[program] = JaxCall(
                program.gradients, ins, list(program.gradient_layouts), self.mesh
            )
        return self._pullbacks[program]


@dataclass
class Invocation:
    """One call without its tensors. others: leaves that are no tensors; sizes: tensors per leaf, or 0."""

    call: JaxCall
    ends: Ends
    tree: Any
    layouts: tuple[Layout, ...]
    others: list[Any]
    sizes: list[int]
    wrt: tuple[int, ...]
    program: VjpProgram | None = None

    def leaves(self, flat: Sequence[Tensor], hand: Callable[[Group, Layout], Any]) -> list[Any]:
        """All leaves; `hand` makes the ones of tensors."""
        groups = _divided(flat, self.sizes)
        return [
            hand(group, layout) if group else other
            for group, layout, other in zip(groups, self.layouts, self.others, strict=True)
        ]

    def to_jax(self, group: Group, layout: Layout) -> jax.Array:
        return prepare_to_jax(group, layout, self.call.mesh, None, OPTIONS)()

    def to_torch(self, array: jax.Array, layout: Layout) -> Group:
        array = stored_as(array, layout, self.call.mesh)
        made: Any = prepare_to_torch(array, layout, self.call.mesh, OPTIONS)()
        return made if isinstance(made, list) else [made]


class ThreadSettings(NamedTuple):
    """Settings of JAX that hold in one thread; autograd runs the backward pass of a GPU in one of its own."""

    x64: bool
    precision: str | None

    @classmethod
    def here(cls) -> ThreadSettings:
        config: Any = jax.config
        return cls(config.jax_enable_x64, config.jax_default_matmul_precision)

    @contextmanager
    def applied(self) -> Iterator[None]:
        with jax.enable_x64(self.x64), jax.default_matmul_precision(self.precision):
            yield


class Apply(torch.autograd.Function):
    """`Apply.apply(invocation, *tensors)` -> the tensors of all outputs; where the derivatives meet."""

    @staticmethod
    def forward(ctx: Any, invocation: Invocation, *flat: Tensor) -> tuple[Tensor, ...]:
        leaves = invocation.leaves(flat, invocation.to_jax)
        program = invocation.program = invocation.call.program(invocation, leaves)
        outputs, ctx.pull = program.forward(leaves)
        groups = [
            invocation.to_torch(x, layout) for x, layout in zip(outputs, program.out_layouts, strict=True)
        ]
        # An argument that the function returns unchanged must not be the caller's own tensor.
        given = {x.data_ptr() for x in flat}
        groups = [[x.clone() if x.data_ptr() in given else x for x in group] for group in groups]
        ctx.invocation, ctx.settings = invocation, ThreadSettings.here()
        if program.wrt:
            # Saved so that torch notices writes to memory that the pullback reads.
            watched = [x for i in program.borrowed(outputs, ctx.pull) for x in groups[i]]
            ctx.save_for_backward(*flat, *watched)
        ctx.mark_non_differentiable(
            *(x for i, group in enumerate(groups) if i not in program.smooth for x in group)
        )
        return tuple(x for group in groups for x in group)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.settings.applied():
            return Apply._pulled(ctx, *cotangents)

    @staticmethod
    def _pulled(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        saved, invocation = ctx.saved_tensors, ctx.invocation
        program, n = invocation.program, len(invocation.ends.local)
        given = _divided(cotangents, [n] * len(program.out_avals))
        given = [given[i] for i in program.smooth]
        if torch.is_grad_enabled():  # the backward pass is recorded
            whole = (lambda group, _: group) if n > 1 else (lambda group, _: group[0])
            leaves = invocation.leaves(saved[: sum(invocation.sizes)], whole)
            made = invocation.call.pullback(program)(leaves, [whole(group, None) for group in given])
            gradients = [x if n > 1 else [x] for x in made]
        else:
            arrays = [
                invocation.to_jax(group, layout)
                for group, layout in zip(given, program.cotangent_layouts, strict=True)
            ]
            gradients = [
                invocation.to_torch(x, layout)
                for x, layout in zip(
                    program.backward(ctx.pull, arrays), program.gradient_layouts, strict=True
                )
            ]
        found = dict(zip(program.wrt, gradients, strict=True))
        result = (found.get(i, [None] * size) for i, size in enumerate(invocation.sizes))
        return None, *(x for group in result for x in group)


def _divided(flat: Sequence[Tensor], sizes: Sequence[int]) -> list[Group]:
    rest = iter(flat)
    return [[next(rest) for _ in range(size)] for size in sizes]


def _check_mesh(ends: Ends) -> None:
    if not ends.are_the_same:
        raise MeshError(
            f"the DTensor's mesh {ends.axes!r} is not JAX's {ends.jax_axes!r} with the same order of devices",
            hint="a function has one mesh: redistribute the DTensor, or make JAX's mesh equal to its mesh",
        )
