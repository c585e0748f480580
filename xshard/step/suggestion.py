"""A suggestion: rules for a training step, its predicted seconds and bytes, and how good it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from xshard.arguments import did_you_mean
from xshard.errors import PlanError
from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.layout import Layout
from xshard.rules import Rules, listed
from xshard.step.op import layout_of
from xshard.step.options import Floats
from xshard.step.problem import (
    COMPUTED,
    COMPUTED_BACK,
    HELD,
    MEMORY,
    MOVED,
    MOVED_BACK,
    OPTIMIZER,
    PARTS,
    StepProblem,
)
from xshard.step.rules import StepRules, ends_of, limited, written
from xshard.step.search import StepSearch

SAME = 0.01  # of the seconds: plans this near are as good


class ByHand(NamedTuple):
    """The best of a plan by hand over all numbers of micro-batches, with the parts of its cost."""

    rank: float
    search: StepSearch
    vector: Floats

    @property
    def seconds(self) -> float:
        return float(self.search.cost.of(self.vector))

    @property
    def bytes(self) -> int:
        return int(self.search.problem.cost(1.0).used(self.vector))


@dataclass(frozen=True, eq=False)
class Suggestion:
    """The layouts of everything in a training step, as rules, with its cost and a bound of all costs."""

    search: StepSearch
    bound: float
    by_hand: Mapping[str, ByHand]

    @property
    def problem(self) -> StepProblem:
        return self.search.problem

    @property
    def assignment(self) -> list[int]:
        assert self.search.best is not None
        return self.search.best

    @cached_property
    def rules(self) -> StepRules:
        return written(self.problem, self.assignment)

    @cached_property
    def layouts(self) -> Mapping[str, tuple[Layout, Layout]]:
        """The layouts of every array where it is made or stored, and where it is used first."""
        edges = reversed(self.problem.edges)
        return {self.problem.nodes[e.nodes[0]].name: ends_of(self.problem, e, self.assignment) for e in edges}

    @property
    def parameters(self) -> Rules:
        """The layouts of parameters, in storage and in use."""
        return self.rules.parameters

    @property
    def inputs(self) -> Rules:
        """What happens to activations on the way into modules."""
        return self.rules.inputs

    @property
    def outputs(self) -> Rules:
        """What happens to activations on the way out of modules."""
        return self.rules.outputs

    @property
    def once(self) -> str:
        """A pattern of the parameters that are gathered once per step, not for each use; "" for none."""
        return self.rules.once

    @property
    def micro_batches(self) -> int:
        """How many parts of the batch run one after another."""
        return self.problem.training.micro_batches

    @property
    def recompute(self) -> bool:
        """Whether the activations of repeated blocks are computed again in the backward pass."""
        return self.problem.training.recompute

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.search.seconds

    @property
    def gap(self) -> float:
        """The share of its seconds by which a better plan could be faster at most."""
        return 1 - self.bound / self.seconds

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes that a device holds at most, by kind."""
        vector = self.problem.vectors(self.assignment)[0]
        kinds = {kind: int(vector[part]) for kind, part in MEMORY.items()}
        held = vector[HELD : len(self.problem.blocks) * len(PARTS) : len(PARTS)].max()
        return {**kinds, "while a block runs": int(held)}

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Seconds of a step by what they are for; moves run beside computing as far as they overlap."""
        vector, training = self.problem.vectors(self.assignment)[0], self.problem.training
        blocks = vector[: len(self.problem.blocks) * len(PARTS)].reshape(-1, len(PARTS))
        sums = training.micro_batches * np.array(self.problem.blocks) @ blocks
        named = {"computing": (COMPUTED, COMPUTED_BACK), "moving": (MOVED, MOVED_BACK)}
        parts = {name: float(sums[list(columns)].sum()) for name, columns in named.items()}
        return {**parts, "optimizer": float(vector[OPTIMIZER])}

    def why(self, name: str) -> str:
        """The cost of the next best layout for an input, a parameter or an operation (its result).

        Raises PlanError for another name.
        """
        problem, number = self.problem, self.problem.number
        if name not in number:
            hint = f"{did_you_mean(name, number)}names are: {listed(list(number))}"
            raise PlanError(f"no array {name!r} in the step", hint=hint)
        node = problem.nodes[number[name]]
        ways, chosen = node.ways[:, -1], self.assignment[number[name]]
        others = (ways != ways[chosen]).any(-1)
        if node.kept is not None:
            others |= node.kept != node.kept[chosen]
        here = self._stated(name, self.assignment)
        left = list(self.search.given)
        left[number[name]] = left[number[name]][others[left[number[name]]]]
        if not len(left[number[name]]):
            return f"{name}: {here}, without another layout"
        search = StepSearch(problem, self.search.limit, left)
        rest = self.assignment[: number[name]], self.assignment[number[name] + 1 :]
        for other in left[number[name]]:
            search.offer([*rest[0], int(other), *rest[1]])
        search.improve()
        search.relax(search.seconds)
        if search.best is None:
            return f"{name}: {here}, nothing else fits the memory"
        more = search.seconds - self.seconds
        share = f"{format_seconds(abs(more))} ({more / self.seconds:+.1%})"
        return f"{name}: {here}; next {self._stated(name, search.best)}, {share} per step"

    def _stated(self, name: str, assignment: Sequence[int]) -> str:
        i, node = assignment[self.problem.number[name]], self.problem.nodes[self.problem.number[name]]
        names = self.problem.names(name)
        text = str(layout_of(node.ways[i, -1], names, self.problem.mesh.axes))
        return (
            text
            if node.kept is None
            else f"{text}, gathered {('for each use', 'once per step')[node.kept[i]]}"
        )

    def estimate(
        self,
        parameters: Mapping[Any, Any] | None = None,
        inputs: Mapping[Any, Any] | None = None,
        outputs: Mapping[Any, Any] | None = None,
        once: str | None = None,
    ) -> Suggestion:
        """The cost of rules, with the same number of micro-batches; the rest is as suggested.

        Nothing moves that no rule names. Raises PlanError for rules that cannot be run.
        """
        own, problem = self.rules, replace(self.problem)
        rules = StepRules(
            own.parameters if parameters is None else Rules(parameters),
            own.inputs if inputs is None else Rules(inputs),
            own.outputs if outputs is None else Rules(outputs),
            own.once if once is None else once,
        )
        search = StepSearch(problem, np.inf, limited(problem, rules))
        search.relax()
        search.improve()
        if search.best is None:
            hint = "a layout that no rule moves has to be the same in all operations that it reaches"
            raise PlanError("no plan follows these rules", hint=hint)
        return Suggestion(search, search.bound, {})

    def __str__(self) -> str:
        step, problem = self.problem.step, self.problem
        batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        lines = [
            f"{len(step.ops)} operations on {problem.mesh!r}, {problem.profile.name}, {batches}, activations "
            f"{'computed again' if self.recompute else 'kept'}"
        ]
        for title in ("parameters", "inputs", "outputs"):
            rules: Rules = getattr(self.rules, title)
            rows = [(f"  {pattern}", str(text)) for pattern, text in rules.items()]
            lines += [title, align_columns(rows)] if rows else []
        lines += [f"gathered once per step\n  {self.once}"] if self.once else []
        parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in self.parts.items())
        lines.append(f"{format_seconds(self.seconds)} per step: {parts}")
        lines.append(f"no plan is more than {max(self.gap, 0):.2%} faster")
        held = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.memory.items())
        lines.append(f"{format_bytes(sum(self.memory.values()))} per device: {held}")
        return "\n".join([*lines, *self._beside()])

    def _beside(self) -> list[str]:
        """The plans by hand, the best first, at three shares of overlap; whether one of them is as good."""
        shares = sorted({0.0, self.problem.training.overlap, 1.0})
        rows = [("overlap", *(f"{share:g}" for share in shares), "bytes", "")]
        mine = self.problem.vectors(self.assignment)[0]
        plans = [("suggested", self.search, mine, sum(self.memory.values()))]
        by_rank = sorted(self.by_hand.items(), key=lambda pair: pair[1].rank)
        plans += [(name, hand.search, hand.vector, hand.bytes) for name, hand in by_rank]
        table = [[float(s.problem.cost(1.0, x).of(v)) for x in shares] for _, s, v, _ in plans]
        for (name, search, _, n), seconds in zip(plans, table, strict=True):
            fits = "" if n <= search.limit else "does not fit"
            rows.append((name, *map(format_seconds, seconds), format_bytes(n), fits))
        lines = [align_columns(rows)]
        fitting = [i for i, (_, s, _, n) in enumerate(plans) if n <= s.limit]
        best = min(
            fitting, key=lambda i: table[i][shares.index(self.problem.training.overlap)] if i else np.inf
        )
        if best and table[best][1] <= self.seconds * (1 + SAME):
            lines.append(
                f"{plans[best][0]} is within {table[best][1] / self.seconds - 1:.1%}: little to gain"
            )
        for x, share in enumerate(shares):
            first = min(fitting, key=lambda i: table[i][x])
            if first:
                lines.append(f"at an overlap of {share:g} {plans[first][0]} is faster")
        return lines
