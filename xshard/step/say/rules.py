"""An assignment as rules that `parallelize` and `place` take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xshard.caches import layout_cache
from xshard.layout import Layout
from xshard.models import ActivationRule, layout_inside
from xshard.notation.parser import ARROW
from xshard.rules import Rules
from xshard.step.price.edges import Edge
from xshard.step.price.nodes import Gathering
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import layout_of
from xshard.step.record.op import Op
from xshard.step.record.repeat import in_first_block

Texts = dict[str, str]  # rules by names of parameters or modules
Known = dict[str, Layout]  # by module, activations inside it: all dims that have names there


class StepRules(NamedTuple):
    """Rules of a step, as `xt.parallelize` takes them.

    Args:
        parameters: Layouts of parameters in storage and in use.
        inputs: Layouts of activations on the way into modules.
        outputs: Layouts of activations on the way out of modules.
        once: A pattern of the parameters that are gathered once per step, not for each use; "" for
            none.
    """

    parameters: Rules
    inputs: Rules
    outputs: Rules
    once: str = ""


def written(problem: StepProblem, assignment: Sequence[int]) -> StepRules:
    """Write a plan that a search has found as rules for `parallelize`.

    The plan, an assignment, is the number of an option for each node: a way to shard a parameter,
    an input or an operation. Rules say the same by names of parameters and modules, such as
    `{"layers.*.{up,gate}.weight": "o/tp/dp i -> o/tp i"}`; names with the same layouts have one
    pattern.
    """
    # All activations first: rules of parameters depend on what is around their modules.
    activations = _ActivationRules(problem, assignment)
    parameters = Texts()
    gathered_once = Texts()  # only its names matter
    for edge in problem.edges:
        source = problem.nodes[edge.source]
        if source.gathering is None:
            continue  # no parameter
        stored, used = ends_of(problem, edge, assignment)
        if source.name not in parameters:  # the first use decides
            parameters[source.name] = activations.parameter_rule(source.name, stored, used)
        gathering = source.gathering[assignment[edge.source]]
        # A parameter that is used as it is stored is not gathered.
        if stored.dims != used.dims and gathering == Gathering.PER_STEP:
            gathered_once[source.name] = ""
    return StepRules(
        parameters=Rules(_merged(parameters)),
        inputs=activations.input_rules(),
        outputs=Rules(_merged(activations.outputs)),
        once="|".join(_merged(gathered_once)),
    )


class _ActivationRules:
    """The rules of activations: what moves where, and which layouts are known inside modules.

    A rule names the axes that it is about; other axes stay as they are around the module, by names
    of dims. So rules need to know what is around them, and modules are gone through in the order of
    the forward pass.
    """

    def __init__(self, problem: StepProblem, assignment: Sequence[int]) -> None:
        self.step = problem.step
        self.entered = Texts()  # rules on the way into modules
        self.outputs = Texts()  # rules on the way out of them
        self.arriving = dict[str, Layout]()  # inputs, as they arrive
        self.known = Known({"": Layout(())})
        edges = [e for e in problem.edges if problem.nodes[e.source].gathering is None]
        n_inputs = len(self.step.inputs)
        for edge in sorted(edges, key=lambda edge: edge.source >= n_inputs):  # inputs are first
            source = problem.nodes[edge.source].name
            op = self.step.by_name[problem.nodes[edge.user].name]
            self._add(edge, source, op, *ends_of(problem, edge, assignment))

    def _add(self, edge: Edge, source: str, op: Op, src: Layout, dst: Layout) -> None:
        """Write the rules that one array needs on its way to the operation that uses it.

        If it moves from `b s` to `b s/tp` where it enters the module `up`, the rule of the inputs
        of `up` is `b s -> b s/tp`; on the way out of a module it is a rule of outputs. An array
        that does not move may still need a rule that says what a module gets.

        Args:
            edge: The move.
            source: The name of the array.
            op: The operation that takes it.
            src: The layout in which it is made.
            dst: The layout in which it is used.
        """
        if source in self.step.inputs:
            # The first use decides how an input arrives: its tags are the use's if nothing moves.
            first_use = dst if dst.dims == src.dims else src
            src = self.arriving.setdefault(source, first_use)
            self.known[""] = _inside(src, src, self.known[""])
        src, dst = self._with_free_names(edge.place, src, dst)
        if edge.enters:
            self._enter(edge.place, src, dst)
        else:
            if edge.place and src != dst:
                self.outputs[edge.place] = _text(src, dst)
            # If the array moves, it has done so before this module, which may need a rule all the
            # same: one that says only what it gets.
            module = self._module_that_varies_more(source, op, dst)
            self._enter(module, dst, dst)
        maker = self.step.by_name.get(source)
        if maker is not None and maker.kind == "lookup" and src.tagged("sum"):
            # A lookup in a table whose rows are sharded gives partial sums. Its module needs a rule
            # of its output that says so, also where they are added up later.
            self.outputs.setdefault(self.step.module(maker, left=True), _text(src, src))

    def _with_free_names(self, place: str, src: Layout, dst: Layout) -> tuple[Layout, Layout]:
        """Rename dims of a rule that would otherwise stay sharded as they are around the module.

        In a rule, axes that it does not name stay as they are around the module, by names of dims.
        Around the module s is sharded over tp, and a rule `b s -> b/dp s` says nothing about tp: s
        would stay sharded. It is meant to be whole, so that it is another dim there:
        `b s_ -> b/dp s_`.

        place: the module or array whose rule it is. src, dst: the layouts before and after the
        move.
        """
        named_axes = {*src.axes, *dst.axes}
        staying = set[str]()
        for layout in self._around(place):
            staying |= {dim.name for dim in layout.dims if not named_axes.issuperset(dim.axes)}
        if not staying:
            return src, dst
        names = [f"{name}_" if name in staying else name for name in src.names]
        dst_names = [f"{name}_" if name in staying else name for name in dst.names]
        return src.with_names(names), dst.with_names(dst_names)

    def _module_that_varies_more(self, source: str, op: Op, used: Layout) -> str:
        """Name an operation's module if it needs a rule although nothing moves; else "".

        It does if activations in it are sharded or sums along more axes than around it. Along an
        axis over which activations are sharded or sums, the devices' gradients of the module's
        parameters differ and have to be added up: the rule says so.

        source: an array that the operation takes; only its first operand counts, for the module's
        input. used: the layout of the array there.
        """
        if self.step.moves_anywhere or op.operands[0] != source:
            return ""
        parameters = [name for name in op.operands if name in self.step.parameters]
        if not parameters:
            return ""
        module = parameters[0].rpartition(".")[0]  # `layers.0.up.weight` -> `layers.0.up`
        for layout in self._around(module):
            if not {*used.axes} <= {*layout.axes}:
                return module
        return ""

    def _enter(self, module: str, src: Layout, dst: Layout) -> None:
        """Add a rule on the way into a module; "" stands for no module."""
        if not module or module in self.entered:
            return  # the first operand decides
        around = self._around(module)
        self.entered[module] = _text(src, dst)
        within = [_inside(src, dst, layout) for layout in around]
        varies_along = [{*layout.axes} for layout in within]
        # A rule that changes nothing is left out later; the module is as what is around it.
        if src != dst or varies_along != [{*layout.axes} for layout in around]:
            self.known[module] = within[0]

    def _around(self, path: str) -> list[Layout]:
        """Return the activations around a module, and around it in the first of repeated blocks."""
        paths = dict.fromkeys((path, in_first_block(path)))
        return [self._nearest(each) for each in paths]

    def _nearest(self, path: str) -> Layout:
        """Return the activations in the last module with a rule that has a path inside it."""
        for module in reversed(self.known):
            if not module or f"{path}.".startswith(f"{module}."):
                return self.known[module]
        return self.known[""]

    def input_rules(self) -> Rules:
        """Write the rules for inputs of the model and of modules, special ones first.

        Equal layers have one rule, `layers.*.up`. What the first of them takes comes from
        elsewhere, so that it has a rule of its own, `layers.0.up`. That one is left out if both are
        the same. Otherwise it is before the other, for the first pattern that fits decides. The
        name "" is the model itself.
        """
        patterns = [name for name in self.entered if "*" in name or "{" in name]
        pattern_of = {in_first_block(name): name for name in patterns}
        # `known` has the modules whose rules change something; other rules are not needed. But if
        # the rule for all layers is needed, so is that of the first layer, even if it changes
        # nothing: without it the rule for all would be applied to the first layer, too.
        needed = Texts()
        for name, text in self.entered.items():
            if name in self.known or pattern_of.get(name) in self.known:
                needed[name] = text
        of_first_blocks = Texts()
        others = Texts()
        for name, text in needed.items():
            pattern = pattern_of.get(name)  # None if it is no module of a first block
            if pattern not in needed:
                others[name] = text
            elif needed[pattern] != text:
                of_first_blocks[name] = text
        rules: dict[Any, Any] = {"": self._root_rule()}
        return Rules(rules | _merged(of_first_blocks) | _merged(others))

    def _root_rule(self) -> str | Texts:
        """Write the rule of the model's inputs; several have one each, by name."""
        rules = Texts()
        for name, arriving in self.arriving.items():
            rules[name] = _text(Layout.parse(" ".join(arriving.names)), arriving)
        if len(rules) > 1:
            return rules
        return next(iter(rules.values())) if rules else "..."

    def parameter_rule(self, name: str, stored: Layout, used: Layout) -> str:
        """Write the rule of a parameter: how it is stored, and how its operation uses it.

        Stored as `o/tp/dp i` and used as `o/tp i | copy(dp)` it is `o/tp/dp i -> o/tp i`: by
        default, `parallelize` adds up gradients along axes over which activations around the
        module vary (are sharded or sums), here dp. If the operation does the same work on all
        devices of such an axis, all of them have the whole gradient. The sum would be too large,
        hence `| mean(dp)`.

        Args:
            name: The parameter; tied ones have several names between bars.
            stored: Its layout in storage.
            used: Its layout in the operation that uses it.
        """
        varying = set[str]()  # axes over which activations around the module are sharded or sums
        for tied_name in name.split("|"):
            for layout in self._around(tied_name):
                varying.update(layout.axes)
        # The parameter is a plain replica along these: not sharded, no sum, no copy.
        same_work = varying - {*used.axes}
        # Copies are not said: `parallelize` derives them from where activations vary.
        tags = [("sum", used.tagged("sum")), ("mean", tuple(sorted(same_work)))]
        said_tags = tuple((kind, axes) for kind, axes in tags if axes)
        return _text(stored, Layout(used.dims, said_tags))


