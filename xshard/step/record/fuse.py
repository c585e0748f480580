"""Chains of operations as one operation each.

`x -> cast -> norm` becomes `x -> norm`. A rule of the fused operation is a rule of each of its
operations that agree on the arrays which they share. *Free* operations (views, casts and numbers
made in place) join a neighbour; functions of elements join each other, and attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple

from xshard.layout import Layout
from xshard.notation.parser import names_of_dim
from xshard.step.record.arrays import COPY, REPLICAS, SUM, space_of, write_arrays
from xshard.step.record.op import AxisRule, Op
from xshard.step.record.training_step import TrainingStep

LIGHT = ("pointwise", "linear", "source")  # classes that may join each other
APART = ("carry", "share", "opaque")  # classes that join nothing


def fuse_operations(step: TrainingStep) -> TrainingStep:
    """Fuse chains of light operations of a training step, so that fewer have to be sharded.

    `x -> cast -> norm -> up` becomes `x -> norm -> up`: the view, cast or function of elements
    goes into the operation that uses its result, which keeps its name. So a search has fewer
    operations, and no choice of layout where nothing is worth moving.

    Nothing is fused across a point where a rule of a module can move an array to or from a
    product. A chain of light operations counts as one kernel: it reads its operands and writes its
    result.
    """
    ops = {op.name: _with_needed_operands(op, step) for op in step.ops}
    # A fused operation may fit another neighbour. So passes over all operations are repeated until
    # one fuses nothing.
    has_fused = True
    while has_fused:
        has_fused = False
        for name in list(ops):
            has_fused |= _fuse_makers_into(ops, name, step)
    first_uses: dict[str, str] = {}
    for op in ops.values():
        for name, array in zip(op.operands, op.arrays, strict=False):
            first_uses.setdefault(name, str(array))
    # A parameter has the dims of the first operation that uses it.
    parameters = {name: first_uses[name] for name in step.parameters}
    return replace(step, ops=tuple(ops.values()), parameters=parameters)


def _fuse_makers_into(ops: dict[str, Op], name: str, step: TrainingStep) -> bool:
    """Fuse into operation `name` the operations that make its operands; change `ops` in place.

    `x -> cast -> norm`, with the name "norm", becomes `x -> norm`: the fused operation replaces
    `ops["norm"]`, and "cast" is deleted if nothing else uses it. Deleting is safe while a caller
    walks over a list of the names: makers come before their users, so that it has passed them.

    ops: by name, in the order in which they run. Returns whether anything was fused.
    """
    has_fused = False
    operand_index = 0
    while operand_index < len(ops[name].operands):
        maker = ops.get(ops[name].operands[operand_index])  # None: an input or a parameter
        if maker is None or not _may_fuse(ops, maker, ops[name], operand_index, step):
            operand_index += 1
            continue
        # The operands of the maker take the place of its result: look at the same index again.
        ops[name] = _FusedPair(maker, ops[name], operand_index, step).as_one_op()
        has_fused = True
        if not _count_users(ops, maker):
            del ops[maker.name]
    return has_fused


def _with_needed_operands(op: Op, step: TrainingStep) -> Op:
    """Narrow what an operation saves for its backward pass to the arrays that a gradient needs.

    `y = x * mask`, where only x has a gradient, saves the mask and not x: the gradient of x is that
    of y times the mask. The result has `keeps=(1,)`. In that field an array is a number: 0 and 1 are
    the operands x and mask, and the number after the last operand, 2, is the operation's result y.
    """
    result = len(op.operands)  # its number
    with_gradient = {i for i, name in enumerate(op.operands) if name in step.differentiable}
    needed = []
    for i in op.saved_operands:
        if i in op.length_operands:  # its values are never read
            continue
        if i == result and step.is_saved(op.name):
            continue  # counted once: an operation that uses the result saves it already
        gradients = with_gradient  # those that are computed from array i
        if len(op.operands) > 1:
            # All operations of several operands are taken for products. There a factor is needed
            # for the gradients of the other factors, and not for its own.
            gradients = with_gradient - {i}
        if gradients:
            needed.append(i)
    return replace(op, keeps=tuple(needed))


def _count_users(ops: Mapping[str, Op], op: Op) -> int:
    """Count the operations that use the result of `op`."""
    return sum(op.name in (*user.operands, user.again) for user in ops.values())


def _is_free(op: Op) -> bool:
    """Tell whether an operation is a view, a cast or numbers made in place."""
    return op.kind in LIGHT and op.work.accesses == 0


def _count_kernels(op: Op) -> int:
    """Count the kernels that an operation runs if no compiler fuses them: views run none."""
    return 0 if _is_free(op) else op.kernels


def _may_fuse(
    ops: Mapping[str, Op], first: Op, second: Op, operand_index: int, step: TrainingStep
) -> bool:
    """Tell whether `first` may be fused into `second`, which uses its result.

    In `x -> cast -> norm` the cast is first, and the norm second. After fusing, the array between
    them can no longer be moved to another layout: it must not be one that a module's layout rule
    moves. And no work may be done twice. Free operations (views, casts, constants) are no work:
    they may be fused into several users, and be computed again in each.

    ops: all operations by name. operand_index: which operand of `second` the array is.
    """
    if first.times != second.times or first.kind in APART or second.kind in APART:
        return False  # layers that run another number of times, and some kinds, stay apart
    has_one_user = _count_users(ops, first) == 1
    is_movable = _is_movable_between(first, second, operand_index, step)
    if _is_free(first):
        # An operation that begins a module carries the rule for the module's input. Computed again
        # in each of several users, it would give this one rule several arrays to move.
        may_be_computed_again = step.moves_anywhere or not step.entered_module(first)
        return not is_movable and (has_one_user or may_be_computed_again)
    if not has_one_user:
        return False  # real work would be done twice
    if _is_free(second):
        return not is_movable and not _widens(first, second, step)
    # Both do work: functions of elements can run as one kernel.
    return _may_be_one_kernel(first, second, is_movable, step)


def _widens(first: Op, second: Op, step: TrainingStep) -> bool:
    """Tell whether an operation broadcasts the result of another, as (8,) -> (4, 8).

    It is not fused into what makes the small array: that is cheaper to move than the large one. It
    may join the operation that follows.
    """
    elements_before = space_of(first.arrays[-1:], step.lengths)
    return space_of(second.arrays[-1:], step.lengths) > elements_before


def _may_be_one_kernel(first: Op, second: Op, is_movable: bool, step: TrainingStep) -> bool:
    """Tell whether `first` and `second` can run as one kernel, as functions of elements can.

    `second` may also be an attention, which computes such a function of its operands on the way.
    is_movable: a rule of a module can move the array between both.
    """
    takes_elements = LIGHT if is_movable else (*LIGHT, "attention")
    if first.kind not in LIGHT or second.kind not in takes_elements:
        return False
    return step.moves_anywhere or not _are_apart(first, second, is_movable, step)


def _is_movable_between(first: Op, second: Op, operand_index: int, step: TrainingStep) -> bool:
    """Tell whether a rule of a module can move the array between two operations.

    It can if the array is the first operand of a module, which `second` begins, or the result of
    one, which `first` ends. Where arrays move anywhere, rules of modules play no part.
    """
    if step.moves_anywhere:
        return False
    if step.left_module(first):
        return True
    return operand_index == 0 and bool(step.entered_module(second))


def _are_apart(first: Op, second: Op, is_movable: bool, step: TrainingStep) -> bool:
    """Tell whether two operations are of modules with parameters of their own, a rule for each.

    A module without an input, such as a function of its parameters, stays apart, for it can have no
    rule. is_movable: a rule can move the array between both.
    """
    first_modules = _modules_of_parameters(first, step)
    second_modules = _modules_of_parameters(second, step)
    if first_modules and second_modules:
        return first_modules != second_modules
    # A rule of a module is for its first operand: `first` has a parameter there, and no input.
    begins_with_parameter = bool(first.operands) and first.operands[0] in step.parameters
    return is_movable and begins_with_parameter


def _modules_of_parameters(op: Op, step: TrainingStep) -> set[str]:
    """Name the modules that have the parameters of an operation: `up.weight` -> `up`."""
    return {name.rpartition(".")[0] for name in op.operands if name in step.parameters}


class Span(NamedTuple):
    """The place of a single dim in an array: in dim number `dim`, between two products of lengths.

    In `b (g d)`, where g has length 4 and d 8, g is Span(1, 1, 4) and d is Span(1, 4, 32). Single
    dims of one array in two notations are parts of each other if their spans overlap.
    """

    dim: int
    low: int
    high: int

    def overlaps(self, other: Span) -> bool:
        """Tell whether two single dims have a part of the array's dim in common."""
        return self.dim == other.dim and self.low < other.high and other.low < self.high


