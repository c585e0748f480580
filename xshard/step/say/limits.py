"""What rules of a user, and layouts that are fixed, leave a search to choose.

A search chooses for each *node* (a parameter, an input, an operation) one of its *options*, the ways
to shard it. An *edge* is an array on its way from one node to another, and may move there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from xshard.errors import NotationError, PlanError, located
from xshard.layout import Layout
from xshard.layout.sub_axes import SubAxisMesh
from xshard.models import rule_of, use_of
from xshard.notation.parser import Dim
from xshard.rules import Rules, RulesLike, match_objects
from xshard.step.price.edges import Edge
from xshard.step.price.nodes import Gathering
from xshard.step.price.options import Flags, Ints, without_copies
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import COPY, as_even_blocks, in_units, placement_by_units
from xshard.step.record.trace import INPUT
from xshard.step.say.rules import StepRules
from xshard.step.say.whole_axes import placements_on


class RuleLimits(NamedTuple):
    """What rules leave to a search.

    Args:
        options: The numbers of the options that each node may take.
        excluded: For each edge the moves to leave out: [layouts where the array is made, layouts
            where it is used].
    """

    options: list[Ints]
    excluded: list[Flags]


def read_limits(problem: StepProblem, rules: StepRules, unused: Sequence[str]) -> RuleLimits:
    """Turn rules that a person wrote into what a search may still choose.

    Parameters are stored, gathered and used as their rules say, inputs arrive as theirs say, and an
    activation moves only at a module whose rule names the move. With no rule for it, it stays as it
    is made.

    Args:
        problem: The step on its mesh.
        rules: The rules.
        unused: Parameters that no operation takes, which may have rules, too.

    Raises:
        PlanError: A rule leaves a node no option.
    """
    limits = _Limits(problem, rules, unused)
    excluded: list[Flags] = []
    for edge in problem.edges:
        is_parameter = problem.nodes[edge.source].gathering is not None
        if is_parameter:
            limits.limit_parameter(edge)
            # Only options that follow its rule are left, so that all their moves are the rule's.
            excluded.append(np.zeros(edge.banned.shape, bool))
        else:
            limits.limit_arrival(edge)
            excluded.append(limits.excluded_moves(edge))
    # Read at the end only: every edge may take options away from both of its nodes.
    return RuleLimits([np.flatnonzero(is_allowed) for is_allowed in limits.allowed], excluded)


class _Limits:
    """The options of every node that rules allow, as flags in `allowed`.

    All are allowed at first. The methods `limit_...` take some away, edge by edge.
    """

    def __init__(self, problem: StepProblem, rules: StepRules, unused: Sequence[str]) -> None:
        self.problem = problem
        self.rules = rules
        self.allowed = [np.ones(len(node.placements), bool) for node in problem.nodes]
        # Tied parameters are one, with several names between bars.
        names = "|".join((*problem.step.parameters, *unused)).split("|")
        self.rule_of_parameter = rules.parameters.match(names, what="parameter")
        self.gathered_once = Rules({rules.once: True} if rules.once else {})

    def limit_parameter(self, edge: Edge) -> None:
        """Disallow options in which a parameter is not stored, gathered and used as its rule says.

        The rule `o/tp/dp i -> o/tp i` leaves options of the parameter that store `o/tp/dp i`, and
        options of the operation that use `o/tp i`. It is gathered before each use, or once per step
        if its name is in `StepRules.once`. Clears flags in `allowed`, for both of these nodes.

        edge: the parameter (`edge.source`) on its way to the operation that uses it (`edge.user`).
        """
        source = self.problem.nodes[edge.source]
        mesh = self.problem.whole_mesh
        name = source.name.partition("|")[0]  # tied parameters, `a|b`, are used in one way
        with located(f"rule of {name}"):
            ndim = len(self.problem.dim_names(source.name))
            use = use_of(self.rule_of_parameter[name], ndim, mesh, frozenset(mesh.axes))
            stored = _placements(self.problem, source.name, use.stored)
            used = _placements(self.problem, source.name, use.used)
        # A parameter that is used as it is stored is not gathered. Its options then come with
        # PER_STEP as well as with PER_USE, at the same cost: those with PER_STEP are left.
        gathering = Gathering.PER_STEP
        if stored != used and self.gathered_once.find(name) is None:
            gathering = Gathering.PER_USE
        # `placements` are [options, arrays, axes], a node's own array last; `used_placements` are
        # [options, axes], of this parameter in the options of the operation.
        is_stored_so = (source.placements[:, -1] == stored).all(-1)
        is_used_so = (without_copies(edge.used_placements) == used).all(-1)
        self.allowed[edge.source] &= is_stored_so & source.is_gathered(gathering)
        self.allowed[edge.user] &= is_used_so
        self._check_options_left(edge, self.rule_of_parameter[name])

    def limit_arrival(self, edge: Edge) -> None:
        """Disallow options in which an input of the model does not arrive as its rule says."""
        source = self.problem.nodes[edge.source]
        rule = self.rules.inputs.find("")  # "" is the model itself
        if source.name not in self.problem.step.inputs or rule is None:
            return
        name = source.name.removesuffix(INPUT)
        text = rule.get(name) if isinstance(rule, dict) else rule  # one for each input
        if text is not None:
            arriving = without_copies(_rule_sides(text, self.problem, source.name).dst)
            self.allowed[edge.source] &= (source.placements[:, -1] == arriving).all(-1)
            self._check_options_left(edge, text)

    def _check_options_left(self, edge: Edge, rule: str) -> None:
        """Raise PlanError if an array's rule leaves one of the ends of its edge no option."""
        array = self.problem.nodes[edge.source].name
        for node in edge.nodes:
            if not self.allowed[node].any():
                name = self.problem.nodes[node].name
                shape = (
                    f"{array} has shape {self.problem.shape(array)} on {self.problem.whole_mesh}"
                )
                raise PlanError(
                    f"no plan follows these rules: that of {array} leaves {name!r} no layout",
                    text=rule,
                    hint=f"{shape}; 'stored -> used' gathers a parameter for its use",
                )

    def excluded_moves(self, edge: Edge) -> Flags:
        """Flag the moves of an activation that no rule names: they are left out of the search.

        A rule `b/dp s -> b/dp s/tp` names dp and tp: along these, only its own move is left. Along
        all other axes, and along all axes without a rule, the layout has to stay as it is.

        edge: the activation on its way from the operation that makes it to one that uses it.

        Returns booleans [made, used], True to leave out: an entry is the move from one of the layouts
        in which the array may be made, `made_layouts` [made, axes], to one in which it may be used,
        `used_layouts` [used, axes].
        """
        source = self.problem.nodes[edge.source].name
        # A copy is a replica whose gradients are partial sums: inputs have no gradient.
        is_input = source in self.problem.step.inputs
        used_layouts = without_copies(edge.used_layouts) if is_input else edge.used_layouts
        is_allowed = edge.made_layouts[:, None] == used_layouts  # [made, used, axes]: it stays
        rules = self.rules.inputs if edge.enters else self.rules.outputs
        # Without a place, no rule could move the array: "" would find the rule of the whole model.
        text = rules.find(edge.place) if edge.place else None
        if text is not None:
            src, dst, is_named = _rule_sides(text, self.problem, source, edge.place)
            if is_input:
                src = without_copies(src)
                dst = without_copies(dst)
            # Along an axis that the rule names, the rule's move is allowed; along others, to stay.
            is_stated = (edge.made_layouts == src)[:, None] & (used_layouts == dst)
            if isinstance(self.problem.mesh, SubAxisMesh):
                # Of heads that are shared a rule says that they are copies, and they stay shared.
                is_shared = edge.made_layouts[:, -2] != edge.made_layouts[:, -1]
                is_copied = (src[-2:] == COPY) & (dst[-2:] == COPY)
                is_stated[..., -2:] |= is_shared[:, None, None] & is_copied & is_allowed[..., -2:]
            is_allowed = np.where(is_named, is_stated, is_allowed)
        # A move is excluded if a single axis does something else than it may.
        return np.asarray(~is_allowed.all(-1))


