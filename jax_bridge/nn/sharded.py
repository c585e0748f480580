"""`Sharded`, a block with its sharding: the argument and result of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jax_bridge.calls import redistribute
from jax_bridge.lower.row_tables import with_zero_padding
from jax_bridge.mesh.context import AnyMesh, block_sharding_in_context
from xshard import Layout, Sharding
from xshard.errors import PlanError, api_boundary
from xshard.nn.windows import dims_without_overlaps
from xshard.notation.parser import Dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True, init=False)
class Sharded:
    """This device's block of a global array.

        x = Sharded(block, "b h/sp c")     # block [b, h/4, c] of an array [b, h, c] on 4 devices

    It is a pytree with a static sharding. So it passes through jit, grad, scan and remat, and
    `jax.tree.map(jax.nn.relu, x)` applies a function to its block.

    Args:
        block: The block, padded at its ends to the shape of the largest; the padding may hold
            anything. Layers return blocks padded with zeros.
        sharding: The array's layout, or its `Sharding`.
        mesh: The mesh; by default the mesh of the context.
        shape: The global shape; by default inferred, assuming that all blocks are equal.

    Raises:
        NotationError: The layout's text is wrong.
        MeshError: The mesh lacks an axis of the layout, or the axis is not manual here.
        ShapeError: The block does not have the shape of the largest block.
        PlanError: The layout has a pending reduction.

    Examples:
        >>> rows = jax.pmap(lambda x: Sharded(x, "h/sp w").to("h/sp:halo(1,1,periodic) w"), "sp")
        >>> rows(jnp.ones((1, 4, 2))).block.shape  # one block on one device
        (1, 6, 2)
    """

    block: jax.Array
    sharding: Sharding = field(metadata={"static": True})

    @api_boundary
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
            sharding = block_sharding_in_context(block, Layout.parse(sharding), mesh, shape)
        # The dataclass is frozen, so that even its __init__ cannot write `self.block = block`.
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "sharding", sharding)
        for kind, _ in self.layout.tags:
            if kind != "copy":
                reason = f"a layer on values still to be reduced by {kind}"
                hint = "redistribute first: layers take values"
                raise PlanError(reason, text=str(self.layout), hint=hint)

    @property
    def layout(self) -> Layout:
        """The layout of the global array."""
        return self.sharding.layout

    @api_boundary
    def to(self, layout: Layout | str) -> Sharded:
        """Move the array to another layout: "h/sp w" -> "h w/sp".

        Args:
            layout: The new layout, with the same dims.

        Returns:
            The same array, as this device's block under the new layout.

        Raises:
            XshardError: As `redistribute` does.
        """
        source = self.sharding
        target = source.with_layout(Layout.parse(layout))
        layouts = (source.layout, target.layout)
        return Sharded(redistribute(self.block, layouts, source.mesh, shape=source.shape), target)

    @api_boundary
    def owned(self) -> Sharded:
        """Drop rows that are copies of the neighbours' (halos), and set padding to zero.

        Then a sum over blocks counts every row once. "h/sp:halo(1,1,zero)" -> "h/sp"

        Returns:
            The same array, without overlaps.
        """
        plain = replace(self.layout, dims=tuple(dims_without_overlaps(self.layout)))
        if plain != self.layout:
            return self.to(plain)  # a move pads with zeros
        return Sharded(with_zero_padding(self.block, self.sharding), self.sharding)

    @api_boundary
    def with_block(self, block: jax.Array, dims: Sequence[Dim], shape: Sequence[int]) -> Sharded:
        """Wrap a block of an array that was computed from this one.

        Args:
            block: The new block; its padding becomes zero.
            dims: The dims of the new array; its tags stay those of this array.
            shape: The new global shape.

        Returns:
            The new array.
        """
        layout = Layout(tuple(dims), self.layout.tags)
        return Sharded(block, Sharding(layout, self.sharding.mesh, tuple(shape))).owned()
