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
from xshard.state.files.checkpoint import Checkpoint
from xshard.state.files.difference import diff_checkpoints
from xshard.state.files.loading import Load, plan_load, read_block
from xshard.state.files.saving import SaveTask, Saving, Source, plan_save, save_blocks
from xshard.state.llama import names_from_text
from xshard.state.names import Names, names_from_json
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
    texts = ("array", "dtype", "layout", "file")
    table = headed_table("array", "shape", "dtype", "layout", "bytes", "file", left_aligned=texts)
    out = console()
    with open_checkpoint(path) as checkpoint:
        total_bytes = 0
        for name, array in checkpoint.items():
            array_bytes = dtypes.n_bytes(array.shape, array.dtype)
            total_bytes += array_bytes
            table.add_row(
                Text(name),
                "x".join(map(str, array.shape)) or "()",
                array.dtype,
                Text(str(checkpoint.layouts.get(name, ""))),
                format_bytes(array_bytes),
                Text(checkpoint.places[name]),
            )
        out.print(table)
        mesh = f", on {checkpoint.mesh!r}" if checkpoint.mesh else ""
        out.print(f"{len(checkpoint)} arrays, {format_bytes(total_bytes)}{mesh}", soft_wrap=True)
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
    device_mesh = Mesh.parse(mesh)
    # Without --rules, each array is whole on every device.
    layouts: Mapping[Any, Any] = _read_json(rules) if rules else {"**": "..."}
    with open_checkpoint(path) as checkpoint:
        loads = plan_load(checkpoint, layouts, device_mesh, _names_of(names), dtype=dtype or None)
        processes = [0] * device_mesh.n_devices  # of each device: this process, 0, has all of them
        sources = {
            name: Source(load.target, load.array.dtype, processes) for name, load in loads.items()
        }
        saving = plan_save(sources, shard_bytes=shard_bytes, constants=checkpoint.constants)
        total_bytes = sum(shard.n_bytes - len(shard.header) for shard in saving.shards)
        _write_with_bar(checkpoint, loads, saving, output, total_bytes)
    console().print(
        f"{len(loads)} arrays, {format_bytes(total_bytes)}, in {output}", soft_wrap=True
    )


def _write_with_bar(
    checkpoint: Checkpoint,
    loads: Mapping[str, Load],
    saving: Saving,
    output: Path,
    total_bytes: int,
) -> None:
    """Read the arrays of a checkpoint block by block and write them, with a bar of progress."""

    # `save_blocks` asks for one block after another, so that a single array is in memory.
    def read_recast(name: str, device: int, target_dtype: str) -> NDArray[Any]:
        load = loads[name]
        block = read_block(checkpoint, load, device)
        return dtypes.recast(block, load.stored, target_dtype)

    err = console(stderr=True)
    with reporting(
        progress=True,
        total_bytes=total_bytes,
        is_seen=err.is_terminal,
        what="written",
        console=err,
    ) as report:
        save_blocks(SaveTask(saving, output, read_recast), report)


def _names_of(text: str) -> Names | None:
    """Read --names: a JSON file, or the names of a known system; None for empty text."""
    if Path(text).is_file():
        return names_from_json(_read_json(text))
    return names_from_text(text) if text else None


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
        differences = list(diff_checkpoints(first, second, older))
        n_arrays = len(first)
    out = console()
    if differences:
        table = headed_table("array", "difference", left_aligned=("array", "difference"))
        for name, difference in differences:
            table.add_row(Text(name), Text(difference))
        out.print(table)
    out.print(f"{len(differences)} of {n_arrays} arrays differ", soft_wrap=True)
    if differences:
        raise typer.Exit(1)


def _read_json(path: str) -> Any:
    """Read a file of JSON. Raises XshardError with its name."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise XshardError(f"{path}: {error}") from None
