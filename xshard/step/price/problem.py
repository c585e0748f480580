"""The cost of a step on a mesh: nodes and edges with prices, and what an assignment costs.

A node is an input, a parameter or an operation; its options are the ways to shard it. An edge has
the moves of an array between the options of two nodes. An assignment is an option for every node.
docs/one_step.md has all of them for a step of two operations, in numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from xshard.step.price.cost import CostFunction
from xshard.step.price.edges import Edge, edges_of
from xshard.step.price.memory import bytes_at_moments
from xshard.step.price.nodes import Node, price_input, price_operation, price_parameter
from xshard.step.price.options import Flags, Floats, Ints
from xshard.step.price.parts import BlockPart, StepPart
from xshard.step.price.passes import closed_form
from xshard.step.price.step_setup import StepSetup

SECONDS = {
    "computing": [BlockPart.FORWARD_COMPUTING_S, BlockPart.BACKWARD_COMPUTING_S],
    "activations": [BlockPart.FORWARD_ACTIVATIONS_S, BlockPart.BACKWARD_ACTIVATIONS_S],
    "parameters": [BlockPart.FORWARD_PARAMETERS_S, BlockPart.BACKWARD_PARAMETERS_S],
    "gradients": [BlockPart.GRADIENTS_S],
}


@dataclass(frozen=True, eq=False)
class StepProblem(StepSetup):
    """A step with the prices of everything that may be assigned.

    excluded: for each edge the pairs of layouts that rules exclude, [rows, columns]; empty for no
    rules.
    """

    excluded: Sequence[Flags] = ()

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes: inputs, parameters, then operations."""
        return [
            *(price_input(self, name) for name in self.step.inputs),
            *(price_parameter(self, name) for name in self.step.parameters),
            *(price_operation(self, op) for op in self.step.ops),
        ]

    @cached_property
    def node_numbers(self) -> Mapping[str, int]:
        """The number of every node by name."""
        return {node.name: number for number, node in enumerate(self.nodes)}

    @cached_property
    def edges(self) -> list[Edge]:
        """The moves of every operand; a repeated block has its first one from elsewhere."""
        edges = edges_of(self, self.nodes, self.node_numbers)
        # These edges are this problem's own; only tables of seconds are shared with others.
        if self.excluded:
            for edge, excluded in zip(edges, self.excluded, strict=True):
                edge.banned |= excluded
        return edges

    def forget_edges(self) -> None:
        """Free the memory of edges, which are made again if anyone asks for them."""
        self.__dict__.pop("edges", None)  # where cached_property has them
        self.__dict__.pop("edges_of_node", None)

    def vector(self, assignment: Sequence[int]) -> Floats:
        """Add up the cost of an assignment, part by part.

        An assignment chooses for each node (a parameter, an input, an operation) one of its
        options, the ways to shard it. Parts are seconds and bytes of each kind. Moves cost what is
        known so far, a lower bound or the planner's price. All parts of an assignment with a move
        that is not possible are infinite.

        assignment: the number of an option for each node. Returns [parts].
        """
        chosen = zip(self.nodes, assignment, strict=True)
        total = np.asarray(sum(node.costs[option] for node, option in chosen))
        for edge in self.edges:
            total[edge.parts] += edge.costs_between(assignment[edge.source], assignment[edge.user])
        if np.isinf(total).any():  # a move is not possible
            # Infinite parts rank last, and callers keep them out of linear programs.
            total[:] = np.inf
        return total

    def vectors_with(
        self, assignment: Sequence[int], vector: Floats, node: int, options: Ints
    ) -> Floats:
        """Compute the costs of the assignments with other options at one node.

        Only this node and the moves to and from it cost something else.

        Args:
            assignment: The number of an option for each node, with possible moves.
            vector: The parts of its cost.
            node: The number of the node.
            options: The options that it has in turn.

        Returns:
            [options, parts].
        """
        costs = self.nodes[node].costs
        vectors = np.asarray(vector + costs[options] - costs[assignment[node]])
        for edge in self.edges_of_node[node]:
            assigned = {end: np.array([assignment[end]]) for end in edge.nodes}
            changed = {**assigned, node: options}
            rows = edge.rows[changed[edge.source]]
            columns = edge.columns[changed[edge.user]]
            assigned_row = edge.rows[assigned[edge.source]]
            assigned_column = edge.columns[assigned[edge.user]]
            cost_as_assigned = edge.costs(assigned_row, assigned_column)
            vectors[:, edge.parts] += (edge.costs(rows, columns) - cost_as_assigned).T
            vectors[edge.banned[rows, columns]] = np.inf
        return vectors

    @cached_property
    def edges_of_node(self) -> list[list[Edge]]:
        """The moves to and from each node."""
        edges_of_node: list[list[Edge]] = [[] for _ in self.nodes]
        for edge in self.edges:
            for node in set(edge.nodes):
                edges_of_node[node].append(edge)
        return edges_of_node

    def raise_to_prices(self, assignment: Sequence[int]) -> float:
        """Replace the lower bounds of all moves of an assignment by the planner's prices.

        Returns the seconds by which the bounds were too low, of one layer and micro-batch.
        """
        added_s = 0.0
        for edge in self.edges:
            added_s += edge.raise_to_price(assignment[edge.source], assignment[edge.user])
        return added_s

    def cost(self, limit: float) -> CostFunction:
        """Make the function from the parts of a plan's cost to the seconds of a training step.

        Parts are seconds of computing and moving, and bytes, of one layer and micro-batch.

        limit: bytes that a device may hold.
        """
        return closed_form(self, self.moments / limit)

    @cached_property
    def moments(self) -> Floats:
        """Bytes that a device holds, at every moment that may have the most: [moments, parts]."""
        return bytes_at_moments(self.parts, self.block_times, self.micro_batches)

    def summary(self, vector: Floats) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds of a step, and the bytes at the moment with most of them, by kind."""
        of_blocks = self.parts.of_blocks @ vector  # [blocks, block parts]
        # Parts are for one micro-batch and one layer.
        seconds = self.micro_batches * self.block_times @ of_blocks
        by_kind = {kind: float(seconds[parts].sum()) for kind, parts in SECONDS.items()}
        by_kind["optimizer"] = float(vector[StepPart.OPTIMIZER_S])
        return by_kind, self._memory(vector)

    def _memory(self, vector: Floats) -> dict[str, int]:
        """Count the bytes that a device holds at its fullest moment, by kind as users read them.

        The kinds, such as "parameters" or "activations", add up to the peak. Each kind's own
        maximum may be at another moment, and those would add up to more.

        vector: the parts of a plan's cost, seconds and bytes.
        """
        fullest = (self.moments @ vector).argmax()
        bytes_by_part = self.moments[fullest] * vector  # [parts]
        bytes_in_blocks = (self.parts.of_blocks @ bytes_by_part).sum(0)  # [block parts]
        # Three neighbours in the order of BlockPart: RUNNING, RECEIVED and SENT_BYTES.
        while_running = bytes_in_blocks[BlockPart.RUNNING_BYTES : BlockPart.GATHERED_BYTES]
        on_way = bytes_in_blocks[BlockPart.AHEAD_BYTES :]
        gradient_bytes = bytes_in_blocks[[BlockPart.GRADIENT_BYTES, BlockPart.SUM_BYTES]]
        gathered_bytes = bytes_in_blocks[BlockPart.GATHERED_BYTES]
        by_kind = {
            "parameters": bytes_by_part[StepPart.PARAMETER_BYTES] + gathered_bytes,
            "gradients": gradient_bytes.sum(),
            "optimizer state": bytes_by_part[StepPart.STATE_BYTES],
            "activations": bytes_in_blocks[BlockPart.SAVED_BYTES],
            "while a block runs": sum(while_running),
            "on the way": sum(on_way),
        }
        return {kind: int(n_bytes) for kind, n_bytes in by_kind.items()}
