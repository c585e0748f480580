"""The weights: shapes and layouts of a Llama, and which elements lie on which node."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from xshard import Layout, Mesh, Sharding
from xshard.rules import Rules

HIDDEN = 4096
FEED = 11008
VOCAB = 32000
LAYERS = 2  # of Llama 2 7B with two layers: 1 GiB in bfloat16
TRAINED = {"**": "o/fsdp ..."}
SERVED = {"**.{o,down}.weight": "o i/tp", "**.norm": "o", "**": "o/tp i"}

# The names of ways in rows and claims.
OURS = "xshard"
TORCH = "torch.load"
DCP = "DCP"
HF = "DCP's reader of Hugging Face"
ORBAX = "orbax"
SLICES = "safetensors' slices"
READING = "reading"
MEMCPY = "memcpy"
DTENSOR = "DTensor"
EXCHANGING = "DTensor with an all-to-all"
STATE_DICT = "DCP's state dict, from rank 0"
BUCKET = 256 * 2**20  # bytes that a load may hold beyond its result


def shapes(scale: int = 1) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, its lengths divided by `scale`."""
    d = HIDDEN // scale
    f = FEED // scale
    v = VOCAB // scale
    by_name: dict[str, tuple[int, ...]] = {"embed.weight": (v, d)}
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (d, d) for name in "qkvo"}
        layer |= {"gate.weight": (f, d), "up.weight": (f, d), "down.weight": (d, f), "norm": (d,)}
        by_name |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return by_name


def shardings(rules: Mapping[str, str], mesh: Mesh, scale: int) -> dict[str, Sharding]:
    """By name."""
    sizes = shapes(scale)
    texts = Rules(rules).match(list(sizes))
    return {
        name: Sharding(Layout.parse(texts[name]).resolved(len(shape)), mesh, shape)
        for name, shape in sizes.items()
    }


def index_of(sharding: Sharding, device: int) -> tuple[slice, ...]:
    """The block of a device in the array, for cuts into intervals."""
    runs = [sharding.held(d, device)[0] for d in range(len(sharding.shape))]
    return tuple(slice(run.start, run.start + run.length) for run in runs)


def places(folder: Path) -> dict[str, Path]:
    """The safetensors file of each array, as the index says."""
    index = json.loads(next(folder.glob("*.index.json")).read_text())
    return {name: folder / file for name, file in index["weight_map"].items()}


def slices(folder: Path, framework: str) -> Iterator[tuple[str, Any]]:
    """The name of each array, and its slice by safetensors itself, which reads the parts it is asked for."""
    from safetensors import safe_open

    with ExitStack() as opened:
        files: dict[Path, Any] = {}
        for name, file in places(folder).items():
            if file not in files:
                files[file] = opened.enter_context(safe_open(file, framework))
            yield name, files[file].get_slice(name)
