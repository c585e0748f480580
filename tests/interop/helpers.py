"""Shared by the tests of torch and JAX together: meshes, blocks, and addresses of memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AxisType
from torch import Tensor

import xshard as xs
from jax_bridge.torch_interop import buffers


def jax_mesh(
    kind: AxisType = AxisType.Auto, order: Sequence[int] | None = None, **axes: int
) -> jax.sharding.Mesh:
    """A mesh of the first devices, or of the devices at the given indices."""
    size = int(np.prod([*axes.values()]))
    devices = [jax.devices()[i] for i in (range(size) if order is None else order)]
    return jax.sharding.Mesh(
        np.array(devices).reshape(*axes.values()), tuple(axes), axis_types=(kind,) * len(axes)
    )


def blocks_of(x: np.ndarray, layout: str, mesh: xs.Mesh) -> list[Tensor]:
    """The blocks of all devices, in torch's memory, which is aligned."""
    return [torch.tensor(block) for block in xs.reference.scatter(x, layout, mesh)]


def gathered(
    blocks: Sequence[Tensor], layout: str, mesh: xs.Mesh, shape: Sequence[int]
) -> np.ndarray:
    return xs.reference.gather(
        [block.detach().numpy() for block in blocks], layout, mesh, tuple(shape)
    )


def memory(x: Any) -> list[int]:
    """Where the blocks of a tensor, a list of them or an array begin, in the order of the mesh."""
    if isinstance(x, jax.Array):
        held = {shard.device: shard.data for shard in x.addressable_shards}
        return [held[d].unsafe_buffer_pointer() for d in x.sharding.mesh.devices.flat]
    return [block.data_ptr() for block in (x if isinstance(x, list) else [x])]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that the log "xshard.interop" gets meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = buffers.LOG.level
    buffers.LOG.addHandler(handler)
    buffers.LOG.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        buffers.LOG.removeHandler(handler)
        buffers.LOG.setLevel(level)
