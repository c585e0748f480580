"""A function of tensors as a differentiable JAX function of global arrays.

Every device hands its blocks to torch. The gradient is another such function, which runs the torch function
again and pulls back through it. So no graph of torch outlives a call, pullbacks may be used twice, and
derivatives of any order exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from jax_bridge.redistribution import redistribute
from jax_bridge.torch_interop import buffers
from jax_bridge.torch_interop.devices import MeshPair
from jax_bridge.torch_interop.route import array_sharding
from jax_bridge.versions import host_callback
from xshard import Plan
from xshard.errors import ShapeError

Flat = Callable[..., Sequence[Tensor]]  # tensors -> tensors


@dataclass(frozen=True, eq=False)
class HostCall:
    """A function of tensors as a function of global arrays.

    enters: the plans of the arguments, from array to blocks. leaves: the plans of the results, from blocks to
    array.
    """

    fn: Flat
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
        return HostCall(
            self._pulled,
            self.meshes,
            (*self.enters, *(self.leaves[i].backward for i in _smooth(self.leaves))),
            tuple(self.enters[i].backward for i in _smooth(self.enters)),
        )

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
        with buffers.on_stream(context, self.meshes.kind):
            blocks = [from_dlpack(x).clone() for x in memory]
            with torch.no_grad():
                outputs = self.fn(*blocks)
            for result, p, x in zip(results, self.leaves, outputs, strict=True):
                actual = tuple(x.shape), x.dtype
                expected = p.source.local_shape(0), buffers.torch_dtype(p.dtype)
                if actual != expected:
                    raise ShapeError(
                        f"the torch function returns {actual}, and {expected} for fake tensors of its shapes",
                        hint="shapes and dtypes of its results may depend only on those of its arguments",
                    )
                from_dlpack(result).copy_(x)

    def _backward(self, arrays: tuple[jax.Array, ...], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        smooth = (cotangents[i] for i in _smooth(self.leaves))
        gradients = self.pullback.differentiable(*arrays, *smooth)
        by_argument = dict(zip(_smooth(self.enters), gradients, strict=True))
        zeros = (np.zeros(x.shape, jax.dtypes.float0) for x in arrays)
        return tuple(by_argument.get(i, zero) for i, zero in enumerate(zeros))

    def _pulled(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the torch function again, and pull back. JAX's complex gradients are conjugates of torch's."""
        n, wrt = len(self.enters), _smooth(self.enters)
        recorded = any(x.requires_grad for x in tensors)
        with torch.enable_grad():
            inputs = [
                x.detach().requires_grad_() if i in wrt and not x.requires_grad else x
                for i, x in enumerate(tensors[:n])
            ]
            outputs = self.fn(*inputs)
            cotangents = zip(_smooth(self.leaves), tensors[n:], strict=True)
            pairs = [(outputs[i], g.conj()) for i, g in cotangents if outputs[i].requires_grad]
            gradients = torch.autograd.grad(
                [y for y, _ in pairs],
                [inputs[i] for i in wrt],
                [g for _, g in pairs],
                create_graph=recorded,
                materialize_grads=True,
            )
            return [g.conj() for g in gradients]


def _moved(x: jax.Array, plan: Plan) -> jax.Array:
    return redistribute(x, plan) if plan.steps else x


def _smooth(plans: Sequence[Plan]) -> tuple[int, ...]:
    """Indices of the arrays that have a cotangent: floats and complex numbers."""
    return tuple(i for i, p in enumerate(plans) if jnp.issubdtype(jnp.dtype(p.dtype), jnp.inexact))
