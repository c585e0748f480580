"""`from_torch`: a torch function as a JAX function.

Its gradient is another torch function, which runs the first one again.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, PartitionSpec
from jax.sharding import Mesh as JaxMesh
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from jax_bridge.calls import redistribute
from jax_bridge.torch_interop import buffers
from jax_bridge.torch_interop.devices import MeshPair, mesh_pair
from jax_bridge.torch_interop.route import array_sharding, layouts_of, named_like
from jax_bridge.versions import host_callback
from torch_bridge.versions.modes import FakeTensorMode
from xshard import Layout, Plan, XshardError, plan
from xshard.errors import ShapeError, api_boundary
from xshard.layout.lengths import global_shape
from xshard.plans.expression import Sides, sides_or_one

Arrays = Sequence[jax.Array]


@api_boundary
def from_torch(
    fn: Callable[..., Any] | torch.nn.Module, in_layouts: Any, out_layouts: Any, mesh: JaxMesh
) -> Callable[..., Any]:
    """Turn a torch function or module into a differentiable function of global arrays.

        layer = from_torch(torch_layer, ("n/dp i", "i o"), "n/dp o", mesh)
        y = jax.jit(layer)(x, w)     # torch_layer gets x: [n/4, i], w: [i, o] on each of 4 devices

    The new function works in jit and grad. XLA calls `fn`, on the devices' own memory. Tracing runs
    it on fake tensors to find shapes. The backward pass runs it again. There is no forward mode.

    Args:
        fn: Gets the device's blocks as tensors, and returns tensors or pytrees of them. It must be
            a pure function of its arguments: JAX may call it twice or not at all. It may write to
            its blocks, which are copies, unless gradients are taken: then torch wants
            `x.clone().mul_(2)`. The function of a module takes its parameters first, by name, as
            `to_jax(dict(module.named_parameters()), ...)` gives them, so that gradients reach them;
            buffers keep their current values.
        in_layouts: The layouts of the tensors that `fn` gets: one for all, or a pytree prefix with
            one for each. The arrays have the same layouts without tags: `copy(dp)` on a parameter
            means that every device along dp uses its own copy, so that gradients add up.
            `"layout -> layout"` moves arrays on the way in. In the array, a dim in zigzag or
            another order is in storage order, as with `reshard`.
        out_layouts: The layouts of the tensors that `fn` returns, given as those of its arguments.
            `sum(dp)` means that the devices' results add up. `"layout -> layout"` moves results on
            the way out.
        mesh: JAX's mesh.

    Returns:
        The new function. An error of `fn` on blocks arrives as a `jax.errors.JaxRuntimeError` with
        its message and traceback.

    Raises:
        NotationError: While tracing: the text is wrong.
        ShapeError: While tracing: an array does not fit its layout.
        DtypeError: While tracing: torch or JAX lacks a dtype.
        Exception: While tracing: any error of `fn` on fake tensors.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("dp",))
        >>> layer = torch.nn.Linear(3, 1)
        >>> call = from_torch(layer, ("... | copy(dp)", "n/dp i"), "n/dp o", mesh)
        >>> weights = {"weight": jnp.ones((1, 3)), "bias": jnp.ones(1)}
        >>> jax.grad(lambda w: call(w, jnp.ones((4, 3))).sum())(weights)["bias"]
        Array([4.], dtype=float32)
    """
    of_blocks = _of_module(fn) if isinstance(fn, torch.nn.Module) else fn
    prepared: dict[Any, _Prepared] = {}

    @api_boundary
    def function(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        arrays = [jnp.asarray(x) for x in leaves]
        key = (tree, tuple((x.shape, x.dtype) for x in arrays))
        if key not in prepared:
            meshes = mesh_pair(mesh)
            prepared[key] = _prepare(of_blocks, in_layouts, out_layouts, meshes, tree, arrays)
        host, out_tree = prepared[key]
        placed = map(host.placed, arrays, host.in_plans)
        return jax.tree.unflatten(out_tree, host.differentiable(*placed))

    return named_like(fn, function, type(fn).__name__)


class _Prepared(NamedTuple):
    """The call for arrays of some shapes and dtypes, and the structure of its results."""

    host: HostCall
    out_tree: Any


def _prepare(
    fn: Callable[..., Any],
    in_layouts: Any,
    out_layouts: Any,
    meshes: MeshPair,
    tree: Any,
    arrays: Arrays,
) -> _Prepared:
    """Prepare the call of a torch function for arrays of these shapes and dtypes.

    Each array gets a plan to the function's block. The function is run on fake tensors of these
    blocks' shapes, which tells the shapes of its results: each gets a plan to an array.

    Args:
        fn: The torch function.
        in_layouts: As of `from_torch`.
        out_layouts: As of `from_torch`.
        meshes: JAX's mesh, which is also torch's here.
        tree: The structure of the arguments.
        arrays: Their leaves.
    """
    in_plans = []
    for layout, x in zip(layouts_of("in_layouts", in_layouts, tree), arrays, strict=True):
        in_plans.append(_plan_in(sides_or_one(layout), meshes, x.shape, x.dtype))

    def of_tensors(*tensors: Tensor) -> Any:
        return fn(*jax.tree.unflatten(tree, tensors))

    def flat(*tensors: Tensor) -> list[Tensor]:
        return jax.tree.leaves(of_tensors(*tensors))

    blocks, out_tree = jax.tree.flatten(_run_on_fakes(of_tensors, in_plans, meshes.kind))
    out_plans = []
    for layout, block in zip(layouts_of("out_layouts", out_layouts, out_tree), blocks, strict=True):
        out_plans.append(_plan_out(sides_or_one(layout), meshes, block))
    return _Prepared(HostCall(flat, meshes, tuple(in_plans), tuple(out_plans)), out_tree)


def _run_on_fakes(of_tensors: Callable[..., Any], in_plans: Sequence[Plan], kind: str) -> Any:
    """Run a function on fake tensors for its blocks: they have no memory, and nothing is computed.

    Args:
        of_tensors: The function.
        in_plans: The way of each array to its block.
        kind: The kind of devices.

    Returns:
        The fake tensors that it returns, in a pytree.

    Raises:
        XshardError: It returns something else than tensors.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = []
        for plan_in in in_plans:
            dtype = buffers.torch_dtype(plan_in.dtype)
            fakes.append(torch.empty(plan_in.target.local_shape(0), dtype=dtype, device=kind))
        results = of_tensors(*fakes)
    for block in jax.tree.leaves(results):
        if not isinstance(block, Tensor):
            reason = f"the torch function returns {type(block).__name__}"
            raise XshardError(reason, hint="tensors, or pytrees of them")
    return results


