"""Mistakes in sums: missing, made twice, replaced by means, or with addends counted once per device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import (
    Case,
    first_of,
    in_double,
    largest_error,
    names_of,
    subsets,
)

_CUT_OFF = (
    "nothing was written, or the path of gradients is cut (detach, no_grad, .data, stop_gradient)"
)
# The unit roundoff of floats, times the growth over a few hundred operations.
_ROUNDINGS = (("float32", 2.0**-20), ("float16 or TF32", 2.0**-8), ("bfloat16", 2.0**-5))
_CONSTANT = 2.0**-10  # a factor nearer to 1 may be rounding
_SAMPLE = 48  # elements that statistics need at least


def zero(case: Case) -> str | None:
    """All zeros in place of values, or the reverse."""
    if not case.scale:
        return f"it is compared with zeros alone: there {_CUT_OFF}"
    return None if any(in_double(block).any() for block in case.got) else f"all zeros: {_CUT_OFF}"


def only_first(case: Case) -> str | None:
    """Right on the first device along axes of replicas, zeros on the others."""
    pairs = [*enumerate(zip(case.got, case.want, strict=True))]

    def is_alone(axes: tuple[str, ...]) -> bool:
        index = [case.sharding.mesh.index(device, axes) for device, _ in pairs]
        return all(
            not in_double(x).any() if index[d] else case.near(x, want) for d, (x, want) in pairs
        )

    along = first_of(case.free_axes, is_alone)
    return (
        along
        and f"only the first device along {along} has the value, others have zeros: nothing sent it"
    )


def not_summed(case: Case) -> str | None:
    """Addends in place of their sum."""
    for axes in subsets(case.free_axes):
        equal = all(map(case.near, _over(case, axes, np.mean), case.got))  # then it is a factor
        is_norm = not case.want[0].ndim and all(
            map(case.near, _over(case, axes, np.linalg.norm), case.want)
        )
        along = names_of(axes)
        if not equal and is_norm:
            return (
                f"the squares of the values along {along} add up to the right one's: norms of parts"
            )
        if not equal and all(map(case.near, _over(case, axes, np.sum), case.want)):
            return (
                f"the blocks along {along} are addends and add up to what is right: "
                f"a sum over {along} is missing (an all-reduce; in a gradient, that of a copy)"
            )
    return None


def other_axes(case: Case) -> str | None:
    """A sum over some axes in place of others, or over the devices that hold different parts."""
    if len({block.shape for block in case.want}) > 1:
        return None
    for summed in subsets(case.sharding.mesh.long_axes):
        wanted = _over(case, summed, np.sum, case.want)
        for left in ((), *subsets([a for a in case.free_axes if a not in summed])):
            if all(map(case.near, _over(case, left, np.sum), wanted)):
                instead = f" in place of {names_of(left)}" if left else ""
                return f"summed over {names_of(summed)}{instead}: that adds what belongs to different devices"
    return None


def own_factors(case: Case) -> str | None:
    """Every device's part right but for a factor of its own."""
    factors = [_ratio(got, want) for got, want in zip(case.got, case.want, strict=True)]
    right = min(block.size for block in case.want) > 1 and all(
        case.near(g, f * in_double(w)) for g, w, f in zip(case.got, case.want, factors, strict=True)
    )
    if not right or min(factors) <= 0 or np.ptp(factors) <= _CONSTANT:
        return None
    told = f"right but for factors {', '.join(f'{f:.4g}' for f in factors)} of the devices"
    for axes in subsets(case.cut_axes):
        weights = 1 / np.array([factors[d] for d in case.sharding.mesh.group(0, axes)])
        along = names_of(axes)
        if np.isclose(weights.sum(), (1, len(weights)), rtol=_CONSTANT).any():
            return (
                f"{told}: means over each one's own count along {along}, not over the count of all"
            )
        if np.isclose(np.square(weights).sum(), 1, rtol=_CONSTANT):
            return f"{told}: divided by the norm of each one's own part along {along}"
    return f"{told}: weights or statistics of their own"


def not_averaged(case: Case) -> str | None:
    """Values of single devices in place of their mean."""
    along = first_of(
        case.free_axes, lambda axes: all(map(case.near, _over(case, axes, np.mean), case.want))
    )
    return (
        along
        and f"blocks along {along} differ and their mean is right: a mean over {along} is missing"
    )


def summed(case: Case) -> str | None:
    """Too large by the size of axes: equal values were added up."""
    if (factor := _factor(case)) is None or factor < 2 or factor != round(factor):
        return None
    if not (sizes := _axes_of_size(case, factor)):
        return f"{factor:g} times too large, which is the size of no mesh axis: counted {factor:g} times"
    return (
        f"{factor:g} times too large, and {factor:g} is the size of {sizes}: equal values were summed over "
        "it where one was meant (a sum in place of a slice, a gradient added up twice), or a mean's 1/n is "
        "missing"
    )


def averaged(case: Case) -> str | None:
    """Too small by the size of axes: a mean in place of a sum."""
    if not (factor := _factor(case)) or not (sizes := _axes_of_size(case, 1 / factor)):
        return None
    return (
        f"{1 / factor:g} times too small, and {1 / factor:g} is the size of {sizes}: divided by it where a "
        "sum was meant (a mean in place of a sum, 1/n applied twice), or one of equal addends was taken"
    )


def scaled(case: Case) -> str | None:
    """A constant factor that is no axis size; of one number there always is one."""
    factor = _factor(case)
    if factor is None or abs(factor - 1) < _CONSTANT or max(block.size for block in case.want) < 2:
        return None
    return f"{factor:.6g} times what it should be, everywhere: a constant factor"


