"""`xshard state`: the arrays of a checkpoint, another form of it, and the differences of two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from numpy.typing import NDArray
from rich.text import Text
from typer import Argument, Option

from xshard import dtypes
from xshard.cli.options import MeshText
from xshard.errors import XshardError
from xshard.formatting import format_bytes
from xshard.layout import Mesh
from xshard.pictures.terminal import console, headed_table
from xshard.state.files import open_checkpoint, verify
from xshard.state.files.difference import diff_checkpoints
from xshard.state.files.loading import plan_load, read_block
from xshard.state.files.saving import Source, plan_save, save_blocks
from xshard.state.llama import named
from xshard.state.names import names_from_json
from xshard.state.progress import reporting

state = typer.Typer(help="Checkpoints: show one, convert one, compare two.", no_args_is_help=True)
PathArgument = Annotated[
    Path, Argument(metavar="PATH", help="A safetensors file, or a folder of them.")
]


@state.command("show")
def show_state(
    path: PathArgument,
    check: Annotated[bool, Option("--verify", help="Compare all checksums.")] = False,
) -> None:
    """Print the names, shapes, dtypes, layouts and files of a checkpoint.

    Example: xshard state show model/
    """
    heads = ("array", "shape", "dtype", "layout", "bytes", "file")
    table = headed_table(*heads, left=("array", "dtype", "layout", "file"))
    out = console()
    with open_checkpoint(path) as checkpoint:
        sizes = {name: dtypes.n_bytes(x.shape, x.dtype) for name, x in checkpoint.items()}
        for name, x in checkpoint.items():
            layout = Text(str(checkpoint.layouts.get(name, "")))
            file = Text(checkpoint.places[name])
            shape = "x".join(map(str, x.shape)) or "()"
            table.add_row(Text(name), shape, x.dtype, layout, format_bytes(sizes[name]), file)
        out.print(table)
        on = f", on {checkpoint.mesh!r}" if checkpoint.mesh else ""
        out.print(
            f"{len(checkpoint)} arrays, {format_bytes(sum(sizes.values()))}{on}", soft_wrap=True
        )
        if check:
            out.print(f"{verify(checkpoint)} checksums are right", soft_wrap=True)


@state.command("convert")
def convert(
    path: PathArgument,
    output: Annotated[Path, Argument(metavar="OUT", help="A folder.")],
    names: Annotated[
        str, Option(metavar="NAMES", help="A JSON file, or llama-to-fused:32,8,128.")
    ] = "",
    rules: Annotated[
        str, Option(metavar="FILE", help="JSON: a layout for every pattern of names.")
    ] = "",
    mesh: MeshText = "",
    dtype: Annotated[str, Option(metavar="NAME", help="Of all floats, as in bfloat16.")] = "",
    shard_bytes: Annotated[str, Option(metavar="BYTES", help="Of a file, as in 5GiB.")] = "5GiB",
) -> None:
    """Write a checkpoint under other names, in other shards; an array at a time is in memory.

    The layouts of --rules are written with the arrays, for those that read them.

    Example: xshard state convert hf/ fused/ --names llama-to-fused:32,8,128
    """
    err = console(stderr=True)
    on = Mesh.parse(mesh)
    laid: Mapping[Any, Any] = _json(rules) if rules else {"**": "..."}
    mapping = (
        names_from_json(_json(names)) if Path(names).is_file() else named(names) if names else None
    )
    with open_checkpoint(path) as checkpoint:
        loads = plan_load(checkpoint, laid, on, mapping, dtype=dtype or None)
        owners = [0] * on.n_devices
        sources = {
            name: Source(load.target, load.array.dtype, owners) for name, load in loads.items()
        }
        saving = plan_save(sources, shard_bytes=shard_bytes, constants=checkpoint.constants)
        total = sum(shard.n_bytes - len(shard.header) for shard in saving.shards)

        def block_of(name: str, device: int, kind: str) -> NDArray[Any]:
            return dtypes.recast(
                read_block(checkpoint, loads[name], device), loads[name].stored, kind
            )

        with reporting(True, total, err.is_terminal, "written", err) as report:
            save_blocks(saving, output, block_of, progress=report)
    console().print(f"{len(loads)} arrays, {format_bytes(total)}, in {output}", soft_wrap=True)


@state.command("diff")
def diff(
    a: PathArgument,
    b: Annotated[Path, Argument(metavar="PATH", help="The other one.")],
    before: Annotated[
        Path | None, Option(metavar="PATH", help="An older state of the other one.")
    ] = None,
) -> None:
    """Name the arrays that differ, and how: transposed, gate and up swapped, another order, not updated.

    Exits with 1 if any does. Example: xshard state diff trained/ served/ --before old/
    """
    older = None if before is None else open_checkpoint(before)
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        unequal = list(diff_checkpoints(first, second, older))
        n = len(first)
    table = headed_table("array", "difference", left=("array", "difference"))
    for row in unequal:
        table.add_row(*map(Text, row))
    if unequal:
        console().print(table)
    console().print(f"{len(unequal)} of {n} arrays differ", soft_wrap=True)
    if unequal:
        raise typer.Exit(1)


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise XshardError(f"{path}: {error}") from None
