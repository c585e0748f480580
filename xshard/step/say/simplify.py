"""An assignment that takes fewer rules to say, for few seconds more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xshard.rules import pattern_text, spellings
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
    """Simplify the best plan of a search: trade a few seconds for fewer rules.

    It takes fewer rules to store all weights as `o/dp i` than to say something else about one of
    them, which may save only 0.1 %. The plan is an assignment: the number of an option, a way to
    shard it, for each parameter, input and operation.

    A change is another layout of one array, or of a parameter together with the operation beside
    it. Changes that save rules are applied until there are no more, those that save most for their
    seconds first.

    most: seconds that the result may take.
    """
    best = list(search.best) if search.best else []
    simple = best
    changed = True
    while changed:
        simpler = _with_changes(search, simple, most)
        changed = simpler != simple
        simple = simpler
    # Changes were chosen by an estimate of the rules (`_variety`). Where the patterns that are
    # written in the end are no fewer, the simpler plan has gained nothing.
    if len(_patterns(search.problem, best)) <= len(_patterns(search.problem, simple)):
        return best
    return simple


def _with_changes(search: StepSearch, assignment: list[int], most: float) -> list[int]:
    """Apply all single changes to a plan that save rules, as far as they do so together.

    A plan is the number of an option for each node, and a change is another option for some. Each
    is found for `assignment` by itself. It is applied to the result of those before it, and stays
    if that has still fewer rules and takes at most `most` seconds.
    """
    problem = search.problem
    variety = _variety(problem, assignment)
    simple = assignment
    for changed in _best_first(search, assignment, variety, most):
        combined = list(simple)
        for node, option in enumerate(changed):
            if option != assignment[node]:
                combined[node] = option
        problem.raise_to_prices(combined)  # so that its seconds are prices, not lower bounds
        new_variety = _variety(problem, combined)
        is_simpler = new_variety < variety - LEAST
        if is_simpler and search.cost.rank(problem.vectors(combined)[0]) <= most:
            simple = combined
            variety = new_variety
    return simple


def _best_first(
    search: StepSearch, assignment: list[int], variety: float, most: float
) -> list[list[int]]:
    """List changed plans with fewer rules, the one that saves most for its seconds first.

    A change that saves 2 rules for 1 ms comes before one that saves 3 for 10 ms.

    Args:
        search: The search with its problem.
        assignment: The plan: the number of an option for each node.
        variety: An estimate of the number of its rules.
        most: Seconds that a changed plan may take.
    """
    problem = search.problem
    seconds = float(search.cost.rank(problem.vectors(assignment)[0]))
    changes = _other_options(search, assignment)
    changes += _like_another_parameter(search, assignment)
    gains = list[tuple[float, list[int]]]()  # saved for each second, changed assignment
    for change in changes:
        if change.rank > most:
            continue  # too slow: counting its rules, which takes longest, is spared
        saved = variety - _variety(problem, change.assignment)
        if saved > LEAST:
            # A change may cost no seconds, or save some. All these count the same tiny cost, so
            # that they come first, in the order of what they save, and nothing is divided by 0.
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
    """List changed plans in which one parameter is stored and used like another one.

    Then both have one rule. The operation that uses it changes with it, and the neighbours of this
    operation take the options that are best for that; all other nodes stay as they are.
    """
    # Uses come in reversed order, and `dict` keeps the last pair of a key: the first use.
    first_uses = dict(_first_uses(search.problem, assignment))
    uses = {node: use for node, (_, use) in first_uses.items()}
    changes = list[Change]()
    for parameter, (edge, use) in first_uses.items():
        flags = _neighbours_free(search.problem, assignment, edge.user)  # options, by node
        for other_use in dict.fromkeys(uses.values()):  # each once, in order
            if other_use.ndim != use.ndim or other_use == use:
                continue  # rules are alike only for equally many dims
            # `flags` serves all other uses in turn: only these two entries depend on the use.
            flags[parameter] = _is_stored_so(search.problem.nodes[parameter], other_use)
            flags[edge.user] = (edge.used_placements == other_use.used).all(-1)
            for changed, vector in search.start_within(flags).vectors.items():
                changes.append(Change(float(search.cost.rank(vector)), list(changed)))
    return changes


def _first_uses(
    problem: StepProblem, assignment: Sequence[int]
) -> Iterator[tuple[int, tuple[Edge, Use]]]:
    """Yield how each parameter is stored and used, for each of its uses, the last use first.

    `dict` of the result keeps the last pair for a parameter, which is its first use in the step: so
    edges, which are in the order of operations, are gone through in reverse.

    assignment: the number of an option for each node. Yields the number of the parameter's node,
    and the edge to the operation that uses it, with the layouts of both ends (`Use`).
    """
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
    """Return flags that leave a node and its neighbours all options, and others only their own.

    For each node [options]; neighbours are the nodes between which and `node` an array moves.
    """
    free = set[int]()  # numbers of nodes
    for edge in problem.edges:
        if node in edge.nodes:
            free.update(edge.nodes)
    flags = list[Flags]()
    for number, priced in enumerate(problem.nodes):
        is_assigned = np.arange(len(priced.placements)) == assignment[number]
        flags.append(is_assigned | (number in free))
    return flags


def _is_stored_so(node: Node, use: Use) -> Flags:
    """Return the options in which a parameter is stored and gathered like another one."""
    is_stored_so = (node.placements[:, -1] == use.stored).all(-1)
    return np.asarray(is_stored_so & node.is_gathered(use.gathering))


def _patterns(problem: StepProblem, assignment: Sequence[int]) -> list[str]:
    """List the patterns of all rules of an assignment."""
    rules = written(problem, assignment)
    patterns = (*rules.parameters, *rules.inputs, *rules.outputs)
    return [pattern_text(pattern) for pattern in patterns]


def _variety(problem: StepProblem, assignment: Sequence[int]) -> float:
    """Measure how much rules say: less for fewer rules, and if one rule has most names.

    A rule for n names counts sqrt(n): rules for 8 and 1 names are less than for 5 and 4.
    """
    patterns = _patterns(problem, assignment)
    # Exact, so that the order of rules does not matter.
    return math.fsum(math.sqrt(len(spellings(pattern))) for pattern in patterns)
