"""`assert_mesh_invariant`: a sharded function means the same on every mesh, and on one device it is right.

Decides which meshes are tried, and what is told of a mismatch: its cause, and the redistribution at which the
meaning first went wrong. How a runtime runs a function is in the bridges' `testing.equivalence`.
"""

from __future__ import annotations

from collections.abc import Sequence

from xshard.testing.comparison import mismatches
from xshard.testing.pickling import packed
from xshard.testing.problem import Meshes, problem
from xshard.testing.report import EquivalenceError
from xshard.testing.runs import Asked, Function, Side, mesh_of_ones
from xshard.testing.trees import Tree
from xshard.testing.trials import located


def assert_mesh_invariant(
    function: Function,
    *,
    args: Sequence[Tree],
    layouts: tuple[Sequence[Tree], Tree],
    mesh: Meshes | None = None,
    framework: Side = "torch",
    differences: bool = True,
    tol: float | None = None,
    check_vma: bool = True,
    preload: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> None:
    """Raise EquivalenceError unless results and gradients mean on every mesh what they mean on one device.

    What they mean is the whole array that blocks stand for under their layout, of gradients under the dual of
    the argument's. The truth is the function itself on a mesh of ones, so that no second implementation is
    needed; there, its gradients are compared with differences.

    function, args, layouts, check_vma, preload, timeout_s: as in `assert_equivalent`.
    mesh: one or several; by default axes of the layouts with 2 and 3 devices, one by one and together.
    framework: "torch" or "jax".
    differences: False for a function whose gradient is not meant to be its derivative (`detach`), or that
    cannot take float64, in which differences are made.
    tol: relative to the largest value of an array; None goes by dtype.

    A mismatch has the likely cause, and the redistribution, of those that the function calls, at which the
    meaning first went wrong. Raises before anything runs as `assert_equivalent` does; FunctionError with the
    message of a function that raised, as one may whose blocks differ in length.

    >>> import numpy as np
    >>> import torch_bridge as xt
    >>> def total(x, mesh):
    ...     return xt.redistribute(x.sum(), "() | sum(dp) -> ()", mesh)
    >>> assert_mesh_invariant(total, args=[np.arange(7.0)], layouts=(["n/dp"], "()"))
    """
    given = problem(function, args, layouts, mesh)
    sent = packed(function)
    asked = Asked(given, {framework: sent}, {}, check_vma, timeout_s, tuple(preload), differences)
    truth = asked.truth(framework, sent, mesh_of_ones(given.meshes))
    runs = [asked.run(framework, each, truth) for each in given.meshes]
    found, compared = mismatches(given, truth, runs, tol)
    if found:
        raise EquivalenceError(list(located(found, asked, truth)), compared)