def fixed_options(problem: StepProblem, fixed: RulesLike) -> list[Ints]:
    """List for each array the ways to shard it that agree with layouts which a user fixed.

    The result has for every node (a parameter, an input, an operation) the numbers of its options.
    Axes that a layout does not name are free: `b/dp c` leaves all options in which dp shards b,
    whatever other axes do. Raises NotationError if a layout leaves no option.

    fixed: layouts by patterns over names of inputs, parameters and operations, for their results.
    """
    array_of_name: dict[str, str] = {}
    for array in problem.node_numbers:
        # Tied parameters are one array, with several names between bars: each may be meant.
        array_of_name |= dict.fromkeys([array, *array.split("|")], array)
    layouts = match_objects(Rules(fixed), array_of_name, "array of the step")
    options: list[Ints] = []
    for node in problem.nodes:
        if node.name not in layouts:
            options.append(np.arange(len(node.placements)))
            continue
        text = layouts[node.name]
        rule = _rule_sides(text, problem, node.name)
        # Of `b -> b/dp`, only `b` counts: how the array is used, after the arrow, is left free.
        is_same = node.placements[:, -1] == rule.src  # [options, axes] of the array itself
        agrees = (is_same | ~rule.is_named).all(-1)  # [options]
        if not agrees.any():
            dims = problem.step.arrays[node.name]
            raise NotationError(
                f"no option has '{text}'",
                hint=f"'{dims}' has lengths {problem.shape(node.name)}",
            )
        options.append(np.flatnonzero(agrees))
    return options


