"""A step as a bridge meets it, operation by operation: operands hand names of dims to results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

from xshard.step.record.arrays import COPY, REPLICAS, SUM
from xshard.step.record.letters import Factor, Written, common_factors, grouped
from xshard.step.record.op import AxisRule, Op
from xshard.step.record.training_step import TrainingStep

Names = list[list[str]]  # [dims][parts]: the names of each dim of an array, several for `(g d)`
ORIGINS = {
    "": 0,
    "n": 1,
    "s": 2,
    "b": 3,
}  # by first letter: unnamed, made here, of an input, the batch


@dataclass
class Trace:
    """Operations in letters of a bridge's own -> a step in which a dim keeps its name.

    Names say where a dim is from and how long it is, so that equal layers have equal texts: `b` is
    the first dim of inputs, `s512` another one of inputs, `n4096` any other dim.

    Args:
        batch: The length of the first dim of inputs.
        dtype: For activations and parameters in use.
        ops: The operations so far.
        dims: The dims of each array so far, by its name; parameters have none before their first
            use.
        shapes: The shape of each array so far.
        lengths: The length of each dim so far.
        inputs: The names of inputs so far.

    Examples:
        >>> from xshard.step.record.letters import view
        >>> trace = Trace(batch=64)
        >>> trace.input("x", (64, 512, 128)), trace.parameter("up", (256, 128))
        ('x', 'up')
        >>> flat = trace.add("flat", view((64, 512, 128), (64 * 512, 128)), ("x",), (64 * 512, 128))
        >>> product = Written(["ac", "dc", "ad"], "contraction")
        >>> print(trace.step(trace.add("y", product, (flat, "up"), (64 * 512, 256))))
        flat  linear       b s512 s128 -> (b s512) s128               x
        y     contraction  (b s512) s128, n256 s128 -> (b s512) n256  flat, up
    """

    batch: int
    dtype: str = "bfloat16"
    ops: list[Op] = field(default_factory=list)
    dims: dict[str, Names] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)

    def input(self, name: str, shape: Sequence[int]) -> str:
        """Add an array of the batch; return its name."""
        names = list[str]()
        for d, length in enumerate(shape):
            # An input of another length, such as a table of positions, is no part of the batch.
            is_batch = d == 0 and length == self.batch
            self._take("b" if is_batch else f"s{length}", length, names)
        self.inputs.append(name)
        self.dims[name] = [[dim] for dim in names]
        self.shapes[name] = (*shape,)
        return name

    def parameter(self, name: str, shape: Sequence[int]) -> str:
        """Add a parameter, whose dims get names where it is first used; return its name."""
        self.shapes[name] = (*shape,)
        return name

    def add(
        self, name: str, op: Written, operands: Sequence[str], shape: Sequence[int], **fields: Any
    ) -> str:
        """Add an operation inside a module; return its name.

        Args:
            name: The name of the operation, and of its result.
            op: The operation in letters.
            operands: Names of arrays, as many as `op` has operands, or more, which are left out.
            shape: The shape of the result.
            fields: Fields of `Op`.
        """
        operands = operands[: len(op.arrays) - 1]  # others have no dims that matter
        arrays = [_letters_of(dims) for dims in op.arrays]
        shapes = [*(self.shapes[operand] for operand in operands), tuple(shape)]
        lengths = _lengths_of_letters(op, arrays, shapes)
        names_of = self._names_of_letters(arrays, operands, lengths)
        named = [_in_names(array, names_of) for array in arrays]
        # Arrays with names keep them; a parameter gets those of its first use.
        for operand, dims in zip(operands, named, strict=False):
            self.dims.setdefault(operand, dims)
        self.ops.append(self._op(name, op, operands, named, names_of, fields))
        self.dims[name] = named[-1]
        self.shapes[name] = (*shape,)
        return name

    def step(self, *last: str, moves_anywhere: bool = False) -> TrainingStep:
        """Return the step that ends in some operations, with all that they need."""
        # Backwards, every operation comes after all that need it.
        needed = set(last)
        ops = list[Op]()
        for op in reversed(self.ops):
            if op.name in needed:
                needed.update(op.operands)
                ops.append(op)
        ops.reverse()
        stored = needed.difference(op.name for op in ops)
        # In the order in which they were met, and inputs are taken out below.
        parameters = dict[str, str]()
        for array, dims in self.dims.items():
            if array in stored:
                parameters[array] = " ".join(map(grouped, dims))
        inputs = {name: parameters.pop(name) for name in self.inputs if name in parameters}
        return TrainingStep(ops, self.lengths, inputs, parameters, "b", self.dtype, moves_anywhere)

    def _names_of_letters(
        self, arrays: Sequence[Names], operands: Sequence[str], lengths: Mapping[str, int]
    ) -> dict[str, list[str]]:
        """Name the dims that each letter stands for: as its operands name them, or anew."""
        # Several operands may name one dim; the best name is the result's.
        factors = {letter: [Factor("", length)] for letter, length in lengths.items()}
        for operand, dims in zip(operands, arrays, strict=False):
            for letters, names in zip(dims, self.dims.get(operand, ()), strict=False):
                for letter, named in self._factors(letters, names, lengths).items():
                    factors[letter] = max(factors[letter], named, key=_preference)
        names_of = dict[str, list[str]]()
        taken = list[str]()  # a name stands for one dim of an operation
        for letter in dict.fromkeys(chain.from_iterable(chain(*arrays))):
            names_of[letter] = []
            for known, length in factors[letter]:
                wanted = known if known else f"n{length}"
                names_of[letter].append(self._take(wanted, length, taken))
        return names_of

    def _factors(
        self, letters: Sequence[str], names: Sequence[str], lengths: Mapping[str, int]
    ) -> dict[str, list[Factor]]:
        """Split the named dims of an operand over the letters of one dim; parts have no name.

        `(a c)` of lengths 64 and 512, of an array with the dims `(b s512)`: a is b, and c is s512.
        """
        name_lengths = [self.lengths[name] for name in names]
        if len(letters) == 1:
            return {letters[0]: list(map(Factor, names, name_lengths))}
        letter_lengths = [lengths[letter] for letter in letters]
        by_name, by_letter = common_factors(name_lengths, letter_lengths)
        name_of = dict[str, str]()  # of factors that are a whole named dim
        for name, factors in zip(names, by_name, strict=True):
            if len(factors) == 1:
                name_of[factors[0].name] = name
        split = dict[str, list[Factor]]()
        for letter, factors in zip(letters, by_letter, strict=True):
            split[letter] = [Factor(name_of.get(name, ""), length) for name, length in factors]
        return split

    def _op(
        self,
        name: str,
        written: Written,
        operands: Sequence[str],
        arrays: Sequence[Names],
        names_of: Mapping[str, Sequence[str]],
        fields: Mapping[str, Any],
    ) -> Op:
        """Write the operation with names in place of letters."""
        whole = list[str]()
        for letter, names in names_of.items():
            # A dim of length 1 cannot be sharded.
            is_whole = letter in written.whole
            whole += [dim for dim in names if is_whole or self.lengths[dim] == 1]
        text = Written([[*map(grouped, dims)] for dims in arrays]).text
        # The bridge says afterwards which operations begin and end modules.
        inside_a_module = {"enters": "", "leaves": ""}
        fields = {**written.work, **inside_a_module, **fields}
        op = Op(name, text, tuple(operands), written.kind, tuple(whole), **fields)
        if not written.links:
            return op
        # Blocks are contiguous: an axis shards the first of several names.
        outermost = {names[0] for names in names_of.values()}
        return replace(op, rules=_rules_beside_links(op, written.links, outermost))

    def _take(self, wanted: str, length: int, taken: list[str]) -> str:
        """Add to `taken` a name for a dim that is not there yet: s512, s512_2, s512_3, ..."""
        stem = wanted.partition("_")[0]
        name = wanted
        number = 2
        while name in taken:
            name = f"{stem}_{number}"
            number += 1
        taken.append(name)
        self.lengths[name] = length
        return name


def _letters_of(dims: Sequence[str]) -> Names:
    """Split the dims of an array into letters: `(a b)`, c -> [a, b], [c]."""
    return [dim.strip("()").split() for dim in dims]


def _in_names(array: Names, names_of: Mapping[str, Sequence[str]]) -> Names:
    """Replace the letters of an array by names, of which one letter may have several."""
    return [[*chain.from_iterable(names_of[letter] for letter in dim)] for dim in array]


def _lengths_of_letters(
    op: Written, arrays: Sequence[Names], shapes: Sequence[Sequence[int]]
) -> dict[str, int]:
    """Read the length of each letter from shapes; those in parentheses say their lengths."""
    lengths = dict(op.lengths)
    for dims, shape in zip(arrays, shapes, strict=True):
        for letters, length in zip(dims, shape, strict=True):
            if len(letters) == 1:
                lengths[letters[0]] = length
    return lengths


def _rules_beside_links(op: Op, n_links: int, outermost: set[str]) -> tuple[AxisRule, ...]:
    """Derive the rules of an operation that reads only lengths from its last operands (`links`).

    An axis shards a common dim in the links and in the others alike, so that the lengths agree. An
    axis that shards no common dim may do anything in the links. outermost: the first dim of each
    letter, which an axis shards before the others.
    """
    *operands, result = op.dims
    linked = operands[-n_links:]
    own_dims = set(chain(*operands[:-n_links], result))
    tags = [REPLICAS, SUM, COPY]
    anything = [tags + _places_of(outermost - own_dims, dims) for dims in linked]
    rules = list[AxisRule]()
    for rule in op.axis_rules:
        sharded = {dims[place] for dims, place in zip(op.dims, rule, strict=True) if place >= 0}
        if not sharded <= own_dims & outermost:
            continue  # inner parts of a dim would need other lengths
        choices = list[list[int]]()  # of placements in each link
        for dims, free_choice in zip(linked, anything, strict=True):
            same = _places_of(sharded, dims)
            choices.append(same if same else free_choice)
        own_placements = rule[: -n_links - 1]
        rules += [(*own_placements, *placements, rule[-1]) for placements in product(*choices)]
    # The idle rule is always there (`Op.axis_rules`).
    return tuple(rule for rule in rules if set(rule) != {REPLICAS})


def _places_of(names: set[str], dims: Sequence[str]) -> list[int]:
    """Find the numbers of some dims in an array."""
    return [place for place, dim in enumerate(dims) if dim in names]


def _preference(factors: Sequence[Factor]) -> tuple[int, int]:
    """Rank the names that operands have for a dim: most factors first, then names from inputs."""
    return len(factors), ORIGINS[factors[0].name[:1]]
