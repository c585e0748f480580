"""Worked examples of ksuit: gathers and reductions, in both gradient conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.compat.worked import Worked, floats


def worked() -> Iterator[Worked]:
    blocks = floats([1, 2], [2, 3])
    gathered = floats(*[[1, 2, 2, 3]] * 2)
    weights = floats([10, 11, 12, 13], [20, 21, 22, 23])
    summed, own = floats([30, 32], [34, 36]), floats([10, 11], [22, 23])

    def tuples(name: str) -> Callable[[Any, Any], Any]:
        def gather(c: Any, x: Any) -> Any:
            import torch

            return torch.cat(tuple(getattr(c, name).apply(x)))

        return gather

    for name in ("AllGatherGradAutograd", "all_gather_grad", "all_gather_grad_autograd"):
        kin = "all_gather_grad" if name[0] == "A" else name
        yield Worked(
            name,
            tuples(name) if name[0] == "A" else lambda c, x, name=name: getattr(c, name)(x),
            lambda c, x, axis, kin=kin: getattr(c, kin)(x, axis),
            blocks,
            gathered,
            weights,
            summed,
        )
    for name in ("AllGatherGradOverwrite", "all_gather_grad_overwrite"):
        yield Worked(
            name,
            tuples(name) if name[0] == "A" else lambda c, x: c.all_gather_grad_overwrite(x),
            lambda c, x, axis: c.all_gather_grad_overwrite(x, axis),
            blocks,
            gathered,
            weights,
            own,
            replicated=True,
        )
    yield Worked(
        "only the first of the gathered is used",
        lambda c, x: c.AllGatherGradAutograd.apply(x)[0],
        lambda c, x, axis: c.all_gather_grad(x, axis)[:2],
        blocks,
        floats([1, 2], [1, 2]),
        floats([1, 1], [1, 1]),
        floats([2, 2], [0, 0]),
    )
    yield Worked(
        "gathered along another dim",
        lambda c, x: c.all_gather_grad(x, batch_dim=1),
        lambda c, x, axis: c.all_gather_grad(x, axis, batch_dim=1),
        floats([[1], [2]], [[2], [3]]),
        floats(*[[[1, 2], [2, 3]]] * 2),
        floats([[10, 12], [11, 13]], [[20, 22], [21, 23]]),
        floats([[30], [32]], [[34], [36]]),
    )
    yield Worked(
        "scalars become rows",
        lambda c, x: c.all_gather_grad(x),
        lambda c, x, axis: c.all_gather_grad(x, axis),
        floats(3, 4),
        floats([3, 4], [3, 4]),
        floats([1, 2], [10, 20]),
        floats(11, 22),
    )
    for name, part in (("sum", 1), ("mean", 2)):
        yield Worked(
            f"all_reduce_{name}_grad passes its gradient",
            lambda c, x, name=name: getattr(c, f"all_reduce_{name}_grad")(x),
            lambda c, x, axis, name=name: getattr(c, f"all_reduce_{name}_grad")(x, axis),
            blocks,
            floats(*[[3 / part, 5 / part]] * 2),
            floats([1, 1], [10, 10]),
            floats([1 / part, 1 / part], [10 / part, 10 / part]),
            replicated=True,
        )
