"""Measured times -> the constants of a profile.

A plan's predicted seconds are linear in the constants, so that measurements are a system of equations: a
row per plan, a column per constant.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.cost.model import Link, Profile
from xshard.errors import XshardError
from xshard.plans.plan import Plan

# A constant: its kind, and the kind of step, or the axis, that it belongs to. ("copy", "") has neither.
#     launch, round: seconds of a kind of step
#     latency, byte: seconds of a message, and per byte, of a link
#     copy: seconds per byte of memory
Column = tuple[str, str]
_SHARED = ""  # the one link of all axes, if they share one
_ACROSS = "between nodes"  # the link of nodes
_GAIN = 0.9  # axes get links of their own if the error is then smaller by this factor
_MAX_REWEIGHTINGS = 30  # after which the constants no longer change
_SMALL_ERROR = 0.1  # logarithms of ratios up to here count squared
_DIGITS = 4  # significant digits of a constant: it is not known better
_NO_TIME = 1e-12  # seconds of a round that costs no measurable time
_NO_LIMIT = 1e15  # bytes per second of a link, if its bytes cost no measurable time


class CalibrationError(XshardError):
    """Measurements that no profile can be fitted to, or a calibration that cannot be made."""


class Sample(NamedTuple):
    """A plan and the seconds that it took."""

    plan: Plan
    seconds: float

    def predicted(self, profile: Profile) -> float:
        """Predict the seconds that the plan takes on the machine of a profile."""
        return replace(self.plan, profile=profile).cost

    def error(self, profile: Profile) -> float:
        """Return the relative error of the prediction: -0.5 if it is half the measured time."""
        return self.predicted(profile) / self.seconds - 1


def median_error(samples: Sequence[Sample], profile: Profile) -> float:
    """Return the median of the absolute relative errors."""
    return statistics.median(abs(sample.error(profile)) for sample in samples)


def fit(
    samples: Sequence[Sample], name: str, *, rounds: bool = False, node_devices: int | None = None
) -> Profile:
    """Fit a machine's constants to measured times: latency and bandwidth of links, and overheads.

    The relative error of the predicted times is made small. Needs scipy.

    Args:
        samples: The measurements: plans and their seconds.
        name: The name of the profile.
        rounds: Whether collectives pay an overhead for each round of a ring, see `Profile`.
        node_devices: Devices of a node: one link is fitted inside nodes, and one between them.
            None: all axes share one link, unless a link for each axis makes the error smaller by a
            tenth or more.

    Raises:
        CalibrationError: No sample sends anything, a time is not positive, or scipy is not installed.
    """
    _check_samples(samples)
    if node_devices is not None:
        # The link across nodes is taken to be slower, and to be one port, like a host's.
        # Any two speeds will do to begin with, as 2 and 1 byte per second.
        start = Profile(
            name,
            source="",
            default=Link(latency_s=0.0, bytes_per_s=2.0),
            across=Link(latency_s=0.0, bytes_per_s=1.0, topology="port"),
            node_devices=node_devices,
            rounds=rounds,
        )
        return _fit(samples, start, by_axis=False)
    no_cost = Link(latency_s=0.0, bytes_per_s=math.inf)
    start = Profile(name, source="", default=no_cost, rounds=rounds)
    one_link = _fit(samples, start, by_axis=False)
    link_by_axis = _fit(samples, start, by_axis=True)
    if _mean_error(samples, link_by_axis) < _GAIN * _mean_error(samples, one_link):
        return link_by_axis
    return one_link


def _check_samples(samples: Sequence[Sample]) -> None:
    """Raise CalibrationError if no sample sends anything, or a time is not positive."""
    stages = chain.from_iterable(sample.plan.stages for sample in samples)
    if not any(stage.step.traffic(stage.before).hops for stage in stages):
        raise CalibrationError(
            f"nothing to fit links to: none of {len(samples)} measurements sends anything"
        )
    for plan, seconds in samples:
        if not 0 < seconds < math.inf:
            raise CalibrationError(f"'{plan.src} -> {plan.dst}' cannot have taken {seconds} s")


def _mean_error(samples: Sequence[Sample], profile: Profile) -> float:
    """Return the mean of |log(predicted / measured)|, which a fit minimises."""
    # A prediction of no time at all is very far off, but not infinitely.
    ratios = (max(sample.predicted(profile) / sample.seconds, 1e-9) for sample in samples)
    return statistics.fmean(abs(math.log(ratio)) for ratio in ratios)


def _fit(samples: Sequence[Sample], start: Profile, *, by_axis: bool) -> Profile:
    """Fit constants to a profile without constants, in which all axes are equal."""
    mesh = samples[0].plan.mesh
    profile = _fit_once(samples, start, by_axis=by_axis)
    # The traffic of an axis depends on which axis is slower, a result of the fit: repeat until both agree.
    for _ in range(3):
        earlier = profile
        profile = _fit_once(samples, profile, by_axis=by_axis)
        if profile.link_spans(mesh) == earlier.link_spans(mesh):
            break
    return profile


def _fit_once(samples: Sequence[Sample], start_profile: Profile, *, by_axis: bool) -> Profile:
    """Fit constants, given a profile that says which axes are slower."""
    rows = [_row(sample.plan, start_profile, by_axis=by_axis) for sample in samples]
    columns = sorted({column for row in rows for column in row})
    coefficients = np.zeros((len(rows), len(columns)))
    for i, row in enumerate(rows):
        coefficients[i] = [row[column] for column in columns]
    constants = _solve(coefficients, np.array([sample.seconds for sample in samples]))
    return _profile(dict(zip(columns, constants.tolist(), strict=True)), start_profile)


def _row(plan: Plan, start_profile: Profile, *, by_axis: bool) -> Counter[Column]:
    """Count how often a plan pays each constant of a machine: a row of the matrix that is fitted.

    A plan's time is the sum of count times constant. {("latency", "dp"): 3, ("byte", "dp"): 6e6,
    ("launch", "all_gather"): 1} pays the latency of dp's link three times, and its seconds per byte
    six million times. A stage is a step of the plan with the layout before it; a hop is what the
    step sends over one mesh axis.

    Args:
        plan: The plan.
        start_profile: A profile with what is not fitted, such as which devices share a node.
        by_axis: Whether each mesh axis has a link of its own.
    """
    row: Counter[Column] = Counter()
    for stage in plan.stages:
        step_kind = stage.step.kind
        fabric = start_profile.fabric(stage.before.mesh)
        traffic = stage.step.traffic(stage.before, fabric.spans)
        row["copy", ""] += start_profile.copied_elements(traffic) * plan.itemsize
        launches = start_profile.count_collectives(step_kind, traffic)
        if launches:
            row["launch", step_kind] += launches
        if traffic.ring_rounds:
            row["round", step_kind] += traffic.ring_rounds
        for hop in traffic.hops:
            link = fabric.link(hop)
            name = _SHARED
            if link == start_profile.across:
                name = _ACROSS
            elif by_axis:
                name = stage.before.mesh.origin(hop.axis)
            row["latency", name] += hop.messages
            row["byte", name] += link.carried_elements(hop) * plan.itemsize
    return row


def _solve(A: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Find non-negative constants x whose predicted times, A x, are nearest to those measured.

    `A` is [samples, constants], how often each sample pays each constant; `seconds` is [samples].
    The error is |log(A x / seconds)|, so a prediction of twice the time counts like one of half the
    time. Large errors count in proportion, not squared (Huber's loss), since a busy machine makes
    single times several times too long. Solved by weighted least squares, with weights that give
    the same gradient.
    """
    try:
        from scipy.optimize import nnls
    except ImportError:
        hint = "pip install scipy, or xshard with its extra 'calibrate'"
        raise CalibrationError("a calibration needs scipy", hint=hint) from None
    weights = 1 / seconds  # least squares of the relative errors: the first guess
    for _ in range(_MAX_REWEIGHTINGS):
        weighted = A * weights[:, None]
        scale = np.linalg.norm(weighted, axis=0)  # constants differ by 12 orders of magnitude
        scale[scale == 0] = 1
        x: NDArray[np.float64] = nnls(weighted / scale, seconds * weights)[0] / scale
        # How far off the times are with these constants decides the weights of the next round.
        ratio = np.maximum(A @ x / seconds, 1e-2)  # a prediction of 0 would have an infinite log
        weights = np.sqrt(_squared_weights(ratio)) / seconds
    return x


