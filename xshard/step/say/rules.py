"""An assignment as rules that `parallelize` and `place` take.

An *assignment* is a plan that a search has found: the number of an option for each node. An option
is a way to shard a parameter, an input or an operation. `limits` reads rules back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

from xshard.caches import layout_cache
from xshard.layout import Layout, Mesh
from xshard.layout.sub_axes import root_of
from xshard.models import ActivationRule, layout_inside
from xshard.notation.parser import ARROW
from xshard.rules import Rules, spellings
from xshard.step.price.edges import Edge
from xshard.step.price.nodes import Gathering
from xshard.step.price.options import Ints
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import in_units, placement_by_units
from xshard.step.record.op import Op
from xshard.step.record.repeat import in_first_block
from xshard.step.record.trace import INPUT
from xshard.step.say.whole_axes import whole_layout

RuleTexts = dict[str, str]  # rules by names of parameters or modules


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


def write_rules(problem: StepProblem, assignment: Sequence[int]) -> StepRules:
    """Write an assignment as rules for `parallelize`, by names of parameters and modules.

    One rule may be `{"layers.*.{up,gate}.weight": "o/tp/dp i -> o/tp i"}`: names with the same
    layouts have one pattern.
    """
    # All activations first: rules of parameters depend on what is around their modules.
    activations = _ActivationRules(problem, assignment)
    parameters = RuleTexts()
    gathered_once = RuleTexts()  # only its names matter
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
        parameters=Rules(_with_patterns(parameters)),
        inputs=activations.input_rules(),
        outputs=Rules(_with_patterns(activations.outputs)),
        once="|".join(_with_patterns(gathered_once)),
    )


class _ActivationRules:
    """The rules of activations, collected in the order of the forward pass.

    A rule names the axes that it is about; all other axes stay as they are around the module. So a
    rule can be written only when the layouts around its module are known: `inside` has, for each
    module with a rule so far, the layout of the activations inside it.
    """

    def __init__(self, problem: StepProblem, assignment: Sequence[int]) -> None:
        self.problem = problem
        self.step = problem.step
        self.inputs = RuleTexts()  # rules on the way into modules
        self.outputs = RuleTexts()  # rules on the way out of them
        self.arriving: dict[str, Layout] = {}  # inputs of the model, as they arrive
        self.inside = dict[str, Layout]({"": Layout(())})  # "" is the model itself
        self._n_before = {"": 0}  # modules that were added to `inside` before each
        n_inputs = len(self.step.inputs)
        # Inputs of the model first, which are the first nodes: their layouts are around all modules.
        for edge in sorted(problem.edges, key=lambda edge: edge.source >= n_inputs):
            if problem.nodes[edge.source].gathering is None:  # no parameter
                src, dst = ends_of(problem, edge, assignment, says_lengths=True)
                self._add_rules(edge, src, dst)

    def _add_rules(self, edge: Edge, src: Layout, dst: Layout) -> None:
        """Add the rules that one array needs on its way to the operation that uses it.

        If it moves from `b s` to `b s/tp` where it enters the module `up`, the rule of the inputs
        of `up` is `b s -> b s/tp`; on the way out of a module it is a rule of outputs. An array
        that does not move may still need a rule that says what a module gets.

        The rules are added to `inputs` and `outputs`, by module. The layout inside a module that has
        a rule is added to `inside`, which the rules of later modules are written against.

        Args:
            edge: The array, with the module at which it may move, `edge.place`, on the way into it
                (`edge.enters`) or out of it.
            src: The layout in which it is made.
            dst: The layout in which it is used.
        """
        source = self.problem.nodes[edge.source].name
        user = self.step.by_name[self.problem.nodes[edge.user].name]
        if source in self.step.inputs:
            # An input of the model, which has one arriving layout for all its uses: the first use
            # decides. If only tags differ there, nothing moves, and the use's tags are taken.
            arriving = dst if dst.dims == src.dims else src
            src = self.arriving.setdefault(source, arriving)
            self.inside[""] = _layout_inside(src, src, self.inside[""])
        src, dst = self._with_free_names(edge.place, src, dst)
        if edge.enters:
            self._add_input_rule(edge.place, src, dst)
        else:
            if edge.place and src != dst:
                self.outputs[edge.place] = _rule_text(src, dst)
            # The array is in its last layout before the module of the operation that uses it. That
            # module may need a rule that moves nothing; its first operand decides.
            if user.operands[0] == source and not self.step.moves_anywhere:
                self._add_resting_rule(user, dst)
        maker = self.step.by_name.get(source)
        if maker is not None and maker.kind == "lookup" and src.tagged("sum"):
            # A lookup in a table whose rows are sharded gives partial sums. Its module needs a rule
            # of its output that says so, also where they are added up later.
            self.outputs.setdefault(self.step.left_module(maker), _rule_text(src, src))

    def _with_free_names(self, place: str, src: Layout, dst: Layout) -> tuple[Layout, Layout]:
        """Rename dims of a rule that are whole in it, but sharded around the module.

        A rule leaves mesh axes that it does not name as they are around the module, by the names of
        dims: if s is sharded over tp there, a rule `b s -> b/dp s` would leave s sharded. In this
        plan s is whole, so its dim gets a name that no dim around has: `b s_ -> b/dp s_`.

        Args:
            place: The module or array whose rule it is. `_layouts_around` finds the layouts of
                activations around it, by the rules written so far.
            src: The layout before the move.
            dst: The layout after it.
        """
        named_axes = {*src.axes, *dst.axes}
        sharded_around: set[str] = set()  # dims, over axes that the rule does not name
        for layout in self._layouts_around(place):
            for dim in layout.dims:
                if not named_axes.issuperset(dim.axes):
                    sharded_around.add(dim.name)
        if not sharded_around:  # the usual case, quickly
            return src, dst

        def renamed(layout: Layout) -> Layout:
            names = [f"{name}_" if name in sharded_around else name for name in layout.names]
            return layout.with_names(names)

        return renamed(src), renamed(dst)

    def _add_resting_rule(self, op: Op, used: Layout) -> None:
        """Add a rule that moves nothing, where a module's activations vary along more axes than around it.

        Activations vary along an axis that shards them or sums over them. Along such an axis the
        devices' gradients of the module's parameters differ, and `parallelize` adds them up. It
        knows the axis by this rule: `used`, the layout of the array that enters.
        """
        parameters = [name for name in op.operands if name in self.step.parameters]
        if not parameters:
            return
        module = parameters[0].rpartition(".")[0]  # `layers.0.up.weight` -> `layers.0.up`
        used_axes = {*used.axes}
        if any(not used_axes.issubset(layout.axes) for layout in self._layouts_around(module)):
            self._add_input_rule(module, used, used)

    def _add_input_rule(self, module: str, src: Layout, dst: Layout) -> None:
        """Add a rule on the way into a module; "" stands for no module."""
        if not module or module in self.inputs:
            return  # the first operand decides
        if src.spread_axes:
            # What is shared stays so, but one block does not tell how many heads there are.
            dims = [replace(dim, shards=()) if dim.spread_axes else dim for dim in src.dims]
            src = dst = replace(src, dims=tuple(dims))
        self.inputs[module] = _rule_text(src, dst)
        layouts_around = self._layouts_around(module)
        layouts_inside = [_layout_inside(src, dst, layout) for layout in layouts_around]
        axes_around = [{*layout.axes} for layout in layouts_around]
        axes_inside = [{*layout.axes} for layout in layouts_inside]
        # A rule that changes nothing is left out later: the module is as what is around it.
        if src != dst or axes_inside != axes_around:
            self._n_before[module] = len(self.inside)
            self.inside[module] = layouts_inside[0]

    def _layouts_around(self, path: str) -> list[Layout]:
        """Return the layout of activations around a module, and in the first of repeated blocks.

        `layers.*.up` may have another layout around it in `layers.0`. One layout for other paths.
        """
        paths = dict.fromkeys((path, in_first_block(path)))
        return [self._layout_around(block_path) for block_path in paths]

    def _layout_around(self, path: str) -> Layout:
        """Return the layout of activations in the last module with a rule that has a path inside it."""
        around = [module for module in _modules_around(path) if module in self.inside]
        last = max(around, key=self._n_before.__getitem__, default="")
        return self.inside[last]

    def input_rules(self) -> Rules:
        """Write the rules for inputs of the model and of modules, those of first layers before others.

        Repeated layers have one rule, for the pattern `layers.*.up`. The first layer gets its input
        from elsewhere, so that it has a rule of its own, for `layers.0.up`. If both say the same, the
        pattern is enough. Else the first layer's rule stands before it, since the first pattern that
        fits a name decides. The rule of the model itself has the name "".
        """
        patterns = [name for name in self.inputs if "*" in name or "{" in name]
        # "layers.0.up" -> "layers.*.up"
        pattern_of_first = {in_first_block(pattern): pattern for pattern in patterns}
        of_first_blocks = RuleTexts()
        others = RuleTexts()
        # Only modules whose rule changes something are in `inside`; other rules are left out.
        for name, text in self.inputs.items():
            pattern = pattern_of_first.get(name)
            if pattern in self.inside:
                # Even if the first layer's rule changes nothing: the pattern's would apply to it.
                if text != self.inputs[pattern]:
                    of_first_blocks[name] = text
            elif name in self.inside:
                others[name] = text
        rules: dict[Any, Any] = {"": self._root_rule()}
        return Rules(rules | _with_patterns(of_first_blocks) | _with_patterns(others))

    def _root_rule(self) -> str | RuleTexts:
        """Write the rule of the model's inputs; several have one each, by name."""
        rules = RuleTexts()
        for name, arriving in self.arriving.items():
            rules[name.removesuffix(INPUT)] = _rule_text(arriving.unsharded, arriving)
        if len(rules) == 1:
            (rule,) = rules.values()
            return rule
        return rules if rules else "..."

    def parameter_rule(self, name: str, stored: Layout, used: Layout) -> str:
        """Write the rule of a parameter: how it is stored, and how its operation uses it.

        Stored as `o/tp/dp i` and used as `o/tp i | copy(dp)`, the rule is `o/tp/dp i -> o/tp i`. The
        copy tag says that gradients are to be added up over dp. It is not written: `parallelize`
        does so by default, along all axes over which activations around the module vary (are
        sharded or sums).

        If the operation does the same work on all devices of such an axis, each of them has the
        whole gradient already, and a sum would be too large. Then the rule ends with `| mean(dp)`.

        Args:
            name: The parameter; tied ones have several names between bars.
            stored: Its layout in storage.
            used: Its layout in the operation that uses it.
        """
        varying_axes: set[str] = set()  # along which activations around the module vary
        for tied_name in name.split("|"):
            for layout in self._layouts_around(tied_name):
                varying_axes.update(layout.axes)
        # Along these axes `used` has a plain replica, not a shard, sum or copy: all devices do the
        # same work.
        same_work_axes = varying_axes - {*used.axes}
        tags = [("sum", used.tagged("sum")), ("mean", tuple(sorted(same_work_axes)))]
        written_tags = tuple((kind, axes) for kind, axes in tags if axes)
        return _rule_text(stored, Layout(used.dims, written_tags))


