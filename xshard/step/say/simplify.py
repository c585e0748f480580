"""An assignment that takes fewer rules to say, for few seconds more.

An *assignment*, or plan, is the number of an option for each node: a way to shard a parameter, an
input or an operation. Its *rank* is its seconds, more if it does not fit the memory; its *variety*
an estimate of how many rules say it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from xshard.rules import pattern_text, spellings
from xshard.step.choose.search import StepSearch
from xshard.step.price.edges import Edge
from xshard.step.price.nodes import Node
from xshard.step.price.options import Flags
from xshard.step.price.problem import StepProblem
from xshard.step.say.rules import ends_of, write_rules

LEAST = 1e-9  # of what a change saves, and of the seconds that count for it


class Gain(NamedTuple):
    """A changed assignment with fewer rules, and how many of them it saves for each second more."""

    rules_per_s: float
    assignment: list[int]


class Change(NamedTuple):
    """Another assignment, and its rank."""

    rank: float
    assignment: list[int]


def simplified(search: StepSearch, most_s: float) -> list[int]:
    """Simplify the best plan of a search: trade a little time per step for fewer rules.

    It takes fewer rules to store all weights as `o/dp i` than to say something else about one of
    them, which may save only 0.1 %.

    A change is another layout of one array, or of a parameter together with the operation beside
    it. Changes that save rules are applied until there are no more, those that save most for their
    seconds first.

    most_s: seconds per step that the result may take.

    Returns the assignment of the simpler plan, or of the best one if no plan is simpler; [] if the
    search has found none.
    """
    best = list(search.best) if search.best else []
    simple = best
    while True:
        simpler = _with_simplifying_changes(search, simple, most_s)
        if simpler == simple:
            break
        simple = simpler
    # Changes were chosen by an estimate (`_variety`), in which a rule for many names counts more. What
    # a user reads are the rules themselves: if these are no fewer, nothing has been gained.
    if len(_patterns(search.problem, best)) <= len(_patterns(search.problem, simple)):
        return best
    return simple


def _with_simplifying_changes(
    search: StepSearch, assignment: list[int], most_s: float
) -> list[int]:
    """Apply all single changes to a plan that save rules, as far as they do so together.

    A change of the plan (0, 2, 1) is another option for some nodes: (0, 2, 4). The changes were
    found for `assignment`, each by itself, and may get in each other's way. So they are tried one
    after another, on top of those kept so far, and one is kept if there are still fewer rules, in at
    most `most_s` seconds.

    Returns the changed plan, or `assignment` itself if no change is kept.
    """
    problem = search.problem
    variety = _variety(problem, assignment)
    simple = assignment
    for changed in _most_worthwhile_first(search, assignment, variety, most_s):
        trial = list(simple)
        for node, option in enumerate(changed):
            if option != assignment[node]:
                trial[node] = option
        # The problem may know only a lower bound of what a move of this plan costs. Replace it by
        # the planner's price, which `problem.vector` then adds up.
        problem.raise_to_prices(trial)
        trial_rank = search.cost.rank(problem.vector(trial))
        trial_variety = _variety(problem, trial)
        if trial_variety < variety - LEAST and trial_rank <= most_s:
            simple = trial
            variety = trial_variety
    return simple


def _most_worthwhile_first(
    search: StepSearch, assignment: list[int], variety: float, most_s: float
) -> list[list[int]]:
    """List changed plans with fewer rules, the one that saves most for its seconds first.

    A change that saves 2 rules for 1 ms comes before one that saves 3 for 10 ms.

    Args:
        search: The search with its problem.
        assignment: The plan.
        variety: Its variety.
        most_s: Seconds that a changed plan may take.
    """
    problem = search.problem
    seconds = float(search.cost.rank(problem.vector(assignment)))
    changes = _other_options(search, assignment)
    changes += _like_another_parameter(search, assignment)
    n_said = Counter(_said_of(problem, edge, assignment) for edge in problem.edges)
    gains: list[Gain] = []
    for change in changes:
        # Writing rules takes longest: it is spared where a plan is too slow, or too large, or has
        # no rule less.
        if change.rank > most_s or not _may_save(problem, assignment, change.assignment, n_said):
            continue
        saved = variety - _variety(problem, change.assignment)
        if saved > LEAST:
            # A change may cost no seconds, or save some. All these count the same tiny cost, so
            # that they come first, in the order of what they save, and nothing is divided by 0.
            added_s = max(change.rank - seconds, LEAST * seconds)
            gains.append(Gain(saved / added_s, change.assignment))
    gains.sort(key=lambda gain: -gain.rules_per_s)
    return [gain.assignment for gain in gains]


def _said_of(problem: StepProblem, edge: Edge, assignment: Sequence[int]) -> Hashable:
    """Return what a rule says of an array on an edge, as far as the edge tells; None for no rule.

    A parameter has a rule in any case, an activation if it moves.
    """
    src, dst = ends_of(problem, edge, assignment)
    is_parameter = problem.nodes[edge.source].gathering is not None
    if not is_parameter and src == dst:
        return None
    return is_parameter, src, dst


def _may_save(
    problem: StepProblem,
    assignment: Sequence[int],
    changed: Sequence[int],
    n_said: Counter[Hashable],
) -> bool:
    """Tell whether a changed plan may have fewer rules.

    It may if an array has no rule any more, or says what a rule of the plan as it was says. Arrays
    that change to one new rule together are missed, which leaves a rule more than there need be.

    n_said: how many arrays of the plan as it was each rule is about, by what it says.
    """
    pairs = zip(assignment, changed, strict=True)
    changed_nodes = [node for node, (option, other) in enumerate(pairs) if option != other]
    for node in changed_nodes:
        for edge in problem.edges_of_node[node]:
            before = _said_of(problem, edge, assignment)
            after = _said_of(problem, edge, changed)
            is_dropped_or_merged = after is None or n_said[after] > 0
            if before is not None and after != before and is_dropped_or_merged:
                return True
    return False


def _other_options(search: StepSearch, assignment: list[int]) -> list[Change]:
    """List the assignments with another option at one node."""
    changes: list[Change] = []
    vector = search.problem.vector(assignment)
    for node, options in enumerate(search.options):
        vectors = search.problem.vectors_with(assignment, vector, node, options)
        for option, rank in zip(options, search.cost.rank(vectors), strict=True):
            changed = list(assignment)
            changed[node] = int(option)
            changes.append(Change(float(rank), changed))
    return changes


class Use(NamedTuple):
    """How a parameter is stored, gathered and used: layouts are a placement for each mesh axis."""

    ndim: int
    gathering: int
    stored: tuple[int, ...]
    used: tuple[int, ...]


def _like_another_parameter(search: StepSearch, assignment: list[int]) -> list[Change]:
    """List changed plans in which one parameter is stored and used like another one.

    Then both have one rule. The operation that uses the parameter changes its option too, and the
    nodes next to this operation take those that are best with that. All others keep theirs.
    """
    first_uses = _first_uses(search.problem, assignment)
    distinct_uses = dict.fromkeys(use for _, use in first_uses.values())  # in order
    changes: list[Change] = []
    for parameter, (edge, use) in first_uses.items():
        # For each node, which options a changed plan may take: [options].
        flags = _with_free_neighbours(search.problem, assignment, edge.user)
        for other_use in distinct_uses:
            if other_use.ndim != use.ndim or other_use == use:
                continue  # rules are alike only for equally many dims
            # Only these two entries depend on the use: each turn of the loop overwrites both.
            flags[parameter] = _is_stored_so(search.problem.nodes[parameter], other_use)
            flags[edge.user] = (edge.used_placements == other_use.used).all(-1)
            for changed, vector in search.plans_within(flags).items():
                changes.append(Change(float(search.cost.rank(vector)), list(changed)))
    return changes


def _first_uses(problem: StepProblem, assignment: Sequence[int]) -> dict[int, tuple[Edge, Use]]:
    """Describe how each parameter is stored, and how the first operation that takes it uses it.

    Returns by number of the parameter's node: the edge, its way to that operation, and its use.
    """
    first_uses: dict[int, tuple[Edge, Use]] = {}
    # Edges are in the order of operations: in reverse, the first use replaces all later ones.
    for edge in reversed(problem.edges):
        node = problem.nodes[edge.source]
        if node.gathering is None:
            continue  # no parameter
        option = assignment[edge.source]
        used = edge.used_placements[assignment[edge.user]]
        use = Use(
            ndim=len(problem.shape(node.name)),
            gathering=int(node.gathering[option]),
            stored=tuple(node.placements[option, -1].tolist()),
            used=tuple(used.tolist()),
        )
        first_uses[edge.source] = edge, use
    return first_uses


def _with_free_neighbours(
    problem: StepProblem, assignment: Sequence[int], node: int
) -> list[Flags]:
    """Return flags that leave a node and its neighbours all options, and others only their own.

    For each node [options]; neighbours are the nodes between which and `node` an array moves.
    """
    free: set[int] = set()  # numbers of nodes
    for edge in problem.edges:
        if node in edge.nodes:
            free.update(edge.nodes)
    flags: list[Flags] = []
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
    rules = write_rules(problem, assignment)
    patterns = (*rules.parameters, *rules.inputs, *rules.outputs)
    return [pattern_text(pattern) for pattern in patterns]


def _variety(problem: StepProblem, assignment: Sequence[int]) -> float:
    """Measure how much rules say: less for fewer rules, and if one rule has most names.

    A rule for n names counts sqrt(n): rules for 8 and 1 names are less than for 5 and 4.
    """
    patterns = _patterns(problem, assignment)
    # Exact, so that the order of rules does not matter.
    return math.fsum(math.sqrt(len(spellings(pattern))) for pattern in patterns)
