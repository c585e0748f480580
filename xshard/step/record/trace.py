"""A step as a bridge meets it, operation by operation: operands hand names of dims to results.

A bridge describes each operation in letters (`letters`); here letters become names. A *merged* dim
stands for several names, as `(b s512)`. A *length operand* is one of which an operation reads only
lengths, as x in `zeros(x.shape[0], 8)`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

from xshard.step.record.arrays import REPLICAS, write_arrays
from xshard.step.record.letters import Factor, LetteredOp, common_factors, merged_dim
from xshard.step.record.op import AxisRule, Op
from xshard.step.record.training_step import TrainingStep

Names = list[list[str]]  # for each dim of an array its names or letters, several if it is merged
# Where a dim comes from, by how its name begins: unknown, an operation, an input, the batch.
ORIGINS = ("", "n", "s", "b")
INPUT = " (input)"  # ends the name of an input that is called like a parameter


def unused_name(wanted: str, stem: str, taken: Collection[str]) -> str:
    """Return a wanted name, or a stem with a number if it is taken: s512, s512_2, s512_3, ..."""
    name = wanted
    number = 2
    while name in taken:
        name = f"{stem}_{number}"
        number += 1
    return name


def input_name(name: str, taken: Collection[str]) -> str:
    """Return the name of an input beside parameters: "w", and "w (input)" if one is called w."""
    return f"{name}{INPUT}" if name in taken else name


@dataclass
class Trace:
    """Operations in letters of a bridge's own -> a step in which a dim keeps its name.

    Names say where a dim is from and how long it is, so that equal layers have equal texts: `b` is
    the first dim of inputs, `s512` another one of inputs, `n4096` any other dim. A second dim of
    this kind in one array is `n4096_2`.

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
        >>> product = LetteredOp(["ac", "dc", "ad"], "contraction")
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
        names: list[str] = []
        for d, length in enumerate(shape):
            # An input of another length, such as a table of positions, is no part of the batch.
            is_batch = d == 0 and length == self.batch
            wanted_name = "b" if is_batch else f"s{length}"
            names.append(self._new_dim(wanted_name, length, names))
        self.inputs.append(name)
        self.dims[name] = [[dim] for dim in names]
        self.shapes[name] = (*shape,)
        return name

    def parameter(self, name: str, shape: Sequence[int]) -> str:
        """Add a parameter, whose dims get names where it is first used; return its name."""
        self.shapes[name] = (*shape,)
        return name

    def add(
        self,
        name: str,
        op: LetteredOp,
        operands: Sequence[str],
        shape: Sequence[int],
        times: int = 1,
    ) -> str:
        """Record one operation of the step, and name the dims of its result.

        Dims of the result get the names that equal dims of operands have; the letters of `op` say
        which are equal. Take the matrix product `a c, d c -> a d` of an array with the dims
        `(b s512) s128` and of a parameter with shape (256, 128) that has no names yet: a is `b
        s512`, c is `s128`, and d is new, so that it is called `n256` after its length. Recorded is
        `(b s512) s128, n256 s128 -> (b s512) n256`.

        Args:
            name: The name of the operation, and of its result.
            op: The operation in letters.
            operands: Names of arrays added before, in the order of `op`. More names than `op` has
                operands are left out.
            shape: The shape of the result.
            times: How often it runs.

        Returns:
            The name again, so that calls can be nested.
        """
        operands = operands[: len(op.arrays) - 1]  # others have no dims that matter
        # Operands first, the result last, in all lists of arrays below.
        letter_arrays = [_letters_of(dims) for dims in op.arrays]
        self.shapes[name] = tuple(shape)
        shapes = [self.shapes[array] for array in (*operands, name)]
        letter_lengths = _lengths_of_letters(op, letter_arrays, shapes)
        names_of_letter = self._names_of_letters(letter_arrays, operands, letter_lengths)
        named_arrays = [_with_names(array, names_of_letter) for array in letter_arrays]
        # Arrays with names keep them; a parameter gets those of its first use.
        for operand, dims in zip(operands, named_arrays, strict=False):
            self.dims.setdefault(operand, dims)
        self.ops.append(self._named_op(name, op, operands, named_arrays, names_of_letter, times))
        self.dims[name] = named_arrays[-1]
        return name

    def step(self, last: str, moves_anywhere: bool = False) -> TrainingStep:
        """Make the training step of those recorded operations that the operation `last` needs.

        Other operations are left out, and so are arrays that only these use. last: the name of the
        final operation, such as a loss. moves_anywhere: the plan may move any array, not only
        inputs and outputs of modules.
        """
        needed = {last}  # names of arrays
        n_known = 0
        # Walked from the end, an operation is met only after all operations that use its result. A
        # carry also needs what its block makes for the next time, which comes later: walk again.
        while n_known < len(needed):
            n_known = len(needed)
            for op in reversed(self.ops):
                if op.name in needed:
                    needed.update((*op.operands, op.again))
        ops = [op for op in self.ops if op.name in needed]
        # Arrays that no operation makes are there before the step: parameters and inputs.
        stored = needed.difference(op.name for op in ops)
        inputs: dict[str, str] = {}
        parameters: dict[str, str] = {}
        for array, dims in self.dims.items():  # not over `stored`: the order is that of first uses
            if array in stored:
                texts = inputs if array in self.inputs else parameters
                texts[array] = _text_of(dims)
        return TrainingStep(
            ops,
            self.lengths,
            inputs,
            parameters,
            dtype=self.dtype,
            moves_anywhere=moves_anywhere,
        )

    def _names_of_letters(
        self, arrays: Sequence[Names], operands: Sequence[str], lengths: Mapping[str, int]
    ) -> dict[str, list[str]]:
        """Return the names of the dims that each letter of an operation stands for.

        Arrays recorded before have named dims, and a letter takes the names that an operand has in
        its place. In `a c, d c -> a d`, where the first operand has the dims `(b s512) s128`, and
        the second one has no names yet: a is [b, s512], c is [s128], and d, of length 256, gets
        the new name [n256].

        arrays: the letters of each operand, then of the result. lengths: of each letter. The length
        of every name is written to `self.lengths`.
        """
        factors = self._inherited_factors(arrays, operands, lengths)
        names_of_letter: dict[str, list[str]] = {}
        names_in_use: list[str] = []  # in this operation: a second s8 becomes s8_2
        for letter in dict.fromkeys(chain.from_iterable(chain(*arrays))):
            names_of_letter[letter] = []
            for inherited_name, length in factors[letter]:
                wanted_name = inherited_name if inherited_name else f"n{length}"
                name = self._new_dim(wanted_name, length, names_in_use)
                names_in_use.append(name)
                names_of_letter[letter].append(name)
        return names_of_letter

    def _inherited_factors(
        self, arrays: Sequence[Names], operands: Sequence[str], lengths: Mapping[str, int]
    ) -> dict[str, list[Factor]]:
        """Find for each letter the named dims of operands that multiply to its length.

        Returns {"a": [b, s512], "d": [""]} for a letter of two named dims, and one without a name yet.

        arrays: the letters of each operand, then of the result. operands: their names. lengths: of
        each letter.
        """
        factors = {letter: [Factor("", length)] for letter, length in lengths.items()}
        for operand, dims in zip(operands, arrays, strict=False):
            names_of_dims = self.dims.get(operand, ())  # a parameter has none before its first use
            for letters, names in zip(dims, names_of_dims, strict=False):
                for letter, candidate in self._named_factors(letters, names, lengths).items():
                    # Several operands may have names for one letter: the more telling ones win.
                    factors[letter] = max(factors[letter], candidate, key=_preference)
        return factors

    def _named_factors(
        self, letters: Sequence[str], names: Sequence[str], lengths: Mapping[str, int]
    ) -> dict[str, list[Factor]]:
        """Match the letters of one merged dim of an operand to the names that this dim has.

        Say the dim was recorded with the names [b, s512], of lengths 64 and 512. The operation calls
        it by the letters [a, c], with `lengths`:

        - a=64, c=512: {a: [b], c: [s512]}.
        - a=512, c=64: a is b and 8 of the 512, c is the other 64. Pieces of a named dim have no
          name: {a: [b, ""], c: [""]}, with the lengths 64 and 8, and 64.
        """
        if len(letters) == 1:
            factors_of_dim = [Factor(name, self.lengths[name]) for name in names]
            return {letters[0]: factors_of_dim}
        name_lengths = [self.lengths[name] for name in names]
        letter_lengths = [lengths[letter] for letter in letters]
        factors_by_name, factors_by_letter = common_factors(name_lengths, letter_lengths)
        # `common_factors` invents names for the pieces. A piece that is all of a named dim gets the
        # name of the dim.
        dim_of_factor = {}
        for dim, factors in zip(names, factors_by_name, strict=True):
            if len(factors) == 1:
                dim_of_factor[factors[0].name] = dim
        named: dict[str, list[Factor]] = {}
        for letter, factors in zip(letters, factors_by_letter, strict=True):
            named[letter] = []
            for factor, length in factors:
                named[letter].append(Factor(dim_of_factor.get(factor, ""), length))
        return named

    def _named_op(
        self,
        name: str,
        lettered: LetteredOp,
        operands: Sequence[str],
        named_arrays: Sequence[Names],
        names_of_letter: Mapping[str, Sequence[str]],
        times: int,
    ) -> Op:
        """Make an `Op` from an operation in letters, with names in the place of letters.

        `a c, d c -> a d` with a = [b, s512], c = [s128] and d = [n256] becomes
        `(b s512) s128, n256 s128 -> (b s512) n256`.

        Args:
            name: The name of the operation, and of its result.
            lettered: The operation in letters.
            operands: The names of its operands.
            named_arrays: The names of the dims of each operand, then of the result.
            names_of_letter: The names of the dims that each letter stands for.
            times: How often it runs.
        """
        unsharded_dims = []  # dims that no mesh axis may shard
        for letter, names in names_of_letter.items():
            for dim in names:
                if letter in lettered.whole or self.lengths[dim] == 1:
                    unsharded_dims.append(dim)
        op = Op(
            name,
            text=write_arrays(list(map(_text_of, named_arrays))),
            operands=tuple(operands),
            kind=lettered.kind,
            whole=tuple(unsharded_dims),
            times=times,
            enters="",  # no module begins or ends here: the bridge says afterwards where one does
            leaves="",
            **lettered.work,
        )
        n_length_operands = lettered.n_length_operands
        if not n_length_operands:
            return op
        # Of a letter with several names, as `(b s512)`, an axis shards the first: blocks are
        # contiguous.
        outermost = {names[0] for names in names_of_letter.values()}
        rules = _rules_with_length_operands(op, n_length_operands, outermost)
        length_operands = range(len(operands) - n_length_operands, len(operands))
        return replace(op, rules=rules, length_operands=tuple(length_operands))

    def _new_dim(self, wanted: str, length: int, names_in_use: Collection[str]) -> str:
        """Choose a name for a dim that is not in use yet, and note its length: s512, s512_2, ..."""
        stem = wanted.partition("_")[0]  # s512_2 -> s512: counting begins anew
        name = unused_name(wanted, stem, names_in_use)
        self.lengths[name] = max(length, 1)  # a dim without rows is planned as one row
        return name


