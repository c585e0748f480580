"""Measured times -> the constants of a profile, which `Profile.seconds` is linear in: one row per plan."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.cost.model import Link, Profile
from xshard.errors import XshardError
from xshard.plans.plan import Plan

Column = tuple[
    str, str
]  # launch and round of a kind; latency and seconds per byte of an axis; copy
_SHARED = ""
_ACROSS = "between nodes"  # the one link of all axes, if they share one, or of nodes
_GAIN = 0.9  # axes get links of their own if the error is then smaller by this factor
_TURNS = 30  # rounds of reweighting, after which the constants no longer change
_FAR = 0.1  # logarithms of ratios up to here count squared
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
        """Seconds that the plan takes on the machine of a profile."""
        return replace(self.plan, profile=profile).cost

    def error(self, profile: Profile) -> float:
        """Relative error of the prediction: -0.5 if it is half the measured time."""
        return self.predicted(profile) / self.seconds - 1


def median_error(samples: Sequence[Sample], profile: Profile) -> float:
    """Median of the absolute relative errors."""
    return statistics.median(abs(sample.error(profile)) for sample in samples)


def fit(
    samples: Sequence[Sample], name: str, *, rounds: bool = False, node_devices: int | None = None
) -> Profile:
    """The profile that predicts the samples best, by relative error. Needs scipy. rounds: see `Profile`.
    node_devices: if given, one link is inside nodes and one across; else all axes share one link, unless
    links of their own make the error smaller by a tenth or more. Raises CalibrationError if no sample sends
    anything, for times that are not positive, and without scipy.
    """
    if not any(step.traffic(before).hops for plan, _ in samples for step, before, _ in plan.stages):
        raise CalibrationError(
            f"nothing to fit links to: none of {len(samples)} measurements sends anything"
        )
    for plan, seconds in samples:
        if not 0 < seconds < math.inf:
            raise CalibrationError(f"'{plan.src} -> {plan.dst}' cannot have taken {seconds} s")
    if node_devices is not None:
        # The link across nodes is taken to be slower, and to be one port, like a host's.
        links = Link(0.0, 2.0), Link(0.0, 1.0, "port")
        return _fit(samples, Profile(name, "", *links, node_devices, rounds=rounds), False)
    about = Profile(name, "", Link(0.0, math.inf), rounds=rounds)
    together, apart = (_fit(samples, about, own) for own in (False, True))
    return apart if _distance(samples, apart) < _GAIN * _distance(samples, together) else together


def _distance(samples: Sequence[Sample], profile: Profile) -> float:
    """Mean of |log(predicted / measured)|, which a fit minimises."""
    # A prediction of no time at all is very far off, but not infinitely.
    ratios = (max(s.predicted(profile) / s.seconds, 1e-9) for s in samples)
    return statistics.fmean(abs(math.log(ratio)) for ratio in ratios)


def _fit(samples: Sequence[Sample], about: Profile, own: bool) -> Profile:
    """about: a profile without constants, in which all axes are equal."""
    mesh = samples[0].plan.mesh
    profile = _fit_once(samples, about, own)
    # The traffic of an axis depends on which axis is slower, a result of the fit: repeat until both agree.
    for _ in range(3):
        known = profile
        profile = _fit_once(samples, profile, own)
        if profile.link_spans(mesh) == known.link_spans(mesh):
            break
    return profile


def _fit_once(samples: Sequence[Sample], known: Profile, own: bool) -> Profile:
    """known: says which axes are slower."""
    rows = [_row(sample.plan, known, own) for sample in samples]
    columns = sorted({column for row in rows for column in row})
    A = np.array([[row[column] for column in columns] for row in rows], np.float64)
    x = _solve(A, np.array([sample.seconds for sample in samples]))
    return _profile(dict(zip(columns, x.tolist(), strict=True)), known)


def _row(plan: Plan, known: Profile, own: bool) -> Counter[Column]:
    """How often a plan pays each constant: the coefficients of `Profile.seconds`."""
    row: Counter[Column] = Counter()
    for step, before, _ in plan.stages:
        fabric = known.fabric(before.mesh)
        traffic = step.traffic(before, fabric.spans)
        row["copy", ""] += known.copied(traffic) * plan.itemsize
        if launches := known.launches(step.kind, traffic):
            row["launch", step.kind] += launches
        if traffic.rounds:
            row["round", step.kind] += traffic.rounds
        for hop in traffic.hops:
            leaves = known.across is not None and fabric.link(hop) == known.across
            link = _ACROSS if leaves else before.mesh.origin(hop.axis) if own else _SHARED
            row["latency", link] += hop.messages
            row["byte", link] += fabric.link(hop).carried(hop) * plan.itemsize
    return row


def _solve(A: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-negative x with A x closest to the seconds, in |log(A x / seconds)|: so 2 counts like 1/2."""
    # Large errors count in proportion, not squared (Huber's loss), since a busy machine makes single times
    # several times too long. Weighted least squares, with weights that give the same gradient.
    try:
        from scipy.optimize import nnls
    except ImportError:
        hint = "pip install scipy, or xshard with its extra 'calibrate'"
        raise CalibrationError("a calibration needs scipy", hint=hint) from None
    weights = 1 / seconds
    for _ in range(_TURNS):
        B = A * weights[:, None]
        scale = np.linalg.norm(B, axis=0)  # constants differ by 12 orders of magnitude
        scale[scale == 0] = 1
        x: NDArray[np.float64] = nnls(B / scale, seconds * weights)[0] / scale
        ratio = np.maximum(A @ x / seconds, 1e-2)
        off = np.where(np.abs(ratio - 1) > 1e-6, ratio - 1, 1e-6)
        far = np.abs(np.log(ratio))
        weights = np.sqrt(np.log1p(off) / off / ratio / np.maximum(far, _FAR)) / seconds
    return x


def _profile(found: dict[Column, float], about: Profile) -> Profile:
    def speed(column: Column, unlimited: float) -> float:
        per_byte = found.get(column, 0.0)
        return _rounded(1 / per_byte) if per_byte > 1 / _NO_LIMIT else unlimited

    links = {}
    for axis, latency in (
        (axis, latency) for (what, axis), latency in found.items() if what == "latency"
    ):
        kind = "port" if axis == _ACROSS else "switch"
        links[axis] = Link(_rounded(latency), speed(("byte", axis), _NO_LIMIT), kind)
    across = links.pop(_ACROSS, None)
    launches = {kind: _rounded(s) for (what, kind), s in found.items() if what == "launch"}
    rounds = [
        (kind, _rounded(s)) for (what, kind), s in found.items() if what == "round" and s > _NO_TIME
    ]
    return replace(
        about,
        across=across,
        # An axis that was not measured is as slow as the slowest that was.
        default=min(links.values(), key=lambda link: (link.bytes_per_s, -link.latency_s)),
        axes=tuple(sorted((axis, link) for axis, link in links.items() if axis != _SHARED)),
        # So is a kind of step.
        launch_s=tuple(sorted({**launches, "other": max(launches.values())}.items())),
        copy_bytes_per_s=speed(("copy", ""), math.inf),
        ring_s=tuple(sorted(rounds)),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
