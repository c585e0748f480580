"""An assignment that takes fewer rules to say, for few seconds more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xshard.rules import spellings, text_of
from xshard.step.choose.search import StepSearch
from xshard.step.price.edges import Edge
from xshard.step.price.nodes import Node
from xshard.step.price.options import Flags
from xshard.step.price.problem import StepProblem
from xshard.step.say.rules import written

LEAST = 1e-9  # of what a change saves, and of the seconds that count for it


class Change(NamedTuple):
    """Another assignment, and its rank: its seconds, more if it does not fit."""

    rank: float
    assignment: list[int]


def simplified(search: StepSearch, most: float) -> list[int]:
    """Return the best assignment after changes for fewer rules, while it takes `most` seconds.

    Changes are other layouts of one array, and of a parameter with what is beside it. Those that
    save most for their seconds are first.
    """
    best = list(search.best) if search.best else []
    simple = best
    changed = True
    while changed:
        simpler = _with_changes(search, simple, most)
        changed = simpler != simple
        simple = simpler
    # Fewer names in rules are not always fewer rules.
    if len(_patterns(search.problem, best)) <= len(_patterns(search.problem, simple)):
        return best
    return simple


def _with_changes(search: StepSearch, assignment: list[int], most: float) -> list[int]:
    """Apply the changes that save rules, one after another, if they still save some."""
    problem = search.problem
    variety = _variety(problem, assignment)
    simple = assignment
    for change in _best_first(search, assignment, variety, most):
        combined = list(simple)
        for node, option in enumerate(change):
            if option != assignment[node]:
                combined[node] = option
        problem.plan(combined)  # so that its seconds are no bounds
        new_variety = _variety(problem, combined)
        is_simpler = new_variety < variety - LEAST
        if is_simpler and search.cost.rank(problem.vectors(combined)[0]) <= most:
            simple = combined
            variety = new_variety
    return simple


def _best_first(
    search: StepSearch, assignment: list[int], variety: float, most: float
) -> list[list[int]]:
    """List the changes that save rules, the one that saves most for its seconds first."""
    problem = search.problem
    seconds = float(search.cost.rank(problem.vectors(assignment)[0]))
    changes = _other_options(search, assignment)
    changes += _like_another_parameter(search, assignment)
    gains = list[tuple[float, list[int]]]()
    for change in changes:
        if change.rank > most:
            continue  # before rules are written, which takes longest
        saved = variety - _variety(problem, change.assignment)
        if saved > LEAST:
            # Changes that cost nothing are first, by what they save.
            added_s = max(change.rank - seconds, LEAST * seconds)
            gains.append((saved / added_s, change.assignment))
    gains.sort(key=lambda gain: -gain[0])
    return [changed for _, changed in gains]


def _other_options(search: StepSearch, assignment: list[int]) -> list[Change]:
    """List the assignments with another option at one node."""
    changes = list[Change]()
    for node, options in enumerate(search.options):
        ranks = search.cost.rank(search.problem.vectors(assignment, node))
        for option in options:
            changed = list(assignment)
            changed[node] = int(option)
            changes.append(Change(ranks[option], changed))
    return changes


class Use(NamedTuple):
    """How a parameter is stored, gathered and used."""

    ndim: int
    gathering: int
    stored: tuple[int, ...]
    used: tuple[int, ...]


def _like_another_parameter(search: StepSearch, assignment: list[int]) -> list[Change]:
    """List assignments with a parameter stored and used like another, neighbours at their best."""
    # A later pair takes the place of an earlier one with the same parameter: the first use stays.
    first_uses = dict(_first_uses(search.problem, assignment))
    uses = {node: use for node, (_, use) in first_uses.items()}
    changes = list[Change]()
    for parameter, (edge, use) in first_uses.items():
        flags = _neighbours_free(search.problem, assignment, edge.user)
        for other in dict.fromkeys(uses.values()):
            if other.ndim != use.ndim or other == use:
                continue  # rules are alike only for equally many dims
            flags[parameter] = _is_stored_so(search.problem.nodes[parameter], other)
            flags[edge.user] = (edge.used_placements == other.used).all(-1)
            for near, vector in search.within(flags).vectors.items():
                changes.append(Change(float(search.cost.rank(vector)), list(near)))
    return changes


def _first_uses(
    problem: StepProblem, assignment: Sequence[int]
) -> Iterator[tuple[int, tuple[Edge, Use]]]:
    """Return the edge of each use of each parameter, the first one last, and what it is like."""
    for edge in reversed(problem.edges):
        node = problem.nodes[edge.source]
        if node.gathering is None:
            continue  # no parameter
        option = assignment[edge.source]
        use = Use(
            ndim=len(problem.shape(node.name)),
            gathering=int(node.gathering[option]),
            stored=tuple(node.placements[option, -1].tolist()),
            used=tuple(edge.used_placements[assignment[edge.user]].tolist()),
        )
        yield edge.source, (edge, use)


def _neighbours_free(problem: StepProblem, assignment: Sequence[int], node: int) -> list[Flags]:
    """Return flags that leave a node and its neighbours all options, and others their own."""
    near = set[int]()
    for edge in problem.edges:
        if node in edge.nodes:
            near.update(edge.nodes)
    flags = list[Flags]()
    for number, each in enumerate(problem.nodes):
        # A number in `near` makes all flags true.
        is_assigned = np.arange(len(each.placements)) == assignment[number]
        flags.append(is_assigned | (number in near))
    return flags


def _is_stored_so(node: Node, use: Use) -> Flags:
    """Return the options in which a parameter is stored and gathered like another one."""
    is_stored_so = (node.placements[:, -1] == use.stored).all(-1)
    return np.asarray(is_stored_so & node.is_gathered(use.gathering))


def _patterns(problem: StepProblem, assignment: Sequence[int]) -> list[str]:
    """List the patterns of all rules of an assignment."""
    rules = written(problem, assignment)
    patterns = (*rules.parameters, *rules.inputs, *rules.outputs)
    return [text_of(pattern) for pattern in patterns]


def _variety(problem: StepProblem, assignment: Sequence[int]) -> float:
    """Measure how much rules say: less for fewer rules, and if one rule has most names."""
    patterns = _patterns(problem, assignment)
    # Exact, so that the order of rules does not matter.
    return math.fsum(math.sqrt(len(spellings(pattern))) for pattern in patterns)