@layout_cache(maxsize=4096)
def _modules_around(path: str) -> tuple[str, ...]:
    """List the modules that have a path inside them: `a.b.c` -> a, a.b, a.b.c."""
    return tuple(accumulate(path.split("."), "{}.{}".format))


@layout_cache(maxsize=4096)
def _layout_inside(src: Layout, dst: Layout, outside: Layout) -> Layout:
    """Return the layout of activations inside a module with a rule `src -> dst`.

    outside: their layout around the module.
    """
    return layout_inside(ActivationRule(src, dst, ""), outside)


def ends_of(
    problem: StepProblem, edge: Edge, assignment: Sequence[int], *, says_lengths: bool = False
) -> tuple[Layout, Layout]:
    """Return the layouts of an array where it is made or stored, and where it is used.

    says_lengths: list the sizes of uneven blocks, as rules of activations do.
    """
    made = edge.made_layouts[edge.rows[assignment[edge.source]]]
    used = edge.used_layouts[edge.columns[assignment[edge.user]]]
    name = problem.nodes[edge.source].name
    return written_ends(problem, name, made, used, says_lengths=says_lengths)


def written_ends(
    problem: StepProblem, name: str, made: Ints, used: Ints, *, says_lengths: bool = False
) -> tuple[Layout, Layout]:
    """Write the layouts of an array before and after a move, given as placements.

    `o i -> o/tp i` for (REPLICAS,) and (0,) on the axis tp. says_lengths: as in `ends_of`.
    """
    # Tuples of ints, for the cache: `simplified` asks for the same few layouts thousands of times.
    return _written_ends(
        (tuple(made.tolist()), tuple(used.tolist())),
        problem.dim_names(name),
        problem.shape(name),
        problem.units[name],
        problem.mesh,
        says_lengths,
    )


