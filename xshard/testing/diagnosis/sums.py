"""Mistakes in sums: missing, made twice, replaced by means, or with addends counted once per device.

Each public function is a finder, see `causes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import (
    Case,
    in_double,
    largest_error,
    names_of,
    rows_of_dim,
    subsets,
)

_CUT_OFF = (
    "nothing was written, or the path of gradients is cut (detach, no_grad, .data, stop_gradient)"
)
# The unit roundoff of floats, times the growth over a few hundred operations.
_ROUNDINGS = (("float32", 2.0**-20), ("float16 or TF32", 2.0**-8), ("bfloat16", 2.0**-5))
_CONSTANT = 2.0**-10  # a factor nearer to 1 may be rounding
_MIN_SAMPLE = 48  # elements that statistics need
_MAX_WHOLE_FACTOR = 64  # whole factors are tried up to it: they may be sizes of axes


def zero(case: Case) -> str | None:
    """Find zeros in place of values, or the reverse."""
    if not case.scale:
        return f"it is compared with zeros alone: there {_CUT_OFF}"
    if any(in_double(block).any() for block in case.got):
        return None
    return f"all zeros: {_CUT_OFF}"


def only_first(case: Case) -> str | None:
    """Recognise replicas of which only the first is right and the others are zeros.

    Replicas should be equal on all devices along some axes: here the first one never sent its
    value. Returns a sentence for the report, or None.
    """
    for axes in subsets(case.free_axes):
        if _is_only_on_first(case, axes):
            along = names_of(axes)
            return f"only the first device along {along} has the value, others have zeros: nothing sent it"
    return None


def _is_only_on_first(case: Case, axes: tuple[str, ...]) -> bool:
    """Tell whether the first device of each group along some axes is right, and all others have zeros."""
    for device, (got, want) in enumerate(case.pairs):
        is_first = case.mesh.index(device, axes) == 0
        fits = case.near(got, want) if is_first else not in_double(got).any()
        if not fits:
            return False
    return True


def not_summed(case: Case) -> str | None:
    """Recognise a missing all-reduce: devices hold addends where all should hold their sum.

    Blocks 1.0 and 2.0 where 3.0 was right on both devices. A norm of parts is such a case, too: its
    squares add up, as 3.0 and 4.0 do to 5.0. Returns a sentence for the report, or None.
    """
    is_number = case.want[0].ndim == 0
    # Along these axes blocks should be equal; along all others they are different parts.
    for axes in subsets(case.free_axes):
        # Blocks that are equal add up to a multiple of themselves: that is a wrong factor, which
        # has a finder of its own.
        if case.all_near(_reduced(case, axes, np.mean), case.got):
            continue
        along = names_of(axes)
        if is_number and case.all_near(_reduced(case, axes, np.linalg.norm), case.want):
            return (
                f"the squares of the values along {along} add up to the right one's: norms of parts"
            )
        if case.all_near(_reduced(case, axes, np.sum), case.want):
            return (
                f"the blocks along {along} are addends and add up to what is right: "
                f"a sum over {along} is missing (an all-reduce; in a gradient, that of a copy)"
            )
    return None


def other_axes(case: Case) -> str | None:
    """Recognise an all-reduce over the wrong mesh axes, such as over dp where tp was right.

    Such a sum adds blocks that belong to different devices, and may leave the right sum undone. With
    the right blocks 1 and 2 along dp, all devices hold 3; or, where they should have been summed
    over tp, addends of 3. Returns a sentence for the report, or None.
    """
    if len({block.shape for block in case.want}) > 1:  # uneven blocks cannot be added up
        return None
    for summed_axes in subsets(case.mesh.long_axes):
        # What the devices would hold: the right blocks, summed over these axes.
        wrong_sums = _reduced(case, summed_axes, np.sum, case.want)
        # The right sum may be left out. It is over axes along which right blocks are equal, and if it
        # is made up for now, the devices hold `wrong_sums`. (): none was left out.
        other_axes = [axis for axis in case.free_axes if axis not in summed_axes]
        for left_out in ((), *subsets(other_axes)):
            if case.all_near(_reduced(case, left_out, np.sum), wrong_sums):
                instead = f" in place of {names_of(left_out)}" if left_out else ""
                return (
                    f"summed over {names_of(summed_axes)}{instead}: "
                    "that adds what belongs to different devices"
                )
    return None


def own_factors(case: Case) -> str | None:
    """Recognise blocks that are right but for a positive factor, another one on each device.

    Of a batch of 8 rows, one device has 3 and another 5. If each divides its loss by its own number
    of rows, and not by 8, its gradients are too large: by 8/3 on the one and by 8/5 on the other.
    Returns a sentence for the report, or None.
    """
    if min(block.size for block in case.want) < 2:  # of one number there always is a factor
        return None
    factors = []
    for got, want in case.pairs:
        factor = _ratio(got, want)
        if not case.near(got, factor * in_double(want)):
            return None
        factors.append(factor)
    if min(factors) <= 0 or np.ptp(factors) <= _CONSTANT:
        return None  # one factor for all devices is for other finders: `scaled`, `summed`

    shown_factors = ", ".join(f"{factor:.4g}" for factor in factors)
    return f"right but for factors {shown_factors} of the devices: {_meaning_of(factors, case)}"


def _meaning_of(factors: Sequence[float], case: Case) -> str:
    """Say what was divided by, on each device, in place of what all devices have together."""
    for axes in subsets(case.cut_axes):
        group = case.mesh.group(0, axes)
        weights = 1 / np.array([factors[device] for device in group])
        along = names_of(axes)
        # A mean over n_i of n rows is wrong by n / n_i, whose inverses add up to 1; if these means
        # are then averaged over the devices, to their number.
        if np.isclose(weights.sum(), (1, len(weights)), rtol=_CONSTANT).any():
            return f"means over each one's own count along {along}, not over the count of all"
        # The squares of the norms of parts add up to the square of the whole norm.
        if np.isclose(np.square(weights).sum(), 1, rtol=_CONSTANT):
            return f"divided by the norm of each one's own part along {along}"
    return "weights or statistics of their own"


def not_averaged(case: Case) -> str | None:
    """Find values of single devices in place of their mean."""
    for axes in subsets(case.free_axes):
        if case.all_near(_reduced(case, axes, np.mean), case.want):
            along = names_of(axes)
            return f"blocks along {along} differ and their mean is right: a mean over {along} is missing"
    return None


def summed(case: Case) -> str | None:
    """Find values that are too large by the size of axes: equal ones were added up."""
    factor = _factor(case)
    # The same value, added up on n devices, is n times as large: 2, 3, ...
    if factor is None or factor < 2 or factor != round(factor):
        return None
    axes = _axes_of_size(case, factor)
    if not axes:
        return f"{factor:g} times too large, which is the size of no mesh axis: counted {factor:g} times"
    return (
        f"{factor:g} times too large, and {factor:g} is the size of {axes}: equal values were summed over "
        "it where one was meant (a sum in place of a slice, a gradient added up twice), or a mean's 1/n is "
        "missing"
    )


def averaged(case: Case) -> str | None:
    """Find values that are too small by the size of axes: a mean in place of a sum."""
    factor = _factor(case)
    if not factor:  # none, or zero
        return None
    axes = _axes_of_size(case, 1 / factor)
    if not axes:
        return None
    return (
        f"{1 / factor:g} times too small, and {1 / factor:g} is the size of {axes}: divided by it where a "
        "sum was meant (a mean in place of a sum, 1/n applied twice), or one of equal addends was taken"
    )


def scaled(case: Case) -> str | None:
    """Find a constant factor that is no axis size."""
    factor = _factor(case)
    if factor is None or abs(factor - 1) < _CONSTANT:
        return None
    if max(block.size for block in case.want) < 2:  # of one number there always is a factor
        return None
    return f"{factor:.6g} times what it should be, everywhere: a constant factor"


def counted_argument(case: Case) -> str | None:
    """Recognise an argument that counts several times, as a bias that all devices add before a sum.

    Then the error is a multiple of that argument: with a bias that 4 devices add, 3 times the bias.
    Returns a sentence for the report, or None.
    """
    if case.whole_got is None:
        return None
    error = case.whole_got - case.whole_want
    for name, value in case.arguments.items():
        argument = in_double(value)
        # A bias is added to every row: it has the last dims of the array.
        row_dims = tuple(range(error.ndim - argument.ndim))
        if not argument.any() or error.shape[len(row_dims) :] != argument.shape:
            continue
        # Fit error = excess * argument: an argument that counts twice has an excess of 1, one that is
        # left out -1.
        excess = _ratio(error.mean(axis=row_dims), argument)
        is_multiple = case.near(error, np.broadcast_to(excess * argument, error.shape))
        if is_multiple and abs(excess) >= _CONSTANT:
            return _counted_text(case, name, excess + 1)
    return None


def _counted_text(case: Case, name: str, times: float) -> str:
    """Write the sentence on an argument that counts so many times instead of once."""
    if round(times, 6) == 0:
        return f"{name} is left out"
    axes = _axes_of_size(case, times)
    if not axes:
        axes = "no axis"
    return (
        f"{name} is counted {times:.4g} times instead of once, and {times:.4g} is the size of {axes}: "
        "every device adds it before a sum; add it after, or on one"
    )


def own_statistics(case: Case) -> str | None:
    """Recognise statistics that each device took over its part of the array, not over all of it.

    Batch normalisation over the rows of one device gives values that are right but for a factor and
    a shift, which differ between devices and channels: got = factor * want + shift. Returns a
    sentence for the report, or None.
    """
    if len(case.wrong_devices) < case.mesh.n_devices:  # the statistics would be wrong everywhere
        return None
    for d, dim in enumerate(case.dims):
        # Take this dim as the channels. Along axes that shard other dims, each device has only some
        # of the elements of a channel.
        axes = [axis for axis in case.cut_axes if axis not in dim.axes]
        if not axes:
            continue
        # Of each device: factor and shift of every channel, [2, channels, 1]. None if some values are
        # no such multiple.
        fits = _fits_of_devices(case, d)
        if fits is None:
            continue
        # If all devices along the axes had one factor and shift, these would be of the whole array.
        if not all(case.near(fits[0], fits[device]) for device in case.mesh.group(0, axes)):
            return (
                f"right but for a factor and a shift per device and index of {dim.name!r}: statistics of its "
                f"own part along {names_of(axes)}, not of all (batch normalisation, a loss per rank)"
            )
    return None


def _fits_of_devices(case: Case, dim: int) -> list[Block] | None:
    """Fit got = factor * want + shift for each index of a dim, on every device.

    Returns the fits of each device, `[2, indices, 1]`, or None if one does not fit.
    """
    fits = []
    for got, want in case.pairs:
        fit = _fit_of_device(case, rows_of_dim(got, dim), rows_of_dim(want, dim))
        if fit is None:
            return None
        fits.append(fit)
    return fits


def _fit_of_device(case: Case, got: Block, want: Block) -> Block | None:
    """Fit every row by least squares: both `[indices, elements]`."""
    if want.shape[1] < 3:  # two numbers always fit
        return None
    want_mean = want.mean(1, keepdims=True)
    centred = want - want_mean
    power = (np.abs(centred) ** 2).sum(1, keepdims=True)
    covariance = (centred.conj() * got).sum(1, keepdims=True)
    factor = covariance / np.where(power > 0, power, 1)  # rows of one value have a shift only
    shift = got.mean(1, keepdims=True) - factor * want_mean
    if not case.near(got, factor * want + shift):
        return None
    return np.stack([factor, shift])


def rounded(case: Case) -> str | None:
    """Find errors as large as the rounding of a shorter float."""
    if max(block.size for block in case.want) < 2:  # one number may be as near by chance
        return None
    error = largest_error(list(map(in_double, case.got)), list(map(in_double, case.want)))
    for name, relative_error in _ROUNDINGS:
        if error <= relative_error * case.scale:
            return (
                f"errors are at most {error / case.scale:.1e} of the largest value: "
                f"rounding, as of {name}, or an approximation (a GELU by tanh, another epsilon)"
            )
    return None


def one_addend(case: Case) -> str | None:
    """Recognise by statistics one of n addends in place of their sum: a missing reduction.

    The other addends are not known, so this is a guess. Of n independent addends of equal size, one
    has slope 1 against their sum, when the sum is regressed on it, and explains 1/n of the sum's
    variance. Every subset of the mesh axes gives an n. Returns a sentence for the report, or None.
    """
    got = _all_numbers(case.got)
    want = _all_numbers(case.want)
    if got.size < _MIN_SAMPLE:
        return None
    product = np.vdot(got, want).real
    got_power = np.vdot(got, got).real
    slope = product / got_power
    explained_share = product**2 / (got_power * np.vdot(want, want).real)
    for axes in subsets(case.mesh.long_axes):
        n_addends = case.mesh.size(*axes)
        spread = 3 * np.sqrt((n_addends - 1) / got.size)  # three standard deviations of the slope
        has_slope = abs(slope - 1) < min(spread, 0.5)
        if has_slope and abs(explained_share - 1 / n_addends) < spread / n_addends:
            return (
                f"it looks like one of {n_addends} addends: what the other devices along {names_of(axes)} "
                "contribute is missing (a slice where a sum was meant, a gradient not added up over copies)"
            )
    return None


def _reduced(
    case: Case,
    axes: tuple[str, ...],
    reduce: Callable[..., Any],
    blocks: Sequence[Block] | None = None,
) -> list[Any]:
    """Reduce blocks over the devices along axes, one result per device. blocks: by default those got."""
    wide = list(map(in_double, case.got if blocks is None else blocks))
    reduced = []
    for device in range(case.mesh.n_devices):
        group = [wide[member] for member in case.mesh.group(device, axes)]
        reduced.append(reduce(group, axis=0))
    return reduced


def _all_numbers(blocks: Sequence[Block]) -> Block:
    """Join the elements of all blocks: `[elements]`."""
    return np.concatenate([in_double(block).ravel() for block in blocks])


def _factor(case: Case) -> float | None:
    """Return the one factor between both arrays, exact if it is n or 1/n; None if there is none."""
    got = _all_numbers(case.got)
    want = _all_numbers(case.want)
    factor = _exact_if_whole(_ratio(got, want))
    error = np.abs(got - factor * want).max()
    # Both arrays are rounded, and the factor as well.
    is_the_factor = error <= 4 * max(1.0, abs(factor)) * case.slack  # False for NaN
    return factor if is_the_factor else None


def _exact_if_whole(factor: float) -> float:
    """Return the whole number, or the inverse of one, that a factor is nearly equal to, or the factor."""
    for n in range(2, _MAX_WHOLE_FACTOR + 1):
        for exact in (float(n), 1 / n):
            if abs(factor - exact) <= 1e-3 * exact:
                return exact
    return factor


def _ratio(got: Block, want: Block) -> float:
    """Fit got = factor * want by least squares -> the factor; 0 if all wanted values are zero."""
    got = in_double(got)
    want = in_double(want)
    power = np.vdot(want, want).real
    if power == 0:
        return 0.0
    return float(np.vdot(want, got).real / power)


def _axes_of_size(case: Case, size: float) -> str:
    """Name the sets of axes with so many devices: "a or of b"; "" for none."""
    names = []
    for axes in subsets(case.mesh.long_axes):
        if np.isclose(case.mesh.size(*axes), size):
            names.append(names_of(axes))
    return " or of ".join(names)
