"""The cost of moves, as cheaply as the question allows (bound, estimate or plan), and of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from xshard.caches import layout_cache
from xshard.contractions.placements import ArrayMove, Axes, Dims
from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.nn.attention import AUTO, HEADS, METHODS, REDUCE, RING, SEQUENCE, WIDTH, Attention
from xshard.plans.plan import Plan, find_plan, search_plan
from xshard.search.estimates import estimate
from xshard.search.grid import Grid, grid
from xshard.search.moves import NamedRoute
from xshard.search.request import Request
from xshard.search.solve import best_path, with_dims_of_start
from xshard.search.states import State, cached_method

# Operations of attention's backward pass for each forward one: 5 products instead of 2, since the scores are
# computed again (FlashAttention, Dao et al. 2022).
BACKWARD = 2.5

# How much is known of the seconds of a move: a lower bound of them, an estimate, or the plan's.
BOUND = 0
ESTIMATE = 1
PRICE = 2

Shape = tuple[int, ...]
End = tuple[Dims, Axes]  # how an array is sharded before or after a move, and its partial sums
Make = Callable[[], ArrayMove]


@dataclass(eq=False, slots=True)
class MoveEstimate:
    """The seconds of a move as far as they are known: `level` says how far.

    grid: the states of arrays of this shape. start, goal: the ends of the move, as its states.
    make: makes the move, if it may multiply by a constant; else the two ends tell its price.
    """

    grid: Grid
    start: State
    goal: State
    make: Make | None
    lower_bound_s: float
    seconds: float  # at least `lower_bound_s`; refined in place, for all that share the move
    level: int = BOUND


MoveKey = tuple[End, End, Shape, object]  # a move without names of dims; copies are replicas


@dataclass(frozen=True)
class Prices:
    """The costs of moves on one mesh, each computed once.

    find: finds a plan. Most plans are only compared, so the default keeps none of them.
    """

    mesh: Mesh
    dtype: str
    profile: Profile
    find: Callable[[Request], Plan] = search_plan
    _moves: dict[MoveKey, MoveEstimate] = field(default_factory=dict)

    def plan(self, move: ArrayMove) -> Plan:
        """Return the cheapest plan of a move."""
        array = (move.shape, self.dtype, self.profile)
        return self.find(Request.on_mesh(self.mesh, move.src, move.dst, *array))

    def move(
        self, src: End, dst: End, shape: Shape, scaling: object, make: Make | None
    ) -> MoveEstimate:
        """Return the estimate of a redistribution: a cached one, or a new one with a lower bound.

        Args:
            src: How each dim is sharded before, and the axes with partial sums.
            dst: The same after.
            shape: The global shape.
            scaling: For moves that may multiply by a constant, as a mean does: what tells those
                apart that have the same ends and shape. Else None.
            make: Makes such a move, for its price; it takes long, and few moves are priced.
        """
        key = (src, dst, shape, scaling)  # hot: most calls find the move here
        move = self._moves.get(key)
        if move is None:
            # The same grid as long as states have its numbers.
            grid = self._grid(shape)
            start = self._state(shape, src)
            goal = self._state(shape, dst)
            bound_s = grid.quick_bound_s(start, goal)
            move = MoveEstimate(grid, start, goal, make, lower_bound_s=bound_s, seconds=bound_s)
            self._moves[key] = move
        return move

    def refine(self, move: MoveEstimate) -> None:
        """Make the predicted seconds of a redistribution one step more exact.

        The first call replaces its lower bound by an estimate, and the second that by the price of
        the cheapest plan, which takes most time to compute. `move` is changed in place: all
        candidates with an equal move share the object, and see the better number.
        """
        if move.level == BOUND:
            estimated = estimate(move.grid, move.start, move.goal)
            # An estimate may be lower than the truth, a bound may not: so the seconds never fall.
            move.seconds = max(move.seconds, estimated)
            move.level = ESTIMATE
            return
        if move.make is None:
            move.seconds = _price(move)
        else:
            move.seconds = self.plan(move.make()).cost
        move.level = PRICE

    @cached_method
    def _grid(self, shape: Shape) -> Grid:
        return grid(self.mesh, shape, itemsize(self.dtype), self.profile)

    @cached_method
    def _state(self, shape: Shape, end: End) -> State:
        """Return one end of a move as searches know it: shards and axes as numbers of the grid."""
        dims, sums = end
        return self._grid(shape).state([dim.normal_shards for dim in dims], sums)


def _price(move: MoveEstimate) -> float:
    """Return the seconds of the cheapest steps of a move, without the `Plan`, which takes longer."""
    grid = move.grid
    start = grid.sharding(move.start)
    # Where blocks are equal, the goal is written with the shards of the start: no step is needed.
    goal = with_dims_of_start(grid.sharding(move.goal), start)
    named_route = NamedRoute(start, goal, grid.itemsize, grid.profile)
    return best_path(named_route.route).seconds


@layout_cache(maxsize=4096)
def fastest_attention(
    attn: Attention, dtype: str, profile: Profile, methods: tuple[str, ...] = METHODS
) -> Attention:
    """Choose the method of an attention that is "auto": the fastest of `methods`."""
    if attn.method != AUTO:
        return attn

    def seconds_of(how: str) -> float:
        return attention_seconds(replace(attn, method=how), dtype, profile)

    return replace(attn, method=min(methods, key=seconds_of))


def attention_seconds(attn: Attention, dtype: str, profile: Profile) -> float:
    """Predict the seconds of attention's forward and backward pass on the busiest device.

    With "gather", "ulysses" and "reduce" that is the sum of all redistributions and of the work.
    With "ring", blocks of keys and values go from device to device during the work, so that in each
    round only the longer of both counts. `attn` has its method chosen; it is not "auto".
    """
    prices = Prices(attn.q.mesh, dtype, profile, find_plan)
    moves_s = 0.0
    # From the given shardings to those of the method, and of the result back; with the gradients'.
    for src, dst in ((attn.q, attn.queries), (attn.kv, attn.keys), (attn.result, attn.target)):
        move = ArrayMove(src.layout, dst.layout, src.shape)
        moves_s += prices.plan(move).cost + prices.plan(move.dual).cost
    compute_s = _operations(attn) / profile.flops(dtype)
    if attn.method != RING or len(attn.rounds) == 1:  # first all moves, then all work
        return moves_s + (1 + BACKWARD) * compute_s

    n_rotations = len(attn.rounds) - 1
    # In a ring a block travels while the one before it is computed: the longer of both counts.
    move_seconds = _rotation_seconds(attn, prices)
    round_work = compute_s / len(attn.rounds)
    forward = round_work + n_rotations * max(round_work, move_seconds)
    # In the backward pass blocks travel again, and beside them their gradients. These are in
    # float32 or wider: for bfloat16 twice the bytes of the block. After the last round gradients
    # travel once more, to the devices that own the keys and values.
    widening = max(1.0, 4 / itemsize(dtype))
    backward_move_seconds = move_seconds * (1 + widening)
    backward = BACKWARD * round_work
    backward += n_rotations * max(BACKWARD * round_work, backward_move_seconds)
    return moves_s + forward + backward + move_seconds * widening


def _rotation_seconds(attn: Attention, prices: Prices) -> float:
    """Predict the seconds in which every block of keys and values goes to the next device."""
    *batch, heads, _, width = attn.keys.max_local_shape
    rotation = attn.rotation((math.prod(batch), heads, attn.block_rows, width))
    src, dst = rotation.layouts
    return prices.plan(ArrayMove(src, dst, tuple(rotation.shape))).cost


def _operations(attn: Attention) -> float:
    """Return the floating point operations of attention's forward pass on the busiest device.

    They are 2 * width for each score in q @ k, and again in weights @ v, for scores that the mask
    leaves: with a causal mask and contiguous blocks, the device with the last queries has most.
    """
    shape = attn.queries.max_local_shape
    batch = math.prod(shape[:HEADS])
    heads = shape[HEADS]
    n_keys = attn.kv.shape[SEQUENCE]
    max_scores = 0
    for device in attn.devices:
        row_of_query = attn.query_rows(device) + attn.offset  # [queries], as a row of the keys
        first_key, stop_key = attn.keys_seen(row_of_query, row_of_query)
        n_seen = stop_key.clip(max=n_keys) - first_key.clip(min=0)
        max_scores = max(max_scores, int(n_seen.clip(min=0).sum()))
    # In "reduce" every device computes all queries with its part of the keys: of the scores counted
    # above, over all keys, it has one n-th.
    n_shares = len(attn.devices) if attn.method == REDUCE else 1
    # 2: a multiplication and an addition. The width of `attn.kv` is that of keys plus that of
    # values, and so covers both products.
    return 2.0 * batch * heads * max_scores * attn.kv.shape[WIDTH] / n_shares
