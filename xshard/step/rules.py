"""An assignment as rules that `parallelize` and `place` take, and rules as limits of what may be assigned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xshard.errors import NotationError, located
from xshard.layout import Layout
from xshard.models import ActivationRule, rule_of
from xshard.notation.parser import ARROW
from xshard.rules import Rules
from xshard.step.edge import Edge
from xshard.step.moves import Ways, layout_of
from xshard.step.op import COPY, REPLICAS, SUM
from xshard.step.options import Indices
from xshard.step.problem import EACH, KEPT, StepProblem

Texts = dict[str, str]


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
    step, nodes = problem.step, problem.nodes
    roots, parameters, inputs, outputs, once, around = Texts(), Texts(), Texts(), Texts(), Texts(), Texts()
    for edge in problem.edges:
        source, src, dst = nodes[edge.nodes[0]], *_ends(problem, edge, assignment)
        if source.kept is not None:
            used = Layout(dst.dims)
            parameters.setdefault(source.name, _text(src, used))
            if used != src and source.kept[assignment[edge.nodes[0]]] == KEPT:
                once[source.name] = ""
            continue
        if source.name in step.inputs:
            roots.setdefault(source.name, _text(Layout.parse(" ".join(src.names)), src))
        if edge.enters and edge.place not in inputs:
            enclosing = [axes for name, axes in around.items() if edge.place.startswith(f"{name}.")]
            axes = " ".join(sorted(dst.axes))
            if src != dst or axes != ("" if not enclosing else enclosing[-1]):
                inputs[edge.place], around[edge.place] = _text(src, dst), axes
        elif edge.place and not edge.enters and src != dst:
            outputs[edge.place] = _text(src, dst)
    # The first of repeated blocks needs no rule where the rule of all is the same.
    inputs = {name: text for name, text in inputs.items() if text != inputs.get(_repeated(name, inputs))}
    root: dict[Any, Any] = {"": roots if len(roots) > 1 else next(iter(roots.values()), "...")}
    arriving = Rules({**root, **_merged(inputs)})
    return StepRules(Rules(_merged(parameters)), arriving, Rules(_merged(outputs)), "|".join(_merged(once)))


def limited(problem: StepProblem, rules: StepRules) -> list[Indices]:
    """The options of every node that rules leave; moves are limited, in place, to those that rules name."""
    allowed = [np.ones(len(node.options), bool) for node in problem.nodes]
    step, once = problem.step, Rules({rules.once: True} if rules.once else {})
    parameters = rules.parameters.match(list(step.parameters), what="parameter")
    root = rules.inputs.find("")
    for edge in problem.edges:
        source = problem.nodes[edge.nodes[0]]
        names = names_of(problem, source.name)
        if source.kept is not None:
            with located(f"rule of {source.name}"):
                rule = _resolved(parameters[source.name], problem, names)
                stored, used = (_ways(side, problem.mesh.axes) for side in (rule.src, rule.dst))
                mode = EACH if rule.moves and once.find(source.name) is None else KEPT
                allowed[edge.nodes[0]] &= (source.options.ways[:, -1] == stored).all(-1) & (
                    source.kept == mode
                )
                kept = np.where(edge.layouts[1] == COPY, REPLICAS, edge.layouts[1])
                allowed[edge.nodes[1]] &= (kept == used).all(-1)[edge.indices[1]]
            continue
        if source.name in step.inputs and root is not None:
            text = root if isinstance(root, str) else root.get(source.name)
            if text is not None:
                arrived = _ways(_resolved(text, problem, names).dst, problem.mesh.axes)
                allowed[edge.nodes[0]] &= (source.options.ways[:, -1] == arrived).all(-1)
        stated = (rules.inputs if edge.enters else rules.outputs).find(edge.place) if edge.place else None
        src, dst = edge.layouts
        same = src[:, None] == dst[None]  # axes that a rule does not name
        if stated is not None:
            with located(f"rule of {edge.place}"):
                rule = _resolved(stated, problem, names)
                ways = (_ways(side, problem.mesh.axes) for side in (rule.src, rule.dst))
                named = np.isin(problem.mesh.axes, rule.axes)
                fits = [side == end for side, end in zip((src, dst), ways, strict=True)]
                same = np.where(named, fits[0][:, None] & fits[1][None], same)
        edge.banned = edge.banned | ~same.all(-1)
    return [np.nonzero(flags)[0] for flags in allowed]


def fixed_options(problem: StepProblem, fixed: Mapping[Any, Any]) -> list[Indices]:
    """The options in which axes do in an array what its layout says; axes that it does not name are free.

    fixed: layouts by patterns over names of inputs, parameters and operations, for their results.
    """
    rules: Any = Rules({**fixed})
    allowed = []
    matched = rules.match([node.name for node in problem.nodes], partial=True, what="array of the step")
    for node in problem.nodes:
        allowed.append(np.ones(len(node.options), bool))
        if node.name in matched:
            with located(f"rule of {node.name}"):
                rule = _resolved(matched[node.name], problem, names_of(problem, node.name))
                named = np.isin(problem.mesh.axes, rule.axes)
                same = node.options.ways[:, -1] == _ways(rule.src, problem.mesh.axes)
                allowed[-1] = (same | ~named).all(-1)
                if not allowed[-1].any():
                    hint = f"'{problem.step.dims[node.name]}' has lengths {problem.shape(node.name)}"
                    raise NotationError(f"no option has '{rule.text}'", hint=hint)
    return [np.nonzero(flags)[0] for flags in allowed]


def names_of(problem: StepProblem, name: str) -> list[str]:
    """A name for each dim of an array: several that are one dim have one name together.

    Dims of parameters have the same names in all, so that one rule is for many.
    """
    members = problem.step.dims[name].members
    if name in problem.step.parameters:
        return {1: ["n"], 2: ["o", "i"], 3: ["e", "o", "i"]}.get(
            len(members), [f"d{i}" for i in range(len(members))]
        )
    return ["".join(each) for each in members]


def _ends(problem: StepProblem, edge: Edge, assignment: Sequence[int]) -> tuple[Layout, Layout]:
    names = names_of(problem, problem.nodes[edge.nodes[0]].name)
    chosen = (
        layouts[index[assignment[n]]]
        for layouts, index, n in zip(edge.layouts, edge.indices, edge.nodes, strict=True)
    )
    src, dst = (layout_of(ways, names, problem.mesh.axes) for ways in chosen)
    return src, dst


def _resolved(text: str, problem: StepProblem, names: Sequence[str]) -> ActivationRule:
    """A rule for an array with as many dims. Raises NotationError for other dims."""
    rule = rule_of(text, problem.mesh)
    return ActivationRule(rule.src.resolved(len(names)), rule.dst.resolved(len(names)), text)


def _ways(layout: Layout, axes: Sequence[str]) -> Ways:
    """A layout as a row of numbers. Raises NotationError for what the search does not know."""
    tags = {axis: {"sum": SUM, "copy": COPY}.get(kind) for kind, tagged in layout.tags for axis in tagged}
    ways = {axis: d for d, dim in enumerate(layout.dims) for axis in dim.axes}
    row = [ways.get(axis, tags.get(axis, REPLICAS)) for axis in axes]
    if None in row or str(layout_of([way or 0 for way in row], layout.names, axes)) != str(layout):
        hint = f"contiguous blocks over axes in the order {', '.join(axes)}, sum and copy"
        raise NotationError(f"'{layout}' is not searched", hint=hint)
    return np.array(row)


def _text(src: Layout, dst: Layout) -> str:
    return str(src) if src == dst else f"{src} {ARROW} {dst}"


def _repeated(name: str, names: Texts) -> str:
    """The pattern of all repeated blocks for the name of the first one."""
    return next((other for other in names if other != name and other.replace("*", "0") == name), "")


def _merged(texts: Texts) -> dict[Any, Any]:
    """One rule for all names with the same text; names that differ in one part become one pattern."""
    merged = dict[Any, Any]()
    for text in dict.fromkeys(texts.values()):
        patterns = list[list[list[str]]]()  # of parts, each with its alternatives
        for parts in (name.split(".") for name, other in texts.items() if other == text):
            for pattern in patterns:
                differ = [i for i, (a, b) in enumerate(zip(pattern, parts, strict=False)) if a != [b]]
                others = [a for i, a in enumerate(pattern) if i not in differ and len(a) > 1]
                if len(pattern) == len(parts) and len(differ) == 1 and not others:
                    pattern[differ[0]].append(parts[differ[0]])
                    break
            else:
                patterns.append([[part] for part in parts])
        merged["|".join(".".join(map(_either, pattern)) for pattern in patterns)] = text
    return merged


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{{{','.join(parts)}}}"
