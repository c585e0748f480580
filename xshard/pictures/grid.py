"""A picture of a sharding as data: the blocks of the global array, and the devices that own each.

A *strip* is one drawn dim, divided into blocks. A *card* is one drawing of the array, with a cell for
each block and one device in each cell. Devices that differ along an axis which shards no drawn dim
have the same cell, so that there are several cards, drawn behind one another. What the devices of such
an axis hold, as replicas or addends of a sum, is the *role* of these cards.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xshard.errors import ShapeError
from xshard.formatting import range_text
from xshard.layout import Sharding
from xshard.layout.runs import count_rows
from xshard.notation.overlap import Fold, Halo, Reads, Window
from xshard.notation.parser import SEGMENTS, Dim
from xshard.pictures.rows import MAX_BLOCKS, Ints, Lane, devices_text, lanes_of, rows_in_order

# What the marks of the notation mean, for the notes below a picture.
_ORDER_TEXT = {
    "block": "in contiguous chunks",
    "balanced": "in contiguous chunks that differ by at most one row",
    SEGMENTS: "each of its segments in contiguous chunks",
    "zigzag": "zigzag: part i of n holds chunks i and 2n-1-i of 2n",
    "cyclic": "cyclic: part i of n holds every n-th row, or chunk of rows, from i",
    "sizes": "in contiguous chunks of given sizes",
    "intervals": "in given intervals",
    "by": "each row to the part that a map gives",
}
_OVERLAP_TEXT = {
    Halo: "each block holds rows of its neighbours",
    Window: "each block holds the rows that its outputs read",
    Reads: "each block holds the rows that a map lists for it",
    Fold: "rows of neighbours are contributions, added at their owner",
}
_TAG_TEXT = {
    "sum": "every device holds an addend: the array is their sum",
    "mean": "every device holds an addend: the array is their mean",
    "max": "every device holds a candidate: the array is their maximum",
    "min": "every device holds a candidate: the array is their minimum",
    "copy": "every device has a copy of its own, and the gradients of the copies add up",
}


class Strip(NamedTuple):
    """A drawn dim.

    Attributes:
        dim: The dim, with its shards and its overlap.
        length: Its length in the array.
        blocks: (start, stop) of each block in order. They end before `length` if there are too many.
        owners: The owner of each block, as an index along the dim's axes.
        lanes: The first blocks with their overlaps.
    """

    dim: Dim
    length: int
    blocks: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    lanes: tuple[Lane, ...] = ()

    @property
    def n_drawn(self) -> int:
        """Rows in the blocks, and 1 for an empty dim."""
        return self.blocks[-1][1] if self.blocks else 1

    @property
    def head(self) -> str:
        """The dim's name and length, beside the strip."""
        return f"{self.dim.name} {self.length}" if self.dim.name else ""

    @property
    def texts(self) -> list[str]:
        """The rows of every block: "0-3"."""
        if not self.dim.name:  # the one row of a dim that does not exist has no number
            return [""]
        return [range_text(start, stop - 1) for start, stop in self.blocks]


# Stands for the rows or columns of an array of fewer dims: one block of one row.
NO_DIM = Strip(Dim(""), length=1, blocks=((0, 1),), owners=(0,))


class CardRole(NamedTuple):
    """What several cards along some axes hold: ("sum", ("tp",)) for addends over tp.

    Attributes:
        role: A tag, "replicas", or the name of a sharded dim that is not drawn.
        axes: The axes. None of them shards a drawn dim.
    """

    role: str
    axes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Picture:
    """The blocks of an array and the devices that own them, by number.

    The array is drawn as a stack of cards: once for each place along the axes that shard no drawn dim.

    Attributes:
        sharding: The sharding.
        down_and_across: The strip of rows and the strip of columns.
        cards: The owner of each block: [cards, rows, columns].
        roles: What the cards along each axis hold.
        empty: Devices without elements.
        notes: What each mesh axis does, in sentences.
        first_holder: For each device the first that holds the same values, which may be itself:
            replicas are drawn in the colour of that one.
    """

    sharding: Sharding
    down_and_across: tuple[Strip, Strip]
    cards: Ints
    roles: tuple[CardRole, ...]
    empty: tuple[int, ...]
    notes: tuple[str, ...]
    first_holder: Mapping[int, int]

    @property
    def strips(self) -> tuple[Strip, ...]:
        """The drawn dims, at most two."""
        return tuple(strip for strip in self.down_and_across if strip.dim.name)

    def first_holders_of(self, devices: Sequence[int]) -> list[int]:
        """Return the first holders of what some devices hold, each once: one for replicas of a block."""
        return list(dict.fromkeys(self.first_holder[device] for device in devices))


