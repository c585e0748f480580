"""An assignment as rules that `parallelize` and `place` take, and rules as limits of what may be assigned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from xshard.errors import NotationError, located
from xshard.layout import Layout
from xshard.models import ActivationRule, inside, rule_of, use_of
from xshard.notation.parser import ARROW
from xshard.rules import Rules, RulesLike, spellings, text_of
from xshard.step.choose.search import StepSearch
from xshard.step.price.moves import Edge
from xshard.step.price.options import Flags, Ints, without_copies
from xshard.step.price.problem import EACH, KEPT, StepProblem
from xshard.step.record.arrays import layout_of, ways_of

Texts = dict[str, str]
Known = dict[str, Layout]  # activations by module, all dims that have names there
LEAST = 1e-9  # of what a change saves, and of the seconds that count for it


class StepRules(NamedTuple):
    """Rules of a step, as `xt.parallelize` takes them, for parameters and for modules' inputs and outputs.

    once: a pattern of the parameters that are gathered once per step, not for each use; "" for none.
    """

    parameters: Rules
    inputs: Rules
    outputs: Rules
    once: str = ""


def written(problem: StepProblem, assignment: Sequence[int]) -> StepRules:
    """The rules of an assignment, names with the same layouts under one pattern."""
    inputs, outputs, known = _of_activations(problem, assignment)
    parameters = Texts()
    once = Texts()
    for edge in problem.edges:
        source = problem.nodes[edge.nodes[0]]
        if source.kept is not None:
            stored, used = ends_of(problem, edge, assignment)
            parameters.setdefault(source.name, _used(source.name, stored, used, known))
            if stored.dims != used.dims and source.kept[assignment[edge.nodes[0]]] == KEPT:
                once[source.name] = ""
    return StepRules(
        Rules(_merged(parameters)), inputs, Rules(_merged(outputs)), "|".join(_merged(once))
    )


def _of_activations(problem: StepProblem, assignment: Sequence[int]) -> tuple[Rules, Texts, Known]:
    """The rules for modules' inputs, texts for their outputs, and what is known inside them."""
    step = problem.step
    nodes = problem.nodes
    entered = Texts()
    outputs = Texts()
    arriving = Known()
    known = Known({"": Layout(())})
    moves = (edge for edge in problem.edges if nodes[edge.nodes[0]].kept is None)
    for edge in sorted(
        moves, key=lambda edge: edge.nodes[0] >= len(step.inputs)
    ):  # inputs are first
        source = nodes[edge.nodes[0]].name
        op = step.by_name[nodes[edge.nodes[1]].name]
        src, dst = ends_of(problem, edge, assignment)
        if source in step.inputs:
            src = arriving.setdefault(source, dst if dst.dims == src.dims else src)
            known[""] = _inside(src, src, known[""])
        place = edge.place
        around = _around(edge.place, known)
        named = {*src.axes, *dst.axes}
        # Dims that are sharded over axes that are not named would stay so under their names.
        if stay := {dim.name for layout in around for dim in layout.dims if {*dim.axes} - named}:
            src, dst = (x.named([f"{n}_" if n in stay else n for n in x.names]) for x in (src, dst))
        start = src
        if not edge.enters:
            if place and src != dst:
                outputs[place] = _text(src, dst)
            # A module with parameters has a rule if activations differ along more axes than around it.
            weights = [n for n in op.operands if n in step.parameters and op.operands[0] == source]
            place = "".join(weights[:1]).rpartition(".")[0]
            start = dst
            around = _around(place, known)
            if step.moves_anywhere or all({*dst.axes} <= {*layout.axes} for layout in around):
                place = ""
        if place and place not in entered:
            entered[place] = _text(start, dst)
            there = [_inside(start, dst, layout) for layout in around]
            if start != dst or any(
                {*a.axes} != {*b.axes} for a, b in zip(there, around, strict=True)
            ):
                known[place] = there[0]
        maker = step.by_name.get(source)
        if (
            maker and maker.kind == "lookup" and src.tagged("sum")
        ):  # its module asks where they are added up
            outputs.setdefault(step.module(maker, left=True), _text(src, src))
    first = {
        spellings(name)[0].replace("*", "0"): name for name in entered if set("*{") & set(name)
    }
    inputs = {
        name: text for name, text in entered.items() if {name, first.get(name, name)} & known.keys()
    }
    # The first of repeated blocks needs no rule if the rule of all is the same, or one before that.
    own = {
        name: text for name, text in inputs.items() if inputs.get(first.get(name, ""), text) != text
    }
    rest = {name: text for name, text in inputs.items() if first.get(name) not in inputs}
    roots = {name: _text(Layout.parse(" ".join(x.names)), x) for name, x in arriving.items()}
    root = roots if len(roots) > 1 else next(iter(roots.values()), "...")
    return Rules({"": root, **_merged(own), **_merged(rest)}), outputs, known


