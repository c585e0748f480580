"""`Sharded`, a block with its sharding: the argument and result of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jax_bridge.calls import redistribute
from jax_bridge.lower.row_tables import without_padding
from jax_bridge.mesh.context import AnyMesh, block_sharding_here
from xshard import Layout, Sharding
from xshard.errors import PlanError
from xshard.notation.parser import Dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True, init=False)
class Sharded:
    """This device's block of a global array.

    block: the block, padded at its ends to the shape of the largest; the padding may hold anything. Layers
    return blocks padded with zeros. sharding: the array's layout, or its `Sharding`. mesh: by default the one
    of the context. shape: the global shape; by default inferred, assuming that all blocks are equal.
    A pytree with a static sharding: it passes through jit, grad, scan and remat, and
    `jax.tree.map(jax.nn.relu, x)` applies a function to its block.

    Raises NotationError, MeshError, ShapeError; PlanError for a layout with a pending reduction.

    >>> rows = jax.pmap(lambda x: Sharded(x, "h/sp w").to("h/sp:halo(1,1,periodic) w"), "sp")
    >>> rows(jnp.ones((1, 4, 2))).block.shape  # one block on one device
    (1, 6, 2)
    """

    block: jax.Array
    sharding: Sharding = field(metadata={"static": True})

    def __init__(
        self,
        block: jax.Array,
        sharding: Layout | str | Sharding,
        mesh: AnyMesh | None = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(sharding, Sharding):
            block = jnp.asarray(block)
            sharding = block_sharding_here(block, Layout.parse(sharding), mesh, shape)
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "sharding", sharding)
        if kinds := [kind for kind, _ in self.layout.tags if kind != "copy"]:
            what = f"a layer on values still to be reduced by {kinds[0]}"
            raise PlanError(
                what, text=str(self.layout), hint="redistribute first: layers take values"
            )

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    def to(self, layout: Layout | str) -> Sharded:
        """The same array under another layout."""
        target = self.sharding.with_layout(Layout.parse(layout))
        pair = self.layout, target.layout
        return Sharded(
            redistribute(self.block, pair, self.sharding.mesh, shape=self.sharding.shape), target
        )

    def owned(self) -> Sharded:
        """The same array with every row at its owner only and zeros in the padding: ready for sums."""
        plain = replace(
            self.layout, dims=tuple(replace(dim, overlap=None) for dim in self.layout.dims)
        )
        if plain != self.layout:
            return self.to(plain)
        return Sharded(without_padding(self.block, self.sharding), self.sharding)

    def with_block(self, block: jax.Array, dims: Sequence[Dim], shape: Sequence[int]) -> Sharded:
        """A block of an array computed from this one, with this layout's tags; its padding becomes zero."""
        layout = Layout(tuple(dims), self.layout.tags)
        return Sharded(block, Sharding(layout, self.sharding.mesh, tuple(shape))).owned()
