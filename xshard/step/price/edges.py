"""What the moves of an array cost, from where it is made or stored to where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from xshard.step.price.moves import MovePrices, dual
from xshard.step.price.nodes import Gathering, Node
from xshard.step.price.options import Flags, Floats, Ints, Placements, distinct, without_copies
from xshard.step.price.parts import BlockPart
from xshard.step.price.step_setup import StepSetup
from xshard.step.record.arrays import COPY, REPLICAS
from xshard.step.record.op import Op
from xshard.step.record.repeat import in_first_block


@dataclass(eq=False)
class Edge:
    """The moves of an array from the options of one node to the options of another.

    Many options have the same layout of one array, so tables have a row for each distinct layout
    where the array is made or stored, and a column for each one in which it is used.

    Args:
        source: The number of the node that makes or stores the array.
        user: The number of the operation that takes it.
        rows: For each option of the source its row.
        columns: For each option of the user its column.
        made_layouts: The layout of each row: [rows, axes].
        used_layouts: The layout of each column: [columns, axes].
        shape: The global shape of the array.
        prices: The seconds of moves.
        seconds_parts: The parts of the cost that get seconds: of the forward and of the backward
            pass.
        runs: How often a move and its adjoint run in each pass, by rows: [passes, move or adjoint,
            rows].
        bytes_by_part: Other parts of the cost: [rows, columns] for each.
        launch_share: The array's part of the elements that move in one collective.
        is_linear: The move has an adjoint in the backward pass.
        place: The module or array at whose rule the array can move. "" for none: only equal layouts
            are possible, all others are `banned`.
        enters: It moves on the way into that module, not out of it.
    """

    source: int
    user: int
    rows: Ints
    columns: Ints
    made_layouts: Placements
    used_layouts: Placements
    shape: tuple[int, ...]
    prices: MovePrices
    seconds_parts: tuple[int, int]
    runs: Floats
    bytes_by_part: Mapping[int, Floats]
    launch_share: float = 1.0
    is_linear: bool = True
    place: str = ""
    enters: bool = False
    parts: Ints = field(init=False)
    banned: Flags = field(init=False)

    def __post_init__(self) -> None:
        # Shared with all edges that have the same layouts: what one plans, others know.
        self._table = self.prices.table(
            self.made_layouts, self.used_layouts, self.shape, self.is_linear, self.launch_share
        )
        tables = list(self.bytes_by_part.values())
        self._bytes = np.array(tables).reshape(-1, *self._table.is_planned.shape)
        self.parts = np.array([*self.bytes_by_part, *self.seconds_parts])
        used = self.used_layouts if self.is_linear else without_copies(self.used_layouts)
        # Where no rule can say a move, an array stays as it is made.
        differs = (self.made_layouts[:, None] != used).any(-1)
        self.banned = differs & (not self.place)

    @property
    def nodes(self) -> tuple[int, int]:
        return self.source, self.user

    @property
    def used_placements(self) -> Placements:
        """The layout in which each option of the user takes the array: [options, axes]."""
        return self.used_layouts[self.columns]

    def costs(self, rows: Ints, columns: Ints) -> Floats:
        """Return the costs of moves from rows to columns, for `parts`: [parts, moves]."""
        seconds = (self.runs[:, :, rows] * self._table.seconds[:, rows, columns]).sum(1)
        return np.concatenate([self._bytes[:, rows, columns], seconds])

    def plan(self, source_option: int, user_option: int) -> float:
        """Plan the move between two options; return the seconds by which the bound was too low."""
        row = int(self.rows[source_option])
        column = int(self.columns[user_option])
        seconds, is_planned = self._table
        if is_planned[row, column] or self.banned[row, column]:
            return 0.0
        src = self.made_layouts[row]
        dst = self.used_layouts[column]
        forward = self.prices.price(src, dst, self.shape, self.launch_share)
        backward = 0.0
        if self.is_linear:
            backward = self.prices.price(dual(dst), dual(src), self.shape, self.launch_share)
        added = forward + backward - seconds[:, row, column].sum()
        seconds[:, row, column] = (forward, backward)
        is_planned[row, column] = True
        return float(added)

    def weighted(self, weights: Floats, source_options: Ints, user_options: Ints) -> Floats:
        """Add up all parts under weights for every pair of some options; infinite if banned.

        A hot path: every bound of a search calls it for every edge. So it works on rows and
            columns, and
        spreads over options at the end.
        """
        byte_weights, second_weights = np.split(weights[self.parts], [len(self._bytes)])
        weighted_runs = (second_weights @ self.runs.reshape(2, -1)).reshape(2, -1, 1)
        total = (weighted_runs * self._table.seconds).sum(0)
        total += (byte_weights @ self._bytes.reshape(len(byte_weights), total.size)).reshape(
            total.shape
        )
        total = np.where(self.banned, np.inf, total)
        return total[self.rows[source_options]][:, self.columns[user_options]]


def edges_of(setup: StepSetup, nodes: Sequence[Node]) -> list[Edge]:
    """Price the moves of every operand of every operation.

    The carry of a repeated block has two edges: its first operand is from elsewhere, all others
    from the block before.
    """
    numbers = {node.name: number for number, node in enumerate(nodes)}
    edges = list[Edge]()
    for op in setup.step.ops:
        # Only the first of repeated blocks takes the operand: 1 of `times` runs.
        first_share = 1 / op.times if op.again else 1.0
        for operand, name in enumerate(op.operands):
            edges.append(_edge(setup, nodes, numbers, name, op, operand, first_share))
        if op.again:
            edges.append(_edge(setup, nodes, numbers, op.again, op, 0, 1 - first_share))
    return edges


def _edge(
    setup: StepSetup,
    nodes: Sequence[Node],
    numbers: Mapping[str, int],
    name: str,
    op: Op,
    operand: int,
    share: float,
) -> Edge:
    """Price the moves of an array that an operation takes as operand number `operand`.

    share: the part of the operation's runs in which it takes this array.
    """
    step = setup.step
    source = nodes[numbers[name]]
    user = nodes[numbers[op.name]]
    used_layouts, columns = distinct(user.placements[:, operand])
    made_layouts, rows = distinct(source.placements[:, -1])
    launch_share = 1.0
    if source.gathering is not None:
        # Options differ in gathering, too: each has its own row.
        made_layouts = source.placements[:, -1]
        rows = np.arange(len(made_layouts))
        launch_share = setup.launch_share(name)
    place, enters = _place(setup, name, op, is_first=operand == 0)
    bytes_by_part = _bytes_by_part(setup, source, op, made_layouts, used_layouts)
    is_linear = name in step.differentiable
    if name in step.by_name and not is_linear and not enters:
        used_layouts = without_copies(used_layouts)  # without a gradient a copy is a replica
    return Edge(
        source=numbers[name],
        user=numbers[op.name],
        rows=rows,
        columns=columns,
        made_layouts=made_layouts,
        used_layouts=used_layouts,
        shape=setup.shape(name),
        prices=setup.moves,
        seconds_parts=(
            setup.part(op, BlockPart.FORWARD_MOVING_S),
            setup.part(op, BlockPart.BACKWARD_MOVING_S),
        ),
        runs=share * _runs(setup, source, op, len(made_layouts)),
        bytes_by_part=bytes_by_part,
        launch_share=launch_share,
        is_linear=is_linear,
        place=place,
        enters=enters,
    )


def _runs(setup: StepSetup, source: Node, op: Op, n_rows: int) -> Floats:
    """Count how often a move and its adjoint run in each pass: [passes, move or adjoint, rows].

    The forward pass has the move, the backward pass its adjoint. It has the move again where
    activations are computed again, and for a parameter that is gathered for each use.
    """
    if source.gathering is None:
        once = np.ones(n_rows)
        again = once * setup.is_recomputed(op)
    else:
        again = np.asarray(source.is_gathered(Gathering.PER_USE), dtype=float)
        once = np.where(again > 0, 1.0, 1 / setup.micro_batches)
    never = np.zeros(n_rows)
    return np.array([[once, never], [again, once]])


def _place(setup: StepSetup, name: str, op: Op, *, is_first: bool) -> tuple[str, bool]:
    """Find the module or array at whose rule an operand can move, "" for none.

    Returns whether it moves on the way into that module, too.
    """
    step = setup.step
    is_parameter = name in step.parameters
    entered = step.module(op, left=False)
    if is_first and not is_parameter and entered:
        if op.again and name != op.again:
            # What the first of repeated blocks takes is a rule of its own.
            return in_first_block(entered), True
        return entered, True
    if name in step.by_name:
        # A module's output has one layout, so that several uses would have to agree.
        is_only_use = len(step.consumers(name)) == op.operands.count(name) == 1
        module = step.module(step.by_name[name], left=True)
        if is_only_use and module:
            return module, False
    return (name if is_parameter or step.moves_anywhere else ""), False


def _bytes_by_part(
    setup: StepSetup,
    source: Node,
    op: Op,
    made_layouts: Placements,
    used_layouts: Placements,
) -> dict[int, Floats]:
    """Return the bytes that a move adds to parts of the cost: [rows, columns] for each part."""
    if source.gathering is not None:
        return _bytes_of_parameter(setup, source, op, used_layouts)
    if op.kind == "loss":
        # The gradient of the logits is there a second time, as it arrives.
        arriving = setup.block_bytes(made_layouts, setup.shape(source.name), setup.item_bytes)
        moves = (made_layouts[:, None] != used_layouts).any(-1)
        return {setup.part(op, BlockPart.RUNNING_BYTES): arriving[:, None] * moves}
    return {}


def _bytes_of_parameter(
    setup: StepSetup, source: Node, op: Op, used: Placements
) -> dict[int, Floats]:
    """Return the bytes of a parameter while it is gathered and used, and of its gradients then.

    Tables are [rows, columns]: options of the parameter, and layouts in which the operation uses
    it.
    """
    shape = setup.shape(source.name)
    bytes_ratio = setup.gradient_bytes / setup.item_bytes
    stored = source.placements[:, -1][:, None]  # [rows, 1, axes]
    is_gathered = (stored != without_copies(used)).any(-1)
    is_first_use = setup.step.consumers(source.name)[0] is op
    per_use = source.is_gathered(Gathering.PER_USE)[:, None] & is_gathered
    # What is gathered once counts once, whatever uses it.
    per_step = source.is_gathered(Gathering.PER_STEP)[:, None] & is_first_use
    used_bytes = setup.block_bytes(used, shape, setup.item_bytes)
    # Gathers take the slow links first: a second message if there are others.
    halfway = np.where(setup.moves.far, used, stored)
    halfway_bytes = setup.block_bytes(halfway, shape, setup.item_bytes)
    has_two_gathers = (halfway != stored).any(-1) & (halfway != used).any(-1)
    received = per_use * (2 * used_bytes + has_two_gathers * halfway_bytes)
    # Gradients are summed first over the axes that shard the parameter in storage alone.
    summed = np.where(used == REPLICAS, stored, used)
    summed_bytes = setup.block_bytes(summed, shape, setup.item_bytes)
    sent = per_use * (used_bytes + 2 * summed_bytes)
    # Over micro-batches, gradients of what is gathered once are added up whole, as it is used.
    has_micro_batches = setup.micro_batches > 1
    gradients = has_micro_batches * per_step * used_bytes * setup.gradient_bytes / setup.item_bytes
    # A sum at the end of the step holds an addend and its result. The gradient, which is counted
    # already, is one of them, and as large as both if the parameter has 16 bits.
    is_summed_later = ((stored == REPLICAS) & (used == COPY)).any(-1)
    stored_bytes = setup.block_bytes(stored, shape, setup.item_bytes)
    sums = is_first_use * is_summed_later * stored_bytes * max(2 - bytes_ratio, 0)
    return {
        setup.part(op, BlockPart.RECEIVED_BYTES): received,
        setup.part(op, BlockPart.SENT_BYTES): sent,
        setup.part(op, BlockPart.GATHERED_BYTES): per_step * is_gathered * used_bytes,
        setup.part(op, BlockPart.GRADIENT_BYTES): gradients,
        setup.part(op, BlockPart.SUM_BYTES): sums,
    }
