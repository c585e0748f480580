"""`xshard selfcheck`: the same plans on numpy, torch and JAX, side by side, against the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, NamedTuple

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
        """Whether it ran, and with the results of the reference."""
        return self.verdict is not None and self.verdict.agrees


class Section(NamedTuple):
    """The rows of one question.

    Attributes:
        question: The plan, with the values that it moves.
        expected: What numpy answers.
        elsewhere: The plan's name in other systems.
        rows: A row for each runtime that takes the mesh.
    """

    question: Question
    expected: Answer
    elsewhere: str
    rows: list[RuntimeRow]


class Example(NamedTuple):
    """An expression, its name in other systems, and options with which it runs, as texts."""

    expression: str
    elsewhere: str
    mesh: str
    shape: str | None
    sizes: str | None = None


# The rows of the notation's table, and three on orders and means: four devices run them within seconds.
EXAMPLES = (
    Example("b s/cp c -> b s c/cp", "all-to-all (Ulysses)", "cp=4", "2,16,8"),
    Example("b s/zigzag(cp) c -> b s c/cp", "the zigzag all-to-all", "cp=4", "2,16,8"),
    Example("b s/zigzag(cp) c -> b s/cp c", "zigzag to contiguous", "cp=4", "2,16,8"),
    Example("n/dp d -> n d", "all-gather, gradients identical", "dp=4", "12,8"),
    Example("n/dp d -> n d | copy(dp)", "all-gather, gradients summed", "dp=4", "12,8"),
    Example("n d | sum(tp) -> n/tp d", "reduce-scatter", "tp=4", "12,8"),
    Example("n d | sum(tp) -> n d", "all-reduce, identity backward", "tp=4", "12,8"),
    Example("n d -> n d | copy(tp)", "identity, all-reduce backward", "tp=4", "12,8"),
    Example("n/x/y d -> n/y/x d", "a permutation of devices", "x=2,y=2", "12,8"),
    Example("b h/sp w -> b h/sp:halo(1,1) w", "halo exchange", "sp=4", "2,16,4"),
    Example("b h/sp:halo(1,1) w -> b h/sp w", "trim", "sp=4", "2,16,4"),
    Example("b s/zigzag(cp) -> b s/zigzag(cp):halo(3,0)", "a causal halo", "cp=4", "2,64"),
    Example("n d | mean(dp,tp) -> n/(dp,tp) d", "mean of gradients, sharded", "dp=2,tp=2", "12,8"),
    Example(
        "b s/tp d, d f/tp -> b s f/tp",
        "sequence and tensor parallel (Megatron)",
        "tp=4",
        shape=None,
        sizes="b=2,s=16,d=4,f=8",
    ),
)


def selfcheck(
    expression: options.ExpressionText = "",
    check_all: Annotated[
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
    examples: tuple[Example, ...] = EXAMPLES
    if not check_all:
        if not expression or mesh is None or (shape is None and sizes is None):
            raise typer.BadParameter("give EXPR, --mesh, and --shape or --sizes, or --all")
        examples = (Example(expression, elsewhere="", mesh=mesh, shape=shape, sizes=sizes),)
    elif expression or mesh is not None or shape is not None or sizes is not None:
        raise typer.BadParameter("--all has expressions, meshes and shapes of its own")
    # Shapes and runtimes before plans: wrong options are told at once.
    lengths = [options.lengths_of_arrays(e.expression, e.shape, e.sizes) for e in examples]
    meshes = [Mesh.parse(example.mesh) for example in examples]
    runtimes = choose(options.listed(runtime), meshes)
    sections = []
    for example, on_mesh, shape_or_sizes in zip(examples, meshes, lengths, strict=True):
        # {"shape": (2, 64)}, or for a contraction {"sizes": {"b": 2, "s": 64}}.
        plan = make_plan(example.expression, on_mesh, dtype=dtype, **shape_or_sizes)
        question = plan_question(plan)
        sections.append(Section(question, in_numpy(question), example.elsewhere, rows=[]))
    failures = _run(runtimes, sections, timeout)  # adds the rows
    print_sections(sections, console())
    for failure in failures:
        print_error(failure)
    for section in sections:
        if not all(row.agrees for row in section.rows):
            raise typer.Exit(1)


def _run(
    runtimes: Sequence[Runtime], sections: Sequence[Section], timeout_s: float
) -> list[FunctionError]:
    """Run all plans on each runtime, and compare its results with those of numpy.

    A section of the report is about one plan, with a row for each runtime that can run on its mesh.
    The rows are added here, to `rows` of each section: an answer and how far it is from numpy's, or
    no answer if the runtime failed.

    Returns:
        The errors of runtimes that failed; [] if all ran, even where results differ.
    """
    failures: list[FunctionError] = []
    with options.counting("runtimes") as count:
        # One after the other: their times are measured, and should not disturb each other.
        for number, runtime in enumerate(runtimes):
            count(number, len(runtimes))
            able = [section for section in sections if runtime.takes(section.question.mesh)]
            try:
                answers = runtime.answers([section.question for section in able], timeout_s)
            except FunctionError as failure:
                failures.append(failure)
                for section in able:
                    section.rows.append(RuntimeRow(runtime.name))
                continue
            for section, answer in zip(able, answers, strict=True):
                verdict = runtime.judge(section.question, answer, section.expected)
                section.rows.append(RuntimeRow(runtime.name, answer, verdict))
    return failures


def print_sections(sections: Sequence[Section], out: Console) -> None:
    """Print the report: for each plan its expression and a row per runtime, then a summary."""
    heads = tuple(Text(head, style="bold") for head in _HEAD)
    all_rows = [heads]
    for section in sections:
        all_rows += _rows(section)
    # One table to the eye: tables of equal column widths with a line of text between them.
    widths = [max(map(_width, column)) for column in zip(*all_rows, strict=True)]
    out.print(_table(widths, [heads]))
    for section in sections:
        out.print()
        _print_title(section, out)
        out.print(_table(widths, _rows(section)))
    out.print()
    out.print(_summary(sections), soft_wrap=True)


def _rows(section: Section) -> list[tuple[Text, ...]]:
    """Make the cells of each runtime's row."""
    return [_cells(section.question, row) for row in section.rows]


