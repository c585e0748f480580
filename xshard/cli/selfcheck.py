"""`xshard selfcheck`: the same plans on numpy, torch and JAX, side by side, against the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from xshard.cli import options
from xshard.contractions import explain as contractions
from xshard.contractions.plan import ContractionPlan
from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh
from xshard.pictures.terminal import console, lines_of, print_error
from xshard.planner import plan as make_plan
from xshard.plans import table as moves
from xshard.runtimes.processes import FunctionError
from xshard.testing.plans import (
    RUNTIMES,
    Runtime,
    Verdict,
    backward_bytes,
    choose,
    in_numpy,
    plan_question,
)
from xshard.testing.question import Answer, Question

_NAMES = ",".join(runtime.name for runtime in RUNTIMES)
_MEASURED = ("difference\nforward", "\nbackward", "received\nforward", "\nbackward")
_HEAD = ("runtime", *_MEASURED, "\ntime", "\nresult")


class RuntimeRow(NamedTuple):
    """The answer of one runtime to one question, and its errors; None if it failed."""

    runtime: str
    answer: Answer | None = None
    verdict: Verdict | None = None

    @property
    def agrees(self) -> bool:
        return self.verdict is not None and self.verdict.agrees


class Section(NamedTuple):
    """The rows of one question. elsewhere: the plan's name in other systems."""

    question: Question
    elsewhere: str
    rows: list[RuntimeRow]


class Example(NamedTuple):
    """An expression, its name in other systems, a mesh to run it on, and its `shape` or `sizes`."""

    expression: str
    elsewhere: str
    mesh: Mesh
    lengths: dict[str, Any]


# The rows of the notation's table, and three on orders and means: four devices run them within seconds.
_BSC, _ND, _BHW = ({"shape": shape} for shape in ((2, 16, 8), (12, 8), (2, 16, 4)))
_LAYER = {"sizes": {"b": 2, "s": 16, "d": 4, "f": 8}}
EXAMPLES = (
    Example("b s/cp c -> b s c/cp", "all-to-all (Ulysses)", Mesh(cp=4), _BSC),
    Example("b s/zigzag(cp) c -> b s c/cp", "the zigzag all-to-all", Mesh(cp=4), _BSC),
    Example("b s/zigzag(cp) c -> b s/cp c", "zigzag to contiguous", Mesh(cp=4), _BSC),
    Example("n/dp d -> n d", "all-gather, gradients identical", Mesh(dp=4), _ND),
    Example("n/dp d -> n d | copy(dp)", "all-gather, gradients summed", Mesh(dp=4), _ND),
    Example("n d | sum(tp) -> n/tp d", "reduce-scatter", Mesh(tp=4), _ND),
    Example("n d | sum(tp) -> n d", "all-reduce, identity backward", Mesh(tp=4), _ND),
    Example("n d -> n d | copy(tp)", "identity, all-reduce backward", Mesh(tp=4), _ND),
    Example("n/x/y d -> n/y/x d", "a permutation of devices", Mesh(x=2, y=2), _ND),
    Example("b h/sp w -> b h/sp:halo(1,1) w", "halo exchange", Mesh(sp=4), _BHW),
    Example("b h/sp:halo(1,1) w -> b h/sp w", "trim", Mesh(sp=4), _BHW),
    Example(
        "b s/zigzag(cp) -> b s/zigzag(cp):halo(3,0)",
        "a causal halo",
        Mesh(cp=4),
        {"shape": (2, 64)},
    ),
    Example(
        "n d | mean(dp,tp) -> n/(dp,tp) d", "mean of gradients, sharded", Mesh(dp=2, tp=2), _ND
    ),
    Example(
        "b s/tp d, d f/tp -> b s f/tp",
        "sequence and tensor parallel (Megatron)",
        Mesh(tp=4),
        _LAYER,
    ),
)


def selfcheck(
    expression: options.ExpressionText = "",
    every: Annotated[
        bool, Option("--all", help="Many expressions, each on a mesh of its own.")
    ] = False,
    mesh: options.MeshOrNone = None,
    shape: options.ShapeOrNone = None,
    sizes: options.SizesOrNone = None,
    dtype: options.Dtype = "float32",
    runtime: Annotated[
        str, Option(metavar="NAMES", help=f"Of {_NAMES}; else all that know the mesh.")
    ] = "",
    timeout: Annotated[
        float, Option(metavar="SECONDS", help="The longest time without progress.")
    ] = 600,
) -> None:
    """Run plans on numpy, torch and JAX, forward and backward; exit with 1 if any differs or fails.

    Example: xshard selfcheck "b s/cp c -> b s c/cp" --mesh cp=4 --shape 2,64,32
    """
    examples = _examples(expression, every, mesh, shape, sizes)
    names = [name for name in map(str.strip, runtime.split(",")) if name]
    runtimes = choose(names, [example.mesh for example in examples])
    plans = [make_plan(e.expression, e.mesh, dtype=dtype, **e.lengths) for e in examples]
    sections = [
        Section(plan_question(p), e.elsewhere, []) for p, e in zip(plans, examples, strict=True)
    ]
    failures = _run(runtimes, sections, timeout)
    print_sections(sections, console())
    for failure in failures:
        print_error(failure)
    if not all(row.agrees for section in sections for row in section.rows):
        raise typer.Exit(1)


