"""`suggest`: where everything in a training step lives, so that it is fastest and fits the devices.

The phases are `record` (what the model does), `price` (what each way to shard it costs), `choose`
(which ways are best) and `say` (rules). docs/one_step.md has a step of two operations in numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypedDict

import numpy as np

from xshard.arguments import limit_of
from xshard.cost.machine import load_profile
from xshard.cost.model import Profile, ProfileLike
from xshard.errors import MeshError, NotationError, PlanError, ProfileError, api_boundary
from xshard.formatting import format_bytes
from xshard.layout import Mesh
from xshard.layout.mesh import check_mesh
from xshard.rules import RulesLike
from xshard.signatures import Bytes, Count, ZeroToOne, short_repr
from xshard.step.choose.hand import HAND, HandPlan, options_by_hand
from xshard.step.choose.search import StepSearch
from xshard.step.price.moves import MovePrices
from xshard.step.price.problem import StepProblem
from xshard.step.record.shared_heads import mesh_with_shared_heads
from xshard.step.record.training_step import TrainingStep
from xshard.step.say.limits import fixed_options
from xshard.step.say.simplify import simplified
from xshard.step.say.suggestion import StepPlan, Suggestion

HEADROOM = 0.07  # of the memory, for what no plan counts: the framework's own, fragments, buffers
MOST_BATCHES = 64
TRIES = 4  # weights to try for a plan by hand
# Times the seconds of another plan by hand: where nothing fits the memory, bounds rise for ever.
HOPELESS = 10.0
SIMPLER = 0.01  # of the seconds and of the bound, for fewer rules, and for a batch that is whole

Progress = Callable[[int, int], None]  # the numbers of searches done, and of all


def _no_progress(done: int, total: int) -> None:
    """Show nothing."""


class SuggestKeywords(TypedDict, total=False):
    """The keywords of `suggest`, which the bridges hand on."""

    memory: Bytes
    profile: ProfileLike
    fixed: RulesLike | None
    micro_batches: Count | None
    recompute: bool | None
    batch_parts: Count | None
    overlap: ZeroToOne | None
    gap: ZeroToOne
    progress: Progress


@api_boundary
def suggest(  # noqa: PLR0913  the public signature
    step: TrainingStep,
    mesh: Mesh,
    *,
    memory: Bytes = None,
    profile: ProfileLike = "h100",
    fixed: RulesLike | None = None,
    micro_batches: Count | None = None,
    recompute: bool | None = None,
    batch_parts: Count | None = None,
    overlap: ZeroToOne | None = None,
    gap: ZeroToOne = 0.002,
    progress: Progress = _no_progress,
) -> Suggestion:
    """Find the layouts of parameters, inputs and activations that make a training step fastest.

    plan = xs.suggest(step, Mesh(dp=4, tp=2), memory="80GiB")
    plan.parameters["up.weight"]     # "o/dp/tp i"

    For fewer rules the plan takes up to 1 % more seconds than the best found, and than the bound.

    Args:
        step: The operations of the forward pass.
        mesh: The devices. Axes of size 1 are left out.
        memory: Bytes of a device, as a number or as "80GiB"; 7 % of them are left free. None: as
            many as needed.
        profile: The machine, as for `plan`.
        fixed: Layouts by patterns over names of inputs, parameters and operations (for their
            results). An axis that one names stays so in storage, others may be added.
        micro_batches: How many parts of the batch run one after another. None: the best number.
        recompute: Activations of repeated blocks are computed again in the backward pass. None: if
            that is best.
        batch_parts: In how many parts a micro-batch is computed, so that activations of one travel
            while another is computed (`xt.halves`). None: 1 or 2, whichever is faster.
        overlap: What if this share of the seconds of moves ran beside computing? None: what the
            schedule hides.
        gap: The share of the seconds that a better plan may still save when the search ends.
        progress: Called with the numbers of searches done, and of all.

    Raises:
        MeshError: The mesh is none, or has one device.
        NotationError: `fixed` is malformed, or fits nothing.
        ProfileError: The profile is unknown, or lacks rates of operations.
        PlanError: Nothing fits the memory, the batch cannot be divided so, or scipy is missing.

    Examples:
        >>> from xshard import Op
        >>> up = Op("up", "b c, f c -> b f", ("x", "up.weight"))
        >>> loss = Op("loss", "b f -> ", ("up",), kind="loss")
        >>> lengths = {"b": 4096, "c": 8192, "f": 8192}
        >>> step = TrainingStep(
        ...     [up, loss], lengths, inputs={"x": "b c"}, parameters={"up.weight": "f c"}
        ... )
        >>> plan = suggest(step, Mesh(dp=4, tp=2), memory="80GiB", micro_batches=1)
        >>> plan.parameters["up.weight"], plan.gap < 0.005
        ('o/dp/tp i', True)
    """
    check_mesh(mesh)
    if not mesh.long_axes:
        what = f"{mesh} has one device, and nothing to shard over"
        raise MeshError(what, hint="a mesh of two devices or more, as Mesh(dp=2)")
    # Axes of size 1 would only multiply options.
    mesh = Mesh({axis: mesh.size(axis) for axis in mesh.long_axes})
    limit = np.inf
    if memory is not None:
        limit = (limit_of(memory, "memory") or 0) * (1 - HEADROOM)
    step = step.with_shares
    moves = _move_prices(step, mesh, load_profile(profile))
    _check_rates(moves)
    candidates = list_problems(step, moves, micro_batches, recompute, overlap, batch_parts)
    searches = _searches_of(candidates, limit, {} if fixed is None else fixed)
    # Plans by hand first: they are good assignments to begin with, and a cutoff for all searches.
    by_hand = _plans_by_hand(searches)
    _raise_bounds(searches, progress)
    _close_gaps(searches, gap)
    progress(len(searches), len(searches))
    chosen = min(searches, key=_seconds_to_compare)
    if not np.isfinite(chosen.seconds):
        raise _nothing_fits(searches, limit, memory)
    bound = min(chosen.seconds, *[search.bound for search in searches])
    most_seconds = _most_seconds(chosen.seconds, bound, gap, by_hand)
    return Suggestion(chosen, simplified(chosen, most_seconds), bound, by_hand)


def _move_prices(step: TrainingStep, mesh: Mesh, machine: Profile) -> MovePrices:
    """Return the seconds of moves on the mesh that is searched.

    Its last axis is split in two if devices may share heads of keys along it: tp=8 with 2 such heads
    is searched as axes of 2 and 4.
    """
    if step.moves_anywhere:
        machine = replace(machine, call_s=0.0)  # a compiled step: the host calls it once
    whole_axes = MovePrices(mesh, step.dtype, machine)
    sub_axes = MovePrices(mesh_with_shared_heads(step, mesh), step.dtype, machine)
    if sub_axes.n_near_devices != whole_axes.n_near_devices:
        return whole_axes  # nodes would end in the middle of a sub-axis
    return sub_axes


class OverlapChoice(NamedTuple):
    """How much travels beside computing: parameters of modules ahead, and activations of other parts.

    prefetch, batch_parts: as in `StepSetup`.
    """

    prefetch: int
    batch_parts: int


def _overlap_choices(
    step: TrainingStep, overlap: float | None, batch_parts: int | None
) -> list[OverlapChoice]:
    """List what to search; for the arguments see `list_problems`."""
    if step.moves_anywhere:
        return [OverlapChoice(prefetch=0, batch_parts=1)]  # XLA has a scheduler of its own
    if batch_parts is not None:
        choices = [OverlapChoice(prefetch, batch_parts) for prefetch in (1, 0)]
    else:
        choices = [
            OverlapChoice(prefetch=1, batch_parts=1),
            OverlapChoice(prefetch=1, batch_parts=2),
            OverlapChoice(prefetch=0, batch_parts=1),
        ]
    if overlap is not None:
        return choices[:1]  # the others differ in what overlaps
    return choices


def list_problems(
    step: TrainingStep,
    moves: MovePrices,
    micro_batches: int | None,
    recompute: bool | None,
    overlap: float | None,
    batch_parts: int | None = None,
) -> list[StepProblem]:
    """List the problems to search: every number of micro-batches, with and without recomputing.

    For a batch of 12 these are 1, 2 and 4 micro-batches, each with and without recomputing
    activations in the backward pass: six problems. A problem is to choose all layouts of a step.

    Args:
        step: The operations.
        moves: The prices of moves on the mesh.
        micro_batches: The only number to search; None: all powers of two that divide the batch, up
            to MOST_BATCHES.
        recompute: Whether activations of repeated blocks are computed again in the backward pass;
            None: both, if there are such blocks.
        overlap: Share of the seconds of moves that run beside computing; None for the schedule's.
        batch_parts: The only number of parts that take turns to search; None: 1, and 2 where
            they hide activations.

    Raises:
        PlanError: The batch cannot be divided so.
    """
    batch = step.batch_length
    # Other numbers than powers of two are searched only when a person asks for one.
    powers = [2**i for i in range(MOST_BATCHES.bit_length()) if batch % 2**i == 0]
    n_micro_batches = powers if micro_batches is None else [micro_batches]
    has_repeated_blocks = any(op.times > 1 for op in step.ops)
    recomputing = [bool(recompute)]  # None is False where nothing can be computed again
    if recompute is None and has_repeated_blocks:
        recomputing = [False, True]
    choices = _overlap_choices(step, overlap, batch_parts)
    problems: list[StepProblem] = []
    for number, is_recomputed, choice in product(n_micro_batches, recomputing, choices):
        if batch % (number * choice.batch_parts) == 0:
            problem = StepProblem(
                step,
                moves,
                micro_batches=number,
                recompute=is_recomputed,
                overlap=overlap,
                prefetch=choice.prefetch,
                batch_parts=choice.batch_parts,
            )
            problems.append(problem)
    if not problems:
        what = f"micro_batches={micro_batches}, batch_parts={batch_parts} do not divide the batch"
        hint = f"{step.batch} is {batch}: {', '.join(map(str, powers))} divide it"
        raise PlanError(what, hint=hint)
    return problems


def _check_rates(moves: MovePrices) -> None:
    """Require a profile with the rates of operations, which one of links alone lacks."""
    rates = [moves.profile.flops(moves.dtype), moves.profile.copy_bytes_per_s]
    if np.isinf(rates).any():
        hint = "give flops_per_s and copy_bytes_per_s; `xshard calibrate` measures them"
        raise ProfileError(f"profile {moves.profile.name!r} lacks rates of operations", hint=hint)


def _searches_of(
    candidates: Sequence[StepProblem], limit: float, fixed: RulesLike
) -> list[StepSearch]:
    """Make a search for each problem in which arrays can have the layouts that a user fixed.

    With 8 rows, `b/dp c` over 4 devices is possible for 1 or 2 micro-batches, not for 4 (2 rows
    each): that problem is left out.

    Args:
        candidates: Problems, the fewest micro-batches first.
        limit: Bytes that a device may hold.
        fixed: Layouts by patterns over names of arrays.

    Raises:
        NotationError: The layouts are not possible in the first problem, hence in none.
    """
    searches: list[StepSearch] = []
    for problem in candidates:
        try:
            options = fixed_options(problem, fixed)
        except NotationError:
            # A dim of a smaller micro-batch may not divide over its axes: that problem is left out.
            # If the first one fails, so do all others.
            if not searches:
                raise
        else:
            searches.append(StepSearch(problem, limit, options))
    return searches


def _plans_by_hand(searches: Sequence[StepSearch]) -> dict[str, StepPlan]:
    """Find the best plan of each kind that people write by hand, such as ZeRO-3.

    Each kind leaves some layouts open, so that a short search finds a good plan of it. Every plan
    found is offered to the searches of all problems (numbers of micro-batches, recomputing), which
    so begin with something good. Returns plans by the name of their kind; one that is not possible
    on the mesh is left out.
    """
    by_hand: dict[str, StepPlan] = {}
    fastest_s = np.inf
    for name, hand in HAND.items():
        plans: list[StepPlan] = []
        best_s = np.inf  # of this kind
        for search, among_hand in _begun_by_hand(searches, hand):
            if among_hand.bound >= best_s:
                break  # neither this problem nor the next has a better plan of this kind
            among_hand.run(most_steps=TRIES, most_s=HOPELESS * fastest_s)
            best_s = min(best_s, among_hand.seconds)
            fastest_s = min(fastest_s, best_s)
            for assignment, vector in among_hand.vectors.items():
                search.offer(assignment)
                plans.append(StepPlan(search, vector))
        if plans:
            by_hand[name] = min(plans, key=_rank)
    return by_hand


def _begun_by_hand(
    searches: Sequence[StepSearch], hand: HandPlan
) -> list[tuple[StepSearch, StepSearch]]:
    """Begin a search among the plans of one kind for each problem, the lowest bound first.

    Returns pairs of the problem's own search and of that among plans by hand.
    """
    first = searches[0].problem
    begun: list[tuple[StepSearch, StepSearch]] = []
    for search in searches:
        problem = search.problem
        if problem.prefetch != first.prefetch or problem.batch_parts != first.batch_parts:
            continue  # people write them for one way to run
        among_hand = search.within(options_by_hand(problem, hand))
        if among_hand is not None:
            among_hand.begin()
            begun.append((search, among_hand))
    return sorted(begun, key=lambda pair: pair[1].bound)


def _rank(plan: StepPlan) -> float:
    """Return a plan's seconds, more if it does not fit."""
    return float(plan.search.cost.rank(plan.vector))


