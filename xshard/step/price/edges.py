"""What the moves of an array cost, from where it is made or stored to where it is used.

An *edge* has the prices of all these moves, as tables: a *row* for each layout in which the array is
made or stored, a *column* for each one in which it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xshard.dtypes import itemsize
from xshard.layout.sub_axes import SubAxisMesh
from xshard.step.price.moves import MoveTable
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

# The parts of the cost that seconds of moves are counted in, in the order of `Edge.runs`.
SECONDS_OF_ACTIVATIONS = BlockPart.FORWARD_ACTIVATIONS_S, BlockPart.BACKWARD_ACTIVATIONS_S
SECONDS_OF_PARAMETERS = (
    BlockPart.FORWARD_PARAMETERS_S,
    BlockPart.BACKWARD_PARAMETERS_S,
    BlockPart.GRADIENTS_S,
)


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
        moves: The seconds of moves from rows to columns. Edges with the same layouts share it: what
            one plans, others know.
        seconds_parts: The parts of the cost that get seconds.
        runs: How often a move and its adjoint run for each of these, by rows: [parts, move or
            adjoint, rows].
        bytes_by_part: The parts of the cost that get bytes: [rows, columns] for each.
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
    moves: MoveTable
    seconds_parts: Sequence[int]
    runs: Floats
    bytes_by_part: Mapping[int, Floats]
    place: str = ""
    enters: bool = False
    # All parts of the cost that the edge adds to, those in bytes first.
    parts: Ints = field(init=False)
    banned: Flags = field(init=False)

    def __post_init__(self) -> None:
        used = self.used_layouts
        if not self.moves.is_linear:
            used = without_copies(used)
        differs = (self.made_layouts[:, None] != used).any(-1)  # [rows, columns]
        # Where no rule can say a move, an array stays as it is made.
        self.banned = differs & (not self.place)
        self.parts = np.array([*self.bytes_by_part, *self.seconds_parts])
        tables = list(self.bytes_by_part.values())
        # [parts in bytes, rows, columns]; there may be no such part.
        self._bytes = np.array(tables).reshape(-1, *differs.shape)
        # What planned moves cost, by the options of both ends: these prices change no more.
        self._planned_costs: dict[tuple[int, int], Floats] = {}

    @property
    def nodes(self) -> tuple[int, int]:
        """The numbers of the nodes at both ends."""
        return self.source, self.user

    @property
    def used_placements(self) -> Placements:
        """The layout in which each option of the user takes the array: [options, axes]."""
        return self.used_layouts[self.columns]

    def costs(self, rows: Ints, columns: Ints) -> Floats:
        """Return the costs of moves from rows to columns, for `parts`: [parts, moves]."""
        seconds_once = self.moves.seconds[:, rows, columns]  # of the move, of its adjoint
        seconds = (self.runs[:, :, rows] * seconds_once).sum(1)
        return np.concatenate([self._bytes[:, rows, columns], seconds])

    def costs_between(self, source_option: int, user_option: int) -> Floats:
        """Return what the move between two options costs, for `parts`; infinite if it is not possible.

        Assignments differ in few options, so that most of them ask for the same moves again.
        """
        options = source_option, user_option
        costs = self._planned_costs.get(options)
        if costs is None:
            row = self.rows[source_option]
            column = self.columns[user_option]
            costs = np.full(len(self.parts), np.inf)
            if not self.banned[row, column]:
                costs = self.costs(row, column)
            if self.moves.is_planned[row, column]:
                self._planned_costs[options] = costs
        return costs

    def raise_to_price(self, source_option: int, user_option: int) -> float:
        """Replace the lower bound of the move between two options by the planner's price.

        Returns the seconds by which the bound was too low; 0 if the move was planned before, or is
        not possible.
        """
        row = int(self.rows[source_option])
        column = int(self.columns[user_option])
        return 0.0 if self.banned[row, column] else self.moves.raise_to_price(row, column)

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
        # `parts` has the parts in bytes first, then those in seconds.
        weights_of_parts = weights[self.parts]
        byte_weights = weights_of_parts[: len(self._bytes)]
        part_weights = weights_of_parts[len(self._bytes) :]
        # What a second of the move, or of its adjoint, weighs: by how often it runs for each part.
        runs_by_part = self.runs.reshape(len(part_weights), -1)  # [parts, move or adjoint and row]
        second_weights = (part_weights @ runs_by_part).reshape(2, -1, 1)
        of_move, of_adjoint = second_weights * self.moves.seconds
        total = of_move + of_adjoint  # [rows, columns]
        # A product of matrices is faster than a sum over tables; there may be no table of bytes.
        byte_tables = self._bytes.reshape(len(byte_weights), total.size)
        total += (byte_weights @ byte_tables).reshape(total.shape)
        total = np.where(self.banned, np.inf, total)
        return total[self.rows[source_options]][:, self.columns[user_options]]

    def weighted_between(self, weights: Floats, source_option: int, user_option: int) -> float:
        """Compute the weighted cost of the move between two options, as `weighted` for one pair."""
        costs = self.costs_between(source_option, user_option)
        if np.isinf(costs[-1]):  # all are; weights may be 0
            return np.inf
        return float(weights[self.parts] @ costs)


def edges_of(setup: StepSetup, nodes: Sequence[Node], numbers: Mapping[str, int]) -> list[Edge]:
    """Make an edge, which prices the moves of an array, for each operand of each operation.

    `y = matmul(x, w)` has two edges, from x and from w, to y.

    Twelve equal layers are operations written once, with `times` 12. One of them, the carry, takes
    what the layer before hands on: in the first layer an array from elsewhere, the operand, and in
    the 11 others the result of the layer before, `Op.again`. It has an edge for each, with 1/12 and
    11/12 of the moves.

    numbers: the number of each node by name.
    """
    edges: list[Edge] = []
    length_edges: list[Edge] = []  # behind all moves, so that the first use of an array reads it
    for op in setup.step.ops:
        share_of_operand = op.starts / op.times if op.again else 1.0
        for operand, name in enumerate(op.operands):
            use = ArrayUse(name, nodes[numbers[name]], op, operand, share_of_operand)
            edge = _edge(setup, nodes, numbers, use)
            if operand in op.length_operands:
                length_edges.append(edge)
            else:
                edges.append(edge)
        if op.again:
            source = nodes[numbers[op.again]]
            use = ArrayUse(op.again, source, op, operand=0, share_of_runs=1 - share_of_operand)
            edges.append(_edge(setup, nodes, numbers, use))
    return [*edges, *length_edges]


class ArrayUse(NamedTuple):
    """An array as an operand of one operation.

    Args:
        name: The array's name.
        source: The node that makes or stores it.
        op: The operation that takes it.
        operand: Its number among the operands.
        share_of_runs: The part of the operation's runs in which it takes this array, 0 to 1.
    """

    name: str
    source: Node
    op: Op
    operand: int
    share_of_runs: float

    @property
    def is_parameter(self) -> bool:
        """Whether the array is a parameter, which is gathered."""
        return self.source.gathering is not None

    @property
    def stays(self) -> bool:
        """Whether the array never moves: only its lengths are read, which are the same anywhere.

        A parameter is gathered for that, too: the lengths are those of the gathered one.
        """
        return self.operand in self.op.length_operands and not self.is_parameter


def _edge(
    setup: StepSetup, nodes: Sequence[Node], numbers: Mapping[str, int], use: ArrayUse
) -> Edge:
    """Make the edge that prices the moves of one array to one operation that takes it.

    An edge is between two nodes, each a parameter, an input or an operation with its options.
    Many options have one layout of this array: the edge keeps distinct layouts only, and for each
    option of the source the number of its layout (`rows`), of the user likewise (`columns`).

    Args:
        setup: The step on its mesh.
        nodes: All nodes, with their options.
        numbers: The number of each node by name.
        use: The array and the operation.
    """
    op = use.op
    user = nodes[numbers[op.name]]
    made_layouts, rows = _made_layouts(use.source, stays=use.stays)
    used_layouts, columns = distinct_layouts(user.placements[:, use.operand])
    place = _place(setup, use)
    bytes_of_moves = _bytes_of_moves(setup, use.source, op, made_layouts, used_layouts)
    # A move is linear if it has an adjoint, which moves the gradient.
    is_linear = use.name in setup.step.differentiable and not use.stays
    if use.name in setup.step.by_name and not is_linear and not place.is_input:
        # A copy is a replica whose gradients are partial sums: without a gradient both are one.
        # This comes after `_bytes_of_moves`, which needs to tell them apart. So do rules on the way
        # into a module.
        used_layouts = without_copies(used_layouts)
    seconds_parts = SECONDS_OF_PARAMETERS if use.is_parameter else SECONDS_OF_ACTIVATIONS
    edge = Edge(
        source=numbers[use.name],
        user=numbers[op.name],
        rows=rows,
        columns=columns,
        made_layouts=made_layouts,
        used_layouts=used_layouts,
        moves=setup.moves.table(
            made_layouts,
            used_layouts,
            setup.shape(use.name),
            is_linear,
            # Parameters travel together, and each is charged its share; an activation travels alone.
            share=setup.launch_share(use.name) if use.is_parameter else 1.0,
        ),
        seconds_parts=[setup.part_index(op, part) for part in seconds_parts],
        runs=use.share_of_runs * _runs_by_part(setup, use.source, op, len(made_layouts)),
        bytes_by_part={
            setup.part_index(op, part): bytes_of_moves[part] for part in sorted(bytes_of_moves)
        },
        place=place.name,
        enters=place.is_input,
    )
    if isinstance(setup.mesh, SubAxisMesh) and not use.is_parameter:
        edge.banned |= _are_moves_of_shared_heads(made_layouts, used_layouts)
    return edge


def _are_moves_of_shared_heads(made_layouts: Placements, used_layouts: Placements) -> Flags:
    """Tell which moves are of heads that devices along a sub-axis share: [rows, columns].

    No rule can say these: one block does not tell how many heads there are.
    """
    is_shared = made_layouts[:, -2] != made_layouts[:, -1]
    differs = (made_layouts[:, None] != used_layouts).any(-1)
    return np.asarray(is_shared[:, None] & differs)


def _made_layouts(source: Node, *, stays: bool) -> tuple[Placements, Ints]:
    """List the layouts in which an array is made or stored, and the row of each option.

    stays: only lengths of the array are read, so that tags mean nothing.
    """
    placements = source.placements[:, -1]  # the last array is the node's own
    if source.gathering is not None:
        # Options of a parameter with one layout differ in when they are gathered: each has a row.
        return placements, np.arange(len(placements))
    if stays:
        placements = np.maximum(placements, REPLICAS)  # all tags become REPLICAS
    return distinct_layouts(placements)


def _runs_by_part(setup: StepSetup, source: Node, op: Op, n_rows: int) -> Floats:
    """Count how often a move and its adjoint run in each part of the seconds.

    The forward pass has the move, the backward pass its adjoint, which moves the gradient back. The
    backward pass has the move again where activations are recomputed, and for a parameter that is
    gathered for each use. Counts are for one micro-batch: of 4, a parameter that is gathered once
    per step counts 1/4 in each.

    Returns [parts, move or adjoint, n_rows]; rows are layouts of the source.
    """
    never = np.zeros(n_rows)
    if source.gathering is None:
        once = np.full(n_rows, setup.batch_parts)
        in_forward = [once, never]
        in_backward = [once * setup.is_recomputed(op), once]
        return np.array([in_forward, in_backward])  # as in SECONDS_OF_ACTIVATIONS
    is_per_use = source.is_gathered(Gathering.PER_USE)
    gathers = np.where(is_per_use, 1.0, 1 / setup.micro_batches)
    # Gradients may be summed in a wider dtype: they take as many times the seconds.
    sums = gathers * (itemsize(setup.step.reduce_dtype) / setup.item_bytes)
    in_forward = [gathers, never]
    in_backward = [is_per_use, never]
    return np.array([in_forward, in_backward, [never, sums]])  # as in SECONDS_OF_PARAMETERS


class Place(NamedTuple):
    """Where a user's rule can move an array: at a module, or the array itself wherever it is used.

    name: of the module or array; "" if no rule can move it. is_input: the rule is for what enters
    the module, not for its result.
    """

    name: str
    is_input: bool


def _place(setup: StepSetup, use: ArrayUse) -> Place:
    """Find the place of the rule that can move an array to an operation that takes it.

    `parallelize` moves parameters, and other arrays only where modules begin and end. So an operand
    moves as the input of the module that the operation begins, or as the result of the module that
    made it; inside a module no rule can move it, unless arrays move anywhere (in JAX).
    """
    step = setup.step
    name = use.name
    op = use.op
    if use.stays:
        return Place(name="", is_input=False)
    if name in step.parameters:
        return Place(name, is_input=False)
    entered = step.entered_module(op)
    if use.operand == 0 and entered:  # the operand that a rule of a module's inputs is about
        # What the first of repeated blocks takes from elsewhere has a rule of its own.
        is_from_elsewhere = op.again and name != op.again
        module = in_first_block(entered) if is_from_elsewhere else entered
        return Place(module, is_input=True)
    maker = step.by_name.get(name)  # None: the array is an input of the step
    # A module's result has one layout, so that several uses would have to agree.
    has_one_use = len(step.consumers(name)) == 1 and op.operands.count(name) == 1
    if maker is not None and has_one_use:
        left = step.left_module(maker)
        if left:
            return Place(left, is_input=False)
    return Place(name if step.moves_anywhere else "", is_input=False)


def _bytes_of_moves(
    setup: StepSetup,
    source: Node,
    op: Op,
    made_layouts: Placements,
    used_layouts: Placements,
) -> Mapping[BlockPart, Floats]:
    """Compute the bytes that a move holds in memory, for all pairs of layouts.

    Rows are layouts in which the array is made or stored, columns those in which it is used:
    [rows, columns] for each kind of bytes. Most moves add nothing, {}, for the operations at both
    ends count their operands and results already. Only a parameter that is gathered, and the
    gradient of a loss's logits, are held beside these.
    """
    if source.gathering is not None:
        return _bytes_of_parameter(setup, source, op, used_layouts)
    if op.kind == "loss":
        # If the logits move to the loss, their gradient is there twice in the backward pass: as
        # the loss makes it, and as it arrives in the layout of the operation before.
        arriving_bytes = setup.bytes_in_use(source.name, made_layouts)
        has_move = (made_layouts[:, None] != used_layouts).any(-1)
        return {BlockPart.RUNNING_BYTES: setup.batch_parts * arriving_bytes[:, None] * has_move}
    return {}


class ParameterUse(NamedTuple):
    """A parameter on its way to one operation that uses it; rows are options of the parameter.

    Args:
        name: Its name.
        stored: The layouts in storage: [rows, 1, axes], to broadcast over columns.
        used: The layouts in use: [columns, axes].
        used_bytes: The bytes of a block in use: [columns].
        is_gathered: It has to be, as both layouts differ: [rows, columns].
        per_use: It is gathered for each use: [rows, columns].
        per_step: It is gathered once per step, and this is its first use, at which that is counted:
            [rows, 1].
        is_first_use: This is its first use.
    """

    name: str
    stored: Placements
    used: Placements
    used_bytes: Floats
    is_gathered: Flags
    per_use: Flags
    per_step: Flags
    is_first_use: bool


def _bytes_of_parameter(
    setup: StepSetup, source: Node, op: Op, used: Placements
) -> Mapping[BlockPart, Floats]:
    """Compute the bytes that a device holds to gather a parameter and to sum its gradients.

    A parameter stored as `f/dp c` and used whole is gathered, for each use or once per step, and
    its gradient is summed and scattered back. A device holds the messages beside the blocks.

    Args:
        setup: The step on its mesh.
        source: The parameter.
        op: An operation that uses it.
        used: The layouts in which it does: [columns, axes].

    Returns:
        For each kind of bytes [rows, columns]. Rows are options of the parameter.
    """
    stored = source.placements[:, -1][:, None]
    is_gathered = (stored != without_copies(used)).any(-1)
    is_first_use = setup.step.consumers(source.name)[0] is op
    use = ParameterUse(
        name=source.name,
        stored=stored,
        used=used,
        used_bytes=setup.bytes_in_use(source.name, used),
        is_gathered=is_gathered,
        per_use=source.is_gathered(Gathering.PER_USE)[:, None] & is_gathered,
        per_step=source.is_gathered(Gathering.PER_STEP)[:, None] & is_first_use,
        is_first_use=is_first_use,
    )
    return {**_bytes_of_gathers(setup, use), **_bytes_of_gradients(setup, use)}


def _bytes_of_gathers(setup: StepSetup, use: ParameterUse) -> Mapping[BlockPart, Floats]:
    """Compute the bytes of a parameter that is gathered, and of the messages that bring it."""
    # Twice: the message, and the parameter that is unpacked from it. (Of a gather in phases, over slow
    # links and then over fast ones, the blocks between are free by then.)
    received_bytes = 2 * use.used_bytes
    # Used in another dtype than the one in storage, it is cast for each use even where nothing moves.
    is_cast = setup.step.stored_dtype != setup.step.dtype
    cast_bytes = is_cast * ~use.is_gathered * use.used_bytes
    is_ahead = min(setup.prefetch, 1)
    return {
        BlockPart.RECEIVED_BYTES: use.per_use * received_bytes + cast_bytes,
        BlockPart.GATHERED_BYTES: use.per_step * use.is_gathered * use.used_bytes,
        BlockPart.AHEAD_BYTES: is_ahead * use.per_use * use.used_bytes,
    }


def _bytes_of_gradients(setup: StepSetup, use: ParameterUse) -> Mapping[BlockPart, Floats]:
    """Compute the bytes of a parameter's gradients, and of the messages that sum and scatter them."""
    # Gradients are summed first over the axes that shard the parameter in storage alone.
    summed = np.where(use.used == REPLICAS, use.stored, use.used)
    summed_bytes = setup.bytes_in_use(use.name, summed)
    stored_bytes = setup.bytes_in_use(use.name, use.stored)
    gradient_ratio = setup.gradient_bytes / setup.item_bytes  # 2 for parameters of 16 bits
    whole_gradient_bytes = np.zeros_like(use.used_bytes)
    if setup.micro_batches > 1:
        # Gradients of what is gathered once are added up over micro-batches whole, as it is used.
        whole_gradient_bytes = use.used_bytes * gradient_ratio
    # A sum at the end of the step holds an addend and its result, two blocks. The gradient, which
    # is counted already, is one of them, and as large as both if the parameter has 16 bits: then
    # nothing is left to count.
    has_copies_of_replicas = ((use.stored == REPLICAS) & (use.used == COPY)).any(-1)
    is_summed_later = use.is_first_use & has_copies_of_replicas
    sum_bytes = stored_bytes * max(2 - gradient_ratio, 0)
    # Until a sum is awaited there are its messages, sent and received, in place of the result, which
    # is counted among the gradients.
    behind_bytes = 2 * summed_bytes - gradient_ratio * stored_bytes
    is_behind = use.per_use | use.per_step & use.is_gathered
    return {
        BlockPart.SENT_BYTES: use.per_use * (use.used_bytes + 2 * summed_bytes),
        BlockPart.GRADIENT_BYTES: use.per_step * whole_gradient_bytes,
        BlockPart.SUM_BYTES: is_summed_later * sum_bytes,
        BlockPart.BEHIND_BYTES: min(setup.prefetch, 1) * is_behind * behind_bytes,
    }