def _text_of(array: Names) -> str:
    """Write the dims of an array: [b, s512], [s128] -> `(b s512) s128`."""
    return " ".join(map(merged_dim, array))


def _letters_of(dims: Sequence[str]) -> Names:
    """Split the dims of an array into letters: `(a b)`, c -> [a, b], [c]."""
    return [dim.strip("()").split() for dim in dims]


def _with_names(array: Names, names_of_letter: Mapping[str, Sequence[str]]) -> Names:
    """Replace the letters of an array by names, of which one letter may have several."""
    named: Names = []
    for letters in array:
        names_of_letters = [names_of_letter[letter] for letter in letters]
        named.append(list(chain(*names_of_letters)))
    return named


def _lengths_of_letters(
    op: LetteredOp, arrays: Sequence[Names], shapes: Sequence[Sequence[int]]
) -> dict[str, int]:
    """Read the length of each letter from shapes; those in parentheses say their lengths."""
    lengths = dict(op.lengths)
    for dims, shape in zip(arrays, shapes, strict=True):
        for letters, length in zip(dims, shape, strict=True):
            if len(letters) == 1:
                lengths[letters[0]] = length
    return lengths


def _rules_with_length_operands(
    op: Op, n_length_operands: int, outermost: set[str]
) -> tuple[AxisRule, ...]:
    """List the rules for one mesh axis in an operation that reads only lengths of some operands.

    `y = zeros(x.shape[0], 8)` has the length operand x. An axis that shards dim 0 of y has to shard
    dim 0 of x, too: so the length that a device reads is that of its own block of y. If the axis
    does not shard dim 0, it may do anything else in x.

    Args:
        op: The operation; its last operands are those of which it reads lengths.
        n_length_operands: How many these are.
        outermost: Of each merged dim, the single dim that axes shard first: b of `(b s512)`.

    Returns:
        Rules as in `Op.axis_rules`: a placement for every operand and the result.
    """
    *operands, result = op.dims
    n_value_operands = len(operands) - n_length_operands
    length_operands = operands[n_value_operands:]
    # Dims of all other arrays: a device works on its blocks of these.
    computing_dims = set(chain(*operands[:n_value_operands], result))
    dims_without_values = outermost - computing_dims
    # A block of an inner factor does not show in a length that is read.
    inner_dims = set(chain(*length_operands)) - outermost
    rules: list[AxisRule] = []
    for rule in op.axis_rules:
        placed = zip(op.dims, rule, strict=True)
        sharded = {dims[placement] for dims, placement in placed if placement >= 0}
        if not sharded <= computing_dims or not sharded.isdisjoint(inner_dims):
            continue
        # What may be done in each length operand under this rule; then all combinations of these.
        choices = []
        for dims in length_operands:
            choices.append(_placements_for_lengths(dims, sharded, dims_without_values))
        for length_placements in product(*choices):
            rules.append((*rule[:n_value_operands], *length_placements, rule[-1]))
    # `Op.axis_rules` adds the idle rule, replicas everywhere: it must not be there twice.
    return tuple(rule for rule in rules if set(rule) != {REPLICAS})


def _placements_for_lengths(
    dims: Sequence[str], sharded: set[str], dims_without_values: set[str]
) -> list[int]:
    """List what an axis that shards the dims `sharded` may do in an operand whose lengths are read.

    It shards the same dim, if the operand has it; else it may shard one of `dims_without_values`, or
    none. Tags are all one, REPLICAS, for no value is read.
    """
    shared = [number for number, dim in enumerate(dims) if dim in sharded]
    if shared:
        return shared
    others = [number for number, dim in enumerate(dims) if dim in dims_without_values]
    return [REPLICAS, *others]


def _preference(factors: Sequence[Factor]) -> tuple[int, int]:
    """Rank the names that operands have for a dim: names from inputs first, then most factors.

    (b, s512) is before (n512, n64), and that before (n32768) and before no name at all. A residual
    that is s512 stays so where a layer adds what it has made in chunks, (n8, n64): the next layer
    has the names of the first.
    """
    return ORIGINS.index(factors[0].name[:1]), len(factors)