def _raise_bounds(searches: Sequence[StepSearch], progress: Progress) -> None:
    """Advance all searches until none can find a plan faster than the best one of all.

    Each search has the seconds of its best plan, and a lower bound for all of its plans. If the
    best plan of all takes 90 ms, a search with a bound of 95 ms cannot win, and ends. It is always
    the turn of the search with the lowest bound, for the best plan is most likely there. A search
    also ends when it can raise its bound no more.

    progress: called with the numbers of searches that have ended, and of all.
    """
    best_s = min(search.seconds for search in searches)
    running = list(searches)
    while running:
        search = min(running, key=lambda search: search.bound)
        search.cutoff = best_s  # it leaves out options that take longer
        # `advance` does one step, and returns False if the bound can be raised no more.
        if search.bound >= best_s or not search.advance():
            progress(len(searches) - len(running), len(searches))
            running.remove(search)
            # It may still win, though its bound stays: changing its best plan step by step may find
            # a faster one.
            if search.bound < best_s:
                search.improve()
        best_s = min(best_s, search.seconds)
        for other in searches:
            if other.bound >= best_s and other.seconds > best_s:
                # It cannot win: its tables of moves are large, and no one asks for them again.
                other.problem.forget_edges()


def _close_gaps(searches: Sequence[StepSearch], gap: float) -> None:
    """Search by integer programs where a better plan may still save more than the gap."""
    best = min(search.seconds for search in searches)
    for search in sorted(searches, key=lambda search: search.bound):
        search.cutoff = best
        if search.bound < best * (1 - gap):
            search.close(gap)
        best = min(best, search.seconds)


