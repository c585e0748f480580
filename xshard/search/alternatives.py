"""Alternatives to the steps of a plan, for comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from xshard.cost.model import Profile
from xshard.layout import Sharding
from xshard.layout.sub_axes import Split
from xshard.search import overlap_paths
from xshard.search.a_star import Search
from xshard.search.overlap_paths import overlaps
from xshard.search.states import Space
from xshard.steps import AllGather, AllReduce, Mask, Slice, Step
from xshard.steps.base import DimCut
from xshard.steps.exchange.traffic import begun_axes, ended_axes


def alternative_steps(
    start: Sharding, goal: Sharding, dtype: str, profile: Profile, split: Split
) -> dict[str, Callable[[], Sequence[Step]]]:
    """Every alternative by name, and what makes its steps. Normal forms without copies.

    split: the axes that the plan splits. A call raises PlanError where that way does not exist.
    """
    if overlaps(start) or overlaps(goal):
        made = overlap_paths.ways(start, goal, dtype, profile)
        return {name: functools.partial(tuple[Step, ...], steps) for name, steps in made.items()}
    space = Space(start, goal, dtype, profile)
    whole = {"whole axes": Search(space, None).best_path} if split else {}
    return {
        **whole,
        "direct exchange": lambda: (space.exchange(goal.layout),),
        "collectives alone": Search(space, None, exchanges=False).best_path,
        "all-gather and slice": lambda: gather_and_slice(start, goal),
    }


def gather_and_slice(start: Sharding, goal: Sharding) -> tuple[Step, ...]:
    """Reduce what ends, gather every dim to what both ends share, slice to the goal. Normal forms."""
    src, dst = start.layout, goal.layout
    steps: list[Step] = []
    for kind, axes in src.tags:
        over = tuple(a for a in axes if a in ended_axes(src, dst))
        if over:
            steps.append(AllReduce(over, kind))
    slices: list[DimCut] = []
    for here, there in zip(src.dims, dst.dims, strict=True):
        n = 0
        while n < min(len(here.shards), len(there.shards)) and here.shards[n] == there.shards[n]:
            n += 1
        if here.shards[n:]:
            steps.append(AllGather(here.name, here.shards[n:]))
        if there.shards[n:]:
            slices.append((there.name, there.shards[n:]))
    begins = begun_axes(src, dst)
    sliced = (Slice(tuple(slices)),) if slices else ()
    return (*steps, *sliced, *((Mask(begins),) if begins else ()))
