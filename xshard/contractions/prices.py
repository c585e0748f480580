"""The cost of moves, as cheaply as the question allows (bound, estimate or plan), and of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from xshard.caches import layout_cache
from xshard.contractions.placements import ArrayMove, Axes, Dims, DimSharding
from xshard.cost.bounds import least_received
from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.nn.attention import AUTO, HEADS, METHODS, REDUCE, RING, SEQUENCE, WIDTH, Attention
from xshard.plans.plan import Plan, find_plan, search_plan
from xshard.search.estimates import estimate
from xshard.search.grid import Grid, grid
from xshard.search.moves import Space
from xshard.search.request import Request
from xshard.search.solve import best_path, respelled
from xshard.search.states import Cut, State, remembered

BACKWARD = (
    2.5  # operations of attention's backward pass for each forward one: scores are computed again
)
BOUND, ESTIMATE, PRICE = range(3)  # how much is known of the cost of a move

Shape = tuple[int, ...]
End = tuple[Dims, Axes]  # how an array is sharded before or after a move, and its partial sums
Make = Callable[[], ArrayMove]


@dataclass(eq=False, slots=True)
class MoveEstimate:
    """The seconds of a move as far as they are known, at least `least`. make: makes it if it may scale."""

    least: float
    seconds: float
    before: End
    after: End
    shape: Shape
    make: Make | None
    level: int = BOUND


Leg = tuple[
    object, ...
]  # a move as its cost sees it: without names of dims, and copies are replicas


@dataclass(frozen=True)
class Prices:
    """The costs of moves on one mesh, each computed once. find: finds plans; most are only compared."""

    mesh: Mesh
    dtype: str
    profile: Profile
    find: Callable[[Request], Plan] = search_plan
    _moves: dict[Leg, MoveEstimate] = field(default_factory=dict)

    def plan(self, move: ArrayMove) -> Plan:
        """The cheapest plan of a move."""
        return self.find(Request.on(self.mesh, *move, self.dtype, self.profile))

    def move(
        self, before: End, after: End, shape: Shape, means: object, make: Make | None
    ) -> MoveEstimate:
        """The move of an array, its seconds as far as they are known. means: tells moves with means apart."""
        leg = before, after, shape, means
        if (known := self._moves.get(leg)) is None:
            grid = self._grid(shape)
            received = self._received(before, after, math.prod(shape))
            start = grid.least_launch + grid.least_latency
            seconds = received * (grid.itemsize / grid.fastest) + start if received else 0.0
            known = self._moves[leg] = MoveEstimate(seconds, seconds, before, after, shape, make)
        return known

    def refine(self, move: MoveEstimate) -> None:
        """Replace a bound by an estimate, and an estimate by the price."""
        both = self._state(move.shape, move.before), self._state(move.shape, move.after)
        if move.level == BOUND:
            move.level, move.seconds = (
                ESTIMATE,
                max(move.seconds, estimate(self._grid(move.shape), *both)),
            )
        else:
            price = self.plan(move.make()).cost if move.make else self._price(move.shape, *both)
            move.level = PRICE
            move.seconds = price

    def _price(self, shape: Shape, *states: State) -> float:
        grid = self._grid(shape)
        start, goal = map(grid.sharding, states)
        return best_path(
            Space(start, respelled(goal, start), grid.itemsize, self.profile).route
        ).seconds

    @remembered
    def _grid(self, shape: Shape) -> Grid:  # the same as long as states have its numbers
        return grid(self.mesh, shape, itemsize(self.dtype), self.profile)

    def _state(self, shape: Shape, end: End) -> State:
        dims, sums = end
        numbers = sorted(map(self._grid(shape).axes.index, sums))
        return State(tuple([self._cut(shape, dim) for dim in dims]), tuple(numbers))

    @remembered
    def _cut(self, shape: Shape, dim: DimSharding) -> Cut:
        return tuple(map(self._grid(shape).number, dim.normal))

    def _received(self, before: End, after: End, elements: int) -> int:
        """Fewest elements that the busiest device must receive."""
        (src, old), (dst, new) = before, after
        if ended := old - new:
            n = self.mesh.n_devices
            size = self.mesh.size
            copies = n // size(*new.union(*(dim.axes for dim in dst)))
            return least_received(elements, n, size(*ended), copies, size(*new & old))
        if new - old:
            return 0
        rows = [dim.rows for dim in dst]
        have = [dim.rows for dim in src]
        return math.prod(rows) - math.prod(map(min, rows, have))


@layout_cache(maxsize=4096)
def fastest_attention(
    attn: Attention, dtype: str, profile: Profile, methods: tuple[str, ...] = METHODS
) -> Attention:
    """The attention with its own method, or with the fastest of `methods`."""
    if attn.how != AUTO:
        return attn
    each = (replace(attn, how=how) for how in methods)
    return min(each, key=lambda attn: attention_seconds(attn, dtype, profile))


def attention_seconds(attn: Attention, dtype: str, profile: Profile) -> float:
    """Predicted seconds of the forward and backward pass on the busiest device."""
    prices = Prices(attn.q.mesh, dtype, profile, find_plan)
    pairs = ((attn.q, attn.queries), (attn.kv, attn.keys), (attn.result, attn.target))
    moves = [ArrayMove(src.layout, dst.layout, src.shape) for src, dst in pairs]
    moving = sum(prices.plan(move).cost + prices.plan(move.dual).cost for move in moves)
    work = _operations(attn) / profile.flops(dtype)
    if attn.how != RING or attn.rounds == 1:
        return moving + (1 + BACKWARD) * work
    *batch, heads, _, width = attn.keys.max_local_shape
    layouts, shape = attn.rotation((math.prod(batch), heads, attn.block_rows, width))
    move_s = prices.plan(ArrayMove(*layouts, tuple(shape))).cost
    precise = max(1.0, 4 / itemsize(dtype))
    rounds = attn.rounds
    round_work = work / attn.rounds
    forward = round_work + (rounds - 1) * max(round_work, move_s)
    # The blocks travel again, and beside them their gradients in the dtype of sums.
    backward = BACKWARD * round_work + (rounds - 1) * max(
        BACKWARD * round_work, move_s * (1 + precise)
    )
    return moving + forward + backward + move_s * precise


def _operations(attn: Attention) -> float:
    """Forward operations of the busiest device: two products over the scores that are not empty."""
    batch, heads, *_ = (
        math.prod(attn.queries.max_local_shape[:HEADS]),
        attn.queries.max_local_shape[HEADS],
    )
    n = attn.kv.shape[SEQUENCE]
    sees = 0
    for device in attn.devices:
        place = attn.query_rows(device) + attn.offset
        first = 0 if attn.left is None else (place - attn.left).clip(min=0)
        last = n if attn.right is None else (place + attn.right + 1).clip(max=n)
        sees = max(sees, int((last - first + 0 * place).clip(min=0).sum()))
    share = len(attn.devices) if attn.how == REDUCE else 1
    return 2.0 * batch * heads * sees * attn.kv.shape[WIDTH] / share
