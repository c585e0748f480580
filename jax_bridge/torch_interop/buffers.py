"""One tensor <-> one array of one device: the same memory, or a copy by torch and its reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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


# ---- dtypes


def jax_name(dtype: torch.dtype) -> str:
    """Return JAX's name for a dtype of torch.

    Raises:
        DtypeError: JAX lacks the dtype, or would silently narrow it: 64 bits without
            `jax_enable_x64`.
    """
    name = str(dtype).removeprefix("torch.")
    if not hasattr(jnp, name):
        raise DtypeError(f"JAX has no {dtype}", hint="convert the tensor to a dtype that both have")
    # JAX would not raise: without 64 bits it narrows, and results differ from torch's.
    narrow = jax.dtypes.canonicalize_dtype(name).name
    if narrow != name:
        hint = 'jax.config.update("jax_enable_x64", True), or convert it'
        raise DtypeError(f"the tensor is {dtype}, which JAX would make {narrow}", hint=hint)
    return name


def torch_dtype(dtype: np.dtype | str) -> torch.dtype:
    """Return torch's dtype for a dtype of JAX, or its name. Raises DtypeError if torch lacks it."""
    if isinstance(dtype, str):
        dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise DtypeError(f"torch has no {dtype}", hint="jax.random.key_data(key) gives its numbers")
    in_torch = None if dtype.name in NIBBLES else getattr(torch, dtype.name, None)
    if not isinstance(in_torch, torch.dtype):
        hint = "convert the array to a dtype that both have"
        raise DtypeError(f"torch has no {dtype.name}", hint=hint)
    return in_torch


def with_float0(given: Mapping[int, Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Complete cotangents, given by number of the array, to those of all arrays, as JAX takes them.

    Arrays of whole numbers get zeros of JAX's type float0, which have no memory.
    """
    cotangents = []
    for i, x in enumerate(arrays):
        cotangents.append(given[i] if i in given else np.zeros(x.shape, jax.dtypes.float0))
    return tuple(cotangents)


# ---- memory


def is_list_of_tensors(value: Any) -> bool:
    """Return whether a value is a list with tensors, such as one for each device."""
    return isinstance(value, list) and any(isinstance(x, Tensor) for x in value)


def check_dense(x: Tensor) -> None:
    """Raise XshardError for a tensor without dense memory: sparse, meta, fake, or a wrapper."""
    # A subclass that handles operations itself is a wrapper: what it stands for is elsewhere.
    handles_operations = type(x).__torch_dispatch__ != Tensor.__torch_dispatch__
    is_wrapper = handles_operations and not isinstance(x, ReadOnlyTensor)
    if is_wrapper or x.is_meta or x.is_quantized or x.layout != torch.strided:
        kind = f"a {type(x).__name__} of {x.layout} on {x.device}"
        hint = "hand over its values instead: x.to_dense(), x.wait(), a real tensor for a fake one"
        raise XshardError(f"{kind} is not dense memory that JAX can read", hint=hint)


def why_copied(x: Tensor, device: jax.Device) -> str | None:
    """Return the reason why JAX cannot use a tensor's memory on a device; None if it can.

    A slice x[:, 1:] -> "its strides are (4, 1), JAX's are (3, 1)"
    """
    # DLPack hands over an address, a shape and strides. That torch negates or conjugates numbers
    # when it reads them would be lost.
    if x.is_conj() or x.is_neg():
        return "it is conjugated or negated lazily"
    if not x.is_contiguous():
        dense_strides = torch.empty(x.shape, device="meta").stride()
        return f"its strides are {x.stride()}, JAX's are {dense_strides}"
    if x.device.type == "cuda" and x.device.index != device.local_hardware_id:
        return f"it is on {x.device}, the mesh has {device}"
    if x.device.type == "cpu" and x.numel() > 0:
        bytes_off = x.data_ptr() % ALIGNMENT
        if bytes_off:
            return f"its memory begins {bytes_off} bytes off a multiple of {ALIGNMENT}"
    return None


def array_over(x: Tensor, device: jax.Device, copy: bool | None) -> jax.Array:
    """Return a tensor as an array of JAX on a device, in the same memory if possible.

    Args:
        x: The tensor.
        device: The device of JAX.
        copy: True to copy in any case; None or False to copy only if JAX cannot use the memory,
            which is logged with the reason. (For False the caller has checked that it can.)
    """
    block = unwrapped(x).detach()
    reason = None if copy else why_copied(block, device)
    if reason is not None:
        LOG.info("the tensor for %s is copied, %s: %s", device, format_bytes(block.nbytes), reason)
    if copy or reason is not None:
        # Fresh memory is contiguous and aligned; `clone` would keep the strides.
        block = torch.empty(block.shape, dtype=block.dtype, device=block.device).copy_(block)
    if block.device.type == "cpu":
        return jax.device_put(array_of(block), device, may_alias=True)
    array = jax.dlpack.from_dlpack(block)
    # Torch's memory may be on another GPU than the mesh wants.
    if array.device == device:
        return array
    return jax.device_put(array, device)


def tensor_over(array: jax.Array, copy: bool | None, writable: bool) -> Tensor:
    """Return an array of one device as a tensor in the same memory, or in new memory if `copy`."""
    if array.platform() == "cpu":
        # torch on CPUs does not wait for JAX; on a GPU the streams wait for each other.
        jax.block_until_ready(array)
    block = from_dlpack(array)
    if copy:
        return block.clone(memory_format=torch.contiguous_format)
    return block if writable else ReadOnlyTensor(block)


class ReadOnlyTensor(Tensor):
    """A block for reading, and its views: operations of torch that would write to it raise."""

    block: Tensor

    @staticmethod
    def __new__(cls, block: Tensor) -> ReadOnlyTensor:
        tensor = subclass_of(cls, block)
        tensor.block = block
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # no contents
        return f"ReadOnlyTensor({self.block!r})"

    # Attributes and methods are a tensor's; their operations come through __torch_dispatch__.
    __torch_function__: Any = plain_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's own has no types
        """Run an operation of torch on the wrapped tensors; results that are views stay read-only.

        Raises:
            XshardError: The operation writes to one of its read-only arguments.
        """
        if kwargs is None:
            kwargs = {}
        names = [argument.name for argument in schema_of(func).arguments]
        by_name = dict(zip(names, args, strict=False), **kwargs)
        cls._check_not_written(func, by_name)
        # A result in the memory of an argument is a view of it: a slice, a transpose.
        shared_storages = set()
        for x in tree_leaves(by_name):
            if isinstance(x, cls):
                shared_storages.add(x.block.untyped_storage().data_ptr())

        def as_view(x: Tensor) -> Tensor:
            is_view = x.untyped_storage().data_ptr() in shared_storages
            return cls(x) if is_view else x

        blocks = tree_map_only(cls, unwrapped, args)
        block_options = tree_map_only(cls, unwrapped, kwargs)
        return tree_map_only(Tensor, as_view, func(*blocks, **block_options))

    @classmethod
    def _check_not_written(cls, func: Any, by_name: dict[str, Any]) -> None:
        """Raise XshardError if the operation's schema says that it writes to a read-only tensor."""
        for argument in schema_of(func).arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if any(isinstance(x, cls) for x in tree_leaves(by_name.get(argument.name))):
                hint = "write to a copy: tensor.clone(), or to_torch(..., copy=True)"
                reason = f"{func} would write to memory that a jax.Array shares"
                raise XshardError(reason, hint=hint)


def unwrapped(x: Tensor) -> Tensor:
    """Return the block of a read-only tensor; any other tensor as it is."""
    return x.block if isinstance(x, ReadOnlyTensor) else x