def counted_argument(case: Case) -> str | None:
    """Off by a multiple of an argument: a bias or a residual that every device adds before a sum."""
    if case.whole_got is None:
        return None
    error = case.whole_got - case.whole_want
    for name, value in case.arguments.items():
        x = in_double(value)
        outer = tuple(range(error.ndim - x.ndim))
        if not x.any() or error.shape[len(outer) :] != x.shape:
            continue
        times = float(np.real(np.vdot(x, error.mean(axis=outer)) / np.vdot(x, x)))
        if abs(times) < _CONSTANT or not case.near(error, np.broadcast_to(times * x, error.shape)):
            continue
        if round(times + 1, 6) == 0:
            return f"{name} is left out"
        count = f"{times + 1:.4g}"
        return (
            f"{name} is counted {count} times instead of once, and {count} is the size of "
            f"{_axes_of_size(case, times + 1) or 'no axis'}: every device adds it before a sum; "
            "add it after, or on one"
        )
    return None


def own_statistics(case: Case) -> str | None:
    """Every device's part right but for a factor and a shift of its own per index of a dim."""
    mesh = case.sharding.mesh
    layout = case.sharding.layout
    for k, dim in enumerate(layout.dims):
        axes = [axis for axis in case.cut_axes if axis not in dim.axes]
        fits = list[Block]()
        if not axes or len(case.wrong_devices) < mesh.n_devices:
            continue
        for pair in zip(case.got, case.want, strict=True):
            got, want = (np.moveaxis(in_double(x), k, 0).reshape(x.shape[k], -1) for x in pair)
            if want.shape[1] < 3:  # two numbers always fit
                break
            centred = want - want.mean(1, keepdims=True)
            power = (np.abs(centred) ** 2).sum(1, keepdims=True)
            factor = (centred.conj() * got).sum(1, keepdims=True) / np.where(power > 0, power, 1)
            shift = got.mean(1, keepdims=True) - factor * want.mean(1, keepdims=True)
            if not case.near(got, factor * want + shift):
                break
            fits.append(np.stack([factor, shift]))
        if len(fits) == mesh.n_devices and not all(
            case.near(fits[0], fits[d]) for d in mesh.group(0, axes)
        ):
            return (
                f"right but for a factor and a shift per device and index of {dim.name!r}: statistics of its "
                f"own part along {names_of(axes)}, not of all (batch normalisation, a loss per rank)"
            )
    return None


def rounded(case: Case) -> str | None:
    """An error as large as the rounding of a shorter float; one number may be as near by chance."""
    if max(block.size for block in case.want) < 2:
        return None
    error = largest_error(list(map(in_double, case.got)), list(map(in_double, case.want)))
    for name, unit in _ROUNDINGS:
        if error <= unit * case.scale:
            share = f"errors are at most {error / case.scale:.1e} of the largest value"
            return f"{share}: rounding, as of {name}, or an approximation (a GELU by tanh, another epsilon)"
    return None


def one_addend(case: Case) -> str | None:
    """One of n addends in place of their sum: with slope 1 it explains 1/n of the sum's variance."""
    got, want = _flat(case)
    if got.size < _SAMPLE:
        return None
    product = np.vdot(got, want).real
    power = np.vdot(got, got).real
    wanted = np.vdot(want, want).real
    slope = product / power
    share = product**2 / (power * wanted)
    for axes in subsets(case.sharding.mesh.long_axes):
        n = case.sharding.mesh.size(*axes)
        spread = 3 * np.sqrt((n - 1) / got.size)
        if abs(slope - 1) < min(spread, 0.5) and abs(share - 1 / n) < spread / n:
            return (
                f"it looks like one of {n} addends: what the other devices along {names_of(axes)} "
                "contribute is missing (a slice where a sum was meant, a gradient not added up over copies)"
            )
    return None


def _over(
    case: Case,
    axes: tuple[str, ...],
    reduce: Callable[..., object],
    blocks: Sequence[Block] | None = None,
) -> list[object]:
    """Per device, the reduction of the blocks along the axes."""
    mesh = case.sharding.mesh
    got = [in_double(block) for block in (case.got if blocks is None else blocks)]
    return [
        reduce([got[d] for d in mesh.group(device, axes)], axis=0)
        for device in range(mesh.n_devices)
    ]


def _flat(case: Case) -> Iterator[Block]:
    """All numbers of the blocks, as they are and as they should be."""
    return (
        np.concatenate([in_double(b).ravel() for b in blocks]) for blocks in (case.got, case.want)
    )


def _factor(case: Case) -> float | None:
    """The one factor between both arrays; exact if it is a whole number or 1/n."""
    got, want = _flat(case)
    factor = _ratio(got, want)
    for n in range(2, 65):
        for exact in (float(n), 1 / n):
            factor = exact if abs(factor - exact) <= 1e-3 * exact else factor
    error = np.abs(got - factor * want).max()
    return factor if error <= 4 * max(1.0, abs(factor)) * case.slack else None


def _ratio(got: Block, want: Block) -> float:
    got = in_double(got)
    want = in_double(want)
    return float(np.real(np.vdot(want, got) / (np.vdot(want, want) or 1.0)))


def _axes_of_size(case: Case, size: float) -> str:
    """The sets of axes with so many devices."""
    mesh = case.sharding.mesh
    sets = (axes for axes in subsets(mesh.long_axes) if np.isclose(mesh.size(*axes), size))
    return " or of ".join(map(names_of, sets))