def _width(cell: Text) -> int:
    return max(map(len, cell.plain.split("\n")))


def _print_title(section: Section, out: Console) -> None:
    """Print a plan's expression, its name in other systems, and the bytes that are planned."""
    plan = section.question.plan
    title = contractions.title(plan) if isinstance(plan, ContractionPlan) else moves.title(plan)
    if section.elsewhere:
        title = f"{title}   {section.elsewhere}"
    out.print(lines_of(title, out.width, "bold cyan"))
    planned = f"planned: {format_bytes(plan.bytes_received)} forward"
    planned_backward = backward_bytes(plan)
    if planned_backward is not None:
        planned += f", {format_bytes(planned_backward)} backward"
    out.print(planned, style="dim")


def _table(widths: Sequence[int], rows: Sequence[Sequence[Text]]) -> Table:
    """Return rows as a table with columns of these widths."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for i, width in enumerate(widths):
        is_text = i in (0, len(widths) - 1)  # the runtime and the result; between them are numbers
        table.add_column(width=width, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _cells(question: Question, row: RuntimeRow) -> tuple[Text, ...]:
    """Make the cells of one runtime's row: its name, errors, bytes received, time, and the verdict.

    A runtime that failed has dashes and "failed".
    """
    name = Text(row.runtime)
    answer = row.answer
    if answer is None or row.verdict is None:
        dashes = [Text("-", style="dim")] * len(_HEAD[2:])  # all but the name and the result
        return name, *dashes, Text("failed", style="bold red")
    result = Text("equal", style="green") if row.agrees else Text("DIFFERENT", style="bold red")
    return (
        name,
        _difference(row.verdict.forward),
        _difference(row.verdict.backward),
        _bytes(answer.forward_bytes, question.plan.bytes_received),
        _bytes(answer.backward_bytes, backward_bytes(question.plan)),
        Text("-" if answer.seconds is None else format_seconds(answer.seconds)),
        result,
    )


def _difference(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:g}", style="bold red" if value else "")


def _bytes(measured: int | None, planned: int | None) -> Text:
    """Print measured bytes, marked if they differ from the plan: the runtime's choice, and no error."""
    if measured is None:
        return Text("-")
    return Text(format_bytes(measured), style="" if measured == planned else "yellow")


def _summary(sections: Sequence[Section]) -> Text:
    """Write the last line of the report: how many runs differ or failed, or that all are equal.

    Such as "3 expressions on numpy, torch (2 of them): all equal", where torch ran on the meshes of
    two of the three.
    """
    rows = list(chain.from_iterable(section.rows for section in sections))
    plural = "s" if len(sections) > 1 else ""
    runtimes = _runtimes_text(rows, len(sections))
    subject = f"{len(sections)} expression{plural} on {runtimes}: "
    if all(row.agrees for row in rows):
        return Text.assemble(subject, ("all equal", "bold green"))
    n_failed = sum(row.answer is None for row in rows)
    n_different = sum(not row.agrees for row in rows) - n_failed
    counts = f"{n_different} different, {n_failed} failed, of {len(rows)} runs"
    return Text.assemble(subject, (counts, "bold red"))


def _runtimes_text(rows: Sequence[RuntimeRow], n_expressions: int) -> str:
    """Name the runtimes of a report, with the number of their runs where that is not all of them.

    Such as "numpy, torch (2 of them)": a runtime may not know the mesh of every expression.
    """
    texts = []
    for runtime, n_runs in Counter(row.runtime for row in rows).items():
        texts.append(runtime if n_runs == n_expressions else f"{runtime} ({n_runs} of them)")
    return ", ".join(texts)
