"""One tensor <-> one array of one device: the same memory, or a copy of torch and the reason for it."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from torch_bridge.autodiff.blocks import array_of
from torch_bridge.versions.modes import plain_torch_function, schema_of, subclass_of
from torch_bridge.versions.pytree import tree_leaves, tree_map_only
from xshard import XshardError
from xshard.errors import DtypeError
from xshard.formatting import format_bytes

LOG = logging.getLogger("xshard.interop")

ALIGNMENT = 64  # bytes: XLA's CPU client reads only host memory that begins at a multiple
# dtypes that torch names but has no tensors of.
NIBBLES = ("int2", "int4", "uint2", "uint4")


def jax_name(dtype: torch.dtype) -> str:
    """JAX's name for a dtype of torch. Raises DtypeError also for 64 bits that JAX would silently narrow."""
    name = str(dtype).removeprefix("torch.")
    if not hasattr(jnp, name):
        raise DtypeError(f"JAX has no {dtype}", hint="convert the tensor to a dtype that both have")
    narrow = jax.dtypes.canonicalize_dtype(name).name
    if narrow != name:
        hint = 'jax.config.update("jax_enable_x64", True), or convert it'
        raise DtypeError(f"the tensor is {dtype}, which JAX would make {narrow}", hint=hint)
    return name


def torch_dtype(dtype: np.dtype | str) -> torch.dtype:
    """Torch's dtype for a dtype of JAX, or its name. Raises DtypeError if torch lacks it."""
    dtype = jnp.dtype(dtype) if isinstance(dtype, str) else dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise DtypeError(f"torch has no {dtype}", hint="jax.random.key_data(key) gives its numbers")
    in_torch = None if dtype.name in NIBBLES else getattr(torch, dtype.name, None)
    if not isinstance(in_torch, torch.dtype):
        raise DtypeError(
            f"torch has no {dtype.name}", hint="convert the array to a dtype that both have"
        )
    return in_torch


def check_dense(x: Tensor) -> None:
    """Raise XshardError for a tensor without dense memory of its own: sparse, meta, fake, a wrapper."""
    wraps = (
        not isinstance(x, ReadOnlyTensor)
        and type(x).__torch_dispatch__ != Tensor.__torch_dispatch__
    )
    if wraps or x.is_meta or x.is_quantized or x.layout != torch.strided:
        reason = f"a {type(x).__name__} of {x.layout} on {x.device} is not dense memory that JAX can read"
        hint = "hand over its values instead: x.to_dense(), x.wait(), a real tensor for a fake one"
        raise XshardError(reason, hint=hint)


def why_copied(x: Tensor, device: jax.Device) -> str | None:
    """The reason why JAX cannot use the memory of a tensor; None if it can."""
    if x.is_conj() or x.is_neg():
        return "it is conjugated or negated lazily"
    if not x.is_contiguous():
        return f"its strides are {x.stride()}, JAX's are {torch.empty(x.shape, device='meta').stride()}"
    if x.device.type == "cuda" and x.device.index != device.local_hardware_id:
        return f"it is on {x.device}, the mesh has {device}"
    if x.device.type == "cpu" and x.numel() and x.data_ptr() % ALIGNMENT:
        return f"its memory begins {x.data_ptr() % ALIGNMENT} bytes off a multiple of {ALIGNMENT}"
    return None


def array_over(x: Tensor, device: jax.Device, copy: bool | None) -> jax.Array:
    """A tensor as an array on the device, in the same memory if possible and `copy` is not true."""
    block = unwrapped(x).detach()
    reason = None if copy else why_copied(block, device)
    if reason is not None:
        LOG.info("the tensor for %s is copied, %s: %s", device, format_bytes(block.nbytes), reason)
    if copy or reason is not None:
        block = torch.empty(block.shape, dtype=block.dtype, device=block.device).copy_(block)
    if block.device.type == "cpu":
        return jax.device_put(array_of(block), device, may_alias=True)
    array = jax.dlpack.from_dlpack(block)
    return array if array.device == device else jax.device_put(array, device)


def tensor_over(array: jax.Array, copy: bool | None, writable: bool) -> Tensor:
    """An array of one device as a tensor in the same memory, or in new memory if `copy` is true."""
    if array.platform() == "cpu":
        jax.block_until_ready(array)  # on a GPU the streams wait for each other
    block = from_dlpack(array)
    block = block.clone(memory_format=torch.contiguous_format) if copy else block
    return block if copy or writable else ReadOnlyTensor(block)


class ReadOnlyTensor(Tensor):
    """A block for reading, and its views: torch's operations that would write to it raise XshardError."""

    block: Tensor

    @staticmethod
    def __new__(cls, block: Tensor) -> ReadOnlyTensor:
        tensor = subclass_of(cls, block)
        tensor.block = block
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReadOnlyTensor({self.block!r})"

    # Attributes and methods are a tensor's; their operations come through __torch_dispatch__.
    __torch_function__: Any = plain_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        named = {
            **dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)),
            **(kwargs or {}),
        }
        for argument in schema_of(func).arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(isinstance(x, cls) for x in tree_leaves(named.get(argument.name))):
                hint = "write to a copy: tensor.clone(), or to_torch(..., copy=True)"
                raise XshardError(
                    f"{func} would write to memory that a jax.Array shares", hint=hint
                )
        shared = [
            x.block.untyped_storage().data_ptr() for x in tree_leaves(named) if isinstance(x, cls)
        ]
        out = func(
            *tree_map_only(cls, unwrapped, args), **tree_map_only(cls, unwrapped, kwargs or {})
        )
        return tree_map_only(
            Tensor, lambda x: cls(x) if x.untyped_storage().data_ptr() in shared else x, out
        )


def unwrapped(x: Tensor) -> Tensor:
    """The block of a read-only tensor; any other tensor as it is."""
    return x.block if isinstance(x, ReadOnlyTensor) else x
