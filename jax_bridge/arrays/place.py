"""`place`: a tree of arrays, in host memory or on devices, under the layouts that rules give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh
from jax.sharding import Mesh as JaxMesh
from numpy.typing import NDArray

from jax_bridge.arrays.order import check_order, remember, stored_rows
from jax_bridge.arrays.reshard import reshard
from jax_bridge.arrays.stored import ArrayMesh, StoredArray, at_rest, is_on, known_layout
from jax_bridge.calls import are_keys, check_dtype
from jax_bridge.mesh.context import jax_mesh
from jax_bridge.trees import array_leaves, is_array
from xshard import Layout, Profile, Rules
from xshard.errors import located
from xshard.plans.expression import sides_or_one


def place(
    tree: Any, layouts: Any, mesh: JaxMesh | AbstractMesh, *, profile: str | Path | Profile = "auto"
) -> Any:
    """A tree of arrays -> the same tree of global `jax.Array`s, each under its layout.

    tree: arrays of numpy or JAX in dicts, lists, `flax.nnx` modules and states, variables of `flax.linen`,
    `equinox` modules. Other leaves stay as they are, and take no rule.
    layouts: `xshard.Rules`, or a dict like it, from patterns of leaf names (`"layers.*.kernel"`) to layouts,
    as for `shard_map`; or one layout for all. Of `"layout -> layout"` the left side counts. Arrays are held
    as `shard_map` takes them: whole in one of the layouts, a dim in zigzag or another order in storage order,
    which is remembered. An array on the mesh is moved by a plan; from other arrays a device receives only its
    own part.

    Raises, before anything is sent, with the name of the leaf: NotationError, ShapeError, MeshError;
    DtypeError for an array that JAX would narrow; XshardError for leaves without a rule and rules without a
    leaf.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> model = {"up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)}}
    >>> place(model, {"**.kernel": "i o/tp", "**": "..."}, mesh)["up"]["kernel"].sharding.spec
    P(None, 'tp')
    """
    array_mesh = ArrayMesh(jax_mesh(mesh), mesh)
    leaves = array_leaves(Rules(layouts) if isinstance(layouts, Mapping) else layouts, tree)
    targets = []
    for leaf in leaves:
        with located(leaf.place):
            targets.append(_target(leaf.x, leaf.given, array_mesh) if is_array(leaf.x) else None)
    placed = []
    for leaf, target in zip(leaves, targets, strict=True):
        with located(leaf.place):
            placed.append(leaf.x if target is None else _placed(leaf.x, target, profile))
    return jax.tree.unflatten(jax.tree.structure(tree), placed)


def _target(x: Any, given: Any, mesh: ArrayMesh) -> StoredArray:
    layout, _, text = sides_or_one(given)
    target = at_rest(layout, mesh.free(layout.axes, text), tuple(x.shape), text)
    if not isinstance(x, jax.Array):
        check_dtype(np.asarray(x).dtype, text)
    return StoredArray.of(target, mesh, text)


def _placed(x: Any, target: StoredArray, profile: str | Path | Profile) -> jax.Array:
    array, mesh = target.array, target.mesh.own
    if isinstance(x, jax.Array) and (isinstance(x, Tracer) or are_keys(x) or is_on(x, mesh)):
        src = known_layout(x, target.other_sharding(x), array)
        return reshard(x, (src, array.layout), mesh, profile=profile)
    check_order(x, array.with_layout(Layout.parse("...")), target.text)
    host = np.asarray(x)
    orders = [stored_rows(array, dim) for dim in range(host.ndim)]

    def part(index: Any) -> NDArray:
        block = host
        for dim, (order, rows) in enumerate(zip(orders, index, strict=True)):
            block = block[(slice(None),) * dim + (rows if order is None else order[rows],)]
        return block

    return remember(jax.make_array_from_callback(host.shape, target.sharding, part, dtype=host.dtype), array)
