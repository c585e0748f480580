"""Options that commands share. Commands parse these texts, not typer, so that errors keep their caret."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Argument, Option

from xshard.arguments import parse_number
from xshard.contractions.expression import is_contraction
from xshard.errors import MeshError, ShapeError
from xshard.layout.mesh import MOST_AXES, MOST_DEVICES
from xshard.pictures.terminal import console

MESH_HELP = "Axes of the mesh and their sizes, as in dp=2,cp=4."
SHAPE_HELP = "Shape of the global array, as in 2,64,32."
SIZES_HELP = "Length of every dim of a contraction, as in b=8,s=64."

ExpressionText = Annotated[
    str, Argument(metavar="EXPR", help='"layout -> layout", or a contraction.')
]
MeshText = Annotated[str, Option("--mesh", metavar="AXES", help=MESH_HELP)]
MeshOrNone = Annotated[str | None, Option("--mesh", metavar="AXES", help=MESH_HELP)]
ShapeOrNone = Annotated[str | None, Option("--shape", metavar="LENGTHS", help=SHAPE_HELP)]
SizesOrNone = Annotated[str | None, Option("--sizes", metavar="LENGTHS", help=SIZES_HELP)]
Dtype = Annotated[
    str, Option(metavar="NAME", help="Dtype of the array, as in float32, bfloat16, int64.")
]


@contextmanager
def counting(what: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr, if that is a terminal: the function takes `completed` or `advance`, and `total`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    out = console(stderr=True)
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        yield partial(bar.update, bar.add_task(what, total=None))


def lengths_of_arrays(expression: str, shape: str | None, sizes: str | None) -> dict[str, Any]:
    """The options of `plan` for --shape or --sizes. Raises ShapeError if the other one is due."""
    takes_sizes = is_contraction(expression, named=sizes is not None)
    if (shape is None) == (sizes is None) or takes_sizes == (sizes is None):
        due = "a contraction takes --sizes, as in b=8,s=64"
        raise ShapeError(due if takes_sizes else "--shape is due, as in 2,64,32", text=expression)
    return (
        {"shape": parse_shape(shape)} if shape is not None else {"sizes": parse_sizes(sizes or "")}
    )


def parse_sizes(text: str) -> dict[str, int]:
    """`"b=8,s=64"` -> `{"b": 8, "s": 64}`. Raises ShapeError with a caret."""
    _check_number(text)
    lengths: dict[str, int] = {}
    for part, span in _parts(text) if text.strip() else ():
        name, _, number = (half.strip() for half in part.partition("="))
        length = parse_number(number)
        if not name or length is None or name in lengths:
            why = f"dim {name!r} twice" if name in lengths else "a dim has a length >= 0"
            raise ShapeError(why, text=text, span=span, hint="as in b=8,s=64")
        lengths[name] = length
    return lengths


def parse_shape(text: str) -> tuple[int, ...]:
    """`"2,64,32"` -> `(2, 64, 32)`; empty text -> `()`. Raises ShapeError with a caret."""
    _check_number(text)
    lengths = []
    for part, span in _parts(text) if text.strip() else ():
        length = parse_number(part.strip())
        if length is None:
            raise ShapeError(
                "a length is a whole number >= 0", text=text, span=span, hint="as in 2,64,32"
            )
        lengths.append(length)
    return tuple(lengths)


def parse_devices(text: str) -> tuple[int, ...]:
    """`"0-3,6"` -> `(0, 1, 2, 3, 6)`. Raises MeshError with a caret."""
    devices: list[int] = []
    for part, span in _parts(text):
        numbers = [parse_number(half.strip()) for half in part.split("-", 1)]
        first = numbers[0]
        last = numbers[-1]
        if first is None or last is None or not 0 <= last - first < MOST_DEVICES:
            raise MeshError(
                "devices are numbers and ranges", text=text, span=span, hint="as in 0-3,6"
            )
        devices += range(first, last + 1)
    return tuple(devices)


def _parts(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """The parts between commas, and where each stands in the text."""
    start = 0
    for part in text.split(","):
        yield part, (start, start + max(1, len(part)))
        start += len(part) + 1


def _check_number(text: str) -> None:
    if text.count(",") >= MOST_AXES:
        raise ShapeError(f"{text.count(',') + 1} dims", hint=f"numpy has at most {MOST_AXES}")
