"""The moves worth trying from a state: all on small meshes, on large ones only towards the goal.

The order of the moves is fixed. Of paths that cost the same, a search keeps the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import (
    chain,
    combinations,
    combinations_with_replacement,
    islice,
    pairwise,
    permutations,
    product,
)

from xshard.search.moves import Move, SearchRoute
from xshard.search.states import (
    Cut,
    Cuts,
    State,
    add_inner_cuts,
    cached_method,
    common,
    common_prefix,
    replaced,
    starts_with,
    without,
)

# Up to so many axes, dims and devices all moves are tried: the proof of optimality covers them.
COMPLETE_AXES = 3
COMPLETE_DIMS = 3
COMPLETE_DEVICES = 64
MAX_PERMUTES = 8  # rearrangements by permutation tried from one state of a large space


class Successors:
    """The moves of one route, generated in a fixed order.

    pinned: for each dim, the leading shards that start and goal share; they always stay.
    usable: the axes that may change.
    complete: whether all moves are tried, so that the cheapest path is optimal.
    """

    def __init__(self, route: SearchRoute) -> None:
        self.grid = route.grid
        self.goal = route.goal
        self.dims = range(len(route.start.cuts))
        self.pinned = tuple(map(common_prefix, route.start.cuts, route.goal.cuts))
        self.usable = tuple(sorted({*route.changing, *route.spare}))
        is_small = (
            len(self.usable) <= COMPLETE_AXES
            and len(self.dims) <= COMPLETE_DIMS
            and self.grid.count_parts(self.usable) <= COMPLETE_DEVICES
        )
        has_even_ends = self.grid.is_regular(route.start) and self.grid.is_regular(route.goal)
        self.complete = is_small and has_even_ends

    @cached_method
    def collectives(self, state: State) -> tuple[Move, ...]:
        """List the moves worth trying from a state, except exchanges."""
        # Of paths that cost the same, the one with the moves of the first kinds wins.
        moves = [*self._reductions(state)]
        moves += self._slices(state)
        moves += self._all_to_alls(state)
        moves += self._gathers(state)
        moves += self._into_sums(state)
        moves += self._permutes(state)
        return tuple(moves)

    def _gathers(self, state: State) -> Iterator[Move]:
        """Yield gathers of innermost shards, one dim at a time."""
        for dim_index, cut in enumerate(state.cuts):
            for leaving in self._movable(dim_index, cut):
                yield Move(
                    "all_gather", (dim_index, leaving), state.without_inner(dim_index, leaving)
                )

    def _slices(self, state: State) -> Iterator[Move]:
        """Yield the local steps in which each device keeps a part of its block: "b s" -> "b s/cp".

        Only mesh axes along which devices hold equal blocks can shard further. The data of a move
        are the new innermost shards for every dim, by number: ((), (1,)) shards dim 1 over axis 1.
        """
        free_axes = self._usable_replicas(state)
        if not free_axes or not state.cuts:  # a scalar has no dims to shard
            return
        new_cuts_of = self._all_new_cuts if self.complete else self._some_new_cuts
        # A dict keeps the order and drops what comes twice; a set would lose the order.
        for new_cuts in dict.fromkeys(new_cuts_of(state, free_axes)):
            new_shards = tuple(chain.from_iterable(new_cuts))
            axes = self.grid.axes_in(new_shards)
            # Something has to be sharded, no axis twice, and only axes that hold replicas.
            if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(free_axes):
                continue
            if self._may_cut(state, new_cuts):
                yield Move("slice", new_cuts, state.with_inner_cuts(new_cuts))

    def _usable_replicas(self, state: State) -> tuple[int, ...]:
        """List the usable axes that hold replicas."""
        return common(self.grid.replica_axes(state), self.usable)

    def _may_cut(self, state: State, new_cuts: Cuts) -> bool:
        """Check that new shards are the goal's, or even; other shards are a detour."""
        for dim_index, (cut, new_cut) in enumerate(zip(state.cuts, new_cuts, strict=True)):
            is_of_goal = starts_with(self._rest_of_goal(dim_index, cut), new_cut)
            if not is_of_goal and not self._is_evenly_cut(dim_index, cut, new_cut):
                return False
        return True

    def _all_new_cuts(self, state: State, free_axes: tuple[int, ...]) -> Iterator[Cuts]:
        """Yield every choice of new innermost shards for the dims, those of the goal first.

        One tuple of axis numbers per dim. For 2 dims and free axes 0 and 1, after the goal's own:
        ((), (0,)), ((0,), ()), ..., ((), (0, 1)), ((0,), (1,)), ((0, 1), ()), ...
        """
        # The goal's own shards may be zigzag or uneven. All other choices are plain, whole axes.
        goals_shards = [
            _prefixes(self._rest_of_goal(dim_index, cut))
            for dim_index, cut in enumerate(state.cuts)
        ]
        yield from product(*goals_shards)
        n_inner_edges = len(state.cuts) - 1
        for n_axes in range(1, len(free_axes) + 1):
            # Each ordering of n axes is cut into one part per dim, at these edges: axes (4, 7, 5)
            # and edges 1, 1 -> (4,), () and (7, 5) for three dims.
            divisions = list(combinations_with_replacement(range(n_axes + 1), n_inner_edges))
            for order, inner_edges in product(permutations(free_axes, n_axes), divisions):
                edges = (0, *inner_edges, n_axes)
                yield tuple(order[start:stop] for start, stop in pairwise(edges))

    def _some_new_cuts(self, state: State, free_axes: tuple[int, ...]) -> Iterator[Cuts]:
        """Yield all shards of the goal at once; then those of one dim at a time."""
        no_cuts: Cuts = ((),) * len(state.cuts)
        yield tuple(self._rest_of_goal(dim_index, cut) for dim_index, cut in enumerate(state.cuts))
        for dim_index, cut in enumerate(state.cuts):
            for new_cut in self._new_cuts(dim_index, cut, free_axes):
                yield replaced(no_cuts, dim_index, new_cut)

    def _new_cuts(self, dim_index: int, cut: Cut, free_axes: tuple[int, ...]) -> Iterator[Cut]:
        """Yield shards that a slice may add to one dim of a large space."""
        yield from _prefixes(self._rest_of_goal(dim_index, cut))[:-1]  # but for the last, ()
        for shard in self.goal.cuts[dim_index]:  # out of order: a permutation puts it right later
            yield (shard,)
        for axis in free_axes:  # a replica's share, so that a slow link carries it once
            if axis not in self.grid.roles(self.goal):
                yield (axis,)

    def _all_to_alls(self, state: State) -> Iterator[Move]:
        """Yield all-to-alls: shards move from the inside of one dim to the inside of another.

        "b s/cp c" -> "b s c/cp". The data of a move are (1, (cp,), 2, (cp,)): these shards leave
        dim 1, and dim 2 gets them (axes and shards have numbers, here cp's).
        """
        for src, cut in enumerate(state.cuts):
            for moving in self._movable(src, cut):
                without_moving = state.without_inner(src, moving)
                for dst, dst_cut in enumerate(state.cuts):
                    if dst == src:
                        continue
                    for new_cut in self._even_cuts(
                        dst, dst_cut, self._arrivals(src, dst, dst_cut, moving)
                    ):
                        next_state = without_moving.with_inner(dst, new_cut)
                        yield Move("all_to_all", (src, moving, dst, new_cut), next_state)

    def _arrivals(self, src: int, dst: int, dst_cut: Cut, moving: Cut) -> Iterator[Cut]:
        """Yield the new shards that an all-to-all may give to dim `dst` for those taken from `src`.

        On a small mesh these are all orders of the moving shards: (0, 1) -> (0, 1), then (1, 0). On
        a large one only those that lead towards the goal.

        Args:
            src: The index of the dim that they leave.
            dst: The index of the dim that they come to.
            dst_cut: The shards that this dim has already; the new ones are inside of them.
            moving: The shards that leave.
        """
        axes = self.grid.axes_in(moving)
        yield from self._goals_shards_over(axes, dst, dst_cut)
        if self.complete:
            yield from permutations(moving)
        elif self.grid.is_plain(moving):
            # Either the goal shards `dst` over these axes. Or it shards `src` over them, and they
            # leave it for a while, so that shards inside of which they were can be gathered.
            goal_cuts = (self.goal.cuts[dst], self.goal.cuts[src])
            if any(set(axes) <= set(self.grid.axes_in(cut)) for cut in goal_cuts):
                yield moving

    def _reductions(self, state: State) -> Iterator[Move]:
        """Yield reductions of sums that end: to replicas, or to new shards of a dim.

        They are an all-reduce over some of the axes, and reduce-scatters over the same axes. Where
        receivers add in a fixed order there are none: exchanges bring them the addends.
        """
        if self.grid.profile.adds_in_order:
            return
        for axes in self._subsets(self.grid.ended(state, self.goal)):
            next_state = state.without_sums(axes)
            yield Move("all_reduce", (axes,), next_state)
            for dim_index, cut in enumerate(state.cuts):
                for new_cut in self._even_cuts(
                    dim_index, cut, self._scatters(dim_index, cut, axes)
                ):
                    yield Move(
                        "reduce_scatter",
                        (dim_index, new_cut),
                        next_state.with_inner(dim_index, new_cut),
                    )

    def _scatters(self, dim_index: int, cut: Cut, axes: tuple[int, ...]) -> Iterator[Cut]:
        """Yield shards that a scatter may give a dim: the goal's, then the axes in any order."""
        yield from self._goals_shards_over(axes, dim_index, cut)
        if self.complete:
            yield from permutations(axes)
        else:
            yield axes

    def _goals_shards_over(self, axes: tuple[int, ...], dim_index: int, cut: Cut) -> Iterator[Cut]:
        """Yield the goal's next shards of a dim, if they are over just these axes, in any order."""
        for shards in _prefixes(self._rest_of_goal(dim_index, cut)):
            if sorted(self.grid.axes_in(shards)) == sorted(axes):
                yield shards

    def _into_sums(self, state: State) -> Iterator[Move]:
        """Yield the two local steps that turn shards or replicas into partial sums.

        Embed: each device writes its shard into a block of zeros, so that the blocks add up to the
        array: "n/x" -> "n | sum(x)". Mask: the first device along some axes keeps its values, and
        the others set theirs to zero: "n" -> "n | sum(x)".
        """
        # Axes with partial sums at the goal, but not here: from the goal back, these sums would
        # end.
        begun = self.grid.ended(self.goal, state)
        for dim_index, cut in enumerate(state.cuts):
            for n_leaving in range(1, len(cut) + 1):
                leaving = cut[-n_leaving:]
                axes = self.grid.axes_in(leaving)
                if set(axes) <= set(begun):
                    next_state = state.with_sums(axes).without_inner(dim_index, leaving)
                    yield Move("embed", (dim_index, leaving), next_state)
        free_axes = self._usable_replicas(state)
        for axes in self._subsets(common(begun, free_axes)):
            yield Move("mask", (axes,), state.with_sums(axes))

    def _permutes(self, state: State) -> Iterator[Move]:
        """Yield permutations: devices swap whole blocks, so each dim keeps its number of parts.

        "n/x/y" -> "n/y/x", for example. The goal itself comes first, if its blocks have the same
        lengths. On a large mesh at most MAX_PERMUTES others follow.
        """
        has_lengths_of_goal = self.grid.lengths(state) == self.grid.lengths(self.goal)
        if state.sums == self.goal.sums and has_lengths_of_goal:
            yield Move("permute", data=(), next_state=self.goal)
        if not self.grid.is_regular(state):
            return
        usable = without(self.usable, state.sums)
        # The number of parts into which the shards of each dim cut that may change, inside the pinned.
        parts_of_dims: list[int] = []
        for cut, pinned in zip(state.cuts, self.pinned, strict=True):
            parts_of_dims.append(self.grid.count_parts(cut[len(pinned) :]))
        known_cuts = (state.cuts, self.goal.cuts)
        new_arrangements = (
            cuts for cuts in self._arrangements(0, usable, parts_of_dims) if cuts not in known_cuts
        )
        max_permutes = None if self.complete else MAX_PERMUTES
        for cuts in islice(new_arrangements, max_permutes):
            yield Move("permute", data=(), next_state=State(cuts, state.sums))

    def exchanges(self, state: State) -> Iterator[Move]:
        """Yield exchanges to states from which the goal is near: collectives do the rest."""
        if self.complete:
            yield from self._all_exchanges(state)
            return
        # The goal sharded further, to be gathered over links that the exchange would fill.
        for axes in self._subsets(self._usable_replicas(self.goal)):
            for dim_index, cut in enumerate(self.goal.cuts):
                if self._is_evenly_cut(dim_index, cut, axes):
                    yield Move(
                        "exchange", data=(), next_state=self.goal.with_inner(dim_index, axes)
                    )

    def _all_exchanges(self, state: State) -> Iterator[Move]:
        """Yield exchanges to every even state that has some of the sums that end, or begin."""
        kept_sums = common(state.sums, self.goal.sums)
        ending = self.grid.ended(state, self.goal)
        beginning = self.grid.ended(self.goal, state)
        ending_choices = ((), *self._subsets(ending))
        if self.grid.profile.adds_in_order:
            # All at once: sums of sums would be rounded otherwise.
            ending_choices = ((), ending)
        beginning_choices = ((), *self._subsets(beginning))
        for not_ended, begun in product(ending_choices, beginning_choices):
            sums = tuple(sorted((*kept_sums, *not_ended, *begun)))
            for cuts in self._all_cuts(sums):
                yield Move("exchange", data=(), next_state=State(cuts, sums))

    @cached_method
    def _all_cuts(self, sums: tuple[int, ...]) -> list[Cuts]:
        """List every way to shard the dims evenly over the mesh axes without partial sums.

        `sums` are the axes with partial sums. For 1 dim and axes 0 and 1: (), (1,), (0,), (0, 1),
        (1, 0), each inside of the shards that always stay (`pinned`). Each axis shards one dim or
        none, so there are at least (dims + 1)^axes ways: for small meshes only.
        """
        all_cuts: list[Cuts] = []
        usable = without(self.usable, sums)
        # Each axis shards one of the dims, or none (-1).
        for dim_of_axis in product((-1, *self.dims), repeat=len(usable)):
            axes_of_dim: list[list[int]] = [[] for _ in self.dims]
            for axis, dim_index in zip(usable, dim_of_axis, strict=True):
                if dim_index >= 0:
                    axes_of_dim[dim_index].append(axis)
            orders = [permutations(axes) for axes in axes_of_dim]
            for inner_cuts in product(*orders):
                cuts = add_inner_cuts(self.pinned, inner_cuts)
                if all(map(self.grid.is_even, self.dims, cuts)):
                    all_cuts.append(cuts)
        return all_cuts

    def _arrangements(
        self, dim_index: int, free_axes: tuple[int, ...], parts_of_dims: list[int]
    ) -> Iterator[Cuts]:
        """Yield ways to shard the dims from `dim_index` on into as many parts as now, the goal's first."""
        if dim_index == len(parts_of_dims):
            yield ()
            return
        for cut in dict.fromkeys(self._rearranged(dim_index, free_axes, parts_of_dims[dim_index])):
            unused_axes = without(free_axes, cut)
            for inner_cuts in self._arrangements(dim_index + 1, unused_axes, parts_of_dims):
                yield (self.pinned[dim_index] + cut, *inner_cuts)

    def _rearranged(
        self, dim_index: int, free_axes: tuple[int, ...], n_parts: int
    ) -> Iterator[Cut]:
        """Yield ways to cut one dim into `n_parts` parts by axes that are still free."""
        if not self.complete:
            yield from self._towards_goal(dim_index, free_axes, n_parts)
            return
        for n_axes in range(len(free_axes) + 1):
            for cut in permutations(free_axes, n_axes):
                if self.grid.count_parts(cut) == n_parts:
                    yield cut

    def _towards_goal(
        self, dim_index: int, free_axes: tuple[int, ...], n_parts: int
    ) -> Iterator[Cut]:
        """Yield ways to cut one dim into `n_parts` parts, those that begin like the goal's first.

        If the goal has "n/0/1", axes 0 to 3 are of size 2, and 4 parts are wanted: (0, 1); then (0,
        1), (0, 2), (0, 3), which begin with axis 0; then all pairs. The longest common beginning
        comes first, and a cut may come twice. Outermost shards that always stay (`pinned`) are left
        out.
        """
        goal_cut = self.goal.cuts[dim_index][len(self.pinned[dim_index]) :]
        for leading_cut in _prefixes(goal_cut):
            if not self.grid.is_plain(leading_cut) or not set(leading_cut) <= set(free_axes):
                continue
            if n_parts % self.grid.count_parts(leading_cut):
                continue  # whatever axes follow, the number of parts is a multiple of these
            # What follows need not be in any order, as the goal has other axes there.
            other_axes = without(free_axes, leading_cut)
            for n_others in range(len(other_axes) + 1):
                for axes in combinations(other_axes, n_others):
                    if self.grid.count_parts(leading_cut + axes) == n_parts:
                        yield leading_cut + axes

    def _subsets(self, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield all of the axes first, then fewer; on large spaces all of them and each alone."""
        for n_axes in range(len(axes), 0, -1):
            if self.complete or n_axes in (1, len(axes)):
                yield from combinations(axes, n_axes)

    def _rest_of_goal(self, dim_index: int, cut: Cut) -> Cut:
        """Return the shards of the goal inside of `cut`: of "n/0/1" after (0,) -> (1,), else ()."""
        goal_cut = self.goal.cuts[dim_index]
        return goal_cut[len(cut) :] if starts_with(goal_cut, cut) else ()

    def _movable(self, dim_index: int, cut: Cut) -> Iterator[Cut]:
        """Yield the innermost shards that may leave a dim together, if they cut it evenly.

        On large spaces, the goal's stay. (0, 1) -> (1,), then (0, 1).
        """
        staying = self.pinned[dim_index]
        if not self.complete:
            staying = common_prefix(cut, self.goal.cuts[dim_index])
        for n_leaving in range(1, len(cut) - len(staying) + 1):
            # Pieces of a message have one size.
            if self._is_evenly_cut(dim_index, cut[:-n_leaving], cut[-n_leaving:]):
                yield cut[-n_leaving:]

    def _even_cuts(self, dim_index: int, cut: Cut, new_cuts: Iterable[Cut]) -> Iterator[Cut]:
        """Yield those of some new shards of a dim that cut it evenly, each once."""
        for new_cut in dict.fromkeys(new_cuts):
            if self._is_evenly_cut(dim_index, cut, new_cut):
                yield new_cut

    def _is_evenly_cut(self, dim_index: int, outer_cut: Cut, inner_cut: Cut) -> bool:
        """Check that `inner_cut` shards each block of a dim under `outer_cut` into equal parts."""
        return self.grid.is_even(dim_index, outer_cut) and self.grid.is_even(
            dim_index, outer_cut + inner_cut
        )


def _prefixes(cut: Cut) -> list[Cut]:
    """List the leading shards, all of them first: (0, 1) -> (0, 1), (0,), ()."""
    return [cut[:n] for n in range(len(cut), -1, -1)]
