"""Why a plan won: its alternatives, priced by the same model, and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.errors import PlanError
from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.layout import Sharding
from xshard.layout.sub_axes import split_of
from xshard.notation.parser import Shard
from xshard.search import overlap_paths
from xshard.search.a_star import Search
from xshard.search.moves import NamedRoute
from xshard.search.solve import with_copies, with_scale, without_copies
from xshard.steps import AllGather, AllReduce, Mask, Slice, Step
from xshard.steps.base import DimCut
from xshard.steps.exchange.traffic import begun_axes, ended_axes

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which explains itself by this


class Alternative(NamedTuple):
    """One alternative to a plan; without a plan it is not possible, for the reason in `why_not`."""

    name: str
    plan: Plan | None
    why_not: str = ""


def explain(plan: Plan) -> str:
    """Print the alternatives of a plan as a table, and why the plan won."""
    options = alternatives(plan)
    rows = [("", "time", "received", "peak", "messages", "steps"), *map(_row, options)]
    return "\n".join([align_columns(rows), "", _verdict(plan, options)])


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """List a plan and the other ways between its layouts, all priced for the same machine.

    Returns:
        The plan itself first, as "the plan", then one entry per way, such as "collectives alone" or
        "all-gather and slice". A way that is not possible has None for its plan, and the reason.

    Raises:
        PlanError: The plan leads from one mesh to another.
    """
    if plan.transfer:
        raise PlanError(
            f"no alternatives from {plan.mesh!r} to {plan.dst_mesh!r}",
            hint="they are ways on one mesh",
        )
    # As in the search of the plan, a way is found for a simpler move. Layouts are in normal form, with
    # the dims of both in the source's order, and `copy` tags, which are about gradients only, are
    # left out. Then tags, the scale of a mean, and the transposition of dims are added to the steps.
    start, goal = plan._normal_ends
    has_transposition = plan.source.layout.names != plan.target.layout.names
    transposition = plan.steps[-1:] if has_transposition else ()
    source_split = split_of(start.mesh)  # that of `spread`
    searches = _searches(
        without_copies(start),
        without_copies(goal),
        plan.dtype,
        plan.request.machine,
        are_axes_split=plan.split != source_split,
    )
    ways = [Alternative("the plan", plan)]
    for name, find_steps in searches.items():
        try:
            steps = with_copies(find_steps(), start, goal)
            scaled = with_scale(steps, plan.scale, start, goal, plan.profile)
            # These steps divide no mesh axis into sub-axes, as those of the plan may.
            other_plan = replace(plan, steps=(*scaled, *transposition), split=source_split)
        except PlanError as error:
            ways.append(Alternative(name, None, error.reason))
        else:
            ways.append(Alternative(name, other_plan))
    return tuple(ways)


StepsFinder = Callable[[], Sequence[Step]]


def _searches(
    start: Sharding, goal: Sharding, dtype: str, profile: Profile, *, are_axes_split: bool
) -> dict[str, StepsFinder]:
    """Return the other ways from one layout to another, by name, each as a function to call later.

    Each function returns the collectives of that way in order, or raises PlanError where the way is
    not possible, as in {"direct exchange": find_steps, "all-gather and slice": find_steps}.
    are_axes_split: whether the steps of the plan divide mesh axes into sub-axes.
    """
    # Blocks with halos (rows of their neighbours) move by a few fixed ways, without a search.
    if start.layout.has_overlap or goal.layout.has_overlap:
        paths = overlap_paths.paths_by_name(start, goal, dtype, profile)
        # Already found: the function has nothing left to do.
        return {name: partial(tuple, steps) for name, steps in paths.items()}
    named_route = NamedRoute(start, goal, itemsize(dtype), profile)
    search = Search(named_route.route, memory_limit=None)

    def by_search(search: Search) -> Sequence[Step]:
        return named_route.steps(search.path().moves)

    def by_exchange() -> Sequence[Step]:
        return (named_route.exchange(start.layout, goal.layout),)

    searches: dict[str, StepsFinder] = {}
    # A plan that divides no axes is on whole axes itself, and would be its own alternative.
    if are_axes_split:
        searches["whole axes"] = partial(by_search, search)
    searches["direct exchange"] = by_exchange
    searches["collectives alone"] = partial(by_search, replace(search, exchanges=False))
    searches["all-gather and slice"] = partial(_gather_and_slice, start, goal)
    return searches


def _gather_and_slice(start: Sharding, goal: Sharding) -> tuple[Step, ...]:
    """Build the simplest way between two layouts: all-reduce, all-gather, then slice locally.

    Sums that the goal no longer has are all-reduced. Each dim keeps the outer shards that both
    layouts have, is gathered over the others, and is sliced as the goal says: from n/dp/tp to
    n/dp/cp, dim n is gathered over tp and then sliced over cp. Sums that begin leave the values on
    the first device along their axes and zeros on the others (Mask). Both layouts are in normal
    form.
    """
    src = start.layout
    dst = goal.layout
    ended = ended_axes(src, dst)  # along these src holds addends, and dst does not
    steps: list[Step] = []
    for tag, axes in src.tags:
        reduced = tuple(axis for axis in axes if axis in ended)
        if reduced:
            steps.append(AllReduce(reduced, tag))
    slices: list[DimCut] = []
    for src_dim, dst_dim in zip(src.dims, dst.dims, strict=True):
        n_kept = _common_prefix(src_dim.shards, dst_dim.shards)  # outer shards that may stay
        removed_shards = src_dim.shards[n_kept:]
        added_shards = dst_dim.shards[n_kept:]
        if removed_shards:
            steps.append(AllGather(src_dim.name, removed_shards))
        if added_shards:
            slices.append((dst_dim.name, added_shards))
    if slices:
        steps.append(Slice(tuple(slices)))
    begun = begun_axes(src, dst)  # along these dst holds addends, and src does not
    if begun:
        steps.append(Mask(begun))
    return tuple(steps)


def _common_prefix(first: Sequence[Shard], second: Sequence[Shard]) -> int:
    """Count the shards at the beginning of two dims that are the same: outermost first."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return min(len(first), len(second))