@layout_cache(maxsize=4096)
def _inside(src: Layout, dst: Layout, outside: Layout) -> Layout:
    """Return the activations inside a module with a rule `src -> dst`."""
    return layout_inside(ActivationRule(src, dst, ""), outside)


def ends_of(problem: StepProblem, edge: Edge, assignment: Sequence[int]) -> tuple[Layout, Layout]:
    """Return the layouts of an array where it is made or stored, and where it is used."""
    names = tuple(problem.names(problem.nodes[edge.source].name))
    src = edge.made_layouts[edge.rows[assignment[edge.source]]]
    dst = edge.used_layouts[edge.columns[assignment[edge.user]]]
    axes = problem.mesh.axes
    # Tuples of ints, for the cache: `simplified` asks for the same few layouts thousands of times.
    return _layout(tuple(src.tolist()), names, axes), _layout(tuple(dst.tolist()), names, axes)


_layout = layout_cache(maxsize=4096)(layout_of)


def _text(src: Layout, dst: Layout) -> str:
    return str(src) if src == dst else f"{src} {ARROW} {dst}"


def _merged(texts: Texts) -> dict[Any, Any]:
    """Write one rule for all names with the same text."""
    names_of = dict[str, list[str]]()
    for name, text in texts.items():
        names_of.setdefault(text, []).append(name)
    return {_pattern_of(names): text for text, names in names_of.items()}


def _pattern_of(names: Iterable[str]) -> str:
    """Write names as one pattern: `a.up`, `a.down`, `b` -> `a.{up,down}|b`."""
    patterns = list[list[list[str]]]()  # [patterns][parts][alternatives]
    for name in names:
        parts = name.split(".")
        for pattern in patterns:
            place = _place_that_differs(pattern, parts)
            if place is not None:
                pattern[place].append(parts[place])
                break
        else:
            patterns.append([[part] for part in parts])
    return "|".join(".".join(map(_either, pattern)) for pattern in patterns)


def _place_that_differs(pattern: Sequence[list[str]], parts: Sequence[str]) -> int | None:
    """Return the only part in which a name differs from a pattern; None for several."""
    if len(pattern) != len(parts):
        return None
    pairs = enumerate(zip(pattern, parts, strict=True))
    places = [i for i, (alternatives, part) in pairs if alternatives != [part]]
    return places[0] if len(places) == 1 else None


def _either(alternatives: Sequence[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"{{{','.join(alternatives)}}}"
