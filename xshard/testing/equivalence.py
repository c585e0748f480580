"""`assert_equivalent`: torch and JAX functions agree; `assert_mesh_invariant`: one agrees on every mesh."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from xshard.layout import Mesh
from xshard.testing.comparison import compare_runs
from xshard.testing.first_wrong import locate_first_wrong
from xshard.testing.mismatch import EquivalenceError
from xshard.testing.pickling import packed
from xshard.testing.problem import (
    Function,
    Meshes,
    check_problem,
    mesh_of_ones,
    updates_of,
)
from xshard.testing.question import Side, Tree
from xshard.testing.runs import RunAnswer, Runs, Truth
from xshard.testing.trials import explain_by_trials


def assert_equivalent(  # noqa: PLR0913  what differs between tests of a port
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
    """Run a torch function and its JAX port sharded, and raise unless all results are equal.

        assert_equivalent(f, g, args=[x], layouts=(["n/tp d"], "n/tp d"), mesh="tp=2")  # x: [n, d]

    On every mesh three things are compared: the outputs, the gradients of all arguments for random
    cotangents (under the dual layouts), and the updated parameters. Both runtimes are compared with
    the reference, then with each other.

    Args:
        torch_fn: One device's blocks of `args` -> its blocks of the outputs: arrays in dicts, lists
            and tuples. It runs on gloo ranks.
        jax_fn: The same for JAX, in `shard_map` on host devices. A function that has a parameter
            `mesh` is given the `xshard.Mesh`. Both may be closures: they are sent to processes of
            their own.
        args: Whole arrays of numpy, or arrays that numpy can read; trees of them. Names in messages
            are those of torch_fn's parameters.
        layouts: One for each argument, and of the outputs. One layout may stand for a whole branch.
        mesh: One or several, as `Mesh` or text: `"dp=2,tp=2; tp=4"`.
        reference: A function of whole arrays. Without one, torch_fn on a mesh of one device is the
            reference, and jax_fn on such a mesh is compared as well.
        reference_runtime: The framework that runs `reference`: "torch" or "jax".
        parameters: Positions of the arguments that take one optimiser step.
        optimisers: The optimisers: for torch a list of tensors -> `torch.optim.Optimizer`, for JAX
            (values, gradients) -> values.
        tol: Relative to the largest value of an array; None goes by dtype (2e-5 for float32).
        check_vma: As for `jax.shard_map`.
        preload: Modules that torch_fn imports, as in ["transformers"]. They are imported once, before
            ranks are forked, and not by each rank of each run. Importing them must start no threads.
        timeout_s: The longest time in which a run makes no progress.

    Raises:
        EquivalenceError: Results differ; it has the place, both values and the likely cause.
        StructureError: Arguments, layouts or outputs are different trees.
        ShapeError: An array does not fit its layout. All but the first and the last error are raised
            before anything runs, and StructureError also when functions return different trees.
        NotationError: A layout or a mesh cannot be read.
        LinearityError: A layout has a max or min.
        MeshError: A layout names an axis that a mesh lacks, or this host has too few devices.
        DtypeError: A dtype that not both frameworks have.
        FunctionError: A function raised, with its message.

    Examples:
        >>> import numpy as np
        >>> def double(x):
        ...     return 2 * x
        >>> assert_equivalent(
        ...     double, double, args=[np.ones(4)], layouts=(["n/tp"], "n/tp"), mesh="tp=2"
        ... )
    """
    problem = check_problem(torch_fn, args, layouts, mesh)
    updates = updates_of(problem, args, parameters, optimisers)
    functions = {"torch": packed(torch_fn), "jax": packed(jax_fn)}
    runs = Runs(
        problem=problem,
        functions=functions,
        updates=updates,
        typed=check_vma,
        timeout_s=timeout_s,
        preload=tuple(preload),
    )
    jax_meshes = problem.meshes
    # On a mesh of ones, torch_fn is the truth itself.
    if reference is None:
        one_device = mesh_of_ones(problem.meshes)
        truth = runs.truth("torch", functions["torch"], one_device)
        jax_meshes = (one_device, *jax_meshes)
    else:
        truth = runs.truth(reference_runtime, packed(reference), Mesh())

    # The frameworks have a process each, so they run at once.
    with ThreadPoolExecutor() as threads:
        torch_answers = threads.submit(_run_on_meshes, runs, "torch", problem.meshes, truth)
        jax_answers = threads.submit(_run_on_meshes, runs, "jax", jax_meshes, truth)
        answers = [*torch_answers.result(), *jax_answers.result()]
    result = compare_runs(problem, truth, answers, tol)
    if result.mismatches:
        mismatches = explain_by_trials(result.mismatches, runs, truth, tol)
        raise EquivalenceError(mismatches, result.n_compared)


def assert_mesh_invariant(  # noqa: PLR0913  as for `assert_equivalent`
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
    """Run a function on several meshes, and raise unless it means on each what it means on one device.

        assert_mesh_invariant(f, args=[x], layouts=(["n/dp d"], "d"))  # x: [n, d], on dp=2 and dp=3

    Blocks mean the global array that they stand for under their layout; gradients are under the dual
    layout. The truth is the function itself on a mesh of ones. There its gradients are compared with
    differences. A mismatch has the likely cause, and the first redistribution with a wrong meaning.

    Args:
        function: As torch_fn and jax_fn in `assert_equivalent`.
        args: As in `assert_equivalent`.
        layouts: As in `assert_equivalent`.
        mesh: One or several; by default axes of the layouts with 2 and 3 devices, one by one and
            together.
        framework: "torch" or "jax".
        differences: False if a gradient is not the derivative (`detach`), or the function takes no
            float64.
        tol: Relative to the largest value of an array; None goes by dtype.
        check_vma: As in `assert_equivalent`.
        preload: As in `assert_equivalent`.
        timeout_s: As in `assert_equivalent`.

    Raises:
        EquivalenceError: Results differ.
        XshardError: As in `assert_equivalent`.

    Examples:
        >>> import numpy as np
        >>> import torch_bridge as xt
        >>> def total(x, mesh):
        ...     return xt.redistribute(x.sum(), "() | sum(dp) -> ()", mesh)
        >>> assert_mesh_invariant(total, args=[np.arange(7.0)], layouts=(["n/dp"], "()"))
    """
    problem = check_problem(function, args, layouts, mesh)
    sent = packed(function)
    runs = Runs(
        problem=problem,
        functions={framework: sent},
        updates={},
        typed=check_vma,
        timeout_s=timeout_s,
        preload=tuple(preload),
        differences=differences,
    )
    truth = runs.truth(framework, sent, mesh_of_ones(problem.meshes))
    answers = _run_on_meshes(runs, framework, problem.meshes, truth)
    result = compare_runs(problem, truth, answers, tol)
    if result.mismatches:
        mismatches = locate_first_wrong(result.mismatches, runs, truth)
        raise EquivalenceError(mismatches, result.n_compared)


def _run_on_meshes(
    runs: Runs, runtime: Side, meshes: Sequence[Mesh], truth: Truth
) -> list[RunAnswer]:
    return [runs.run(runtime, mesh, truth) for mesh in meshes]
