"""`assert_equivalent`: torch and JAX functions agree; `assert_mesh_invariant`: one agrees on every mesh."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from xshard.layout import Mesh
from xshard.testing.comparison import explained, located, mismatches
from xshard.testing.mismatch import EquivalenceError
from xshard.testing.pickling import packed
from xshard.testing.question import Tree
from xshard.testing.runs import Function, Meshes, Runs, Side, mesh_of_ones, problem, updates_of


def assert_equivalent(
    torch_fn: Function,
    jax_fn: Function,
    *,
    args: Sequence[Tree],
    layouts: tuple[Sequence[Tree], Tree],
    mesh: Meshes,
    reference: Function | None = None,
    reference_runtime: Side = "jax",
    parameters: Sequence[int] = (),
    optimisers: tuple[Function, Function] | None = None,
    tol: float | None = None,
    check_vma: bool = True,
    preload: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> None:
    """Run both functions sharded, and raise EquivalenceError unless all results are equal.

    torch_fn, jax_fn: one device's blocks of `args` -> its blocks of the outputs, arrays in dicts, lists and
    tuples. torch_fn runs on gloo ranks, jax_fn in `shard_map` on host devices; one that has a parameter
    `mesh` is given the `xshard.Mesh`. They may be closures: they are sent to processes of their own.
    args: whole arrays of numpy, or that numpy can read; trees of them. Names in messages are torch_fn's.
    layouts: one for each argument, and of the outputs; one layout may stand for a whole branch.
    mesh: one or several, as `Mesh` or text: `"dp=2,tp=2; tp=4"`.
    reference: a function of whole arrays, run by `reference_runtime`. Without one torch_fn on a mesh of one
    device is the reference, and jax_fn on such a mesh is compared as well.
    parameters, optimisers: positions of the arguments that take one optimiser step, and the optimisers:
    for torch a list of tensors -> `torch.optim.Optimizer`, for JAX (values, gradients) -> values.
    tol: relative to the largest value of an array; None goes by dtype (2e-5 for float32).
    check_vma: as for `jax.shard_map`.
    preload: modules that torch_fn imports, as in ["transformers"]: they are imported once, before ranks are
    forked, and not by each rank of each run. Importing them must start no threads.
    timeout_s: the longest time in which a run makes no progress.

    On every mesh the outputs, the gradients of all arguments for random cotangents (under the dual layouts)
    and the updated parameters are compared: both runtimes with the reference, then with each other.

    Raises, before anything runs, StructureError, ShapeError, NotationError, LinearityError, MeshError,
    DtypeError; FunctionError with the message of a function that raised; StructureError if they return
    different trees.

    >>> import numpy as np
    >>> def double(x):
    ...     return 2 * x
    >>> assert_equivalent(
    ...     double, double, args=[np.ones(4)], layouts=(["n/tp"], "n/tp"), mesh="tp=2"
    ... )
    """
    checked = problem(torch_fn, args, layouts, mesh)
    update = updates_of(checked, args, parameters, optimisers)
    sent = {"torch": packed(torch_fn), "jax": packed(jax_fn)}
    comparison = Runs(checked, sent, update, check_vma, timeout_s, tuple(preload))
    alone = mesh_of_ones(checked.meshes)
    if reference is None:
        truth = comparison.truth("torch", sent["torch"], alone)
        meshes = (alone, *checked.meshes)
    else:
        truth = comparison.truth(reference_runtime, packed(reference), Mesh())
        meshes = checked.meshes
    with ThreadPoolExecutor() as at_once:
        torch_runs = at_once.submit(
            lambda: [comparison.run("torch", m, truth) for m in checked.meshes]
        )
        jax_runs = at_once.submit(lambda: [comparison.run("jax", m, truth) for m in meshes])
        runs = [*torch_runs.result(), *jax_runs.result()]  # of each, one device first
    wrong, compared = mismatches(checked, truth, runs, tol)
    if wrong:
        raise EquivalenceError(list(explained(wrong, comparison, truth, tol)), compared)


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

    Blocks mean the global array that they stand for under their layout; gradients are under the dual layout.
    The truth is the function itself on a mesh of ones; there its gradients are compared with differences.

    function, args, layouts, check_vma, preload, timeout_s: as in `assert_equivalent`.
    mesh: one or several; by default axes of the layouts with 2 and 3 devices, one by one and together.
    framework: "torch" or "jax".
    differences: False if a gradient is not the derivative (`detach`), or the function takes no float64.
    tol: relative to the largest value of an array; None goes by dtype.

    A mismatch has the likely cause, and the first redistribution with a wrong meaning. Raises as the other.

    >>> import numpy as np
    >>> import torch_bridge as xt
    >>> def total(x, mesh):
    ...     return xt.redistribute(x.sum(), "() | sum(dp) -> ()", mesh)
    >>> assert_mesh_invariant(total, args=[np.arange(7.0)], layouts=(["n/dp"], "()"))
    """
    checked = problem(function, args, layouts, mesh)
    sent = packed(function)
    comparison = Runs(
        checked, {framework: sent}, {}, check_vma, timeout_s, tuple(preload), differences
    )
    truth = comparison.truth(framework, sent, mesh_of_ones(checked.meshes))
    runs = [comparison.run(framework, each, truth) for each in checked.meshes]
    wrong, compared = mismatches(checked, truth, runs, tol)
    if wrong:
        raise EquivalenceError(list(located(wrong, comparison, truth)), compared)
