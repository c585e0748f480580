"""Small checkpoints for tests, written by two processes of which this one plays both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard import Layout, Mesh, Sharding
from xshard.state.files import Checkpoint
from xshard.state.files.loading import plan_load, read_block
from xshard.state.files.saving import Source, abort, begin, commit, plan_save, write

MESH = Mesh(p=2)


def arrays(seed: int = 0, rows: int = 4) -> dict[str, NDArray[Any]]:
    """One that both processes write a half of, and one that one of them writes."""
    numbers = np.random.default_rng(seed)
    return {"w": numbers.normal(size=(rows, 6)).astype(np.float32), "b": numbers.integers(0, 9, 6)}


def save(folder: Path, these: Mapping[str, NDArray[Any]], **options: Any) -> None:
    cuts = {
        name: Sharding(Layout.parse("o/p i" if x.ndim == 2 else "o"), MESH, x.shape)
        for name, x in these.items()
    }
    sources = {name: Source(at, these[name].dtype.name, (0, 1)) for name, at in cuts.items()}

    def block_of(name: str, device: int, dtype: str) -> NDArray[Any]:
        half = these[name].shape[0] // 2
        return these[name][device * half : (device + 1) * half] if these[name].ndim == 2 else these[name]

    saving = plan_save(sources, **options)
    token = begin(saving, folder)
    try:
        sums: dict[str, Any] = {}
        for process in (0, 1):
            for name, boxes in write(saving, folder, token, process, block_of).items():
                sums.setdefault(name, []).extend(boxes)
        commit(saving, folder, token, sums)
    except BaseException:
        abort(folder, token)
        raise


def load(checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """All arrays, whole."""
    loads = plan_load(checkpoint, {"**": "..."}, Mesh(one=1))
    return {name: read_block(checkpoint, each, 0) for name, each in loads.items()}
