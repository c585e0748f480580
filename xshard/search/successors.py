"""The moves worth trying from a state: all on small meshes, on large ones towards the goal."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import (
    combinations,
    combinations_with_replacement,
    pairwise,
    permutations,
    product,
    takewhile,
)

from xshard.search.grid import Cut, State, remembered
from xshard.search.moves import Move, SearchRoute

# Up to this many axes, dims and devices the step set is complete: the proof of optimality covers it.
COMPLETE_AXES = 3
COMPLETE_DIMS = 3
COMPLETE_DEVICES = 64
MAX_PERMUTES = 8  # rearrangements by permutation tried from one state of a large space


class Moves:
    """The moves of one route, generated in a fixed order."""

    def __init__(self, route: SearchRoute) -> None:
        self.grid = route.grid
        self.goal = route.goal
        start = route.start
        self.dims = range(len(start.cuts))
        self.pinned = tuple(map(_shared, start.cuts, self.goal.cuts))
        self.usable = tuple(sorted({*route.changing, *route.spare}))
        small = len(self.usable) <= COMPLETE_AXES and len(self.dims) <= COMPLETE_DIMS
        small = small and self.grid.parts(self.usable) <= COMPLETE_DEVICES
        plain = (self.grid.is_regular(state) for state in (start, self.goal))
        self.complete = small and all(plain)

    def _free(self, state: State) -> tuple[int, ...]:
        return tuple(a for a in self.grid.free(state) if a in self.usable)

    @remembered
    def collectives(self, state: State) -> tuple[Move, ...]:
        """Every move worth trying from a state, exchanges left out."""
        first = self._reductions, self._slices, self._all_to_alls
        kinds = *first, self._gathers, self._into_sums, self._permutes
        return tuple(move for moves in kinds for move in moves(state))

    def _gathers(self, state: State) -> Iterator[Move]:
        for d, cut in enumerate(state.cuts):
            for n in range(1, len(cut) + 1 - self._kept(d, cut)):
                if self._evenly(d, cut[:-n], cut[-n:]):
                    yield Move("all_gather", (d, n), state.with_cut(d, cut[:-n]))

    def _slices(self, state: State) -> Iterator[Move]:
        free = self._free(state)
        if not free or not state.cuts:  # a scalar has no dims to shard
            return
        new_cuts = self._all_new_cuts if self.complete else self._some_new_cuts
        for new in dict.fromkeys(new_cuts(state, free)):
            axes = [a for cut in new for a in self.grid.axes_in(cut)]
            if (
                axes
                and len(set(axes)) == len(axes)
                and set(axes) <= set(free)
                and self._may_cut(state, new)
            ):
                yield Move(
                    "slice", new, State(tuple(map(tuple.__add__, state.cuts, new)), state.sums)
                )

    def _may_cut(self, state: State, new: tuple[Cut, ...]) -> bool:
        """Whether new shards are the goal's, or even; other shards are a detour."""
        return all(
            not more or more == self._wanted(d, cut)[: len(more)] or self._evenly(d, cut, more)
            for d, (cut, more) in enumerate(zip(state.cuts, new, strict=True))
        )

    def _all_new_cuts(self, state: State, free: tuple[int, ...]) -> Iterator[tuple[Cut, ...]]:
        """Shards that slices may add to every dim: the goal's first, then any free axes in any order."""
        wanted = [self._wanted(d, cut) for d, cut in enumerate(state.cuts)]
        yield from product(*([w[:n] for n in range(len(w), -1, -1)] for w in wanted))
        for n in range(1, len(free) + 1):
            splits = list(combinations_with_replacement(range(n + 1), len(wanted) - 1))
            for order, inner in product(permutations(free, n), splits):
                yield tuple(order[a:b] for a, b in pairwise((0, *inner, n)))

    def _some_new_cuts(self, state: State, free: tuple[int, ...]) -> Iterator[tuple[Cut, ...]]:
        """All shards of the goal at once; else one dim at a time."""
        yield tuple(self._wanted(d, cut) for d, cut in enumerate(state.cuts))
        for d, cut in enumerate(state.cuts):
            for new in self._new_cuts(d, cut, free):
                yield tuple(new if e == d else () for e in range(len(state.cuts)))

    def _new_cuts(self, d: int, cut: Cut, free: tuple[int, ...]) -> Iterator[Cut]:
        wanted = self._wanted(d, cut)
        for n in range(len(wanted), 0, -1):
            yield wanted[:n]
        for s in self.goal.cuts[d]:  # out of order: a permutation puts it right later
            yield (s,)
        for a in free:  # a replica's share, so that a slow link carries it once
            if a not in self.grid.roles(self.goal):
                yield (a,)

    def _all_to_alls(self, state: State) -> Iterator[Move]:
        for d, cut in enumerate(state.cuts):
            for n in range(1, len(cut) + 1 - self._kept(d, cut)):
                moving = cut[-n:]
                if not self._evenly(d, cut[:-n], moving):
                    continue
                for e, other in enumerate(state.cuts):
                    if e == d:
                        continue
                    for new in dict.fromkeys(self._arrivals(d, e, other, moving)):
                        if self._evenly(e, other, new):
                            after = state.with_cut(d, cut[:-n]).with_cut(e, other + new)
                            yield Move("all_to_all", (d, n, e, new), after)

    def _arrivals(self, d: int, e: int, other: Cut, moving: Cut) -> Iterator[Cut]:
        """How axes taken from dim `d` may shard dim `e`."""
        axes = sorted(self.grid.axes_in(moving))
        wanted = self._wanted(e, other)
        for k in range(1, len(wanted) + 1):
            if sorted(self.grid.axes_in(wanted[:k])) == axes:
                yield wanted[:k]
        if self.complete:
            yield from permutations(moving)
        elif self.grid.is_plain(moving):
            # To the goal's dim; or out of the way of a gather, to come back later.
            goals = self.goal.cuts[e], self.goal.cuts[d]
            if any(set(axes) <= set(self.grid.axes_in(cut)) for cut in goals):
                yield moving

    def _reductions(self, state: State) -> Iterator[Move]:
        ending = tuple(a for a in state.sums if a not in self.goal.sums)
        for axes in self._subsets(ending):
            after = State(state.cuts, tuple(a for a in state.sums if a not in axes))
            yield Move("all_reduce", (axes,), after)
            for d, cut in enumerate(state.cuts):
                wanted = self._wanted(d, cut)
                fits = [wanted[:k] for k in range(1, len(wanted) + 1)]
                orders = permutations(axes) if self.complete else (axes,)
                for new in dict.fromkeys([*fits, *orders]):
                    if sorted(self.grid.axes_in(new)) == sorted(axes) and self._evenly(d, cut, new):
                        yield Move("reduce_scatter", (d, new), after.with_cut(d, cut + new))

    def _into_sums(self, state: State) -> Iterator[Move]:
        begins = [a for a in self.goal.sums if a not in state.sums]
        for d, cut in enumerate(state.cuts):
            for n in range(1, len(cut) + 1):
                axes = self.grid.axes_in(cut[-n:])
                if set(axes) <= set(begins):
                    sums = tuple(sorted((*state.sums, *axes)))
                    yield Move("embed", (d, n), State(state.cuts, sums).with_cut(d, cut[:-n]))
        free = self._free(state)
        for axes in self._subsets(tuple(a for a in begins if a in free)):
            yield Move("mask", (axes,), State(state.cuts, tuple(sorted((*state.sums, *axes)))))

    def _permutes(self, state: State) -> Iterator[Move]:
        """Rearrangements that keep the length of every block: the goal itself, else others."""
        grid = self.grid
        n_found = 0
        pairs = enumerate(zip(state.cuts, self.goal.cuts, strict=True))
        fits = all(grid.length(d, cut)[0] == grid.length(d, aim)[0] for d, (cut, aim) in pairs)
        if state.sums == self.goal.sums and fits:
            yield Move("permute", (), self.goal)
        if not grid.is_regular(state):
            return
        usable = tuple(a for a in self.usable if a not in state.sums)
        parts = [
            self.grid.parts(cut[len(pin) :])
            for cut, pin in zip(state.cuts, self.pinned, strict=True)
        ]
        for cuts in self._arrangements(0, usable, parts):
            if cuts not in (state.cuts, self.goal.cuts):
                yield Move("permute", (), State(cuts, state.sums))
                n_found += 1
                if n_found == MAX_PERMUTES and not self.complete:
                    return

    def exchanges(self, state: State) -> Iterator[Move]:
        """Exchanges to states from which the goal is near: collectives do the rest."""
        if self.complete:
            ending = tuple(a for a in state.sums if a not in self.goal.sums)
            begins = tuple(a for a in self.goal.sums if a not in state.sums)
            kept = tuple(a for a in state.sums if a in self.goal.sums)
            for stay in ((), *self._subsets(ending)):
                for new in ((), *self._subsets(begins)):
                    sums = tuple(sorted((*kept, *stay, *new)))
                    for cuts in self._all_cuts(sums):
                        yield Move("exchange", (), State(cuts, sums))
            return
        free = self._free(self.goal)
        for axes in self._subsets(free):
            for d, cut in enumerate(self.goal.cuts):
                if self._evenly(d, cut, axes):
                    yield Move("exchange", (), self.goal.with_cut(d, cut + axes))

    @remembered
    def _all_cuts(self, sums: tuple[int, ...]) -> list[tuple[Cut, ...]]:
        """Every way to shard the dims evenly by axes that hold no addends."""
        every = list[tuple[Cut, ...]]()
        usable = [a for a in self.usable if a not in sums]
        for places in product((-1, *self.dims), repeat=len(usable)):
            chosen = [
                tuple(a for a, p in zip(usable, places, strict=True) if p == d) for d in self.dims
            ]
            for tails in product(*map(permutations, chosen)):
                cuts = tuple(map(tuple.__add__, self.pinned, tails))
                if all(map(self.grid.is_even, self.dims, cuts)):
                    every.append(cuts)
        return every

    def _arrangements(
        self, d: int, usable: tuple[int, ...], parts: list[int]
    ) -> Iterator[tuple[Cut, ...]]:
        """Ways to shard the dims from `d` on into as many parts as now, the goal's leading shards first."""
        if d == len(parts):
            yield ()
            return
        for cut in dict.fromkeys(self._rearranged(d, usable, parts[d])):
            left = tuple(a for a in usable if a not in cut)
            for others in self._arrangements(d + 1, left, parts):
                yield (self.pinned[d] + cut, *others)

    def _rearranged(self, d: int, usable: tuple[int, ...], parts: int) -> Iterator[Cut]:
        if self.complete:
            for n in range(len(usable) + 1):
                yield from (cut for cut in permutations(usable, n) if self.grid.parts(cut) == parts)
            return
        goal = self.goal.cuts[d][len(self.pinned[d]) :]
        for n in range(len(goal), -1, -1):
            lead = goal[:n]
            if (
                not self.grid.is_plain(lead)
                or not set(lead) <= set(usable)
                or parts % self.grid.parts(lead)
            ):
                continue
            rest = [a for a in usable if a not in lead]
            for k in range(len(rest) + 1):
                # The order of axes that the goal does not have there does not matter.
                yield from (
                    lead + c for c in combinations(rest, k) if self.grid.parts(lead + c) == parts
                )

    def _subsets(self, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """All of the axes first, then fewer; on large spaces all of them and each alone."""
        for n in range(len(axes), 0, -1):
            if self.complete or n in (1, len(axes)):
                yield from combinations(axes, n)

    def _wanted(self, d: int, cut: Cut) -> Cut:
        """The goal's shards of a dim that come after `cut`, if those lead up to them."""
        goal = self.goal.cuts[d]
        return goal[len(cut) :] if goal[: len(cut)] == cut else ()

    def _kept(self, d: int, cut: Cut) -> int:
        """Number of leading shards of a dim that stay: the pinned; on large spaces, all of the goal's."""
        return len(self.pinned[d] if self.complete else _shared(cut, self.goal.cuts[d]))

    def _evenly(self, d: int, outer: Cut, inner: Cut) -> bool:
        """Whether `inner` shards every block of a dim under `outer` into equal parts."""
        return self.grid.is_even(d, outer) and self.grid.is_even(d, outer + inner)


def _shared(a: Cut, b: Cut) -> Cut:
    """The leading shards that both have."""
    return a[: sum(takewhile(bool, map(operator.eq, a, b)))]
