"""Options that commands share. Commands parse these texts, not typer, so that errors keep their caret."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Argument, Option

from xshard.arguments import parse_number
from xshard.contractions.expression import is_contraction
from xshard.errors import MeshError, ShapeError
from xshard.layout.mesh import MAX_AXES, MAX_DEVICES
from xshard.pictures.terminal import console

_MESH = Option("--mesh", metavar="AXES", help="Axes of the mesh and their sizes, as in dp=2,cp=4.")

ExpressionText = Annotated[
    str, Argument(metavar="EXPR", help='"layout -> layout", or a contraction.')
]
MeshText = Annotated[str, _MESH]
MeshOrNone = Annotated[str | None, _MESH]
ShapeOrNone = Annotated[
    str | None,
    Option("--shape", metavar="LENGTHS", help="Shape of the global array, as in 2,64,32."),
]
SizesOrNone = Annotated[
    str | None,
    Option(
        "--sizes",
        metavar="LENGTHS",
        help="Length of every dim of a contraction, as in b=8,s=64.",
    ),
]
MachineName = Annotated[str, Option(metavar="NAME|FILE", help="The machine: a profile or a file.")]
Dtype = Annotated[
    str, Option(metavar="NAME", help="Dtype of the array, as in float32, bfloat16, int64.")
]


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr while a `with` block runs, if that is a terminal.

        with counting("plans") as count:
            count(1, 8)         # plans ... 1/8

    Yields the function that moves the bar: how many are done, and how many there are.
    """
    out = console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)

        def count(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield count


def lengths_of_arrays(expression: str, shape: str | None, sizes: str | None) -> dict[str, Any]:
    """Parse --shape or --sizes into the argument that `xshard.plan` takes for this expression.

    A move or a layout with --shape 2,64 -> {"shape": (2, 64)}; a contraction with --sizes b=8,s=64
    -> {"sizes": {"b": 8, "s": 64}}. An option that is not given is None.

    Raises:
        ShapeError: The other one is due, or both are given: a contraction takes --sizes, a move
            --shape.
    """
    if is_contraction(expression, named=sizes is not None):
        if sizes is None:
            raise ShapeError("a contraction takes --sizes, as in b=8,s=64", text=expression)
        if shape is not None:
            raise ShapeError("--shape beside --sizes", text=expression, hint="leave --shape out")
        return {"sizes": parse_sizes(sizes)}
    if shape is None:
        raise ShapeError("--shape is due, as in 2,64,32", text=expression)
    if sizes is not None:
        hint = "leave --sizes out, which is for contractions"
        raise ShapeError("--sizes beside --shape", text=expression, hint=hint)
    return {"shape": parse_shape(shape)}


def listed(text: str) -> list[str]:
    """Split names at commas: "numpy, torch" -> ["numpy", "torch"]."""
    names = [name.strip() for name in text.split(",")]
    return [name for name in names if name]


def parse_sizes(text: str) -> dict[str, int]:
    """Read lengths by name: "b=8,s=64" -> {"b": 8, "s": 64}.

    Raises:
        ShapeError: A part is no length of a dim, marked with a caret.
    """
    _check_number(text)
    lengths: dict[str, int] = {}
    for part in _parts(text):
        name, _, number = part.text.partition("=")
        name = name.strip()
        length = parse_number(number.strip())
        if name in lengths:
            raise ShapeError(
                f"dim {name!r} twice", text=text, span=part.span, hint="as in b=8,s=64"
            )
        if not name or length is None:
            raise ShapeError(
                "a dim has a length >= 0", text=text, span=part.span, hint="as in b=8,s=64"
            )
        lengths[name] = length
    return lengths


def parse_shape(text: str) -> tuple[int, ...]:
    """Read a shape: "2,64,32" -> (2, 64, 32); empty text -> ().

    Raises:
        ShapeError: A part is no length, marked with a caret.
    """
    _check_number(text)
    lengths = []
    for part in _parts(text):
        length = parse_number(part.text.strip())
        if length is None:
            raise ShapeError(
                "a length is a whole number >= 0", text=text, span=part.span, hint="as in 2,64,32"
            )
        lengths.append(length)
    return tuple(lengths)


def parse_devices(text: str) -> tuple[int, ...]:
    """Read device numbers: "0-3,6" -> (0, 1, 2, 3, 6).

    Raises:
        MeshError: A part is no number and no range, marked with a caret.
    """
    devices: list[int] = []
    parts = _parts(text)
    if not parts:  # empty text: an empty part takes the way to the error below
        parts = [Part(text="", span=(0, 1))]
    for part in parts:
        ends = [parse_number(half.strip()) for half in part.text.split("-", 1)]
        first = ends[0]
        last = ends[-1]
        # A range of billions would fill the memory before the plan refuses it.
        if first is None or last is None or not 0 <= last - first < MAX_DEVICES:
            raise MeshError(
                "devices are numbers and ranges", text=text, span=part.span, hint="as in 0-3,6"
            )
        devices += range(first, last + 1)
    return tuple(devices)


class Part(NamedTuple):
    """Text between commas, and where it stands."""

    text: str
    span: tuple[int, int]


def _parts(text: str) -> list[Part]:
    """Split text at commas; empty text has no parts."""
    if not text.strip():
        return []
    parts = []
    start = 0
    for part in text.split(","):
        # An empty part is marked where it is missing.
        parts.append(Part(part, (start, start + max(1, len(part)))))
        start += len(part) + 1
    return parts


def _check_number(text: str) -> None:
    """Raise ShapeError for more dims than numpy has: before each of a million parts is read."""
    if text.count(",") >= MAX_AXES:
        raise ShapeError(f"{text.count(',') + 1} dims", hint=f"numpy has at most {MAX_AXES}")
