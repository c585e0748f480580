"""The cost of moves, as cheaply as the question allows (bound, estimate or plan), and of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from xshard.contractions.placements import DimSharding, OperandSharding
from xshard.cost.bounds import least_received
from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.layout import Layout, Mesh, Sharding
from xshard.nn.attention import AUTO, HEADS, METHODS, REDUCE, RING, SEQUENCE, WIDTH, Attention
from xshard.notation.parser import Dim
from xshard.plans.plan import Plan, find_plan, search_plan
from xshard.search.move_costs import estimate
from xshard.search.request import Request
from xshard.search.states import Cut, Space, State

BACKWARD = 2.5  # operations of attention's backward pass for each forward one: scores are computed again
BOUND, ESTIMATE, PRICE = range(3)  # how much is known of the cost of a move


class ArrayMove(NamedTuple):
    """An array of a global shape is to go from one layout to another."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]

    @property
    def dual(self) -> ArrayMove:
        """The move of the gradient."""
        return ArrayMove(self.dst.dual, self.src.dual, self.shape)


@dataclass(eq=False)
class MoveEstimate:
    """The seconds of a move as far as they are known, at least `least`. make: makes the move when needed."""

    least: float
    before: OperandSharding
    after: OperandSharding
    shape: tuple[int, ...]
    make: Callable[[], ArrayMove]
    level: int = BOUND

    def __post_init__(self) -> None:
        self.seconds = self.least


Leg = tuple[object, ...]  # a move as its cost sees it: without names of dims, and copies are replicas


@dataclass(frozen=True)
class Prices:
    """The costs of moves on one mesh, each computed once. find: finds plans; most are only compared."""

    mesh: Mesh
    dtype: str
    profile: Profile
    find: Callable[[Request], Plan] = search_plan
    _moves: dict[Leg, MoveEstimate] = field(default_factory=dict)
    _estimates: dict[tuple[tuple[int, ...], State, State], float] = field(default_factory=dict)
    _spaces: dict[tuple[int, ...], Space] = field(default_factory=dict)
    _cuts: dict[tuple[tuple[int, ...], DimSharding], Cut] = field(default_factory=dict)
    _sizes: dict[frozenset[str], int] = field(default_factory=dict)

    def plan(self, move: ArrayMove) -> Plan:
        """The cheapest plan of a move."""
        devices = range(self.mesh.n_devices)
        endpoints = move.src, move.dst, self.mesh, self.mesh, devices, devices
        return self.find(Request(*endpoints, move.shape, self.dtype, self.profile))

    def move(
        self,
        before: OperandSharding,
        after: OperandSharding,
        shape: tuple[int, ...],
        means: object,
        make: Callable[[], ArrayMove],
    ) -> MoveEstimate:
        """The move of an array, its seconds as far as they are known. means: tells moves with means apart."""
        leg = before[:2], after[:2], shape, means
        if (known := self._moves.get(leg)) is None:
            received = self._received(before, after, math.prod(shape))
            start, per_element = self._fastest
            seconds = received * per_element + start if received else 0.0
            known = self._moves[leg] = MoveEstimate(seconds, before, after, shape, make)
        return known

    def refine(self, move: MoveEstimate) -> None:
        """Replace a bound by an estimate, and an estimate by the price."""
        if move.level == BOUND:
            move.level, move.seconds = ESTIMATE, max(move.seconds, self._estimated(move))
        else:
            move.level, move.seconds = PRICE, self.plan(move.make()).cost

    def _estimated(self, move: MoveEstimate) -> float:
        space = self._space(move.shape)
        start, goal = self._state(space, move.before), self._state(space, move.after)
        key = move.shape, start, goal
        if key not in self._estimates:
            self._estimates[key] = estimate(space, start, goal)
        return self._estimates[key]

    def _space(self, shape: tuple[int, ...]) -> Space:
        if shape not in self._spaces:
            unsharded = Sharding(Layout(tuple(Dim(f"d{i}") for i in range(len(shape)))), self.mesh, shape)
            self._spaces[shape] = Space(unsharded, unsharded, self.dtype, self.profile)
        return self._spaces[shape]

    def _state(self, space: Space, sharding: OperandSharding) -> State:
        """The state of an array."""
        cuts = []
        for dim in sharding.dims:
            key = space.start.shape, dim
            if (cut := self._cuts.get(key)) is None:
                cut = self._cuts[key] = tuple(map(space.grid.shards.number, dim.normal))
            cuts.append(cut)
        return State(tuple(cuts), tuple(sorted(map(space.axes.index, sharding.sums))))

    def _received(self, before: OperandSharding, after: OperandSharding, elements: int) -> int:
        """Fewest elements that the busiest device must receive."""
        if (before.sums or after.sums) and (ended := before.sums - after.sums):
            kept, n = self._size(after.sums & before.sums), self.mesh.n_devices
            copies = n // self._size(after.sums.union(*(dim.axes for dim in after.dims)))
            return least_received(elements, n, self._size(ended), copies, kept)
        if after.sums and after.sums - before.sums:
            return 0
        src, dst = [dim.rows for dim in before.dims], [dim.rows for dim in after.dims]
        return math.prod(dst) - math.prod(map(min, src, dst))

    def _size(self, axes: frozenset[str]) -> int:
        """The number of devices along some axes."""
        if axes not in self._sizes:
            self._sizes[axes] = self.mesh.size(*axes)
        return self._sizes[axes]

    @cached_property
    def _fastest(self) -> tuple[float, float]:
        """Fewest seconds before the first byte of any move arrives, and for each element."""
        links, launches = self.profile.fabric(self.mesh).links, [s for _, s in self.profile.launch_s]
        start = min(launches, default=0.0) + min((link.latency_s for link in links), default=0.0)
        return start, itemsize(self.dtype) / max((link.bytes_per_s for link in links), default=1.0)


@lru_cache(maxsize=4096)
def fastest_attention(
    attn: Attention, dtype: str, profile: Profile, methods: tuple[str, ...] = METHODS
) -> Attention:
    """The attention with its own method, or with the fastest of `methods`."""
    if attn.how != AUTO:
        return attn
    return min(
        (replace(attn, how=how) for how in methods), key=lambda each: attention_seconds(each, dtype, profile)
    )


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
    move_s, precise = prices.plan(ArrayMove(*layouts, tuple(shape))).cost, max(1.0, 4 / itemsize(dtype))
    rounds, round_work = attn.rounds, work / attn.rounds
    forward = round_work + (rounds - 1) * max(round_work, move_s)
    # The blocks travel again, and beside them their gradients in the dtype of sums.
    backward = BACKWARD * round_work + (rounds - 1) * max(BACKWARD * round_work, move_s * (1 + precise))
    return moving + forward + backward + move_s * precise


def _operations(attn: Attention) -> float:
    """Forward operations of the busiest device: two products over the scores that are not empty."""
    batch, heads, *_ = math.prod(attn.queries.max_local_shape[:HEADS]), attn.queries.max_local_shape[HEADS]
    n, sees = attn.kv.shape[SEQUENCE], 0
    for device in attn.devices:
        place = attn.query_rows(device) + attn.offset
        first = 0 if attn.left is None else (place - attn.left).clip(min=0)
        last = n if attn.right is None else (place + attn.right + 1).clip(max=n)
        sees = max(sees, int((last - first + 0 * place).clip(min=0).sum()))
    share = len(attn.devices) if attn.how == REDUCE else 1
    return 2.0 * batch * heads * sees * attn.kv.shape[WIDTH] / share