@layout_cache(maxsize=4096)
def _written_ends(
    ends: tuple[tuple[int, ...], ...],
    names: tuple[str, ...],
    shape: tuple[int, ...],
    units: tuple[int, ...],
    mesh: Mesh,
    says_lengths: bool,
) -> tuple[Layout, Layout]:
    """Write the layouts before and after a move, given as placements.

    A move is written with one name for a dim on both sides of its arrow. A dim of 6 heads of 16 rows
    that one side shards by whole heads is `(o 16)/balanced(tp)` there. On the other side it is
    `(o 16)` if it is whole, and `o_16/tp` in even blocks.

    Args:
        ends: The placements before and after the move, one for each mesh axis (see `record.arrays`).
        names: The names of the dims.
        shape: Their lengths.
        units: How many units (as heads) each dim has; 1 for a dim that is not sharded by units.
        mesh: The mesh that is searched.
        says_lengths: List the units of each block: `(o 16)/sizes(tp,2,2,1,1)`.
    """
    all_placements = {*chain(*ends)}
    dims_by_units = []
    for d in range(len(names)):
        if placement_by_units(d, len(names)) in all_placements:
            dims_by_units.append(d)
    whole_layouts = [whole_layout(placements, names, shape, mesh) for placements in ends]
    shared_names: dict[int, str] = {}  # of dims whose units devices share: `(o 64)/spread(tp)`
    for layout in whole_layouts:
        shared_names |= {i: dim.name for i, dim in enumerate(layout.dims) if dim.spread_axes}
    layouts: list[Layout] = []
    for placements, layout in zip(ends, whole_layouts, strict=True):
        dims = list(layout.dims)
        for d, name in shared_names.items():
            dims[d] = replace(dims[d], name=name)
        for d in dims_by_units:
            dim_in_units = in_units(
                dims[d], shape[d], units[d], root_of(mesh), says_length=says_lengths
            )
            if d in placements:  # this end shards the dim in even blocks: only the name is shared
                dims[d] = replace(dims[d], name=dim_in_units.name)
            else:
                dims[d] = dim_in_units
        layouts.append(replace(layout, dims=tuple(dims)))
    src, dst = layouts
    return src, dst