def _plan_in(expression: Sides, meshes: MeshPair, shape: tuple[int, ...], dtype: np.dtype) -> Plan:
    """Plan the way from an array to the function's blocks."""
    buffers.torch_dtype(dtype)  # raises for a dtype that torch lacks
    src = expression.src
    if src == expression.dst:
        src = replace(src, tags=())  # as a global array has it: "n | sum(dp)" -> "n"
    array_sharding(src, meshes, shape)  # raises before anything is traced
    return plan((src, expression.dst), meshes.jax_axes, shape, dtype.name)


def _plan_out(expression: Sides, meshes: MeshPair, block: Tensor) -> Plan:
    """Plan the way from the function's blocks, like this one, to an array."""
    shape = global_shape(expression.src, meshes.jax_axes, block.shape, expression.text)
    dtype = buffers.jax_name(block.dtype)
    dst = expression.dst
    if dst == expression.src:
        dst = replace(dst, tags=())
    array_sharding(dst, meshes, shape)  # raises before anything is traced
    return plan((expression.src, dst), meshes.jax_axes, shape, dtype)


def _of_module(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a module as a function of its parameters, by name, and its arguments."""
    # A copy, as JAX may call it later, when the user's module has changed. Its parameters are not
    # copied: each call brings its own.
    copied = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    # During a call a module holds the parameters of that call, so devices take turns.
    lock = threading.RLock()

    def call(parameters: dict[str, Tensor], *args: Any) -> Any:
        with lock:
            return torch.func.functional_call(copied, parameters, args)

    return call


@dataclass(frozen=True, eq=False)
class HostCall:
    """A function of tensors as one of arrays.

    Attributes:
        fn: The function of this device's blocks.
        meshes: JAX's mesh, which is also torch's here.
        in_plans: The way of each array to the function's block.
        out_plans: The way of each block that the function returns to an array.
    """

    fn: Callable[..., Sequence[Tensor]]
    meshes: MeshPair
    in_plans: tuple[Plan, ...]
    out_plans: tuple[Plan, ...]

    def placed(self, x: jax.Array, plan_in: Plan) -> jax.Array:
        """Return the array with the source sharding of its plan, where that is part of its type."""
        if AxisType.Explicit not in self.meshes.jax_mesh.axis_types:
            return x
        return jax.reshard(x, array_sharding(plan_in.src, self.meshes, plan_in.shape))

    @cached_property
    def differentiable(self) -> Callable[..., tuple[jax.Array, ...]]:
        """The function of arrays, differentiable."""
        call = jax.custom_vjp(self._run)

        def forward(*arrays: jax.Array) -> tuple[tuple[jax.Array, ...], Arrays]:
            # The forward pass is the call itself: second derivatives go through it, too.
            return call(*arrays), arrays

        call.defvjp(forward, self._backward)
        return call

    @cached_property
    def pullback(self) -> HostCall:
        """The gradients as a function of the arrays and the cotangents."""
        cotangents = [self.out_plans[i].backward for i in _inexact(self.out_plans)]
        gradients = [self.in_plans[i].backward for i in _inexact(self.in_plans)]
        in_plans = (*self.in_plans, *cotangents)
        return HostCall(self._pull_back, self.meshes, in_plans, tuple(gradients))

    @cached_property
    def _run(self) -> Callable[..., tuple[jax.Array, ...]]:
        """The function of arrays without a gradient."""
        on_devices = jax.shard_map(
            self._on_device,
            mesh=self.meshes.jax_mesh,
            in_specs=tuple(self._spec(plan.src, plan.shape) for plan in self.in_plans),
            out_specs=tuple(self._spec(plan.dst, plan.shape) for plan in self.out_plans),
            check_vma=False,  # JAX does not differentiate through it
        )
        # Jitted, so that calls outside of jit compile it once.
        return jax.jit(on_devices)

    def _spec(self, layout: Layout, shape: tuple[int, ...]) -> PartitionSpec:
        """Return JAX's spec of an array under a layout."""
        return array_sharding(layout, self.meshes, shape).spec

    def _on_device(self, *blocks: jax.Array) -> tuple[jax.Array, ...]:
        """Call the function on one device, inside shard_map."""
        arguments = map(_move, blocks, self.in_plans)
        types = tuple(
            jax.ShapeDtypeStruct(plan.source.local_shape(0), plan.dtype) for plan in self.out_plans
        )
        results = host_callback(self._on_host, types)(*arguments)
        return tuple(map(_move, results, self.out_plans))

    def _on_host(self, context: Any, results: Sequence[Any], *memory: Any) -> None:
        """Run the torch function on one device's memory; XLA calls this while its program runs.

        Args:
            context: XLA's context of the call, with its CUDA stream.
            results: Memory to write the results to.
            memory: The memory of the arguments.
        """
        stream: Any = nullcontext()
        if self.meshes.kind == "cuda":
            # What makes the arguments is queued on XLA's stream, maybe not done yet: torch queues
            # its work behind it.
            stream = torch.cuda.stream(torch.cuda.ExternalStream(context.stream))
        with stream:
            # Copies: the function may write to its blocks, and XLA's memory has to stay as it is.
            blocks = [from_dlpack(x).clone() for x in memory]
            with torch.no_grad():
                outputs = self.fn(*blocks)
            for output, plan_out, result in zip(outputs, self.out_plans, results, strict=True):
                _check_like_fake(output, plan_out)
                from_dlpack(result).copy_(output)

    def _backward(self, arrays: Arrays, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Return the cotangents of all arrays: JAX's float0 for those of whole numbers."""
        inexact_cotangents = [cotangents[i] for i in _inexact(self.out_plans)]
        gradients = self.pullback.differentiable(*arrays, *inexact_cotangents)
        by_number = dict(zip(_inexact(self.in_plans), gradients, strict=True))
        return buffers.with_float0(by_number, arrays)

    def _pull_back(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the torch function again under autograd, and return the gradients of its arguments.

        Args:
            tensors: The arguments, then a cotangent for each result of floats or complex numbers.

        Returns:
            A gradient for each argument of floats or complex numbers.
        """
        # In a second derivative this function is itself differentiated: then its tensors require
        # gradients, and the graph of the first derivative is kept.
        is_recorded = any(x.requires_grad for x in tensors)
        n_arguments = len(self.in_plans)
        arguments = list(tensors[:n_arguments])
        cotangents = tensors[n_arguments:]
        wrt = _inexact(self.in_plans)
        with torch.enable_grad():
            for i in wrt:
                if not arguments[i].requires_grad:
                    arguments[i] = arguments[i].detach().requires_grad_()
            outputs = self.fn(*arguments)
            differentiated = []
            their_cotangents = []
            for i, cotangent in zip(_inexact(self.out_plans), cotangents, strict=True):
                if outputs[i].requires_grad:  # else it depends on no argument
                    differentiated.append(outputs[i])
                    # JAX's complex gradients are conjugates of torch's, here and below.
                    their_cotangents.append(cotangent.conj())
            gradients = torch.autograd.grad(
                differentiated,
                [arguments[i] for i in wrt],
                their_cotangents,
                create_graph=is_recorded,
                materialize_grads=True,
            )
            return [gradient.conj() for gradient in gradients]


def _check_like_fake(output: Tensor, plan_out: Plan) -> None:
    """Raise ShapeError for a result of another shape or dtype than tracing has found."""
    actual = (tuple(output.shape), output.dtype)
    expected = (plan_out.source.local_shape(0), buffers.torch_dtype(plan_out.dtype))
    if actual != expected:
        both = f"{actual}, and {expected} for fake tensors of its shapes"
        hint = "shapes and dtypes of its results may depend only on those of its arguments"
        raise ShapeError(f"the torch function returns {both}", hint=hint)


def _move(x: jax.Array, plan: Plan) -> jax.Array:
    return redistribute(x, plan) if plan.steps else x


def _inexact(plans: Sequence[Plan]) -> tuple[int, ...]:
    """Return the indices of the arrays that have a cotangent: floats and complex numbers."""
    return tuple(
        i for i, plan in enumerate(plans) if jnp.issubdtype(jnp.dtype(plan.dtype), jnp.inexact)
    )
