"""`xshard selfcheck`: the same plans on numpy, torch and JAX, side by side, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from xshard.cli.options import MESH_HELP, Dtype, ExpressionText, ShapeOrNone, SizesOrNone, lengths_of_arrays
from xshard.cli.selfcheck_table import Row, Section, print_sections
from xshard.layout import Mesh
from xshard.pictures.console import console, print_error
from xshard.planner import plan as make_plan
from xshard.runtimes.examples import EXAMPLES, Example
from xshard.runtimes.processes import FunctionError
from xshard.runtimes.registry import RUNTIMES, Runtime, choose
from xshard.runtimes.tasks import Outcome, Task, make_task, run_reference

_NAMES = ",".join(runtime.name for runtime in RUNTIMES)


def selfcheck(
    expression: ExpressionText = "",
    every: Annotated[
        bool, typer.Option("--all", help="The showcase: every expression on a mesh of its own.")
    ] = False,
    mesh: Annotated[str | None, typer.Option(metavar="AXES", help=MESH_HELP)] = None,
    shape: ShapeOrNone = None,
    sizes: SizesOrNone = None,
    dtype: Dtype = "float32",
    runtime: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Some of {_NAMES}; by default all that know the mesh.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="The longest time without progress of a runtime.")
    ] = 600,
) -> None:
    """Run plans on numpy, torch and JAX, forward and backward; exit with 1 if any differs or fails.

    Example: xshard selfcheck "b s/cp c -> b s c/cp" --mesh cp=4 --shape 2,64,32
    """
    examples = _examples(expression, every, mesh, shape, sizes)
    names = [name for name in map(str.strip, runtime.split(",")) if name]
    runtimes = choose(names, [example.mesh for example in examples])
    tasks = [make_task(make_plan(e.expression, e.mesh, dtype=dtype, **e.lengths)) for e in examples]
    rows, failures = _ask(runtimes, tasks, timeout)
    sections = [
        Section(task, example.elsewhere, tuple(found))
        for example, task, found in zip(examples, tasks, rows, strict=True)
    ]
    print_sections(sections, console())
    for failure in failures:
        print_error(failure)
    if not all(row.agrees for found in rows for row in found):
        raise typer.Exit(1)


def _examples(
    expression: str, every: bool, mesh: str | None, shape: str | None, sizes: str | None
) -> tuple[Example, ...]:
    """What to verify. Raises BadParameter where the options contradict or lack one another."""
    if every:
        if expression or (mesh, shape, sizes) != (None,) * 3:
            raise typer.BadParameter("--all has expressions, meshes and shapes of its own")
        return EXAMPLES
    if not expression or mesh is None or (shape is None and sizes is None):
        raise typer.BadParameter("give EXPR, --mesh, and --shape or --sizes, or --all")
    return (Example(expression, "", Mesh.parse(mesh), lengths_of_arrays(expression, shape, sizes)),)


def _ask(
    runtimes: Sequence[Runtime], tasks: Sequence[Task], timeout_s: float
) -> tuple[list[list[Row]], list[FunctionError]]:
    """Per task, a row for every runtime that can take it; and the errors of runtimes that failed."""
    expected = [run_reference(task) for task in tasks]
    rows: list[list[Row]] = [[] for _ in tasks]
    failures: list[FunctionError] = []
    taken = {r.name: [i for i, task in enumerate(tasks) if r.takes(task.plan.mesh)] for r in runtimes}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    out = console(stderr=True)
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task("", total=sum(map(len, taken.values())))
        # One after the other: their times are measured, and should not disturb each other.
        for runtime in runtimes:
            mine = taken[runtime.name]
            progress.update(bar, description=runtime.name)
            outcomes: list[Outcome | None] = [None] * len(mine)
            try:
                outcomes[:] = runtime.run([tasks[i] for i in mine], timeout_s)
            except FunctionError as failure:
                failures.append(failure)
            for i, outcome in zip(mine, outcomes, strict=True):
                verdict = None if outcome is None else runtime.judge(tasks[i], outcome, expected[i])
                rows[i].append(Row(runtime.name, outcome, verdict))
            progress.advance(bar, len(mine))
    return rows, failures
