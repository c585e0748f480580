"""`place`: a tree of arrays, of the host or on devices, put where rules say.

Decides what every device is given: of an array of the host no more than its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from jax_bridge.arrays.border import held, where
from jax_bridge.arrays.given import found_elsewhere, free_mesh, is_on
from jax_bridge.arrays.leaves import is_array, is_layout, of_each
from jax_bridge.arrays.order import check_order, remember, stored_rows
from jax_bridge.arrays.primitive import Mesh
from jax_bridge.arrays.reshard import reshard
from jax_bridge.keys import are_keys
from jax_bridge.planning import check_dtype, jax_mesh
from jax_bridge.specs import storage_layout, to_named_sharding
from xshard import Layout, Profile, Rules, Sharding
from xshard.errors import located
from xshard.plans.expression import sides_or_one


def place(tree: Any, rules: Any, mesh: Mesh, *, profile: str | Path | Profile = "auto") -> Any:
    """A tree of arrays -> the same tree of global `jax.Array`s, each under its layout.

    tree: of arrays of numpy or JAX: dicts, lists, `flax.nnx` modules and states, variables of `flax.linen`,
    `equinox` modules. What is no array stays as it is, and has no rule.
    rules: `xshard.Rules`, or a dict like it, from patterns of leaf names (`"layers.*.kernel"`) to layouts, as
    for `shard_map`; or one layout for all. Of `"layout -> layout"` the left side counts, where arrays are
    stored. Arrays are held as `shard_map` takes them: whole in one of the layouts, a dim in zigzag or another
    order in storage order, which is remembered.
    An array on the mesh is moved by a plan; of others a device gets no more than its part.

    Raises, before anything is sent, with the name of the leaf: NotationError, ShapeError, MeshError;
    DtypeError for an array that JAX would narrow; XshardError for leaves without a rule and rules without a
    leaf.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> model = {"up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)}}
    >>> place(model, {"**.kernel": "i o/tp", "**": "..."}, mesh)["up"]["kernel"].sharding.spec
    P(None, 'tp')
    """
    mesh = jax_mesh(mesh)
    rules = Rules(rules) if isinstance(rules, Mapping) else rules
    leaves = of_each(rules, tree, is_layout, has_rule=is_array)
    targets = []
    for leaf in leaves:
        with located(leaf.place):
            targets.append(_target(leaf.x, leaf.said, mesh) if is_array(leaf.x) else None)
    placed = []
    for leaf, target in zip(leaves, targets, strict=True):
        with located(leaf.place):
            placed.append(leaf.x if target is None else _placed(leaf.x, target, mesh, profile))
    return jax.tree.unflatten(jax.tree.structure(tree), placed)


def _target(x: Any, said: Any, mesh: Mesh) -> Sharding:
    layout, _, text = sides_or_one(said)
    target = held(layout, free_mesh(mesh, layout.axes, text), tuple(x.shape), text)
    to_named_sharding(storage_layout(target.layout), mesh)  # refused here, if at all
    if not isinstance(x, jax.Array):
        check_dtype(np.asarray(x).dtype, text)
    return target


def _placed(x: Any, target: Sharding, mesh: Mesh, profile: str | Path | Profile) -> jax.Array:
    text = str(target.layout)
    sharding = to_named_sharding(storage_layout(target.layout), mesh)
    if isinstance(x, jax.Array) and (isinstance(x, Tracer) or are_keys(x) or is_on(x, mesh)):
        found = found_elsewhere(x, text, sharding.spec, mesh)
        return reshard(x, (where(x, found, target), target.layout), mesh, profile=profile)
    check_order(x, target.with_layout(Layout.parse("...")), text)
    host = np.asarray(x)
    stored = [stored_rows(target, dim) for dim in range(host.ndim)]

    def part(index: Any) -> NDArray:
        mine = host
        for dim, (rows, at) in enumerate(zip(stored, index, strict=True)):
            mine = mine[(slice(None),) * dim + (at if rows is None else rows[at],)]
        return mine

    return remember(jax.make_array_from_callback(host.shape, sharding, part, dtype=host.dtype), target)