def _squared_weights(ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights w with which w (ratio - 1)^2 / 2 has the gradient of the error.

    The error is log(ratio)^2 / 2 for small logarithms; for large ones it grows in proportion. `ratio`
    is the predicted time of each sample by the measured one.
    """
    # log(ratio) / (ratio - 1) is 0 / 0 for a ratio of 1, and nearly 1 beside it.
    error = ratio - 1
    error = np.where(np.abs(error) > 1e-6, error, 1e-6)
    log_ratio = np.log1p(error)
    dampening = np.maximum(np.abs(np.log(ratio)), _SMALL_ERROR)
    return log_ratio / error / ratio / dampening


def _profile(constants: Mapping[Column, float], start: Profile) -> Profile:
    """Make a profile of a machine from fitted constants.

    `constants` maps (kind, name) to seconds: ("latency", "dp") and ("byte", "dp") are of the link of
    the mesh axis dp, ("launch", "all_gather") and ("round", "all_gather") of a kind of step, and
    ("copy", "") of a byte that is copied. Seconds per byte become bytes per second. `start` gives the
    fields that were not fitted.
    """
    links = _links(constants)
    across = links.pop(_ACROSS, None)
    measured = list(links.values())
    if not measured and across is not None:  # nodes of one device have no link inside
        measured = [across]
    # For axes and kinds of steps that were not measured, take the slowest that was measured.
    slowest = min(measured, key=lambda link: (link.bytes_per_s, -link.latency_s))
    links.pop(_SHARED, None)  # the links of single axes are left
    launch_s = _of_kind(constants, "launch")
    launch_s["other"] = max(launch_s.values())
    round_s = _of_kind(constants, "round")
    return replace(
        start,
        across=across,
        default=slowest,
        axes=tuple(sorted(links.items())),
        launch_s=_rounded_seconds(launch_s),
        copy_bytes_per_s=_speed(constants.get(("copy", ""), 0.0), math.inf),
        ring_s=_rounded_seconds({kind: s for kind, s in round_s.items() if s > _NO_TIME}),
    )


def _links(constants: Mapping[Column, float]) -> dict[str, Link]:
    """Make links of their constants, by name: a mesh axis, `_ACROSS` or `_SHARED`."""
    s_per_byte = _of_kind(constants, "byte")
    links = {}
    for name, latency_s in _of_kind(constants, "latency").items():
        bytes_per_s = _speed(s_per_byte.get(name, 0.0), _NO_LIMIT)
        topology = "port" if name == _ACROSS else "switch"
        links[name] = Link(rounded(latency_s), bytes_per_s, topology)
    return links


def _rounded_seconds(seconds: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Round the seconds of each kind of step, and sort them by kind, as a profile has them."""
    return tuple((step_kind, rounded(seconds[step_kind])) for step_kind in sorted(seconds))


def _of_kind(constants: Mapping[Column, float], column_kind: str) -> dict[str, float]:
    """Return the constants of one kind, by the name of the link or of the kind of step."""
    return {name: value for (its_kind, name), value in constants.items() if its_kind == column_kind}


def _speed(s_per_byte: float, unlimited: float) -> float:
    """Return bytes per second; `unlimited` if bytes cost no measurable time."""
    if s_per_byte <= 1 / _NO_LIMIT:
        return unlimited
    return rounded(1 / s_per_byte)


def rounded(value: float) -> float:
    """Round a measured constant to the digits that are known."""
    return float(f"{value:.{_DIGITS}g}")