class RuleSides(NamedTuple):
    """A rule for an array: placements before and after a move, and which axes it names: [axes] each."""

    src: Ints
    dst: Ints
    is_named: Flags


def _rule_sides(text: str, problem: StepProblem, name: str, place: str = "") -> RuleSides:
    """Read a rule for an array; raise NotationError for what is not searched.

    Args:
        text: The rule: "b s -> b s/tp".
        problem: The step on its mesh.
        name: The array.
        place: The module whose rule it is, for errors; "" for the array itself.
    """
    ndim = len(problem.dim_names(name))
    with located(f"rule of {place if place else name}"):
        rule = rule_of(text, problem.whole_mesh)
        src = np.array(_placements(problem, name, rule.src.resolved(ndim)))
        dst = np.array(_placements(problem, name, rule.dst.resolved(ndim)))
    named_axes = [problem.mesh.origin(axis) for axis in problem.mesh.axes]
    return RuleSides(src, dst, np.isin(named_axes, rule.axes))


def _placements(problem: StepProblem, name: str, layout: Layout) -> list[int]:
    """Convert a layout of an array into placements: of `b/dp c | sum(tp)`, on dp and tp, [0, SUM].

    `(o 16)/balanced(tp)` shards a dim by units, see `placement_by_units`. Raises NotationError for
    layouts that are not searched.
    """
    shape = problem.shape(name)
    units = problem.units[name]
    mesh = problem.whole_mesh
    even_dims: list[Dim] = []  # as if all blocks were even: so far `placements_on` can read them
    dims_by_units: set[int] = set()
    for d, dim in enumerate(layout.dims):
        even_dim = as_even_blocks(dim)
        # Two ways to write units: in rules of parameters, and of activations.
        write_in_units = partial(in_units, even_dim, shape[d], units[d], mesh)
        if dim in (write_in_units(says_length=False), write_in_units(says_length=True)):
            dims_by_units.add(d)
            even_dims.append(even_dim)
        else:
            even_dims.append(dim)
    placements = placements_on(replace(layout, dims=tuple(even_dims)), problem.mesh, shape)
    for axis, placement in enumerate(placements):
        if placement in dims_by_units:
            placements[axis] = placement_by_units(placement, len(even_dims))
    return placements
