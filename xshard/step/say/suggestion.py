"""A suggestion: rules for a training step, its predicted seconds and bytes, and how good it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xshard.arguments import did_you_mean
from xshard.errors import PlanError
from xshard.formatting import Pictured, align_columns, format_bytes, format_seconds
from xshard.layout import Layout
from xshard.rules import Rules, RulesLike, listed
from xshard.step.choose.search import StepSearch
from xshard.step.price.options import Floats
from xshard.step.record.arrays import layout_of
from xshard.step.say.rules import StepRules, ends_of, limited, written

SAME = 0.01  # of the seconds: plans this near are as good


class StepPlan(NamedTuple):
    """A plan that a search met, with the parts of its cost."""

    search: StepSearch
    vector: Floats

    @property
    def bytes(self) -> int:
        return int(self.search.problem.cost(1.0).used(self.vector))

    @property
    def fits(self) -> bool:
        return self.bytes <= self.search.limit

    def seconds(self, overlap: float | None = None) -> float:
        return float(self.search.problem.cost(1.0, overlap).of(self.vector))


@dataclass(eq=False)
class Suggestion(Pictured):
    """The layouts of everything in a training step, as rules, with its cost and a bound of all costs.

    parameters: rules for storage and use. inputs, outputs: rules for activations on the way into and out of
    modules. once: a pattern of the parameters that are gathered once per step, not for each use; "" for none.
    micro_batches: parts of the batch that run one after another. recompute: activations of repeated blocks
    are computed again in the backward pass. seconds: predicted for a step. bound: no plan takes fewer; gap:
    the share of the seconds above it. memory: bytes of a device when it holds most, by kind. parts: seconds
    by kind; moves run beside computing as far as they overlap. by_hand: plans as people write them. unused:
    parameters that no operation takes.
    """

    search: StepSearch
    assignment: Sequence[int]
    bound: float
    by_hand: Mapping[str, StepPlan]
    unused: Sequence[str] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        problem = self.search.problem
        vector = problem.vectors(self.assignment)[0]
        self.parameters, self.inputs, self.outputs, self.once = written(problem, self.assignment)
        self.micro_batches = problem.micro_batches
        self.recompute = problem.recompute
        self.seconds, (self.parts, self.memory) = (
            float(self.search.cost.of(vector)),
            problem.summary(vector),
        )
        self.gap = 1 - self.bound / self.seconds

    @cached_property
    def layouts(self) -> Mapping[str, tuple[Layout, Layout]]:
        """The layouts of every array where it is made or stored, and where it is used first."""
        problem = self.search.problem
        edges = reversed(self.search.problem.edges)
        return {problem.nodes[e.nodes[0]].name: ends_of(problem, e, self.assignment) for e in edges}

    def why(self, name: str) -> str:
        """The cost of the next best layout for an input, a parameter or an operation (its result).

        Raises PlanError for another name.
        """
        problem = self.search.problem
        number = self.search.problem.number
        chosen = list(self.assignment)
        if name not in number:
            hint = f"{did_you_mean(name, number)}names are: {listed(list(number))}"
            raise PlanError(f"no array {name!r} in the step", hint=hint)
        i = number[name]
        node = problem.nodes[number[name]]
        others = (node.ways[:, -1] != node.ways[chosen[i], -1]).any(-1)
        left = list(self.search.left)
        here = f"{name}: {self._stated(i, chosen[i])}"
        left[i] = left[i][others[left[i]]]
        if not len(left[i]):
            return f"{here}, without another layout"
        search = StepSearch(problem, self.search.limit, left)
        for other in left[i]:
            search.offer([*chosen[:i], int(other), *chosen[i + 1 :]])
        search.improve()
        any(search.bound >= search.seconds for _ in search.rounds())
        if search.best is None:
            return f"{here}, nothing else fits the memory"
        more = search.seconds - self.seconds
        share = f"{format_seconds(abs(more))} ({more / self.seconds:+.1%})"
        return f"{here}; next {self._stated(i, search.best[i])}, {share} per step"

    def _stated(self, i: int, option: int) -> str:
        """An option of a node as text."""
        problem = self.search.problem
        node = self.search.problem.nodes[i]
        text = str(layout_of(node.ways[option, -1], problem.names(node.name), problem.mesh.axes))
        if node.kept is None or "/" not in text:
            return text
        return f"{text}, gathered {('for each use', 'once per step')[node.kept[option]]}"

    def estimate(
        self,
        parameters: RulesLike | None = None,
        inputs: RulesLike | None = None,
        outputs: RulesLike | None = None,
        once: str | None = None,
    ) -> Suggestion:
        """The cost of rules, with the same number of micro-batches; the rest is as suggested.

        Nothing moves that no rule names. Raises PlanError for rules that cannot be run.
        """
        stated = {"parameters": parameters, "inputs": inputs, "outputs": outputs}
        rules = {
            name: getattr(self, name) if own is None else Rules(own) for name, own in stated.items()
        }
        problem = replace(self.search.problem)
        left = limited(
            problem, StepRules(**rules, once=self.once if once is None else once), self.unused
        )
        search = StepSearch(problem, np.inf, left)
        list(search.rounds())
        search.improve()
        if search.best is None:
            hint = (
                "a layout that no rule moves has to be the same in all operations that it reaches"
            )
            raise PlanError("no plan follows these rules", hint=hint)
        return Suggestion(search, search.best, search.bound, {})

    def __str__(self) -> str:
        problem = self.search.problem
        batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        again = "computed again" if self.recompute else "kept"
        on = f"{problem.mesh!r}, {problem.moves.profile.name}"
        lines = [f"{len(problem.step.ops)} operations on {on}, {batches}, activations {again}"]
        for title in ("parameters", "inputs", "outputs"):
            rows = [(f"  {pattern}", str(text)) for pattern, text in getattr(self, title).items()]
            lines += [title, align_columns(rows)] if rows else []
        lines += [f"gathered once per step\n  {self.once}"] if self.once else []
        parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in self.parts.items())
        held = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.memory.items())
        lines += [
            f"{format_seconds(self.seconds)} per step: {parts}",
            f"no plan is more than {max(self.gap, 0):.2%} faster",
            f"{format_bytes(sum(self.memory.values()))} per device: {held}",
        ]
        lines += self._beside()
        whole = ", ".join(op.name for op in problem.step.ops if op.kind == "opaque")
        return "\n".join([*lines, f"whole, as no rule is known: {whole}"] if whole else lines)

    def _beside(self) -> list[str]:
        """The plans by hand, the best first, at three shares of overlap; whether one of them is as good."""
        own = self.search.problem.overlap
        mine = StepPlan(self.search, self.search.problem.vectors(self.assignment)[0])
        by_hand = sorted(
            self.by_hand.items(), key=lambda pair: (not pair[1].fits, pair[1].seconds())
        )
        plans = {"suggested": mine, **dict(by_hand)}
        shares = sorted({0.0, own, 1.0})
        rows = [("overlap", *(f"{share:g}" for share in shares), "bytes", "")]
        for name, plan in plans.items():
            seconds = (format_seconds(plan.seconds(share)) for share in shares)
            rows.append(
                (name, *seconds, format_bytes(plan.bytes), "" if plan.fits else "does not fit")
            )
        lines = [align_columns(rows)]
        fitting = [name for name, plan in plans.items() if plan.fits]
        more = plans[fitting[1]].seconds() / self.seconds - 1 if fitting[1:] else np.inf
        if more <= SAME:
            lines.append(f"{fitting[1]} is within {more:.1%}: little to gain")
        for share in shares:
            first = min(fitting, key=lambda name: plans[name].seconds(share))
            if first != "suggested":
                lines.append(f"at an overlap of {share:g} {first} is faster")
        return lines