def _rule_text(src: Layout, dst: Layout) -> str:
    """Write a rule: `b s -> b s/tp`, or one layout if nothing moves."""
    return str(src) if src == dst else f"{src} {ARROW} {dst}"


def _with_patterns(texts: RuleTexts) -> dict[Any, Any]:
    """Write one rule for all names with the same text: a: `o/dp i`, b: `o/dp i` -> `a|b`: `o/dp i`."""
    names_of_text: dict[str, list[str]] = {}
    for name, text in texts.items():
        names_of_text.setdefault(text, []).append(name)
    return {_pattern_of(names): text for text, names in names_of_text.items()}


def _pattern_of(names: Iterable[str]) -> str:
    """Write names as one pattern: `a.up`, `a.down`, `b` -> `a.{up,down}|b`."""
    # A pattern has for each part, between dots, the alternatives: [["a"], ["up", "down"]].
    patterns: list[list[list[str]]] = []
    for name in names:
        parts = name.split(".")
        for pattern in patterns:
            i = _differing_part(pattern, parts)
            if i is not None:
                pattern[i].append(parts[i])
                break
        else:
            patterns.append([[part] for part in parts])
    texts = [".".join(map(_alternatives_text, pattern)) for pattern in patterns]
    return "|".join(texts)


def _differing_part(pattern: Sequence[list[str]], parts: Sequence[str]) -> int | None:
    """Return the number of the only part in which a name differs from a pattern; None for several."""
    if len(pattern) != len(parts):
        return None
    pairs = enumerate(zip(pattern, parts, strict=True))
    differing = [i for i, (alternatives, part) in pairs if alternatives != [part]]
    return differing[0] if len(differing) == 1 else None


def _alternatives_text(alternatives: Sequence[str]) -> str:
    """Write alternatives in braces; numbers in order, of several lists as one: {0,2} and {1,3}."""
    if len(alternatives) == 1:
        return alternatives[0]
    parts = [part for text in alternatives for part in spellings(text)]
    if all(map(str.isdecimal, parts)):
        parts.sort(key=int)
    return f"{{{','.join(parts)}}}"