class HiddenDim(NamedTuple):
    """A dim that only an array between two operations has: the array's number, the dim's number there."""

    array: int
    dim: int


class Restriction(NamedTuple):
    """A merged dim that no array shows any more, and how each rule shards it.

    Attributes:
        text: The dim, as `(g d)`.
        factor_by_rule: For each rule 0 if it shards g, 1 if it shards d, REPLICAS for neither.
    """

    text: str
    factor_by_rule: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _FusedPair:
    """Two operations that become one; the result of `first` is an operand of `second`.

    The arrays of both are numbered, as in `arrays`. For `first` = `x, w -> h` and `second` =
    `h, v -> y` they are 0 x, 1 w, 2 h as it is made (`first_result`), 3 h as it is used
    (`second_start` + `operand_index`), 4 v, 5 y (`second_result`). Arrays inside an operation that
    is itself a fused chain come after its result. `i` and `j` stand for such numbers. A rule for an
    axis has a placement for each of them.
    """

    first: Op
    second: Op
    operand_index: int
    step: TrainingStep

    @cached_property
    def arrays(self) -> list[Layout]:
        """All arrays of both operations; other attributes name them by their position here."""
        return [*self.first.all_arrays, *self.second.all_arrays]

    @cached_property
    def spans(self) -> list[list[Span]]:
        """The spans of the single dims of each array."""
        return [_spans(array, self.step.lengths) for array in self.arrays]

    @property
    def first_result(self) -> int:
        """The number of the first operation's result."""
        return len(self.first.operands)

    @property
    def second_start(self) -> int:
        """The number of the second operation's first operand."""
        return len(self.first.all_arrays)

    @property
    def second_result(self) -> int:
        """The number of the result."""
        return self.second_start + len(self.second.operands)

    @cached_property
    def length_arrays(self) -> set[int]:
        """The numbers of operands of which only lengths are read: tags mean nothing there."""
        length_arrays = {*self.first.length_operands}
        length_arrays.update(self.second_start + i for i in self.second.length_operands)
        return length_arrays

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of operands, by number."""
        names = dict(enumerate(self.first.operands))
        return names | dict(enumerate(self.second.operands, self.second_start))

    @cached_property
    def first_entered(self) -> str:
        """The module that begins with the first operation; "" for none."""
        return self.step.entered_module(self.first)

    @cached_property
    def second_entered(self) -> str:
        """The module that begins with the second operation; "" for none."""
        return self.step.entered_module(self.second)

    @property
    def insertion_index(self) -> int:
        """At which index the operands of the first operation are put among those of the second.

        It is where the first one's result was, or 0 if they enter a module: its rule is for operand
        0.
        """
        return 0 if self.first_entered and not self.second_entered else self.operand_index

    @cached_property
    def all_operand_arrays(self) -> list[int]:
        """The numbers of the operands in their order; two may have one name."""
        operands = list(range(self.second_start, self.second_result))
        del operands[self.operand_index]  # the array in between
        operands[self.insertion_index : self.insertion_index] = range(self.first_result)
        return operands

    @cached_property
    def equal_pairs(self) -> list[tuple[int, int]]:
        """The pairs of numbers that are one array: the one in between, and operands of one name."""
        pairs = [(self.first_result, self.second_start + self.operand_index)]
        for i, j in combinations(self.all_operand_arrays, 2):
            if self.names[i] == self.names[j]:
                pairs.append((i, j))
        return pairs

    @cached_property
    def operand_arrays(self) -> list[int]:
        """The numbers of the operands in their order, one for each name."""
        repeated = {j for _, j in self.equal_pairs}
        return [i for i in self.all_operand_arrays if i not in repeated]

    @cached_property
    def visible_arrays(self) -> list[int]:
        """The numbers of the arrays that the fused operation has: its operands and its result."""
        return [*self.operand_arrays, self.second_result]

    @cached_property
    def rules(self) -> list[AxisRule]:
        """The ways in which one mesh axis may take part in both operations.

        A rule has a placement for every array: the dim that the axis shards there, or a tag. It is a
        rule of the first operation, followed by one of the second, if both do the same to the array
        in between, and to operands of one name.
        """
        # The second operation may take copies of a result whose own rules know only replicas.
        first_rules = (*self.first.axis_rules, *self._copying_rules())
        rules = [
            (*first_rule, *second_rule)
            for first_rule, second_rule in product(first_rules, self.second.axis_rules)
        ]
        for i, j in self.equal_pairs:
            agreeing = self._agreeing_placements(i, j)
            rules = [rule for rule in rules if (rule[i], rule[j]) in agreeing]
        return [self._with_tags_of_values(rule) for rule in rules]

    def _with_tags_of_values(self, rule: AxisRule) -> AxisRule:
        """Give arrays of which only lengths are read the tags of equal arrays whose values are read."""
        placements = list(rule)
        for i, j in self.equal_pairs:
            if i in self.length_arrays and rule[i] < 0:
                placements[i] = rule[j]
        return tuple(placements)

    def _agreeing_placements(self, i: int, j: int) -> set[tuple[int, int]]:
        """List pairs of placements of arrays i and j that can go together, as both are one array.

        Both have the same tag (replicas, sums, copies), or shard dims that overlap. If array i is
        `(g d)` and array j is c: (0, 0) and (1, 0), as g and d both are a part of c.
        """
        tags = (REPLICAS, SUM, COPY)
        agreeing = {(tag, tag) for tag in tags}
        if i in self.length_arrays or j in self.length_arrays:
            agreeing.update(product(tags, tags))  # where no value is read, any tag goes
        for number_in_i, span_in_i in enumerate(self.spans[i]):
            for number_in_j, span_in_j in enumerate(self.spans[j]):
                if span_in_i.overlaps(span_in_j):
                    agreeing.add((number_in_i, number_in_j))
        return agreeing

    def _copying_rules(self) -> list[AxisRule]:
        """List further rules for the first operation, under which an axis holds copies of its result.

        A placement COPY means: the devices of the axis have equal blocks, and their gradients are
        partial sums. (Under REPLICAS the gradients are equal, too.) An operation on copies of all
        operands gives a copy, and its gradient is linear in the partial sums: for `x, w -> h` the
        rule is (COPY, COPY, COPY), a placement for each array of the operation.
        """
        # The second operation's arrays begin where the first one's end, so that this is their number.
        copies = [COPY] * self.second_start
        for operand in self.first.length_operands:
            copies[operand] = REPLICAS
        rules = [tuple(copies)]
        if self.first.kind == "source":
            # Constants have no gradient, so that replicas of them are copies, too. Rules that leave
            # the result replicated get a twin with COPY in that place.
            for rule in self.first.axis_rules:
                if rule[self.first_result] == REPLICAS:
                    placements = list(rule)
                    placements[self.first_result] = COPY
                    rules.append(tuple(placements))
        return rules

    @cached_property
    def saved_arrays(self) -> set[int]:
        """The numbers of the arrays that the backward pass needs, the lowest one of each name."""
        saved = {*self.first.saved_operands}
        saved.update(self.second_start + i for i in self.second.saved_operands)
        for i, j in self.equal_pairs:
            if j in saved:
                saved.add(i)  # the lower number is the visible one
        if self.first_result in saved:  # it is not visible, but a view of an array is that array
            if _is_free(self.first):
                saved.update(range(self.first_result))
            elif _is_free(self.second):
                saved.add(self.second_result)
        return saved

    @property
    def inner_elements(self) -> int:
        """Elements of the array in between if the backward pass needs it, and it is no view."""
        is_view = _is_free(self.first) or _is_free(self.second)
        if self.first_result not in self.saved_arrays or is_view:
            return 0
        return space_of(self.first.arrays[-1:], self.step.lengths)

    @cached_property
    def restrictions(self) -> list[Restriction]:
        """Merged dims that fusing hides, each with the factor of it that every rule shards.

        A merged dim `(g d)` is one dim of an array with two names. Its blocks are contiguous, so that
        axes can shard d only after g. If the fused operation shows the dim as c alone, its text no
        longer says so: `(g d)` is listed here.
        """
        restrictions: dict[Restriction, None] = {}  # a set that keeps its order
        for hidden in self._hidden_dims():
            factor_by_rule = self._sharded_factors(hidden)
            if max(factor_by_rule) >= 0:  # else no rule shards the dim: it restricts nothing
                text = self.arrays[hidden.array].dims[hidden.dim].text
                restrictions[Restriction(text, factor_by_rule)] = None
        return list(restrictions)

    def _hidden_dims(self) -> list[HiddenDim]:
        """List the dims for `restrictions`.

        If `h` is made as `b (g d)`, array 2, and used as `b c`, array 3: `(g d)`, dim 1 of array 2.
        """
        # An operation that is itself a fused chain has the dims that it hides after its result, each
        # as an array of this one dim.
        inside_arrays = (
            *range(self.first_result + 1, self.second_start),
            *range(self.second_result + 1, len(self.arrays)),
        )
        hidden_dims = [HiddenDim(i, dim=0) for i in inside_arrays]
        # The arrays of a pair are one array under two names. Either may have a merged dim that is
        # another factoring, or none, of the dim in the other: it is lost if only that one is shown.
        reversed_pairs = [(j, i) for i, j in self.equal_pairs]
        for i, j in (*self.equal_pairs, *reversed_pairs):
            for dim in range(len(self.arrays[i].dims)):
                spans = _spans_of_dim(self.spans[i], dim)
                if len(spans) > 1 and spans != _spans_of_dim(self.spans[j], dim):
                    hidden_dims.append(HiddenDim(i, dim))
        return hidden_dims

    def _sharded_factors(self, hidden: HiddenDim) -> tuple[int, ...]:
        """Return for each rule which factor of one dim it shards: 0 for g in `(g d)`, 1 for d.

        REPLICAS if the rule shards none of them.
        """
        # Rules shard single dims, which have numbers of their own: in `b (g d)` g is 1 and d is 2.
        dims_of_single_dims = [span.dim for span in self.spans[hidden.array]]
        first_factor = dims_of_single_dims.index(hidden.dim)
        n_factors = dims_of_single_dims.count(hidden.dim)
        factor_of_placement = {first_factor + i: i for i in range(n_factors)}
        return tuple(factor_of_placement.get(rule[hidden.array], REPLICAS) for rule in self.rules)

    def as_one_op(self) -> Op:
        """Fuse the two operations into one, with the name and the result of the second.

        `x -> cast` and `cast, w -> norm` give `x, w -> norm`: operands of the first operation stand
        where its result stood. The array between them disappears from the text.
        """
        kind, accesses = self._kind_and_accesses()
        flops, inner = self._flops_and_inner()
        return Op(
            name=self.second.name,
            text=write_arrays([str(self.arrays[i]) for i in self.visible_arrays]),
            operands=tuple(self.names[i] for i in self.operand_arrays),
            kind=kind,
            rules=self._rules_of_visible(),
            length_operands=self._visible_length_operands(),
            times=self.second.times,
            enters=self._enters(),
            leaves=self.step.left_module(self.second),
            keeps=self._visible_saved_arrays(),
            flops=flops,
            accesses=accesses,
            inside=tuple(restriction.text for restriction in self.restrictions),
            inner=inner,
            calls=self.first.calls + self.second.calls,
            kernels=_count_kernels(self.first) + _count_kernels(self.second),
        )

    def _visible_saved_arrays(self) -> tuple[int, ...]:
        """Return what the backward pass needs, by position among operands and result."""
        visible = enumerate(self.visible_arrays)
        return tuple(position for position, i in visible if i in self.saved_arrays)

    def _visible_length_operands(self) -> tuple[int, ...]:
        """Return the positions of operands of which neither operation reads values."""
        read = {i for i in self.all_operand_arrays if i not in self.length_arrays}
        read.update(i for i, j in self.equal_pairs if j in read)
        return tuple(position for position, i in enumerate(self.operand_arrays) if i not in read)

    def _rules_of_visible(self) -> tuple[AxisRule, ...]:
        """Shorten each rule to the arrays that the fused operation has, then to hidden dims.

        A placement for each of `visible_arrays`, then one for each of `restrictions`.
        """
        rules: dict[AxisRule, None] = {}  # in order, each once
        for number, rule in enumerate(self.rules):
            in_visible = [rule[i] for i in self.visible_arrays]
            in_hidden_dims = [hidden.factor_by_rule[number] for hidden in self.restrictions]
            rules[*in_visible, *in_hidden_dims] = None
        # `Op.axis_rules` adds the idle rule, replicas everywhere.
        return tuple(rule for rule in rules if set(rule) != {REPLICAS})

    def _flops_and_inner(self) -> tuple[float, float]:
        """Return `Op.flops` and `Op.inner`: floating point operations, and hidden elements saved.

        Both are per element of the space of all dims of the fused operation. The space of each of
        the two may be smaller: so they are added up in absolute numbers.
        """
        lengths = self.step.lengths
        space = space_of([self.arrays[i] for i in self.visible_arrays], lengths)
        first_space = space_of(self.first.arrays, lengths)
        second_space = space_of(self.second.arrays, lengths)
        flops = self.first.work.flops * first_space + self.second.work.flops * second_space
        inner_elements = self.first.inner * first_space + self.second.inner * second_space
        inner_elements += self.inner_elements
        return flops / space, inner_elements / space

    def _kind_and_accesses(self) -> tuple[str, float | None]:
        """Return the class of the heavier operation, and how often its arrays are accessed."""
        heavier = max(self.second, self.first, key=_weight)  # the second one of equals
        if heavier.kind not in LIGHT:
            return heavier.kind, heavier.accesses
        if not _is_free(self.first) and not _is_free(self.second):
            return heavier.kind, None  # one kernel: as its class says
        if not self.operand_arrays:
            return "source", 0.0
        return heavier.kind, heavier.accesses

    def _enters(self) -> str:
        """Name the module whose rule can move the first operand."""
        if self.insertion_index == 0 and self.first_entered:
            return self.first_entered
        # In place of the array in between stands an operand of the first operation, without a module.
        return "" if self.operand_index == 0 else self.second_entered


def _weight(op: Op) -> tuple[bool, bool, bool]:
    """Rank operations by work: products, then functions of elements, then sums, then views."""
    return op.kind not in LIGHT, not _is_free(op), op.kind == "pointwise"


def _spans(array: Layout, lengths: Mapping[str, int]) -> list[Span]:
    """Find the span of each single dim of an array."""
    spans = []
    for number, dim in enumerate(array.dims):
        low = 1
        for name in names_of_dim(dim):
            high = low * lengths[name]
            spans.append(Span(number, low, high))
            low = high
    return spans


def _spans_of_dim(spans: Sequence[Span], dim: int) -> list[Span]:
    """Select the spans of the single dims in one dim of an array."""
    return [span for span in spans if span.dim == dim]