@lru_cache(maxsize=4096)
def _inside(src: Layout, dst: Layout, outside: Layout) -> Layout:
    return inside(ActivationRule(src, dst, ""), outside)


def _around(path: str, known: Known) -> list[Layout]:
    """Activations in the nearest modules with a rule around a path, and around it in the first block."""
    paths = dict.fromkeys((path, spellings(path)[0].replace("*", "0")))
    return [[known[n] for n in known if f"{each}.".startswith(n and f"{n}.")][-1] for each in paths]


def _used(name: str, src: Layout, dst: Layout, known: Known) -> str:
    """The rule of a parameter; `mean` has the axes of its modules along which its operation is idle."""
    around = (layout for each in name.split("|") for layout in _around(each, known))
    varying = {axis for layout in around for axis in layout.axes}
    tags = ("sum", dst.tagged("sum")), ("mean", tuple(sorted(varying - {*dst.axes})))
    return _text(src, Layout(dst.dims, tuple((kind, axes) for kind, axes in tags if axes)))


def ends_of(problem: StepProblem, edge: Edge, assignment: Sequence[int]) -> tuple[Layout, Layout]:
    """The layouts at both ends of a move."""
    names = tuple(problem.names(problem.nodes[edge.nodes[0]].name))
    axes = problem.mesh.axes
    chosen = zip(edge.layouts, edge.indices, (assignment[node] for node in edge.nodes), strict=True)
    src, dst = (
        _layout(tuple(layouts[index[i]].tolist()), names, axes) for layouts, index, i in chosen
    )
    return src, dst


_layout = lru_cache(maxsize=4096)(layout_of)


def simplified(search: StepSearch, most: float) -> list[int]:
    """The best assignment after changes for fewer rules, while it takes `most` seconds.

    Changes are other layouts of one array, and of a parameter with what is beside it; those that save most
    for their seconds are first.
    """
    problem = search.problem
    best = list(search.best or ())
    here = best
    before = list[int]()
    least = _variety(problem, best)
    while here != before:
        before = here
        changes = list[tuple[float, list[int]]]()
        seconds = float(search.cost.rank(problem.vectors(here)[0]))
        ranks = (
            (n, i, search.cost.rank(problem.vectors(here, n))) for n, i in enumerate(search.left)
        )
        of_one = (
            (each[i], [*here[:n], int(i), *here[n + 1 :]]) for n, left, each in ranks for i in left
        )
        for rank, there in (*of_one, *_like_another(search, here)):
            if rank <= most and (fewer := least - _variety(problem, there)) > LEAST:
                changes.append((fewer / max(rank - seconds, LEAST * seconds), there))
        for _, there in sorted(changes, key=lambda change: -change[0]):
            there = [
                new if new != old else now
                for old, new, now in zip(before, there, here, strict=True)
            ]
            problem.plan(there)
            variety = _variety(problem, there)
            if variety < least - LEAST and search.cost.rank(problem.vectors(there)[0]) <= most:
                here = there
                least = variety
    return min(best, here, key=lambda assignment: len(_patterns(problem, assignment)))


def _like_another(search: StepSearch, here: list[int]) -> Iterator[tuple[float, list[int]]]:
    """Assignments with a parameter stored and used as another one is, and what is best beside it."""
    problem = search.problem
    nodes = search.problem.nodes
    uses = dict[int, Edge]()
    lies = dict[int, Any]()
    for edge in problem.edges[::-1]:
        p, op = edge.nodes
        if (kept := nodes[p].kept) is not None:
            ways = tuple(nodes[p].ways[here[p], -1]), tuple(edge.used[here[op]])
            uses[p], lies[p] = edge, (len(problem.shape(nodes[p].name)), kept[here[p]], *ways)
    for p, edge in uses.items():
        beside = {n for each in problem.edges if edge.nodes[1] in each.nodes for n in each.nodes}
        flags = [
            (np.arange(len(each.ways)) == here[n]) | (n in beside) for n, each in enumerate(nodes)
        ]
        for ndim, kept, stored, used in dict.fromkeys(lies.values()):
            if ndim == lies[p][0] and lies[p] != (ndim, kept, stored, used):
                flags[p] = (nodes[p].ways[:, -1] == stored).all(-1) & (
                    cast(Ints, nodes[p].kept) == kept
                )
                flags[edge.nodes[1]] = (edge.used == used).all(-1)
                near = search.within(flags).vectors
                yield from (
                    (float(search.cost.rank(vector)), list(there)) for there, vector in near.items()
                )


def _patterns(problem: StepProblem, assignment: Sequence[int]) -> list[str]:
    return [text_of(pattern) for rules in written(problem, assignment)[:3] for pattern in rules]