def _seconds_to_compare(search: StepSearch) -> float:
    """Return the seconds of a search's best plan; SIMPLER more if parts of the batch take turns.

    Such a plan is run by `halves`, which has conditions of its own: it has to be worth it.
    """
    if search.problem.batch_parts > 1:
        return search.seconds * (1 + SIMPLER)
    return search.seconds


def _nothing_fits(searches: Sequence[StepSearch], limit: float, memory: Bytes) -> PlanError:
    """Return the error for a step that does not fit, with the least memory that any plan takes."""
    shares: list[float] = []  # of the limit
    for search in searches:
        shares += map(float, map(search.cost.largest_limit_share, search.vectors.values()))
    if not shares:
        return PlanError(
            "no plan has the layouts of fixed=", hint="fix the layouts of fewer arrays"
        )
    least = format_bytes(int(min(shares) * limit / (1 - HEADROOM)))
    hint = f"the least that was found is {least}; more devices hold more"
    return PlanError(f"the step does not fit {short_repr(memory)} per device", hint=hint)


def _most_seconds(best: float, bound: float, gap: float, by_hand: Mapping[str, StepPlan]) -> float:
    """Return the seconds that a plan with fewer rules may take: no more than any plan by hand."""
    # The gap to the bound stays within SIMPLER; where it is larger already, it grows by `gap`.
    near_the_bound = max(bound / (1 - SIMPLER), best * (1 + gap))
    fitting = [plan.seconds() for plan in by_hand.values() if plan.fits]
    return min(best * (1 + SIMPLER), near_the_bound, *fitting)
