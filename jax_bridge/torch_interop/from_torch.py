"""`from_torch`: a torch function as a JAX function; its gradient is another, which runs it again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType
from jax.sharding import Mesh as JaxMesh
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from jax_bridge.calls import redistribute
from jax_bridge.torch_interop import buffers
from jax_bridge.torch_interop.devices import MeshPair, mesh_pair
from jax_bridge.torch_interop.route import array_sharding, layouts_of
from jax_bridge.versions import host_callback
from torch_bridge.versions.modes import FakeTensorMode
from xshard import Plan, XshardError, plan
from xshard.errors import ShapeError
from xshard.layout.lengths import global_shape
from xshard.plans.expression import Sides, sides_or_one
from xshard.steps.base import without_tags

Arrays = Sequence[jax.Array]


def from_torch(
    fn: Callable[..., Any] | torch.nn.Module, in_layouts: Any, out_layouts: Any, mesh: JaxMesh
) -> Callable[..., Any]:
    """A torch function or module as a differentiable function of global arrays, for use in jit and grad.

    fn: gets the device's blocks as tensors, and returns tensors or pytrees of them. The function of a module
    takes its parameters first, by name, as `to_jax(dict(module.named_parameters()), ...)` gives them, so that
    gradients reach them; buffers keep their current values.
    in_layouts, out_layouts: layouts of the tensors that `fn` gets and returns; one for all, or a pytree
    prefix with one for each. The arrays have the same layouts without tags: `copy(dp)` on a parameter means
    that every device along dp uses its own copy, so that gradients add up; `sum(dp)` on an output means that
    the devices' results add up. `"layout -> layout"` moves arrays on the way in, or results on the way out.
    In the array, a dim in zigzag or another order is in storage order, as with `reshard`.

    XLA calls `fn`, on the devices' own memory. `fn` must be a pure function of its arguments: JAX may call it
    twice or not at all. It may write to its blocks, which are copies. Tracing runs it on fake tensors to find
    shapes. The backward pass runs it again. There is no forward mode.

    Raises while tracing: NotationError, ShapeError, DtypeError, and any error of `fn` on fake tensors. An
    error of `fn` on blocks arrives as a `jax.errors.JaxRuntimeError` with its message and traceback.

    >>> mesh = jax.make_mesh((1,), ("dp",))
    >>> layer = torch.nn.Linear(3, 1)
    >>> call = from_torch(layer, ("... | copy(dp)", "n/dp i"), "n/dp o", mesh)
    >>> weights = {"weight": jnp.ones((1, 3)), "bias": jnp.ones(1)}
    >>> jax.grad(lambda w: call(w, jnp.ones((4, 3))).sum())(weights)["bias"]
    Array([4.], dtype=float32)
    """
    call = _of_module(fn) if isinstance(fn, torch.nn.Module) else fn
    prepared: dict[Any, tuple[HostCall, Any]] = {}

    def function(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        arrays = [jnp.asarray(x) for x in leaves]
        key = tree, tuple((x.shape, x.dtype) for x in arrays)
        if key not in prepared:
            prepared[key] = _prepare(call, in_layouts, out_layouts, mesh_pair(mesh), tree, arrays)
        host, out_tree = prepared[key]
        placed = (_placed(x, p, host.meshes) for x, p in zip(arrays, host.enters, strict=True))
        return jax.tree.unflatten(out_tree, host.differentiable(*placed))

    function.__name__ = function.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    function.__doc__ = fn.__doc__
    return function


def _prepare(
    fn: Callable[..., Any],
    in_layouts: Any,
    out_layouts: Any,
    meshes: MeshPair,
    tree: Any,
    arrays: Arrays,
) -> tuple[HostCall, Any]:
    """The call for arrays of these shapes and dtypes, and the structure of its results."""
    dtypes = [buffers.torch_dtype(x.dtype) for x in arrays]
    moves = zip(map(sides_or_one, layouts_of("in_layouts", in_layouts, tree)), arrays, strict=True)
    enters = tuple(_plan(sides, meshes, x.shape, x.dtype.name, enters=True) for sides, x in moves)

    def of_tensors(*tensors: Tensor) -> Any:
        return fn(*jax.tree.unflatten(tree, tensors))

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        types = [(p.target.local_shape(0), dtype) for p, dtype in zip(enters, dtypes, strict=True)]
        out = of_tensors(*(torch.empty(n, dtype=dtype, device=meshes.kind) for n, dtype in types))
    blocks, out_tree = jax.tree.flatten(out)
    if wrong := [type(x).__name__ for x in blocks if not isinstance(x, Tensor)]:
        raise XshardError(
            f"the torch function returns {wrong[0]}", hint="tensors, or pytrees of them"
        )
    leaves = []
    for layout, block in zip(layouts_of("out_layouts", out_layouts, out_tree), blocks, strict=True):
        parsed = sides_or_one(layout)
        shape = global_shape(parsed.src, meshes.axes, block.shape, parsed.text)
        leaves.append(_plan(parsed, meshes, shape, buffers.jax_name(block.dtype), enters=False))
    return HostCall(
        lambda *x: jax.tree.leaves(of_tensors(*x)), meshes, enters, tuple(leaves)
    ), out_tree


def _plan(
    parsed: Sides, meshes: MeshPair, shape: tuple[int, ...], dtype: str, *, enters: bool
) -> Plan:
    """The plan from an array to the function's blocks or, unless it `enters`, from blocks to an array."""
    src, dst, _ = parsed
    if src == dst:
        whole = without_tags(src, tuple(axis for _, axes in src.tags for axis in axes))
        src, dst = (whole, dst) if enters else (src, whole)
    array_sharding(src if enters else dst, meshes, shape)  # raises before anything is traced
    return plan((src, dst), meshes.jax_axes, shape, dtype)


