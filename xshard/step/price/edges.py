"""What the moves of an array cost, from where it is made or stored to where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from xshard.step.price.moves import MovePrices, dual
from xshard.step.price.nodes import Gathering, Node
from xshard.step.price.options import (
    Flags,
    Floats,
    Ints,
    Placements,
    distinct_layouts,
    without_copies,
)
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
        """Price the move between two options by the planner, in place of a lower bound.

        An edge is an array on its way from the operation that makes it (the source) to one that
        uses it; its table has lower bounds of seconds until a move is planned.

        Writes into the table of seconds, which edges with the same layouts share: a move is planned
        once for all of them.

        Returns:
            The seconds by which the bound was too low, forward and backward pass together; 0 if the
            move was planned before, or is not possible.
        """
        row = int(self.rows[source_option])
        column = int(self.columns[user_option])
        seconds, is_planned = self._table  # seconds: [passes, rows, columns]
        if is_planned[row, column] or self.banned[row, column]:
            return 0.0
        src = self.made_layouts[row]
        dst = self.used_layouts[column]
        forward = self.prices.price(src, dst, self.shape, self.launch_share)
        backward = 0.0
        if self.is_linear:
            # The gradient moves back: from the dual of the destination to the dual of the source.
            backward = self.prices.price(dual(dst), dual(src), self.shape, self.launch_share)
        added = forward + backward - seconds[:, row, column].sum()
        seconds[:, row, column] = (forward, backward)
        is_planned[row, column] = True
        return float(added)

    def weighted(self, weights: Floats, source_options: Ints, user_options: Ints) -> Floats:
        """Compute the weighted cost of moving an array, for all pairs of options of both ends.

        A move costs seconds and bytes, several parts of a step's cost; weights make one number of
        them. Options are ways to shard the operation that makes the array, the source, and the one
        that uses it.

        A hot path: every bound of a search calls it for every edge. So it works on distinct
        layouts, rows and columns, and spreads over options at the end.

        Args:
            weights: Of all parts of a step's cost: [parts].
            source_options: The numbers of options of the source.
            user_options: The numbers of options of the user.

        Returns:
            [source options, user options]; infinite where a move is not possible.
        """
        # `parts` has the parts in bytes first, then the seconds of both passes.
        byte_weights, second_weights = np.split(weights[self.parts], [len(self._bytes)])
        # runs: [passes, move or adjoint, rows]. Weighted over passes: [move or adjoint, rows, 1].
        weighted_runs = (second_weights @ self.runs.reshape(2, -1)).reshape(2, -1, 1)
        total = (weighted_runs * self._table.seconds).sum(0)  # [rows, columns]
        # A product of matrices is faster than a sum over tables; there may be no table of bytes.
        byte_tables = self._bytes.reshape(len(byte_weights), total.size)
        total += (byte_weights @ byte_tables).reshape(total.shape)
        total = np.where(self.banned, np.inf, total)
        return total[self.rows[source_options]][:, self.columns[user_options]]


def edges_of(setup: StepSetup, nodes: Sequence[Node]) -> list[Edge]:
    """Make an edge, which prices the moves of an array, for each operand of each operation.

    `y = matmul(x, w)` has two edges, from x and from w, to y.

    An operation of equal layers, written once with `times` 12, may have a carry: what one layer
    hands on to the next. A carry has two edges for its one operand: the first layer takes the array
    from elsewhere, the 11 others take what the layer before made, whose name is `Op.again`.
    """
    numbers = {node.name: number for number, node in enumerate(nodes)}
    edges = list[Edge]()
    for op in setup.step.ops:
        # Of 12 layers, 1/12 take the operand, and 11/12 the result of the layer before.
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
    """Make the edge that prices the moves of one array to one operation that takes it.

    An edge is between two nodes, each a parameter, an input or an operation with its options.
    Many options have one layout of this array: the edge keeps distinct layouts only, and for each
    option of the source the number of its layout (`rows`), of the user likewise (`columns`).

    Args:
        setup: The step on its mesh.
        nodes: All nodes, with their options.
        numbers: The number of each node by name.
        name: The name of the array.
        op: The operation.
        operand: The number of the operand.
        share: The part of the operation's runs in which it takes this array, 0 to 1.
    """
    step = setup.step
    source = nodes[numbers[name]]
    user = nodes[numbers[op.name]]
    used_layouts, columns = distinct_layouts(user.placements[:, operand])
    made_layouts, rows = distinct_layouts(source.placements[:, -1])  # the last array is the result
    launch_share = 1.0
    if source.gathering is not None:  # a parameter
        # Options with one layout differ in when they are gathered: each has its own row.
        made_layouts = source.placements[:, -1]
        rows = np.arange(len(made_layouts))
        launch_share = setup.launch_share(name)
    place, enters = _place(setup, name, op, is_first=operand == 0)
    bytes_by_part = _bytes_by_part(setup, source, op, made_layouts, used_layouts)
    is_linear = name in step.differentiable
    if name in step.by_name and not is_linear and not enters:
        # A copy is a replica whose gradients are partial sums: without a gradient both are one.
        # This comes after `_bytes_by_part`, which needs to tell them apart. So do rules on the way
        # into a module, hence not where `enters`.
        used_layouts = without_copies(used_layouts)
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
            setup.part_index(op, BlockPart.FORWARD_MOVING_S),
            setup.part_index(op, BlockPart.BACKWARD_MOVING_S),
        ),
        runs=share * _runs(setup, source, op, len(made_layouts)),
        bytes_by_part=bytes_by_part,
        launch_share=launch_share,
        is_linear=is_linear,
        place=place,
        enters=enters,
    )


def _runs(setup: StepSetup, source: Node, op: Op, n_rows: int) -> Floats:
    """Count how often a move and its adjoint run in the forward and in the backward pass.

    The forward pass has the move, the backward pass its adjoint, which moves the gradient back. The
    backward pass has the move again where activations are recomputed, and for a parameter that is
    gathered for each use. Counts are for one micro-batch: of 4, a parameter that is gathered once
    per step counts 1/4 in each.

    Returns [2 passes, move or adjoint, n_rows]; rows are layouts of the source.
    """
    if source.gathering is None:
        per_pass = np.ones(n_rows)
        repeated = per_pass * setup.is_recomputed(op)
    else:
        repeated = np.asarray(source.is_gathered(Gathering.PER_USE), dtype=float)
        per_pass = np.where(repeated > 0, 1.0, 1 / setup.micro_batches)
    never = np.zeros(n_rows)
    forward = [per_pass, never]  # of the move, of its adjoint
    backward = [repeated, per_pass]
    return np.array([forward, backward])


def _place(setup: StepSetup, name: str, op: Op, *, is_first: bool) -> tuple[str, bool]:
    """Find the name under which a user's rule can move an operand: of a module, or of the array.

    `parallelize` moves arrays only where modules begin and end, and parameters: an operand inside a
    module has no such place, "". In order: the module that the operation begins, if this is its
    first operand; the module whose result the array is; the array itself, if it is a parameter, or
    if arrays move anywhere.

    Returns also True if the array moves on the way into that module (a rule of inputs), and False
    on the way out, and for arrays. name: of the array. is_first: it is operand 0.
    """
    step = setup.step
    is_parameter = name in step.parameters
    entered = step.module(op, left=False)  # "" if the operation begins no module
    if is_first and not is_parameter and entered:
        if op.again and name != op.again:
            # What the first of repeated blocks takes from elsewhere has a rule of its own.
            return in_first_block(entered), True
        return entered, True
    if name in step.by_name:  # the result of an operation
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
    """Compute the bytes that a move holds in memory, for all pairs of layouts.

    Returns, by the number of a part of the cost, arrays [rows, columns]: rows are layouts in which
    the array is made or stored, columns those in which it is used. Most moves add nothing, {}, for
    the operations at both ends count their operands and results already. Only a parameter that is
    gathered, and the gradient of a loss's logits, are held beside these.
    """
    if source.gathering is not None:
        return _bytes_of_parameter(setup, source, op, used_layouts)
    if op.kind == "loss":
        # If the logits move to the loss, their gradient is there twice in the backward pass: as
        # the loss makes it, and as it arrives in the layout of the operation before.
        arriving = setup.block_bytes(made_layouts, setup.shape(source.name), setup.item_bytes)
        moves = (made_layouts[:, None] != used_layouts).any(-1)
        return {setup.part_index(op, BlockPart.RUNNING_BYTES): arriving[:, None] * moves}
    return {}


def _bytes_of_parameter(
    setup: StepSetup, source: Node, op: Op, used: Placements
) -> dict[int, Floats]:
    """Compute the bytes that a device holds to gather a parameter and to sum its gradients.

    A parameter stored as `f/dp c` and used whole is gathered, for each use or once per step, and
    its gradient is summed and scattered back. A device holds the messages beside the blocks.

    Args:
        setup: The step on its mesh.
        source: The parameter.
        op: An operation that uses it.
        used: The layouts in which it does: [columns, axes].

    Returns:
        For each part of the cost [rows, columns]. Rows are options of the parameter.
    """
    shape = setup.shape(source.name)
    gradient_ratio = setup.gradient_bytes / setup.item_bytes  # 2 for parameters of 16 bits
    stored = source.placements[:, -1][:, None]  # [rows, 1, axes]: broadcasts over columns
    is_gathered = (stored != without_copies(used)).any(-1)
    is_first_use = setup.step.consumers(source.name)[0] is op
    per_use = source.is_gathered(Gathering.PER_USE)[:, None] & is_gathered
    # A parameter that is gathered once per step is held once, however many operations use it:
    # it is counted at the first.
    per_step = source.is_gathered(Gathering.PER_STEP)[:, None] & is_first_use
    used_bytes = setup.block_bytes(used, shape, setup.item_bytes)
    # A gather over links between and within nodes takes two messages, the slow links first. After
    # the first one, axes over slow links have the layout in use, all others that in storage. The
    # result of the first message is held, too, while the second one runs.
    halfway = np.where(setup.moves.slow_axes, used, stored)
    halfway_bytes = setup.block_bytes(halfway, shape, setup.item_bytes)
    has_two_gathers = (halfway != stored).any(-1) & (halfway != used).any(-1)
    # Twice: the message, and the parameter that is unpacked from it.
    received = per_use * (2 * used_bytes + has_two_gathers * halfway_bytes)
    # Gradients are summed first over the axes that shard the parameter in storage alone.
    summed = np.where(used == REPLICAS, stored, used)
    summed_bytes = setup.block_bytes(summed, shape, setup.item_bytes)
    sent = per_use * (used_bytes + 2 * summed_bytes)
    gradients = np.zeros_like(used_bytes * per_step)
    if setup.micro_batches > 1:
        # Gradients of what is gathered once are added up over micro-batches whole, as it is used.
        gradients = per_step * used_bytes * setup.gradient_bytes / setup.item_bytes
    # A sum at the end of the step holds an addend and its result, two blocks. The gradient, which
    # is counted already, is one of them, and as large as both if the parameter has 16 bits: then
    # nothing is left to count.
    is_summed_later = ((stored == REPLICAS) & (used == COPY)).any(-1)
    stored_bytes = setup.block_bytes(stored, shape, setup.item_bytes)
    sums = is_first_use * is_summed_later * stored_bytes * max(2 - gradient_ratio, 0)
    return {
        setup.part_index(op, BlockPart.RECEIVED_BYTES): received,
        setup.part_index(op, BlockPart.SENT_BYTES): sent,
        setup.part_index(op, BlockPart.GATHERED_BYTES): per_step * is_gathered * used_bytes,
        setup.part_index(op, BlockPart.GRADIENT_BYTES): gradients,
        setup.part_index(op, BlockPart.SUM_BYTES): sums,
    }