def picture(sharding: Sharding, dims: Sequence[str] = (), devices: Sequence[int] = ()) -> Picture:
    """Find out all that a drawing of a sharding shows: which device holds which block of the array.

    The result has no colours and no pixels: it is drawn as SVG or printed as text. "n/dp c" on dp=2,
    tp=2 is drawn as two blocks, one below the other. `cards`, [cards, blocks down, blocks across], has
    the devices of these blocks twice, since tp shards nothing: [[0], [2]] at tp=0, [[1], [3]] at tp=1.

    Args:
        sharding: The sharding.
        dims: The dims to draw. Default: the first two, sharded ones before others.
        devices: The device's number at each position of the mesh. Default: 0, 1, 2, ...
    """
    drawn_dims = _drawn_dims(sharding, dims)
    mesh = sharding.mesh
    device_numbers = np.array(devices or range(mesh.n_devices))
    strips = [_strip(sharding, dim_index, device_numbers) for dim_index in drawn_dims]
    down, across = [NO_DIM] * (2 - len(strips)) + strips  # a single dim goes across
    # The axes that shard no drawn dim, as ("replicas", ("tp",)): there is a card for each place along
    # these.
    roles = _roles(sharding, {*down.dim.axes, *across.dim.axes})
    is_empty = [_is_empty(sharding, device) for device in range(mesh.n_devices)]
    return Picture(
        sharding,
        down_and_across=(down, across),
        cards=_cards(sharding, roles, down, across, device_numbers),
        roles=roles,
        empty=tuple(device_numbers[is_empty].tolist()),
        notes=_notes(sharding, drawn_dims),
        first_holder=_first_holders(sharding, device_numbers),
    )


def _cards(
    sharding: Sharding,
    roles: Sequence[CardRole],
    down: Strip,
    across: Strip,
    device_numbers: Ints,
) -> Ints:
    """Return the device's number of each drawn block, [cards, down, across].

    "n/zigzag(dp)" on dp=2 has one card of one row: blocks 0 and 3 of device 0, 1 and 2 of device 1.
    """
    mesh = sharding.mesh
    card_axes: list[str] = []
    for role in roles:
        card_axes += role.axes
    # First by owners. Along each direction lies one group of mesh axes: here [1, 1, 2], ((0, 1)).
    directions = (card_axes, down.dim.axes, across.dim.axes)
    device_at = np.zeros([mesh.size(*axes) for axes in directions], np.int64)
    device_at[tuple(map(mesh.indices, directions))] = device_numbers
    # From one entry for each owner to one for each drawn block, in the order of the rows: [1, 1, 4],
    # ((0, 1, 1, 0)).
    down_owners = np.array(down.owners, np.int64)
    across_owners = np.array(across.owners, np.int64)
    return device_at[:, down_owners[:, None], across_owners]


def _first_holders(sharding: Sharding, device_numbers: Ints) -> dict[int, int]:
    """Return, for each device, the first of those that hold the same values.

    "n/dp" on dp=2, tp=2 -> {0: 0, 1: 0, 2: 2, 3: 2}. device_numbers: the device's number at each
    position of the mesh.
    """
    replica_axes = _replica_axes(sharding)
    mesh = sharding.mesh
    other_axes = [axis for axis in mesh.axes if axis not in replica_axes]
    group_indices = mesh.indices(other_axes).tolist()  # of each device; replicas have one index
    first_of_group: dict[int, int] = {}
    first_holder: dict[int, int] = {}
    for device, group_index in zip(device_numbers.tolist(), group_indices, strict=True):
        first_holder[device] = first_of_group.setdefault(group_index, device)
    return first_holder


def _roles(sharding: Sharding, drawn_axes: set[str]) -> tuple[CardRole, ...]:
    """List what the axes that shard no drawn dim do: [("sum", ("tp",)), ("replicas", ("dp",))]."""
    layout = sharding.layout
    other_axes = set(sharding.mesh.long_axes) - drawn_axes
    axes_of_roles = [(dim.name, dim.axes) for dim in layout.dims]
    axes_of_roles += [*layout.tags, ("replicas", _replica_axes(sharding))]
    roles = []
    for role, axes in axes_of_roles:
        card_axes = tuple(axis for axis in axes if axis in other_axes)
        if card_axes:
            roles.append(CardRole(role, card_axes))
    return tuple(roles)


def _is_empty(sharding: Sharding, device: int) -> bool:
    """Return whether a device owns no element."""
    dims = range(len(sharding.shape))
    return not all(count_rows(sharding.owned(dim_index, device)) for dim_index in dims)


def title(sharding: Sharding) -> str:
    """Say which array lies where."""
    return f"{sharding.layout}   {list(sharding.shape)} on {sharding.mesh}"


def roles_text(drawn: Picture) -> str:
    """Say how the cards relate: "sum over tp, replicas over dp"; "" for one card."""
    return ", ".join(f"{role} over {' x '.join(axes)}" for role, axes in drawn.roles)