def _row(option: Alternative) -> tuple[str, ...]:
    plan = option.plan
    if plan is None:
        return option.name, "-", "-", "-", "-", option.why_not
    return (
        option.name,
        format_seconds(plan.cost),
        format_bytes(plan.bytes_received),
        format_bytes(plan.peak_bytes),
        str(plan.messages),
        ", ".join(map(str, plan.steps)) or "nothing",
    )


def _verdict(plan: Plan, options: Sequence[Alternative]) -> str:
    """Say why the plan won: a sentence on the best alternative, and one per way that is too large.

    A way is too large if it holds a block larger than both the source's and the destination's, as
    gathering the whole array does between two sharded layouts.
    """
    if not plan.steps:
        return "The layouts mean the same: there is nothing to do."
    small_enough = {}
    too_large = {}
    for option in options[1:]:  # the first is the plan itself
        other_plan = option.plan
        if other_plan is None or other_plan.steps == plan.steps:
            continue
        if other_plan.exceeds_endpoints:
            too_large[option.name] = other_plan
        else:
            small_enough[option.name] = other_plan
    sentences = [_against_best(plan, small_enough)]
    sentences += [
        _against_too_large(plan, name, other_plan) for name, other_plan in too_large.items()
    ]
    return "\n".join(sentences)


def _against_best(plan: Plan, other_plans: Mapping[str, Plan]) -> str:
    """Say in a sentence how much faster the plan is than the fastest of the others, and why.

    Such as "2 us faster than direct exchange, the best of the others, under 'h100': 6 fewer
    messages."
    """
    if not other_plans:
        return "Every other way within the memory of both ends is the same plan or not possible."
    name = min(other_plans, key=lambda name: other_plans[name].cost)
    best = other_plans[name]
    if best.cost <= plan.cost:
        why = "holds less" if plan.peak_bytes < best.peak_bytes else "is the plainer of the two"
        return f"As fast as {name} under '{plan.profile.name}'; it {why}."
    savings = {
        "bytes received": best.bytes_received - plan.bytes_received,
        "messages": best.messages - plan.messages,
        "steps": len(best.steps) - len(plan.steps),
    }
    fewer = [f"{saving} fewer {quantity}" for quantity, saving in savings.items() if saving > 0]
    reasons = ", ".join(fewer) if fewer else "cheaper launches and copies"
    saved = format_seconds(best.cost - plan.cost)
    than = f"{name}, the best of the others, under '{plan.profile.name}'"
    return f"{saved} faster than {than}: {reasons}."


def _against_too_large(plan: Plan, name: str, other_plan: Plan) -> str:
    saved_s = plan.cost - other_plan.cost
    verb_phrase = f"would be {format_seconds(saved_s)} faster, but" if saved_s > 0 else "also"
    return f"{name.capitalize()} {verb_phrase} holds a block larger than both ends, which no plan does."
