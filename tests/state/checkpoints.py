"""Small checkpoints for tests, written by several processes of which this one plays all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard import Layout, Mesh, Sharding, reference
from xshard.state import Names
from xshard.state.files import open_checkpoint
from xshard.state.files.loading import plan_load, read_block
from xshard.state.files.saving import (
    SaveTask,
    Source,
    Writers,
    abort,
    begin,
    commit,
    plan_save,
    write,
)

Arrays = Mapping[str, NDArray[Any]]
CUTS = {"w": "o/p i"}
WHOLE = {"**": "..."}
ONE = Mesh(one=1)
TWO = Mesh(p=2)


def arrays(seed: int = 0) -> dict[str, NDArray[Any]]:
    """One that both processes write a half of, and one that one of them writes."""
    numbers = np.random.default_rng(seed)
    return {"w": numbers.normal(size=(4, 6)).astype(np.float32), "b": numbers.integers(0, 9, 6)}


def sources(
    these: Arrays, cuts: Mapping[str, str], mesh: Mesh, dtype: str | None = None
) -> dict[str, Source]:
    """Arrays of a program with a process for every device. cuts: layouts by name; others are whole."""
    found = {}
    for name, x in these.items():
        at = Sharding(Layout.parse(cuts.get(name, "...")), mesh, x.shape)
        found[name] = Source(at, dtype or x.dtype.name, range(mesh.n_devices))
    return found


def save(
    folder: Path,
    these: Arrays,
    cuts: Mapping[str, str] = CUTS,
    mesh: Mesh = TWO,
    names: Names | None = None,
    dtype: str | None = None,
    **options: Any,
) -> None:
    """As the processes of all devices do, one after the other."""
    saving = plan_save(sources(these, cuts, mesh, dtype), names, **options)
    blocks = {
        name: reference.scatter(x, saving.sources[name].sharding.layout, mesh)
        for name, x in these.items()
    }
    task = SaveTask(saving, folder, lambda n, d, _: blocks[n][d])
    token = begin(saving, folder)
    sums: dict[str, list[Any]] = {}
    processes = range(mesh.n_devices)
    try:
        for process in processes:
            written = write(task._replace(writers=Writers(processes, process)), token)
            for name, boxes in written.items():
                sums.setdefault(name, []).extend(boxes)
        commit(task, token, sums)
    except BaseException:
        abort(task, token)
        raise


def load(
    folder: Path, rules: Mapping[str, str] = WHOLE, mesh: Mesh = ONE, names: Names | None = None
) -> dict[str, list[NDArray[Any]]]:
    """The blocks of all devices."""
    with open_checkpoint(folder) as checkpoint:
        loads = plan_load(checkpoint, rules, mesh, names)
        devices = range(mesh.n_devices)
        return {
            name: [read_block(checkpoint, each, d) for d in devices] for name, each in loads.items()
        }


class Runs:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)