def cell_text(drawn: Picture, i: int, j: int) -> str:
    """Return the devices of a cell: "d0", and "sum d0-3" if they do not hold replicas."""
    roles = "".join(f"{role} " for role, _ in drawn.roles if role != "replicas")
    return f"{roles}d{devices_text(sorted(drawn.cards[:, i, j].tolist()))}"


def reading(drawn: Picture) -> list[str]:
    """Explain the marks in this picture."""
    lines = []
    for strip in drawn.strips:
        if strip.n_drawn < strip.length:
            n_rows = f"{strip.n_drawn} of {strip.length}"
            lines.append(f"only the first {n_rows} rows of {strip.dim.name} are drawn")
    if drawn.empty:
        lines.append(f"empty: d{devices_text(drawn.empty)}")
    return lines


def _drawn_dims(sharding: Sharding, dims: Sequence[str]) -> tuple[int, ...]:
    """Choose which one or two dims of an array are drawn, as numbers in the array's order.

    `dims` are the names that the user asks for. Without names, sharded dims come before others, and
    of the others the last ones first. Raises ShapeError for dims that do not exist, and for more
    than two.
    """
    names = sharding.layout.names
    for name in dims:
        if name not in names:
            raise ShapeError(
                f"no dim {name!r} in '{sharding.layout}'", hint=f"dims are: {', '.join(names)}"
            )
    if len(dims) > 2 or len(set(dims)) < len(dims):
        raise ShapeError(f"a picture has one or two dims, not {', '.join(dims)}")
    if dims:
        return tuple(map(names.index, dims))
    sharded = [dim_index for dim_index, dim in enumerate(sharding.layout.dims) if dim.axes]
    unsharded = [dim_index for dim_index in reversed(range(len(names))) if dim_index not in sharded]
    return tuple(sorted([*sharded, *unsharded][:2]))


def _strip(sharding: Sharding, dim_index: int, device_numbers: Ints) -> Strip:
    """Divide a dim, for drawing, into ranges of rows that each lie in one device's block.

    8 rows under zigzag on 2 devices -> rows 0-1 of block 0, 2-3 of 1, 4-5 of 1, 6-7 of 0. With many
    blocks, only the first are kept.

    dim_index: of the dim. device_numbers: the device's number at each position of the mesh.
    """
    length = sharding.shape[dim_index]
    # The rows of all blocks as intervals, sorted by first row.
    owned = rows_in_order(sharding, dim_index)
    stops = owned.start + owned.length
    # The rows at which a range begins or ends.
    edges = np.unique(np.concatenate([owned.start, stops, [0, length]]))[: MAX_BLOCKS + 1]
    # The owner of a range has the last interval that begins at or before the range does.
    interval_of_range = np.searchsorted(owned.start, edges[:-1], side="right") - 1
    return Strip(
        dim=sharding.layout.dims[dim_index],
        length=length,
        blocks=tuple(itertools.pairwise(edges.tolist())),
        owners=tuple(owned.block[interval_of_range].tolist()),
        lanes=tuple(lanes_of(sharding, dim_index, device_numbers)),
    )


def _notes(sharding: Sharding, drawn_dims: tuple[int, ...]) -> tuple[str, ...]:
    """Write sentences on what each mesh axis does, to print below a drawing.

    Such as "n is cut over dp, in contiguous chunks" and "along tp all devices hold the same values
    (replicas)". `drawn_dims` has the numbers of the dims that are drawn; other sharded dims are named.
    """
    layout = sharding.layout
    notes = []
    for dim in layout.dims:
        for shard in dim.shards:
            cut = f"is cut over {' x '.join(shard.axes)}"
            notes.append(f"{dim.name} {cut}, {_ORDER_TEXT[shard.order]}")
    for dim in layout.dims:
        if dim.overlap is not None:
            notes.append(f"{dim.name} overlaps: {_OVERLAP_TEXT[type(dim.overlap)]} ({dim.overlap})")
    for tag, axes in layout.tags:
        notes.append(f"along {', '.join(axes)} {_TAG_TEXT[tag]}")
    replicas = ", ".join(_replica_axes(sharding))
    if replicas:
        notes.append(f"along {replicas} all devices hold the same values (replicas)")
    hidden = [
        dim.name
        for dim_index, dim in enumerate(layout.dims)
        if dim.axes and dim_index not in drawn_dims
    ]
    if hidden:
        notes.append(
            f"not drawn: {', '.join(hidden)}, cut too; devices that share a block here differ there"
        )
    return tuple(notes)


def _replica_axes(sharding: Sharding) -> tuple[str, ...]:
    """Return the axes along which devices hold the same values: no dim and no tag names them."""
    return tuple(axis for axis in sharding.mesh.long_axes if axis not in sharding.layout.axes)
