"""Operations of a training step: dims by name, and what one mesh axis may do in each class.

A *rule* says it for one axis: a placement in each operand and in the result (`arrays` says what a
placement is). It prints as a contraction over an axis `x`: `b c/x, f c/x -> b f | sum(x)`. The
classes (`KINDS`) derive rules from the dims of an operation by the table of `contractions.types`;
rules of an operation's own replace them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

from xshard.errors import NotationError, PlanError, api_boundary, located
from xshard.layout import Layout
from xshard.notation.parser import ARROW, names_of_dim
from xshard.signatures import did_you_mean
from xshard.step.record.arrays import COPY, REPLICAS, SUM, dims_of, layout_of, parse_arrays

AxisRule = tuple[int, ...]  # what one mesh axis does: a placement in each array


@dataclass(frozen=True)
class Kind:
    """A class of operations: which rules they have, and how much work they are.

    Args:
        sums: A mesh axis may shard a dim that the result lacks, and leaves partial sums.
        passed_tags: Tags that the result has if all operands have them: a sum of addends is an addend.
        flops: Floating point operations per element of the space of all dims.
        rate: Share of the machine's rate of matrix products that they reach, 0 to 1.
        accesses: How often operands and result are read or written.
        backward: The work of the backward pass, as a multiple of the forward one's.
        saves_operands: The backward pass needs them.
    """

    sums: bool = False
    passed_tags: tuple[int, ...] = ()
    flops: float = 0.0
    rate: float = 1.0
    accesses: float = 1.0
    backward: float = 1.0
    saves_operands: bool = False


KINDS: Mapping[str, Kind] = {
    # products and sums over dims; convolutions, with their windows whole
    "contraction": Kind(sums=True, flops=2.0, backward=2.0, saves_operands=True),
    # functions of elements; norms, softmax, cumulative and sorting ones with their dims whole;
    # random numbers
    "pointwise": Kind(accesses=1.5, backward=2.0, saves_operands=True),
    # sums of arrays, views, permutations, broadcasts; slices, concatenations, padding with their
    # dims whole
    "linear": Kind(sums=True, passed_tags=(SUM,)),
    # rows of a table by number; a shard of the rows gives zeros for the others
    "lookup": Kind(sums=True),
    # scores of queries and keys; the dim of the keys is whole; `flops` count a causal mask
    "attention": Kind(flops=2.0, rate=0.75, backward=2.5, saves_operands=True),
    # a sum of losses over all dims; logits are kept in float32 too
    "loss": Kind(sums=True, accesses=4.0, saves_operands=True),
    # one activation for several operations: moved once for all of them
    "share": Kind(passed_tags=(COPY,), accesses=0.0, saves_operands=True),
    # numbers made in place: constants, positions, masks
    "source": Kind(accesses=0.0),
    # the first array of a repeated block: the result of the block before
    "carry": Kind(accesses=0.0),
    # no rule is known: every device computes all of it
    "opaque": Kind(accesses=1.5, backward=2.0, saves_operands=True),
}


@api_boundary
@dataclass(frozen=True)
class Op:
    """An operation of the forward pass, with named dims: `b s c, f c -> b s f`.

    A dim has one length wherever it is. Results reach operands by position: a dim may have another
    name in the next operation.

    Args:
        name: Its name, which is the result's too; `*` stands for the number of a repeated block.
        text: The dims of operands and result, as in `"b s c, (g d) c -> b s (g d)"`. In parentheses
            are dims that are one dim of the array.
        operands: Names of operations, inputs and parameters, one for each operand in `text`.
        kind: Its class, one of `KINDS`.
        whole: Dims that no axis may shard.
        rules: They replace the rules of its class for an axis, each as in `axis_rules`.
        length_operands: Operands of which only lengths are read, by number. Their tags mean
            nothing: rules have replicas for all of them.
        times: How often it runs.
        again: In a repeated block, the operation that gives the operand of a `carry` from the
            second time on.
        starts: How often a `carry` takes its operand: once, but in a loop inside a repeated block
            once for each of these blocks.
        enters: The module with this operation as its first one: a rule of the module can move the
            first operand. None stands for its own name if it has a parameter, "" for no module.
        leaves: The module with this operation as its last one: a rule can move the result. None and
            "" are as for `enters`.
        flops: Floating point operations per element of the space of all dims, in place of its
            class's number.
        accesses: How often arrays are read or written, in place of its class's number.
        keeps: The operands that a backward pass needs, by number, the result's after the last one.
            None: all of them, if its class saves them.
        inside: In a chain of operations, the dims of arrays between them, after the result in
            `rules`.
        inner: Elements that the backward pass needs of arrays between them, per element of the
            space of all dims.
        calls: How many operations of the framework it is, as a chain of several.
        kernels: How many kernels it runs if no compiler fuses them, one for each operation but views.

    Raises:
        NotationError: The text is malformed, or names another number of operands or an unknown dim.
        PlanError: There is no such class.

    Examples:
        >>> op = Op("up", "b s c, f c -> b s f", ("norm", "up.weight"))
        >>> for rule in op.axis_rules[2:]:
        ...     print(op.text_of(rule))
        b s c | copy(x), f/x c -> b s f/x
        b s c/x, f c/x -> b s f | sum(x)
        b s c, f c -> b s f
    """

    name: str
    text: str
    operands: tuple[str, ...] = ()
    kind: str = "contraction"
    whole: Sequence[str] = ()
    rules: tuple[AxisRule, ...] | None = None
    length_operands: tuple[int, ...] = ()
    times: int = 1
    again: str = ""
    starts: int = 1
    enters: str | None = None
    leaves: str | None = None
    flops: float | None = None
    accesses: float | None = None
    keeps: tuple[int, ...] | None = None
    inside: tuple[str, ...] = ()
    inner: float = 0.0
    calls: int = 1
    kernels: int = 1

    def __post_init__(self) -> None:
        for field in ("operands", "whole"):
            value = getattr(self, field)
            object.__setattr__(self, field, (value,) if isinstance(value, str) else tuple(value))
        with located(f"operation {self.name}"):
            self._check()

    def _check(self) -> None:
        """Require a known class, a name for each operand, and whole dims that the text has.

        `Op("up", "b c, f c -> b f", ("x",))` has two operands and one name: a NotationError.
        `whole` are dims that no mesh axis may shard.
        """
        if self.kind not in KINDS:
            hint = f"{did_you_mean(self.kind, KINDS)}there are: {', '.join(KINDS)}"
            raise PlanError(f"no class {self.kind!r} of operations", hint=hint)
        n_operands = len(self.arrays) - 1
        if n_operands != len(self.operands):
            names = ", ".join(self.operands)
            reason = f"{n_operands} operands and {len(self.operands)} names: {names}"
            hint = "one name for each operand before the arrow"
            raise NotationError(reason, text=self.text, hint=hint)
        all_dims = dict.fromkeys(chain.from_iterable(self.dims))
        unknown = [dim for dim in self.whole if dim not in all_dims]
        if unknown:
            hint = f"dims: {' '.join(all_dims)}"
            raise NotationError(f"no dim {unknown[0]!r}", text=self.text, hint=hint)

    @cached_property
    def arrays(self) -> tuple[Layout, ...]:
        """The arrays of the operands, then of the result; several dims may be one, as `(g d)`."""
        return parse_arrays(self.text)

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of the operands, then the result's, which is the operation's."""
        return (*self.operands, self.name)

    @cached_property
    def all_arrays(self) -> tuple[Layout, ...]:
        """The arrays of the operands, then of the result, then those `inside` a chain."""
        between = [parse_arrays(f"{ARROW} {text}")[0] for text in self.inside]
        return (*self.arrays, *between)

    @cached_property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The single dims of each array, operands first."""
        return tuple(dims_of(array) for array in self.arrays)

    @property
    def work(self) -> Kind:
        """Its class with the operation's own numbers."""
        work = KINDS[self.kind]
        if self.flops is not None:
            work = replace(work, flops=self.flops)
        if self.accesses is not None:
            work = replace(work, accesses=self.accesses)
        return work

    @property
    def saved_operands(self) -> Sequence[int]:
        """The operands that the backward pass needs, by number; the result's is after them."""
        if self.keeps is not None:
            return self.keeps
        return range(len(self.operands)) if KINDS[self.kind].saves_operands else ()

    @cached_property
    def axis_rules(self) -> tuple[AxisRule, ...]:
        """The ways in which one mesh axis may take part: a placement in each of `all_arrays`.

        A placement is the number of the dim that the axis shards, or a negative tag: REPLICAS
        (equal blocks), SUM (addends), COPY (equal blocks whose gradients are addends). For
        `b c, f c -> b f` the rules are (0, COPY, 0) to shard b, (COPY, 0, 1) to shard f,
        (1, 1, SUM) to shard c; the last one is idle, with REPLICAS everywhere.
        """
        idle = (REPLICAS,) * len(self.all_arrays)
        if self.rules is not None:
            return (*self.rules, idle)
        if self.kind == "opaque":
            return (idle,)
        rules: list[AxisRule] = []
        *operands, result = self.dims
        kind = KINDS[self.kind]
        # An operation that sums, such as a matrix product, may be sharded along a dim that its
        # result lacks: results on devices are then addends.
        candidates = chain(result, *operands) if kind.sums else result
        for dim in dict.fromkeys(candidates):  # each once, in order
            if dim not in self.whole:
                rules.append(self._rule_that_shards(dim))
        for tag in kind.passed_tags:
            # Linear operations, for example, turn addends into addends: all operands and the result
            # have the same tag.
            rules.append((tag,) * len(self.dims))
        return (*rules, idle)

    @cached_property
    def dims_sharded_together(self) -> list[Mapping[tuple[str, int], str]]:
        """The dims that each rule shards: {(array, number of its dim): the single dim that is cut}.

        All of them have to be cut into the same units. The rule that shards f of
        `x: b c, w: f c -> y: b f` has {("w", 0): "f", ("y", 1): "f"}. {} stands for a rule that
        cannot shard by units.
        """
        return [self._dims_sharded_by(rule) for rule in self.axis_rules]

    def _dims_sharded_by(self, rule: AxisRule) -> Mapping[tuple[str, int], str]:
        """Find the dims that one rule shards, for `dims_sharded_together`."""
        sharded: dict[tuple[str, int], str] = {}
        for i, array in enumerate(self.arrays):
            if rule[i] < 0:
                continue
            # At which number among the single dims each dim of the array begins.
            n_single = [len(names_of_dim(dim)) for dim in array.dims]
            starts = list(accumulate(n_single, initial=0))
            if rule[i] not in starts:
                return {}  # k of `(h k)`: units are of h
            rule_without_array = (*rule[:i], REPLICAS, *rule[i + 1 :])
            if rule_without_array in self.axis_rules:
                return {}  # only lengths of this array are read: its blocks may be any
            sharded[self.array_names[i], starts.index(rule[i])] = self.dims[i][rule[i]]
        return sharded

    def _rule_that_shards(self, dim: str) -> AxisRule:
        """Return the rule that shards a dim wherever it is.

        Operands without it are copies: each device uses them for a part of the work, so that their
        gradients are partial sums. A result without it is a partial sum.
        """
        tags = [COPY] * len(self.operands) + [SUM]
        placed = zip(self.dims, tags, strict=True)
        return tuple(dims.index(dim) if dim in dims else tag for dims, tag in placed)

    def text_of(self, rule: Sequence[int]) -> str:
        """Write a rule as a contraction over the axis `x`: `b c/x, f c/x -> b f | sum(x)`."""
        texts = []
        for placement, dims in zip(rule, self.dims, strict=False):
            texts.append(str(layout_of([placement], dims, "x")))
        *operands, result = texts
        return f"{', '.join(operands)} {ARROW} {result}".strip()


def renamed(op: Op, names: Mapping[str, str]) -> Op:
    """Rename an operation, its operands and what it takes `again`; names that are not in `names` stay."""
    if names.keys().isdisjoint((op.name, op.again, *op.operands)):
        return op
    operands = tuple(names.get(name, name) for name in op.operands)
    again = names.get(op.again, op.again)
    return replace(op, name=names.get(op.name, op.name), operands=operands, again=again)
