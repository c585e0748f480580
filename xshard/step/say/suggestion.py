"""A suggestion: rules for a training step, predicted seconds and bytes, and how good it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from xshard.errors import PlanError
from xshard.formatting import Pictured, align_columns, format_bytes, format_seconds
from xshard.layout import Layout
from xshard.rules import Rules, RulesLike, listed_names
from xshard.schedule import EXPOSED, Schedule
from xshard.signatures import did_you_mean
from xshard.step.choose.search import StepSearch
from xshard.step.price.nodes import Gathering
from xshard.step.price.options import Floats
from xshard.step.price.passes import schedule_of
from xshard.step.say.limits import read_limits
from xshard.step.say.rules import StepRules, ends_of, write_rules, written_ends

SAME = 0.01  # of the seconds: plans this near are as good
WHY_EXPOSED = """\
  activations are awaited where they are used; parameters and gradients at the ends of a pass, and where
  they travel for a longer time than a module computes"""
GATHERED = {Gathering.PER_USE: "for each use", Gathering.PER_STEP: "once per step"}


class StepPlan(NamedTuple):
    """A plan that a search met, with the parts of its cost: seconds and bytes by kind, [parts]."""

    search: StepSearch
    vector: Floats

    @property
    def bytes(self) -> int:
        """Bytes of a device when it holds most."""
        # With a limit of one byte, the share of the limit is the bytes.
        return int(self.search.problem.cost(1.0).largest_limit_share(self.vector))

    @property
    def fits(self) -> bool:
        """Whether a device can hold it."""
        return self.bytes <= self.search.limit

    def seconds(self) -> float:
        """Return the seconds of a step."""
        return float(self.search.cost.total(self.vector))


@dataclass(eq=False)
class Suggestion(Pictured):
    """The layouts of everything in a training step as rules, with their cost and a bound.

    Args:
        search: The search that found it.
        assignment: An option for every node of the search's problem.
        bound: No plan takes fewer seconds.
        by_hand: Plans like people write them, by name.
        unused: Parameters that no operation takes.

    Attributes:
        parameters: Rules for storage and use of parameters.
        inputs: Rules for activations on the way into modules.
        outputs: Rules for activations on the way out of modules.
        once: A pattern of the parameters that are gathered once per step, not for each use; "" for
            none.
        micro_batches: Parts of the batch that run one after another.
        recompute: Activations of repeated blocks are computed again in the backward pass.
        prefetch: How many modules ahead parameters travel.
        batch_parts: Parts of a micro-batch that take turns to compute, as in `xt.halves`.
        seconds: Predicted for a step.
        parts: Seconds by kind; `schedule` says which moves run beside computing.
        memory: Bytes of a device when it holds most, by kind.
        gap: The share of the seconds above the bound.
    """

    search: StepSearch
    assignment: Sequence[int]
    bound: float
    by_hand: Mapping[str, StepPlan]
    unused: Sequence[str] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        problem = self.search.problem
        # Plain attributes: bridges add rules to them.
        rules = write_rules(problem, self.assignment)
        self.parameters = rules.parameters
        self.inputs = rules.inputs
        self.outputs = rules.outputs
        self.once = rules.once
        self.micro_batches = problem.micro_batches
        self.recompute = problem.recompute
        self.prefetch = problem.prefetch
        self.batch_parts = problem.batch_parts
        vector = problem.vector(self.assignment)
        self.parts, self.memory = problem.summary(vector)
        self.seconds = float(self.search.cost.total(vector))
        self.gap = 1 - self.bound / self.seconds

    @cached_property
    def schedule(self) -> Schedule:
        """What computes and what travels in both passes of a micro-batch, with predicted seconds."""
        problem = self.search.problem
        return schedule_of(problem, problem.vector(self.assignment))

    @cached_property
    def layouts(self) -> Mapping[str, tuple[Layout, Layout]]:
        """The layouts of every array where it is made or stored, and where it is used first."""
        problem = self.search.problem
        layouts: dict[str, tuple[Layout, Layout]] = {}
        for edge in reversed(problem.edges):  # the first use is the last to be written
            name = problem.nodes[edge.source].name
            layouts[name] = ends_of(problem, edge, self.assignment)
        return layouts

    @property
    def gathers(self) -> str:
        """A pattern of the modules that gather their parameters together, as the schedule has them."""
        modules: dict[str, None] = {}
        for parameter in self.search.problem.step.parameters:
            # Layers gather all that is inside; outside of layers each module gathers its own.
            layers, star, _ = parameter.partition("*")
            name, *_ = parameter.split("|")  # the first one of a tied parameter
            module = f"{layers}*" if star else name.rpartition(".")[0]
            modules[module] = None
        modules.pop("", None)  # the model itself gathers the rest
        return "|".join(modules)

    def why(self, name: str) -> str:
        """Say what the next best layout of an array would cost.

        The text has the form "NAME: its layout; next another layout, 1.2 ms (+3.4%) per step". It
        says so if the array has no other layout, or none with which a plan fits the memory.

        Args:
            name: An input, a parameter, or an operation for its result, by the name that the plan
                prints.

        Raises:
            PlanError: There is no such array.
        """
        problem = self.search.problem
        if name not in problem.node_numbers:
            names = listed_names(list(problem.node_numbers))
            raise PlanError(
                f"no array {name!r} in the step",
                hint=f"{did_you_mean(name, problem.node_numbers)}names are: {names}",
            )
        node = problem.node_numbers[name]
        assigned = f"{name}: {self._option_text(node, self.assignment[node])}"
        # All other layouts are searched anew: with another one for this array, the best plan may
        # differ elsewhere, too.
        search = self._search_for_another_layout(node)
        if search is None:
            return f"{assigned}, without another layout"
        if search.best is None:
            return f"{assigned}, nothing else fits the memory"
        added_s = search.seconds - self.seconds
        added = f"{format_seconds(abs(added_s))} ({added_s / self.seconds:+.1%})"
        return f"{assigned}; next {self._option_text(node, search.best[node])}, {added} per step"

    def _search_for_another_layout(self, node: int) -> StepSearch | None:
        """Search for the best plan in which one array has another layout than now.

        Returns None if the array has no other layout. Otherwise returns the search, at its end, with
        the plan in `best`: None if no such plan fits the memory. It is not always proved to be the
        best, since the lower bound may stop rising before it reaches the plan's seconds.

        node: the number of a parameter, an input or an operation, for its result.
        """
        problem = self.search.problem
        # [options, axes]: of the node's own array, which is the last one.
        placements = problem.nodes[node].placements[:, -1]
        differs = (placements != placements[self.assignment[node]]).any(-1)  # [options]
        options = list(self.search.options)
        options[node] = options[node][differs[options[node]]]  # numbers of those that differ
        if not len(options[node]):
            return None
        search = StepSearch(problem, self.search.limit, options)
        # Most often the next best plan differs from the present one in nothing else, so that these
        # plans are good ones to begin with.
        for option in options[node]:
            changed = list(self.assignment)
            changed[node] = int(option)
            search.offer(changed)
        search.improve()
        # As long as the lower bound is below the best plan's seconds, another may be better.
        # `advance` raises the bound a little, and returns False if it can do so no more.
        while search.advance():
            if search.bound >= search.seconds:
                break
        return search

    def _option_text(self, node_number: int, option: int) -> str:
        """Write an option of a node as text: "o/dp i, gathered for each use"."""
        problem = self.search.problem
        node = problem.nodes[node_number]
        placements = node.placements[option, -1]  # of the node's own array: [axes]
        layout, _ = written_ends(problem, node.name, placements, placements)
        is_sharded = "/" in str(layout)  # else there is nothing to gather
        if node.gathering is None or not is_sharded:
            return str(layout)
        return f"{layout}, gathered {GATHERED[node.gathering[option]]}"

    def estimate(
        self,
        parameters: RulesLike | None = None,
        inputs: RulesLike | None = None,
        outputs: RulesLike | None = None,
        once: str | None = None,
    ) -> Suggestion:
        """Price rules of your own, with the same number of micro-batches.

        Arrays move only where a rule says so. The result is a suggestion with these rules.

        Args:
            parameters: Rules for parameters; None for the suggested ones, like all others.
            inputs: Rules for modules' inputs.
            outputs: Rules for modules' outputs.
            once: A pattern of the parameters that are gathered once per step.

        Raises:
            PlanError: No plan follows these rules.
        """
        rules = StepRules(
            parameters=self.parameters if parameters is None else Rules(parameters),
            inputs=self.inputs if inputs is None else Rules(inputs),
            outputs=self.outputs if outputs is None else Rules(outputs),
            once=self.once if once is None else once,
        )
        options, excluded = read_limits(self.search.problem, rules, self.unused)
        problem = replace(self.search.problem, excluded=excluded)
        # Rules may leave some choice, such as how operations inside a module are sharded: the best
        # one is searched. They are priced though they may not fit the memory.
        search = StepSearch(problem, limit=float("inf"), options=options)
        search.run()
        search.improve()
        if search.best is None:
            raise PlanError(
                "no plan follows these rules",
                hint="a layout that no rule moves has to be the same in all operations that it reaches",
            )
        return Suggestion(search, search.best, search.bound, by_hand={})

    def __str__(self) -> str:
        """Write the rules, the seconds and bytes they cost, and how plans by hand compare.

        The lines after the rules: seconds per step by kind; how far from the optimum the plan can
        be at most; bytes per device by kind; the table of plans by hand, such as ZeRO-3; operations
        that are not sharded because nothing is known of them.
        """
        lines = [self._headline(), *self._rules_as_lines()]
        seconds = [f"{kind} {format_seconds(seconds)}" for kind, seconds in self.parts.items()]
        memory = [f"{kind} {format_bytes(n_bytes)}" for kind, n_bytes in self.memory.items()]
        total_bytes = sum(self.memory.values())  # all kinds are for the same moment
        lines.append(f"{format_seconds(self.seconds)} per step: {', '.join(seconds)}")
        lines += self._exposed_lines()
        # By rounding, the lower bound may be above the seconds by a hair: `max` avoids "-0.00%".
        lines.append(f"no plan is more than {max(self.gap, 0):.2%} faster")
        lines.append(f"{format_bytes(total_bytes)} per device: {', '.join(memory)}")
        lines += self._comparison_lines()
        without_rule = [op.name for op in self.search.problem.step.ops if op.kind == "opaque"]
        if without_rule:
            lines.append(f"whole, as no rule is known: {', '.join(without_rule)}")
        return "\n".join(lines)

    def _rules_as_lines(self) -> list[str]:
        """Write a table of rules for each kind that has any, under its title."""
        lines: list[str] = []
        for title in ("parameters", "inputs", "outputs"):  # attributes of these names
            rules = getattr(self, title)
            if rules:
                rows = [(f"  {pattern}", str(text)) for pattern, text in rules.items()]
                lines += [title, align_columns(rows)]
        if self.once:
            lines.append(f"gathered once per step\n  {self.once}")
        return lines

    def _headline(self) -> str:
        """Write what was planned, on which mesh, and how the batch is divided."""
        problem = self.search.problem
        plural = "es" if self.micro_batches > 1 else ""
        parts = f" in {self.batch_parts} parts" if self.batch_parts > 1 else ""
        activations = "computed again" if self.recompute else "kept"
        return (
            f"{len(problem.step.ops)} operations on {problem.whole_mesh!r}, {problem.moves.profile.name}, "
            f"{self.micro_batches} micro-batch{plural}{parts}, activations {activations}"
        )

    def _exposed_lines(self) -> list[str]:
        """Write for how long the device waits for each kind of moves, and why."""
        problem = self.search.problem
        if problem.overlap is not None or problem.step.moves_anywhere:
            return []  # a share, and no schedule
        seconds_of: dict[str, float] = {}
        for span in self.schedule.timeline().spans:
            if span.lane == EXPOSED:
                kind = span.name.rpartition(" ")[2]  # "layers.0 parameters"
                seconds_of[kind] = seconds_of.get(kind, 0.0) + span.end_s - span.begin_s
        exposed = [
            f"{kind} {format_seconds(problem.micro_batches * seconds)}"
            for kind, seconds in seconds_of.items()
        ]
        return [f"exposed: {', '.join(exposed)}", WHY_EXPOSED] if exposed else []

    def _comparison_lines(self) -> list[str]:
        """Compare this plan with plans by hand, such as ZeRO-3: a table, then a remark.

        A row has the plan's seconds, its bytes, and whether it fits.
        """
        vector = self.search.problem.vector(self.assignment)
        plans = {"suggested": StepPlan(self.search, vector)}
        # Plans that fit the memory first, the fastest first. (`|=` takes pairs, and keeps their order.)
        plans |= sorted(self.by_hand.items(), key=_fitting_first)
        rows: list[tuple[str, ...]] = []
        for name, plan in plans.items():
            remark = "" if plan.fits else "does not fit"
            rows.append((name, format_seconds(plan.seconds()), format_bytes(plan.bytes), remark))
        lines = [align_columns(rows)]
        fitting = [name for name, plan in plans.items() if plan.fits]
        # The first one is the suggested plan itself, the second one the best by hand.
        if len(fitting) > 1:
            slower = plans[fitting[1]].seconds() / self.seconds - 1
            if slower <= SAME:
                lines.append(f"{fitting[1]} is within {slower:.1%}: little to gain")
        return lines


def _fitting_first(named: tuple[str, StepPlan]) -> tuple[bool, float]:
    """Rank plans by name: those that fit the memory first, the fastest first."""
    _, plan = named
    return not plan.fits, plan.seconds()
