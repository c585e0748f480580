"""`xshard suggest`: rules for a model of transformers, from its config alone."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from xshard.cli.explore.views import suggestion_page
from xshard.cli.options import Dtype, MachineName, MeshText, counting
from xshard.dtypes import name_of
from xshard.errors import PlanError
from xshard.layout import Mesh


def suggest_command(  # noqa: PLR0913, PLR0917  typer makes an option of each
    config: Annotated[
        Path, Argument(metavar="CONFIG", help="A config.json of transformers, or its folder.")
    ],
    mesh: MeshText,
    batch: Annotated[int, Option(min=1, help="Examples in a step, on all devices together.")],
    sequence: Annotated[int, Option(min=1, help="Tokens in an example.")] = 1,
    memory: Annotated[
        str | None, Option(metavar="BYTES", help="Bytes of a device, as in 80GiB.")
    ] = None,
    profile: MachineName = "h100",
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
    fixed_layouts = {}
    for text in fixed or ():
        name, equals, layout = text.partition("=")
        if not equals:
            raise PlanError(
                f"--fixed {text!r} lacks a layout", hint="as in --fixed 'input_ids=b/dp s'"
            )
        fixed_layouts[name] = layout
    device_mesh = Mesh.parse(mesh)
    model, inputs = _model_of(config, batch, sequence, name_of(dtype))
    with counting("searches") as count:
        # By its name: this package imports no framework.
        suggestion = import_module("torch_bridge").suggest(
            model,
            inputs,
            device_mesh,
            memory=memory,
            profile=profile,
            fixed=fixed_layouts,
            progress=count,
        )
    if page is not None:
        page.write_text(suggestion_page(suggestion), encoding="utf-8")
    if as_json:
        kinds = ("parameters", "inputs", "outputs")
        rules = {kind: dict(getattr(suggestion, kind).items()) for kind in kinds}
        typer.echo(json.dumps(rules, indent=1))
    else:
        typer.echo("\n".join([str(suggestion), *map(suggestion.why, why or ())]))


def _model_of(path: Path, batch: int, sequence: int, dtype: str) -> tuple[Any, dict[str, Any]]:
    """Build a model from its Hugging Face config, and example inputs, without any values.

    Both are on torch's meta device, which has shapes only. Inputs are by name, such as
    {"input_ids": tensor [batch, sequence]}, or images for a vision model.

    Raises:
        PlanError: A package is missing, there is no config, or it names no model that takes text or images.
    """
    try:
        torch = import_module("torch")
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        raise PlanError(
            f"{error.name} is not installed", hint="pip install torch transformers"
        ) from None
    config, model_class = _read_config(transformers, path)
    input_name = model_class.main_input_name
    if input_name not in ("input_ids", "pixel_values"):
        raise PlanError(
            f"{model_class.__name__} takes {input_name}",
            hint="`torch_bridge.suggest(model, batch, mesh)` in Python takes any batch",
        )
    with torch.device("meta"):
        model = model_class(config).to(getattr(torch, dtype))
        if input_name == "input_ids":
            x = torch.empty(batch, sequence, dtype=torch.int64)
        else:
            size = config.image_size
            x = torch.empty(batch, config.num_channels, size, size, dtype=model.dtype)
    inputs = {input_name: x}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = x
    return model, inputs


def _read_config(transformers: Any, path: Path) -> tuple[Any, Any]:
    """Read a model's config, and find the class of models that it names.

    `transformers` is the module. Returns the config and the class, such as `LlamaForCausalLM`; the model
    itself is not built.
    """
    if not path.exists():  # transformers would ask the network
        raise PlanError(
            f"there is no {str(path)!r}", hint="`hf download NAME config.json` fetches a config"
        )
    try:
        # Products of all experts at once are what can be planned; a cache is for inference.
        config = transformers.AutoConfig.from_pretrained(
            path, experts_implementation="batched_mm", use_cache=False
        )
        return config, getattr(transformers, (config.architectures or ("",))[0])
    except (OSError, ValueError, AttributeError):
        raise PlanError(
            f"'{path}' names no model of transformers",
            hint='as in "model_type": "llama", "architectures": ["LlamaForCausalLM"]',
        ) from None