def _variety(problem: StepProblem, assignment: Sequence[int]) -> float:
    """Less for fewer rules, and for rules of many names beside rules of few."""
    return math.fsum(
        math.sqrt(len(spellings(pattern))) for pattern in _patterns(problem, assignment)
    )


def limited(problem: StepProblem, rules: StepRules, unused: Sequence[str]) -> list[Ints]:
    """The options of every node that rules leave; moves are limited, in place, to those that rules name.

    unused: parameters that no operation takes, which may have rules, too.
    """
    allowed = [np.ones(len(node.ways), bool) for node in problem.nodes]
    step = problem.step
    once = Rules({rules.once: True} if rules.once else {})
    parameters = rules.parameters.match(
        "|".join((*step.parameters, *unused)).split("|"), what="parameter"
    )
    root = rules.inputs.find("")
    for edge in problem.edges:
        (a, b), (src, dst), source = edge.nodes, edge.layouts, problem.nodes[edge.nodes[0]]
        if source.kept is not None:
            name = source.name.partition("|")[0]  # of tied parameters, which are used in one way
            with located(f"rule of {name}"):
                ndim = len(problem.names(source.name))
                axes = problem.mesh.axes
                use = use_of(parameters[name], ndim, problem.mesh, frozenset(axes))
                stored = ways_of(use.stored, axes)
                used = ways_of(use.used, axes)
            mode = EACH if stored != used and once.find(name) is None else KEPT
            allowed[a] &= (source.ways[:, -1] == stored).all(-1) & (source.kept == mode)
            allowed[b] &= (without_copies(edge.used) == used).all(-1)
            continue
        arriving = root if isinstance(root, str) else (root or {}).get(source.name)
        plain = (
            without_copies if source.name in step.inputs else np.asarray
        )  # they need no gradient
        if source.name in step.inputs and arriving is not None:
            arrived = plain(_sides(arriving, problem, source.name)[1])
            allowed[a] &= (source.ways[:, -1] == arrived).all(-1)
        stated = (
            (rules.inputs if edge.enters else rules.outputs).find(edge.place)
            if edge.place
            else None
        )
        same = src[:, None] == plain(dst)  # axes that a rule does not name
        if stated is not None:
            start, end, named = _sides(stated, problem, source.name, edge.place)
            same = np.where(
                named, (src == plain(start))[:, None] & (plain(dst) == plain(end)), same
            )
        edge.banned = edge.banned | ~same.all(-1)
    return [np.nonzero(flags)[0] for flags in allowed]


def fixed_options(problem: StepProblem, fixed: RulesLike) -> list[Ints]:
    """The options in which axes do in an array what its layout says; axes that it does not name are free.

    fixed: layouts by patterns over names of inputs, parameters and operations, for their results.
    """
    layouts = Rules(fixed).match(list(problem.number), partial=True, what="array of the step")
    allowed = []
    for node in problem.nodes:
        start, _, named = _sides(layouts.get(node.name, "..."), problem, node.name)
        allowed.append(np.nonzero(((node.ways[:, -1] == start) | ~named).all(-1))[0])
        if not len(allowed[-1]):
            hint = f"'{problem.step.arrays[node.name]}' has lengths {problem.shape(node.name)}"
            raise NotationError(f"no option has '{layouts[node.name]}'", hint=hint)
    return allowed


def _sides(
    text: str, problem: StepProblem, name: str, place: str = ""
) -> tuple[list[int], list[int], Flags]:
    """A rule for an array -> the ways of both layouts, and which axes it names. Raises NotationError."""
    axes = problem.mesh.axes
    n = len(problem.names(name))
    with located(f"rule of {place or name}"):
        rule = rule_of(text, problem.mesh)
        src, dst = (ways_of(side.resolved(n), axes) for side in (rule.src, rule.dst))
    return src, dst, np.isin(axes, rule.axes)


def _text(src: Layout, dst: Layout) -> str:
    return str(src) if src == dst else f"{src} {ARROW} {dst}"


def _merged(texts: Texts) -> dict[Any, Any]:
    """One rule for all names with the same text; names that differ in one part become one pattern."""
    merged = dict[Any, Any]()
    for text in dict.fromkeys(texts.values()):
        patterns = list[list[list[str]]]()  # of parts, each with its alternatives
        for parts in (name.split(".") for name, other in texts.items() if other == text):
            for pattern in patterns:
                differ = [
                    i for i, (a, b) in enumerate(zip(pattern, parts, strict=False)) if a != [b]
                ]
                if len(pattern) == len(parts) and len(differ) == 1:
                    pattern[differ[0]].append(parts[differ[0]])
                    break
            else:
                patterns.append([[part] for part in parts])
        either = (
            [p[0] if len(p) == 1 else f"{{{','.join(p)}}}" for p in pattern] for pattern in patterns
        )
        merged["|".join(map(".".join, either))] = text
    return merged
