"""`Placed`, a block with its place in the global array: the argument and result of every layer.

Decides that the place travels with the block. To JAX the place is static: a `Placed` goes through jit, grad,
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
from xshard import Layout, Sharding
from xshard.errors import PlanError
from xshard.notation.parser import Dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Placed:
    """This device's block of a global array.

    block: of shape `sharding.max_local_shape`; a smaller one is padded at its ends, with zeros if a function
    of this package made it. sharding: the array's layout, mesh and shape.

    Raises PlanError for a layout with a pending reduction.
    """

    block: jax.Array
    sharding: Sharding = field(metadata={"static": True})

    def __post_init__(self) -> None:
        if kinds := [kind for kind, _ in self.layout.tags if kind != "copy"]:
            raise PlanError(
                f"a layer on values still to be reduced by {kinds[0]}",
                text=str(self.layout),
                hint="redistribute first: layers take values",
            )

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    def to(self, layout: Layout | str) -> Placed:
        """The same array under another layout."""
        target = self.sharding.with_layout(Layout.parse(layout))
        pair = self.layout, target.layout
        return Placed(redistribute(self.block, pair, self.sharding.mesh, shape=self.sharding.shape), target)

    def owned(self) -> Placed:
        """Every row at its owner only, and zeros in the padding: to be summed or compared."""
        plain = replace(self.layout, dims=tuple(replace(dim, overlap=None) for dim in self.layout.dims))
        if plain != self.layout:
            return self.to(plain)
        return replace(self, block=without_padding(self.block, self.sharding))

    def remade(self, block: jax.Array, dims: Sequence[Dim], shape: Sequence[int]) -> Placed:
        """A block of an array computed from this one, with its tags; the padding becomes zero."""
        layout = Layout(tuple(dims), self.layout.tags)
        return Placed(block, Sharding(layout, self.sharding.mesh, tuple(shape))).owned()


def place(
    x: jax.Array, layout: Layout | str, shape: Sequence[int] | None = None, mesh: AnyMesh | None = None
) -> Placed:
    """This device's block with its place: the array's layout, mesh and global shape.

    shape: the global shape; by default inferred, assuming all blocks are equal. An uneven block has the shape
    of the largest; its padding may hold anything. mesh: by default the one of the context. Axes that the
    layout does not name are left alone.
    Raises NotationError, MeshError, ShapeError.

    >>> import functools
    >>> rows = jax.pmap(lambda x: place(x, "h/sp w").to("h/sp:halo(1,1,periodic) w"), "sp")
    >>> rows(jnp.ones((1, 4, 2))).block.shape  # one block on one device
    (1, 6, 2)
    """
    x = jnp.asarray(x)
    return Placed(x, block_sharding_here(x, layout, mesh, shape))