def _placed(x: jax.Array, plan: Plan, meshes: MeshPair) -> jax.Array:
    """The array with the source sharding of its plan, which is part of its type on Explicit axes."""
    if AxisType.Explicit not in meshes.jax_mesh.axis_types:
        return x
    return jax.reshard(x, array_sharding(plan.src, meshes, plan.shape))


def _of_module(module: torch.nn.Module) -> Callable[..., Any]:
    # During a call a module holds the parameters of that call, so devices take turns. The module is a copy,
    # as JAX may call it later, when the user's module has changed.
    copied = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    lock = threading.RLock()

    def call(parameters: dict[str, Tensor], *args: Any) -> Any:
        with lock:
            return torch.func.functional_call(copied, parameters, args)

    return call


@dataclass(frozen=True, eq=False)
class HostCall:
    """A function of tensors as one of arrays. enters, leaves: the plans of its arguments and results."""

    fn: Callable[..., Sequence[Tensor]]
    meshes: MeshPair
    enters: tuple[Plan, ...]
    leaves: tuple[Plan, ...]

    @cached_property
    def differentiable(self) -> Callable[..., tuple[jax.Array, ...]]:
        """The function of arrays, differentiable."""
        call = jax.custom_vjp(self._run)
        # The forward pass is the call itself: second derivatives go through it too.
        call.defvjp(lambda *arrays: (call(*arrays), arrays), self._backward)
        return call

    @cached_property
    def pullback(self) -> HostCall:
        """The gradients as a function of the arrays and the cotangents."""
        cotangents = (self.leaves[i].backward for i in _smooth(self.leaves))
        gradients = tuple(self.enters[i].backward for i in _smooth(self.enters))
        return HostCall(self._pulled, self.meshes, (*self.enters, *cotangents), gradients)

    @cached_property
    def _run(self) -> Callable[..., tuple[jax.Array, ...]]:
        """The function of arrays without a gradient; jitted, so that calls outside of jit compile it once."""
        on_devices = jax.shard_map(
            self._local,
            mesh=self.meshes.jax_mesh,
            in_specs=tuple(array_sharding(p.src, self.meshes, p.shape).spec for p in self.enters),
            out_specs=tuple(array_sharding(p.dst, self.meshes, p.shape).spec for p in self.leaves),
            check_vma=False,  # JAX does not differentiate through it
        )
        return jax.jit(on_devices)

    def _local(self, *blocks: jax.Array) -> tuple[jax.Array, ...]:
        """The call on one device, inside shard_map."""
        arguments = [_moved(x, p) for x, p in zip(blocks, self.enters, strict=True)]
        types = tuple(jax.ShapeDtypeStruct(p.source.local_shape(0), p.dtype) for p in self.leaves)
        results = host_callback(self._on_host, types)(*arguments)
        return tuple(_moved(x, p) for x, p in zip(results, self.leaves, strict=True))

    def _on_host(self, context: Any, results: Sequence[Any], *memory: Any) -> None:
        """Call the function on copies of XLA's memory, and write its results to XLA's memory."""
        on_gpu = self.meshes.kind == "cuda"  # XLA's stream there
        with (
            torch.cuda.stream(torch.cuda.ExternalStream(context.stream))
            if on_gpu
            else nullcontext()
        ):
            blocks = [from_dlpack(x).clone() for x in memory]
            with torch.no_grad():
                outputs = self.fn(*blocks)
            for result, p, x in zip(results, self.leaves, outputs, strict=True):
                actual = tuple(x.shape), x.dtype
                expected = p.source.local_shape(0), buffers.torch_dtype(p.dtype)
                if actual != expected:
                    both = f"{actual}, and {expected} for fake tensors of its shapes"
                    hint = (
                        "shapes and dtypes of its results may depend only on those of its arguments"
                    )
                    raise ShapeError(f"the torch function returns {both}", hint=hint)
                from_dlpack(result).copy_(x)

    def _backward(
        self, arrays: tuple[jax.Array, ...], cotangents: Sequence[Any]
    ) -> tuple[Any, ...]:
        smooth = (cotangents[i] for i in _smooth(self.leaves))
        gradients = self.pullback.differentiable(*arrays, *smooth)
        by_argument = dict(zip(_smooth(self.enters), gradients, strict=True))
        zeros = (np.zeros(x.shape, jax.dtypes.float0) for x in arrays)
        return tuple(by_argument.get(i, zero) for i, zero in enumerate(zeros))

    def _pulled(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the torch function again, and pull back. JAX's complex gradients are conjugates of torch's."""
        n = len(self.enters)
        wrt = _smooth(self.enters)
        recorded = any(x.requires_grad for x in tensors)
        with torch.enable_grad():
            inputs = list(tensors[:n])
            for i in wrt:
                inputs[i] = (
                    inputs[i] if inputs[i].requires_grad else inputs[i].detach().requires_grad_()
                )
            outputs = self.fn(*inputs)
            cotangents = zip(_smooth(self.leaves), tensors[n:], strict=True)
            pairs = [(outputs[i], g.conj()) for i, g in cotangents if outputs[i].requires_grad]
            arguments = [y for y, _ in pairs], [inputs[i] for i in wrt], [g for _, g in pairs]
            options: Any = {"create_graph": recorded, "materialize_grads": True}
            return [g.conj() for g in torch.autograd.grad(*arguments, **options)]


def _moved(x: jax.Array, plan: Plan) -> jax.Array:
    return redistribute(x, plan) if plan.steps else x


def _smooth(plans: Sequence[Plan]) -> tuple[int, ...]:
    """Indices of the arrays that have a cotangent: floats and complex numbers."""
    return tuple(i for i, p in enumerate(plans) if jnp.issubdtype(jnp.dtype(p.dtype), jnp.inexact))
