"""A block with its place in the global array: what the layers take and return.

Decides that the place travels with the block. It is static for JAX: a `Placed` goes through jit, grad,
scan and remat, and `jax.tree.map(jax.nn.relu, x)` applies a function to its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jax_bridge.lower.row_tables import without_padding
from jax_bridge.planning import AnyMesh, block_sharding_here
from jax_bridge.redistribution import redistribute
from xshard import Layout, PlanError, Sharding
from xshard.notation.parser import Dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Placed:
    """This device's block of a global array.

    Raises PlanError for addends.

    block: of shape `sharding.max_local_shape`; a smaller one is padded at its ends, with zeros where a
    function of this package made it. sharding: the array's layout, mesh and shape.
    """

    block: jax.Array
    sharding: Sharding = field(metadata={"static": True})

    def __post_init__(self) -> None:
        if kinds := [kind for kind, _ in self.layout.tags if kind != "copy"]:
            raise PlanError(
                f"a layer of what is still to be reduced by {kinds[0]}",
                text=str(self.layout),
                hint="redistribute first: layers take values",
            )

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    def to(self, layout: Layout | str) -> Placed:
        """The same array under another layout."""
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        target = self.sharding.with_layout(layout)
        pair = self.layout, target.layout
        return Placed(redistribute(self.block, pair, self.sharding.mesh, shape=self.sharding.shape), target)

    def owned(self) -> Placed:
        """Every row at its owner alone, and zeros in the padding: to be summed, or compared."""
        plain = replace(self.layout, dims=tuple(replace(dim, overlap=None) for dim in self.layout.dims))
        if plain != self.layout:
            return self.to(plain)
        return replace(self, block=without_padding(self.block, self.sharding))

    def remade(self, block: jax.Array, dims: Sequence[Dim], shape: Sequence[int]) -> Placed:
        """The block of an array made from this one, under its tags; its padding becomes zero."""
        layout = Layout(tuple(dims), self.layout.tags)
        return Placed(block, Sharding(layout, self.sharding.mesh, tuple(shape))).owned()


def place(
    x: jax.Array,
    layout: Layout | str,
    shape: Sequence[int] | None = None,
    mesh: AnyMesh | None = None,
) -> Placed:
    """This device's block, placed in the array that a layout describes.

    shape: of the global array, inferred where all blocks are as large as this one; an uneven block has
    the shape of the largest, and what its padding holds does not matter. mesh: read from the context
    where it is left out. Axes that the layout does not name are left alone.
    Raises NotationError, MeshError, ShapeError.

    >>> import functools
    >>> rows = jax.pmap(lambda x: place(x, "h/sp w").to("h/sp:halo(1,1,periodic) w"), "sp")
    >>> rows(jnp.ones((1, 4, 2))).block.shape  # one block on one device
    (1, 6, 2)
    """
    x = jnp.asarray(x)
    return Placed(x, block_sharding_here(x, layout, mesh, shape))