def _examples(
    expression: str, every: bool, mesh: str | None, shape: str | None, sizes: str | None
) -> tuple[Example, ...]:
    """The expressions to check. Raises BadParameter where the options contradict or lack one another."""
    if every:
        if expression or (mesh, shape, sizes) != (None,) * 3:
            raise typer.BadParameter("--all has expressions, meshes and shapes of its own")
        return EXAMPLES
    if not expression or mesh is None or (shape is None and sizes is None):
        raise typer.BadParameter("give EXPR, --mesh, and --shape or --sizes, or --all")
    return (
        Example(
            expression, "", Mesh.parse(mesh), options.lengths_of_arrays(expression, shape, sizes)
        ),
    )


def _run(
    runtimes: Sequence[Runtime], sections: Sequence[Section], timeout_s: float
) -> list[FunctionError]:
    """Add a row per runtime to each section with a mesh it takes -> errors of runtimes that failed."""
    questions = [section.question for section in sections]
    expected = list(map(in_numpy, questions))
    failures: list[FunctionError] = []
    taken = {
        r.name: [i for i, question in enumerate(questions) if r.takes(question.mesh)]
        for r in runtimes
    }
    with options.counting("") as count:
        # One after the other: their times are measured, and should not disturb each other.
        for runtime in runtimes:
            numbers = taken[runtime.name]
            count(description=runtime.name, total=sum(map(len, taken.values())))
            answers: list[Answer | None] = [None] * len(numbers)
            try:
                answers[:] = runtime.answers([questions[i] for i in numbers], timeout_s)
            except FunctionError as failure:
                failures.append(failure)
            for i, answer in zip(numbers, answers, strict=True):
                verdict = (
                    None if answer is None else runtime.judge(questions[i], answer, expected[i])
                )
                sections[i].rows.append(RuntimeRow(runtime.name, answer, verdict))
            count(advance=len(numbers))
    return failures


def print_sections(sections: Sequence[Section], out: Console) -> None:
    """A heading, every section under its expression, and a summary."""
    cells = [[_cells(section.question, row) for row in section.rows] for section in sections]
    # One table to the eye: tables of equal column widths with a line of text between them.
    heads = tuple(Text(head, style="bold") for head in _HEAD)
    columns = zip(heads, *chain(*cells), strict=True)
    widths = [
        max(len(line) for cell in column for line in cell.plain.split("\n")) for column in columns
    ]
    out.print(_table(widths, [heads]))
    for section, rows in zip(sections, cells, strict=True):
        plan = section.question.plan
        title = contractions.title(plan) if isinstance(plan, ContractionPlan) else moves.title(plan)
        back = backward_bytes(plan)
        planned = f"planned: {format_bytes(plan.bytes_received)} forward"
        out.print()
        out.print(
            lines_of("   ".join(filter(None, (title, section.elsewhere))), out.width, "bold cyan")
        )
        out.print(
            planned + ("" if back is None else f", {format_bytes(back)} backward"), style="dim"
        )
        out.print(_table(widths, rows))
    out.print()
    out.print(_summary(sections), soft_wrap=True)


def _table(widths: Sequence[int], rows: Sequence[Sequence[Text]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for i, width in enumerate(widths):
        table.add_column(width=width, justify="left" if i in (0, len(widths) - 1) else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _cells(question: Question, row: RuntimeRow) -> tuple[Text, ...]:
    name = Text(row.runtime)
    if row.answer is None or row.verdict is None:
        return name, *(Text("-", style="dim") for _ in _HEAD[2:]), Text("failed", style="bold red")
    plan = question.plan
    seconds = row.answer.seconds
    received = _bytes(row.answer.forward_bytes, plan.bytes_received)
    received_back = _bytes(row.answer.backward_bytes, backward_bytes(plan))
    differences = _difference(row.verdict.forward), _difference(row.verdict.backward)
    time = Text("-" if seconds is None else format_seconds(seconds))
    result = Text("equal", style="green") if row.agrees else Text("DIFFERENT", style="bold red")
    return name, *differences, received, received_back, time, result


def _difference(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:g}", style="bold red" if value else "")


def _bytes(measured: int | None, planned: int | None) -> Text:
    """Marked if they differ, which is the runtime's choice and no error."""
    text = "-" if measured is None else format_bytes(measured)
    return Text(text, style="yellow" if measured is not None and measured != planned else "")


def _summary(sections: Sequence[Section]) -> Text:
    rows = [row for section in sections for row in section.rows]
    failed = sum(row.answer is None for row in rows)
    different = sum(not row.agrees for row in rows) - failed
    taken = Counter(row.runtime for row in rows)  # not every runtime knows every mesh
    names = [name if n == len(sections) else f"{name} ({n} of them)" for name, n in taken.items()]
    what = f"{len(sections)} expression{'s' * (len(sections) > 1)} on {', '.join(names)}: "
    if not failed and not different:
        return Text.assemble(what, ("all equal", "bold green"))
    return Text.assemble(
        what, (f"{different} different, {failed} failed, of {len(rows)} runs", "bold red")
    )
