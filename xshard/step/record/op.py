"""Operations of a training step: dims by name, and what one mesh axis may do in each class of operations.

A rule says it for one axis. It prints as a contraction over an axis `x`: `b c/x, f c/x -> b f | sum(x)`.
The classes (`KINDS`) derive rules from the dims of an operation by the table of `contractions.types`;
rules of its own replace them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard.arguments import did_you_mean
from xshard.errors import NotationError, PlanError, located
from xshard.layout import Layout, Mesh
from xshard.notation.parser import ARROW, Dim, Shard, parse_sides, parts_of

REPLICAS = -1
SUM = -2
COPY = -3  # ways of an axis in an array, beside a position: the dim that it shards
TAGS = {"sum": SUM, "copy": COPY}
Ints = NDArray[np.int64]
Ways = Ints  # [layouts, axes]: per axis the dim of the array that it shards, or a tag
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Kind:
    """A class of operations.

    sums: an axis may shard a dim that the result lacks, and leaves partial sums. passes: tags that all
    operands may have, and the result then has. flops: floating point operations per element of the space of
    all dims; rate: share of the rate of matrix products. accesses: how often operands and result are read
    or written. backward: work of the backward pass for each forward one. saves: it needs the operands.
    """

    sums: bool = False
    passes: tuple[int, ...] = ()
    flops: float = 0.0
    rate: float = 1.0
    accesses: float = 1.0
    backward: float = 1.0
    saves: bool = False


KINDS: Mapping[str, Kind] = {
    # products and sums over dims; convolutions, with their windows whole
    "contraction": Kind(sums=True, flops=2.0, backward=2.0, saves=True),
    # functions of elements; norms, softmax, cumulative and sorting ones with their dims whole; random numbers
    "pointwise": Kind(accesses=1.5, backward=2.0, saves=True),
    # sums of arrays, views, permutations, broadcasts; slices, concatenations, padding with their dims whole
    "linear": Kind(sums=True, passes=(SUM,)),
    # rows of a table by number; a shard of the rows gives zeros for the others
    "lookup": Kind(sums=True),
    # scores of queries and keys; the dim of the keys is whole; `flops` count a causal mask
    "attention": Kind(flops=2.0, rate=0.75, backward=2.5, saves=True),
    # a sum of losses over all dims; logits are kept in float32 too
    "loss": Kind(sums=True, accesses=4.0, saves=True),
    # one activation for several operations: moved once for all of them
    "share": Kind(passes=(COPY,), accesses=0.0, saves=True),
    # numbers made in place: constants, positions, masks; and the first rows of a repeated block
    "source": Kind(accesses=0.0),
    "carry": Kind(accesses=0.0),
    # no rule is known: every device computes all of it
    "opaque": Kind(accesses=1.5, backward=2.0, saves=True),
}


@dataclass(frozen=True)
class Op:
    """An operation of the forward pass.

    name: its name, which is the result's too; `*` stands for the number of a repeated block.
    text: the dims of operands and result, as in `"b s c, (g d) c -> b s (g d)"`; in parentheses are dims that
    are one dim of the array. A dim has one length wherever it is; results reach operands by position.
    operands: names of operations, inputs and parameters. kind: its class, one of `KINDS`.
    whole: dims that no axis may shard. rules: they replace the rules of its class for an axis, each as in
    `axis_rules`. times: how often it runs. again: in a repeated block, the operation that gives the operand
    of a `carry` from the second time on.
    enters, leaves: the module with it as the first and as the last operation; there rules can move the first
    operand and the result; None stands for its own name if it has a parameter, "" for no module.
    flops, accesses: they replace the numbers of its class (`Kind`). keeps: the operands that a backward pass
    needs, by number, the result's after the last one; None: all, if its class saves them. inside: in a chain
    of operations, the dims of arrays between them, after the result in `rules`. inner: elements that the
    backward pass needs of arrays between them, per element of the space of all dims.
    Raises NotationError, PlanError.

    >>> op = Op("up", "b s c, f c -> b s f", ("norm", "up.weight"))
    >>> [op.text_of(rule) for rule in op.axis_rules][2:]
    ['b s c | copy(x), f/x c -> b s f/x', 'b s c/x, f c/x -> b s f | sum(x)', 'b s c, f c -> b s f']
    """

    name: str
    text: str
    operands: tuple[str, ...] = ()
    kind: str = "contraction"
    whole: tuple[str, ...] = ()
    rules: tuple[tuple[int, ...], ...] | None = None
    times: int = 1
    again: str = ""
    enters: str | None = None
    leaves: str | None = None
    flops: float | None = None
    accesses: float | None = None
    keeps: tuple[int, ...] | None = None
    inside: tuple[str, ...] = ()
    inner: float = 0.0

    def __post_init__(self) -> None:
        for name in ("operands", "whole"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        with located(f"operation {self.name}"):
            if self.kind not in KINDS:
                hint = f"{did_you_mean(self.kind, KINDS)}there are: {', '.join(KINDS)}"
                raise PlanError(f"no class {self.kind!r} of operations", hint=hint)
            if (n := len(self.arrays) - 1) != len(self.operands):
                reason = f"{n} operands and {len(self.operands)} names: {', '.join(self.operands)}"
                raise NotationError(
                    reason, text=self.text, hint="one name for each operand before the arrow"
                )
            known = dict.fromkeys(dim for dims in self.dims for dim in dims)
            if unknown := [dim for dim in self.whole if dim not in known]:
                reason = f"no dim {unknown[0]!r}"
                raise NotationError(reason, text=self.text, hint=f"dims: {' '.join(known)}")

    @cached_property
    def arrays(self) -> tuple[Layout, ...]:
        """The arrays of the operands, then of the result; dims that are one have a name such as `(g d)`."""
        return parse_arrays(self.text)

    @cached_property
    def every(self) -> tuple[Layout, ...]:
        """The arrays of the operands, of the result, and inside."""
        return (*self.arrays, *(parse_arrays(f"{ARROW} {text}")[0] for text in self.inside))

    @cached_property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The dims of each array, one by one."""
        return tuple(map(dims_of, self.arrays))

    @property
    def work(self) -> Kind:
        """Its class with the operation's own numbers."""
        own = {n: v for n in ("flops", "accesses") if (v := getattr(self, n)) is not None}
        return replace(KINDS[self.kind], **own)

    @property
    def kept(self) -> Sequence[int]:
        """The numbers of operands that the backward pass needs; the result's is the one after them."""
        return (
            range(len(self.operands) * KINDS[self.kind].saves) if self.keeps is None else self.keeps
        )

    @cached_property
    def axis_rules(self) -> tuple[tuple[int, ...], ...]:
        """For each rule of one axis the dim that it shards in `every` array, or a tag; the last is idle."""
        *operands, result = self.dims
        idle = (REPLICAS,) * len(self.every)
        kind = KINDS[self.kind]
        if self.rules is not None or self.kind == "opaque":
            return (*(self.rules or ()), idle)
        rules = []
        for dim in dict.fromkeys((*result, *(d for dims in operands for d in dims))):
            if dim not in self.whole and (dim in result or kind.sums):
                ways = (dims.index(dim) if dim in dims else COPY for dims in operands)
                rules.append((*ways, result.index(dim) if dim in result else SUM))
        return (*rules, *((tag,) * len(self.dims) for tag in kind.passes), idle)

    def text_of(self, rule: Sequence[int]) -> str:
        """A rule as a contraction over the axis `x`."""
        pairs = zip(rule, self.dims, strict=False)
        *sides, result = (str(layout_of([way], dims, "x")) for way, dims in pairs)
        return f"{', '.join(sides)} {ARROW} {result}".strip()


def renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The operation with new names for itself and for its operands."""
    operands = tuple(names.get(name, name) for name in op.operands)
    return replace(op, name=names.get(op.name, op.name), operands=operands)


@lru_cache(2**12)
def parse_arrays(text: str) -> tuple[Layout, ...]:
    """`"b c, f c -> b f"` -> the arrays, the result last; before the arrow there may be none."""
    is_made = not text.partition(ARROW)[0].strip()
    operands, results, _ = parse_sides(f"() {text}" if is_made else text, "contraction")
    arrays = tuple(Layout(*side) for side in (*operands, *results))[is_made:]
    for array in arrays:
        if array.axes or len(set(dims_of(array))) < len(dims_of(array)):
            hint = "an operation has the dims of arrays, each once, and no axes"
            raise NotationError(f"'{array}' in an operation", text=text, hint=hint)
    return arrays


def dims_of(array: Layout) -> tuple[str, ...]:
    """The names of all dims, also of those in parentheses."""
    return tuple(name for dim in array.dims for name in parts_of(dim))


def layout_of(ways: Sequence[int], names: Sequence[str], axes: Sequence[str]) -> Layout:
    """The ways of all axes, as a layout of dims with these names."""
    pairs = list(zip(axes, ways, strict=True))
    dims = (Dim(n, tuple(Shard((a,)) for a, way in pairs if way == d)) for d, n in enumerate(names))
    tags = ((kind, (a,)) for kind, tag in TAGS.items() for a, way in pairs if way == tag)
    return Layout(tuple(dims), tuple(tags))


def ways_of(layout: Layout, axes: Sequence[str]) -> list[int]:
    """The inverse of `layout_of`. Raises NotationError for what the search does not know."""
    ways = {axis: d for d, dim in enumerate(layout.dims) for axis in dim.axes}
    ways |= {axis: TAGS.get(kind, REPLICAS) for kind, tagged in layout.tags for axis in tagged}
    row = [ways.get(axis, REPLICAS) for axis in axes]
    if str(layout_of(row, layout.names, axes)) != str(layout):
        hint = f"contiguous blocks over axes in the order {', '.join(axes)}, sum and copy"
        raise NotationError(f"'{layout}' is not searched", hint=hint)
    return row


def options_of(op: Op, lengths: Mapping[str, int], mesh: Mesh) -> Ints:
    """All combinations of rules, one per axis, that divide all dims evenly -> [options, arrays, axes]."""
    table = np.array(op.axis_rules)
    n_axes = len(mesh.axes)
    chosen = np.indices((len(table),) * n_axes).reshape(n_axes, -1).T
    ways = np.swapaxes(table[chosen], 1, 2).copy()
    fits = np.ones(len(chosen), bool)
    for j, array in enumerate(op.every):
        ways[:, j], fitting = _in_array(ways[:, j], array, lengths, mesh)
        fits &= fitting
    ways = ways[fits, : len(op.arrays)]
    first = np.unique(ways, axis=0, return_index=True)[
        1
    ]  # rules over dims that are one are the same layouts
    return ways[np.sort(first)]


def _in_array(
    ways: Ways, array: Layout, lengths: Mapping[str, int], mesh: Mesh
) -> tuple[Ways, Flags]:
    """Layouts of dims -> layouts of the array that has some of them as one dim, and which are possible."""
    grouped = ways.copy()
    fits = np.ones(len(ways), bool)
    axes = np.arange(len(mesh.axes))
    d = 0
    for group, dim in enumerate(
        array.dims
    ):  # sharded once those before it are down to 1, by later axes
        down = np.ones(len(ways), bool)
        last = np.full(len(ways), -1)
        for name in parts_of(dim):
            here = ways == d
            factor = product(here, mesh.sizes)
            any_here = here.any(-1)
            first = np.where(here, axes, len(axes)).min(-1)
            fits &= (lengths[name] % factor == 0) & (~any_here | (down & (first > last)))
            down = down & (factor == lengths[name])
            last = np.maximum(last, np.where(here, axes, -1).max(-1))
            grouped[here] = group
            d += 1
    return grouped, fits


def product(which: Flags, sizes: Sequence[int] | Floats) -> Floats:
    """The product of the sizes of some axes, which come last."""
    return np.asarray(np.prod(np.where(which, sizes, 1), -1))


def distinct(ways: Ways) -> tuple[Ways, Ints]:
    """The distinct layouts, and the number of the one that each option has."""
    rows, index = np.unique(ways, axis=0, return_inverse=True)
    return rows, index.reshape(-1)


def without_copies(ways: ArrayLike) -> Ways:
    """The layouts of arrays that need no gradient here."""
    return np.where(np.equal(ways, COPY), REPLICAS, ways)
