"""`suggest`: where everything in a training step lives, so that it is fastest and fits the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np

from xshard.arguments import limit_of, shown, whole_number
from xshard.cost.machine import load_profile
from xshard.cost.model import ProfileLike
from xshard.errors import NotationError, PlanError, ProfileError
from xshard.formatting import format_bytes
from xshard.layout import Mesh
from xshard.layout.mesh import check_mesh
from xshard.rules import RulesLike
from xshard.step.choose.hand import HAND, allowed
from xshard.step.choose.search import StepSearch
from xshard.step.price.moves import MovePrices
from xshard.step.price.problem import StepProblem
from xshard.step.record.training_step import TrainingStep
from xshard.step.say.rules import fixed_options, simplified
from xshard.step.say.suggestion import StepPlan, Suggestion

HEADROOM = 0.07  # of the memory, for what no plan counts: the framework's own, fragments, buffers
MOST_BATCHES = 64
TRIES = 4  # rounds of a plan by hand
SIMPLER = 0.01  # of the seconds and of the bound, for fewer rules


def suggest(
    step: TrainingStep,
    mesh: Mesh,
    *,
    memory: int | str | None = None,
    profile: ProfileLike = "h100",
    fixed: RulesLike | None = None,
    micro_batches: int | None = None,
    recompute: bool | None = None,
    overlap: float = 0.8,
    gap: float = 0.002,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Suggestion:
    """The layouts of parameters, inputs and activations that make a training step fastest.

    memory: bytes of a device, as a number or as "80GiB"; 7 % of them are left free. None: as many as needed.
    profile: the machine, as for `plan`. fixed: layouts by patterns over names of inputs, parameters and
    operations (for their results): an axis that one names stays so in storage, others may be added.
    micro_batches, recompute: how many parts of the batch run one after another, and whether the activations
    of repeated blocks are computed again in the backward pass; None stands for the best.
    overlap: share of the seconds of moves that run beside computing, if that takes long enough.
    gap: the share of the seconds that a better plan may still save when the search ends; for fewer rules the
    plan takes up to 1 % more than the best found, and than the bound. progress: called with the numbers of
    searches done, and of all.
    Raises MeshError, NotationError, ProfileError; PlanError if nothing fits the memory, and without scipy.

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
    mesh = Mesh({axis: n for axis, n in zip(mesh.axes, mesh.sizes, strict=True) if n > 1})
    limit = np.inf if memory is None else (limit_of(memory, "memory") or 0) * (1 - HEADROOM)
    step = step.with_shares
    moves = MovePrices(mesh, step.dtype, load_profile(profile))
    if np.isinf([moves.profile.flops(step.dtype), moves.profile.copy_bytes_per_s]).any():
        hint = "give flops_per_s and copy_bytes_per_s; `xshard calibrate` measures them"
        raise ProfileError(f"profile {moves.profile.name!r} lacks rates of operations", hint=hint)
    searches = list[StepSearch]()
    by_hand = dict[str, StepPlan]()
    for problem in problems(step, moves, micro_batches, recompute, overlap):
        try:
            searches.append(StepSearch(problem, limit, fixed_options(problem, fixed or {})))
        except NotationError:  # a smaller micro-batch cannot be sharded so
            if not searches:
                raise
    for name, hand in HAND.items():
        plans = list[StepPlan]()
        for search in searches:
            near = search.within(allowed(search.problem, hand))
            list(islice(near.rounds(), TRIES if near.vectors else 0))
            for assignment, vector in near.vectors.items():
                search.offer(assignment)
                plans.append(StepPlan(search, vector))
        if plans:
            by_hand[name] = min(plans, key=lambda plan: float(plan.search.cost.rank(plan.vector)))
    best = min(s.seconds for s in searches)
    running = {search: search.rounds() for search in searches}
    while (
        running
    ):  # always a round of the lowest bound: most bounds pass the seconds of the best one soon
        search = min(running, key=lambda s: s.bound)
        search.cutoff = best
        if search.bound >= best or next(running[search], True):
            progress(len(searches) - len(running), len(searches))
            del running[search]
            if search.bound < best:
                search.improve()
        best = min(best, search.seconds)
        for worse in (s for s in searches if s.bound >= best < s.seconds):
            vars(worse.problem).pop("edges", None)  # tables of moves, which no one asks for again
    for search in sorted(searches, key=lambda s: s.bound):
        if search.bound < best * (1 - gap):
            search.close(gap)
        best = min(best, search.seconds)
    progress(len(searches), len(searches))
    if not np.isfinite(best):
        least = min(float(s.cost.used(v)) * limit for s in searches for v in s.vectors.values())
        least_text = format_bytes(int(least / (1 - HEADROOM)))
        hint = f"the least that was found is {least_text}; more devices hold more"
        raise PlanError(f"the step does not fit {shown(memory)} per device", hint=hint)
    fastest = min(searches, key=lambda s: s.seconds)
    bound = min(best, *(s.bound for s in searches))
    fitting = (plan.seconds() for plan in by_hand.values() if plan.fits)
    most = min(best * (1 + SIMPLER), max(bound / (1 - SIMPLER), best * (1 + gap)), *fitting)
    return Suggestion(fastest, simplified(fastest, most), bound, by_hand)


def problems(
    step: TrainingStep,
    moves: MovePrices,
    micro_batches: int | None,
    recompute: bool | None,
    overlap: float,
) -> Iterable[StepProblem]:
    """The numbers of micro-batches that divide the batch, with and without computing activations again."""
    batch = step.lengths[step.batch]
    numbers = [2**i for i in range(MOST_BATCHES.bit_length()) if batch % 2**i == 0]
    if micro_batches is not None:
        if not (whole_number(micro_batches) or 0) > 0 or batch % micro_batches:
            hint = f"{step.batch} is {batch}: {', '.join(map(str, numbers))} divide it"
            raise PlanError(f"{shown(micro_batches)} micro-batches", hint=hint)
        numbers = [micro_batches]
    again = (
        [False, True]
        if recompute is None and any(op.times > 1 for op in step.ops)
        else [bool(recompute)]
    )
    yield from (StepProblem(step, moves, n, each, overlap) for n in numbers for each in again)
