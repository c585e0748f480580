"""The planner: the cheapest path of steps between two layouts.

Decides which steps are worth trying (`moves`) and searches over layouts, cheapest first, with
the direct exchange as the path that always exists. Sees names and shapes, never data; the
same input gives the same plan in every process.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path

from xshard import bounds, dtypes
from xshard.cost import Price, Profile, load_profile, price
from xshard.errors import NotationError, PlanError, ShapeError
from xshard.layout import Layout, check_axes, parse_expression
from xshard.mesh import Mesh
from xshard.moves import moves
from xshard.plan import Plan, format_bytes
from xshard.sharding import Sharding
from xshard.steps import AllGather, AllReduce, Exchange, Permute, Retag, Scale, Step
from xshard.steps.base import axes_of, with_tag, without_tags
from xshard.steps.exchange import ended

# How many layouts a search may settle before it takes the best path it has.
MAX_SETTLED = 500


def plan(
    expression: str | tuple[Layout | str, Layout | str],
    mesh: Mesh,
    shape: Sequence[int],
    dtype: object = "float32",
    *,
    profile: str | Path | Profile = "h100",
    memory_limit: int | None = None,
) -> Plan:
    """`"layout -> layout"` for an array of global `shape` -> the cheapest plan.

    dtype: a name or a dtype of numpy, torch or JAX. profile: the machine it is priced for.
    memory_limit: bytes that no device may exceed at any moment.
    Raises NotationError, ShapeError, DtypeError; PlanError where no plan fits the limit.

    >>> p = plan("b s/cp c -> b s c/cp", Mesh(cp=4), (2, 16, 8))
    >>> [str(step) for step in p.steps], p.bytes_received == p.bytes_lower_bound
    (['all_to_all s/cp -> c/cp'], True)
    """
    if isinstance(expression, str):
        text: str | None = expression
        src, dst = parse_expression(expression)
    else:
        text = None
        src, dst = (Layout.parse(side) if isinstance(side, str) else side for side in expression)
        if src.names != dst.names:
            raise NotationError(f"dim names differ: '{src}' and '{dst}'", hint="same names, same order")
    for layout in (src, dst):
        check_axes(layout, mesh, text)
    try:
        return find_plan(
            src,
            dst,
            mesh,
            tuple(shape),
            dtypes.name_of(dtype),
            load_profile(profile),
            memory_limit=memory_limit,
        )
    except ShapeError as error:
        raise ShapeError(error.reason, text=text, hint=error.hint) from None


@lru_cache(maxsize=4096)
def find_plan(
    src: Layout,
    dst: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    profile: Profile,
    *,
    scale: Fraction | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """The cheapest plan between two layouts, by value. `scale`: the constant it multiplies by, where
    that is not read off the layouts (a backward plan)."""
    source, target = Sharding(src, mesh, shape), Sharding(dst, mesh, shape)
    check_moves(source, target, dtype)
    factor = source.scale / target.scale if scale is None else scale
    start, goal = (s.with_layout(s.normal) for s in (source, target))
    search = Search(_uncopied(start), _uncopied(goal), dtype, profile, memory_limit)
    steps = _with_copies(search.best_path(), start, goal)
    if factor != 1:
        # Scaled where the block is smaller: before it grows or after it shrank.
        first = start.max_local_size <= goal.max_local_size
        steps = (Scale(factor), *steps) if first else (*steps, Scale(factor))
    return Plan(source.layout, target.layout, mesh, shape, dtype, steps, factor, profile)


def check_moves(source: Sharding, target: Sharding, dtype: str) -> None:
    """Raise for pairs of layouts between which no redistribution is defined."""
    src, dst = source.layout, target.layout
    for layout in (src, dst):
        if any(dim.overlap is not None for dim in layout.dims):
            raise PlanError(f"'{layout}' overlaps: overlapping layouts have ownership but no plans yet")
    for kind, axes in src.tags:
        if kind != "copy" and not set(axes) <= set(dst.tagged(kind)):
            dtypes.check_reduction(dtype, kind)
    for kind in ("max", "min"):
        new = [a for a in dst.tagged(kind) if a not in src.tagged(kind)]
        if new:
            raise PlanError(
                f"'{dst}' holds a {kind} over {', '.join(new)} that '{src}' does not",
                hint=f"a {kind} can be kept or reduced, not begun: write copy({','.join(new)})",
            )


@dataclass(frozen=True)
class _Path:
    """Steps tried so far and what they cost."""

    rank: tuple[float, int]
    steps: tuple[Step, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Search:
    """Cheapest-first search (A*) over layouts without copy tags, from `start` to `goal`."""

    start: Sharding
    goal: Sharding
    dtype: str
    profile: Profile
    memory_limit: int | None

    @cached_property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.dtype)

    @cached_property
    def largest(self) -> int:
        """Elements of the larger end: no block on the way is larger."""
        return max(self.start.max_local_size, self.goal.max_local_size)

    @cached_property
    def fastest(self) -> float:
        """Bytes per second of the fastest link."""
        links = [self.profile.link(axis) for axis in self.start.mesh.axes] or [self.profile.default]
        return max(link.bytes_per_s for link in links)

    def best_path(self) -> tuple[Step, ...]:
        """The steps of the cheapest path within the memory limit. Raises PlanError where none fits."""
        path = self._search()
        if path is None:
            least = replace(self, memory_limit=None).least_peak_bytes()
            raise PlanError(
                f"no plan stays within {format_bytes(self.memory_limit or 0)} per device",
                hint=f"the least any plan needs is {format_bytes(least)} ({least} bytes)",
            )
        return path.steps

    def least_peak_bytes(self) -> int:
        """The smallest peak of any path: the limit is lowered until no path is left."""
        least, path = 0, self._search()
        while path is not None:
            least = path.peak_bytes
            path = replace(self, memory_limit=least - 1)._search()
        return least

    def _search(self) -> _Path | None:
        goal = self.goal.layout
        settled: set[Layout] = set()
        tie = itertools.count()
        queue = [
            (self._remaining(self.start), next(tie), self.start, _Path((0.0, 0), (), self._held(self.start)))
        ]
        while queue:
            _, _, here, path = heapq.heappop(queue)
            if here.layout in settled:
                continue
            settled.add(here.layout)
            if here.layout == goal:
                return path
            steps: Iterator[Step] | tuple[Step, ...] = moves(here, self.goal)
            if len(settled) > MAX_SETTLED:
                steps = (Exchange(goal),)
            for step in steps:
                after = self._try(step, here)
                if after is None or after.layout in settled:
                    continue
                cost = price(step, here, after, self.itemsize, self.profile)
                if self.memory_limit is not None and cost.peak_bytes > self.memory_limit:
                    continue
                longer = self._extended(path, step, cost)
                estimate = round(longer.rank[0] + self._remaining(after)[0], 15), longer.rank[1]
                heapq.heappush(queue, (estimate, next(tie), after, longer))
        return None

    def _try(self, step: Step, here: Sharding) -> Sharding | None:
        """Where a step leads, if it applies and holds no block larger than both ends."""
        try:
            after = step.after(here)
        except PlanError:
            return None
        return after if after.max_local_size <= self.largest else None

    def _extended(self, path: _Path, step: Step, cost: Price) -> _Path:
        # Among equals the plainer path wins: local moves, then collectives, then exchanges.
        plainness = 3 if isinstance(step, Exchange) else 2 if cost.received_bytes else 1
        rank = (path.rank[0] + cost.seconds, path.rank[1] + plainness)
        return _Path(rank, (*path.steps, step), max(path.peak_bytes, cost.peak_bytes))

    def _remaining(self, here: Sharding) -> tuple[float, int]:
        """Seconds that any path from here must still spend."""
        if ended(here.layout, self.goal.layout):
            return 0.0, 0
        return bounds.received_elements(here, self.goal) * self.itemsize / self.fastest, 0

    def _held(self, here: Sharding) -> int:
        return here.max_local_size * self.itemsize


def _uncopied(sharding: Sharding) -> Sharding:
    return sharding.with_layout(without_tags(sharding.layout, sharding.layout.tagged("copy")))


def _with_copies(steps: Sequence[Step], start: Sharding, goal: Sharding) -> tuple[Step, ...]:
    """The steps with copies told from replicas, which the search does not distinguish.

    An axis whose values become whole for the last time holds copies if the goal says so; what
    no step settles is retagged at the end, where no data moves.
    """
    wanted = goal.layout.tagged("copy")
    here, result = start, []
    for i, step in enumerate(steps):
        later = {a for s in steps[i + 1 :] for a in _consumed(s)}
        copies = tuple(a for a in wanted if a not in later)
        if isinstance(step, AllGather):
            step = replace(step, copies=tuple(a for a in axes_of(step.shards) if a in copies))
        elif isinstance(step, AllReduce):
            step = replace(step, copies=tuple(a for a in step.axes if a in copies))
        elif isinstance(step, Exchange | Permute):
            free = [a for a in copies if a not in step.to.axes]
            step = replace(step, to=with_tag(step.to, "copy", free))
        result.append(step)
        here = step.after(here)
    have = here.layout.tagged("copy")
    retag = Retag(
        copies=tuple(a for a in wanted if a not in have), replicas=tuple(a for a in have if a not in wanted)
    )
    return (*result, retag) if retag != Retag() else tuple(result)


def _consumed(step: Step) -> tuple[str, ...]:
    """Axes that a step takes out of replicas or copies."""
    shards = getattr(step, "shards", ())
    if step.kind in ("slice", "embed"):
        return axes_of(shards)
    if step.kind == "mask":
        return tuple(getattr(step, "axes", ()))
    return step.to.axes if isinstance(step, Exchange | Permute) else ()
