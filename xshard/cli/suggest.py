"""`xshard suggest`: rules for a model of transformers, from its config alone."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from xshard.cli.explore.views import suggestion_page
from xshard.cli.options import Dtype, MeshText, counting
from xshard.dtypes import name_of
from xshard.errors import PlanError
from xshard.layout import Mesh


def suggest_command(
    config: Annotated[
        Path, Argument(metavar="CONFIG", help="A config.json of transformers, or its folder.")
    ],
    mesh: MeshText,
    batch: Annotated[int, Option(min=1, help="Examples in a step, on all devices together.")],
    sequence: Annotated[int, Option(min=1, help="Tokens in an example.")] = 1,
    memory: Annotated[
        str | None, Option(metavar="BYTES", help="Bytes of a device, as in 80GiB.")
    ] = None,
    profile: Annotated[
        str, Option(metavar="NAME|FILE", help="The machine: a profile or a file.")
    ] = "h100",
    dtype: Dtype = "bfloat16",
    fixed: Annotated[
        list[str] | None, Option(metavar="NAME=LAYOUT", help="A layout to keep.")
    ] = None,
    why: Annotated[
        list[str] | None, Option(metavar="NAME", help="Also print the next best layout.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print only the rules, as JSON.")] = False,
    page: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Write a page with bars.")
    ] = None,
) -> None:
    """Print the layouts that make a training step fastest, its seconds and bytes, and plans by hand.

    The model is built on the meta device: no weights are read.

    Example: xshard suggest llama/config.json --mesh dp=8,tp=8 --batch 16 --sequence 8192 --memory 80GiB
    """
    if bare := [text for text in fixed or () if "=" not in text]:
        raise PlanError(
            f"--fixed {bare[0]!r} lacks a layout", hint="as in --fixed 'input_ids=b/dp s'"
        )
    kept = dict(text.split("=", 1) for text in fixed or ())
    on, (model, arrays) = Mesh.parse(mesh), _model_of(config, batch, sequence, name_of(dtype))
    with counting("searches") as count:
        options: dict[str, Any] = {"memory": memory, "profile": profile, "fixed": kept}
        options["progress"] = lambda done, total: count(completed=done, total=total)
        plan = import_module("torch_bridge").suggest(model, arrays, on, **options)
    rules = {
        name: dict(getattr(plan, name).items()) for name in ("parameters", "inputs", "outputs")
    }
    lines = [json.dumps(rules, indent=1)] if as_json else [str(plan), *map(plan.why, why or ())]
    if page is not None:
        page.write_text(suggestion_page(plan), encoding="utf-8")
    typer.echo("\n".join(lines))


def _model_of(path: Path, batch: int, sequence: int, dtype: str) -> tuple[Any, dict[str, Any]]:
    """A model and its inputs by name, on the meta device. Raises PlanError."""
    try:
        torch = import_module("torch")
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        raise PlanError(
            f"{error.name} is not installed", hint="pip install torch transformers"
        ) from None
    if not path.exists():  # transformers would ask the network
        raise PlanError(
            f"there is no {str(path)!r}", hint="`hf download NAME config.json` fetches a config"
        )
    try:
        how = {"experts_implementation": "batched_mm", "use_cache": False}
        config = transformers.AutoConfig.from_pretrained(path, **how)
        kind = getattr(transformers, (config.architectures or ("",))[0])
    except (OSError, ValueError, AttributeError):
        hint = 'as in "model_type": "llama", "architectures": ["LlamaForCausalLM"]'
        raise PlanError(f"'{path}' names no model of transformers", hint=hint) from None
    name = kind.main_input_name
    images = ("num_channels", "image_size", "image_size")
    if name not in ("input_ids", "pixel_values"):
        hint = "`torch_bridge.suggest(model, batch, mesh)` in Python takes any batch"
        raise PlanError(f"{kind.__name__} takes {name}", hint=hint)
    shape = [sequence] if name == "input_ids" else [getattr(config, n) for n in images]
    with torch.device("meta"):
        model = kind(config).to(getattr(torch, dtype))
        x = torch.empty(batch, *shape, dtype=torch.int64 if name == "input_ids" else model.dtype)
    return model, {name: x, **({"decoder_input_ids": x} if config.is_encoder_decoder else {})}
