"""`parallelize`: layouts by name -> the same model, in parallel.

Decides which rule every parameter and every module has, and refuses before training what cannot be right.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, mesh_of, process_mesh
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.parallel import ATTRIBUTE, Parallel
from torch_bridge.models.parameters import Init, Kept, Setting, cut_all
from torch_bridge.models.units import Gathered, Placed, Unit
from xshard import Profile, Rules, Sharding, XshardError
from xshard.arguments import shown
from xshard.errors import PlanError, with_path
from xshard.models import Use, rule_of, summed_later, use_of, varying
from xshard.rules import Pattern

RulesLike = Rules | Mapping[Any, Any]


def parallelize(
    model: nn.Module,
    mesh: MeshLike,
    parameters: RulesLike,
    inputs: RulesLike,
    outputs: RulesLike | None = None,
    *,
    gathers: Pattern | None = None,
    init: Init = None,
    device: torch.device | str | None = None,
    keep: bool = False,
    bucket_bytes: int = 25 * 2**20,
    comm_dtype: CommDtypeLike = None,
    profile: str | Path | Profile = "auto",
) -> nn.Module:
    """A model of whole tensors -> the same model, each process with its blocks: layouts by name say how.

    The model is changed in place and returned. It keeps its names, optimisers, hooks and code; `.grad` after
    `backward()` is the block of the whole gradient, that of the sum of what processes computed apart.

    parameters: rules for names of parameters, and of buffers, which are whole without one. A layout says
    where one is stored; `"o/dp i -> o i"`, that its module uses it gathered (a buffer is kept as it is used).
    inputs: rules for names of modules, "" is the model: what happens to the first tensor argument, or to
    several, as a dict by name or a tuple by place, of which some may be absent. One layout says where it is.
    Axes that a rule does not name are as in the enclosing module. outputs: likewise, for results.
    Derived, and written nowhere: over which axes gradients are summed. Those are the axes along which
    activations differ in a module, by the right side of its rule or of the nearest one around it.
    gathers: a pattern of the modules that gather parameters, all inside them at once, as "layers.*";
    the model gathers the rest. None: those with a rule for their input. keep: whether it stays until
    the backward pass, or is gathered again; that of the outermost stays.

    init: values for tensors on the meta device: a function of one module that sets its own tensors, or a
    state dict of whole ones. device: where those will be. bucket_bytes: how much of gradients travels
    together. comm_dtype: in which parameters and gradients travel, as in `redistribute`.

    Raises XshardError with the name of the parameter or the module: for a name without a rule, a rule
    without a name, layouts that do not fit, tensors that differ between processes, and, in the forward pass,
    for a block that is not what a rule says. DesyncError, on all processes, where their calls differ. After
    the first backward pass, ReplicaError where gradients that should be equal are not.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def step():
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    ...     with torch.no_grad():
    ...         whole = model(torch.ones(2, 4))
    ...     parallel = xt.parallelize(
    ...         model,
    ...         Mesh(tp=2),
    ...         parameters={
    ...             "0.weight": "o/tp i",
    ...             "0.bias": "o/tp",
    ...             "2.weight": "o i/tp",
    ...             "2.bias": "o -> o | sum(tp)",
    ...         },
    ...         inputs={"": "b i -> b i | copy(tp)"},
    ...         outputs={"2": "b o | sum(tp) -> b o"},
    ...     )
    ...     return tuple(model[0].weight.shape), torch.allclose(parallel(torch.ones(2, 4)), whole)
    >>> xt.testing.run_ranks(2, step)
    [((4, 4), True), ((4, 4), True)]
    """
    if hasattr(model, ATTRIBUTE):
        raise XshardError("the model is parallel already", hint="write all rules in one call")
    processes = process_mesh(mesh)
    setting = Setting(mesh, mesh_of(mesh), processes, profile, comm_dtype)
    found: list[tuple[dict[str, Unit], list[Kept], dict[str, Use]]] = []

    def prepared() -> CallFacts:
        units = _units(model, setting, inputs, outputs or {}, gathers)
        found.append((units, *_kept(model, setting, Rules(parameters), units)))
        facts = {"parameters": str(dict(Rules(parameters))), "inputs": str(dict(Rules(inputs)))}
        facts["outputs"] = str(dict(Rules(outputs or {})))
        shapes = [each.sharding.shape for each in found[0][1]]
        facts["model"] = f"of {len(shapes)} tensors, {sum(map(math.prod, shapes))} elements"
        facts["options"] = str((setting.axes, gathers, keep, bucket_bytes, comm_dtype, profile))
        return CallFacts(facts, {}, processes.ranks, {})

    compare_ranks(processes.ranks, "parallelize", prepared)
    units, kept, uses = found[0]
    cut_all(kept, setting, init, _device(mesh, device))
    for name, module in model.named_modules():
        if name in units:
            units[name].keep = keep or units[name].parent is None
            units[name].attach(module)
    gradients = Gradients(setting, [each for each in kept if each.later], bucket_bytes)
    parallel = Parallel(setting, kept, uses, list(units.values()), gradients)
    model.register_forward_pre_hook(parallel.begin, prepend=True)
    setattr(model, ATTRIBUTE, parallel)
    gradients.prepare()
    return model


def _device(mesh: MeshLike, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _units(
    model: nn.Module, setting: Setting, inputs: RulesLike, outputs: RulesLike, gathers: Pattern | None
) -> dict[str, Unit]:
    """The modules that have rules, or gather, by name, outer ones first."""
    modules = {name: m for name, m in model.named_modules() if _has_forward(m)}
    rules = [Rules(each).match(list(modules), partial=True, what="module") for each in (inputs, outputs)]
    gathering = set(rules[0])
    if gathers is not None:
        gathering = {"", *Rules({gathers: "..."}).match(list(modules), partial=True, what="module")}
    units: dict[str, Unit] = {}
    for name, module in modules.items():
        if not any(name in names for names in (*rules, gathering)):
            continue
        incoming, outgoing = (_placed(each.get(name), name, setting) for each in rules)
        parent = _around(name, units)
        axes = varying(parent.varying if parent else (), [placed.rule for placed in incoming])
        arguments = list(inspect.signature(module.forward).parameters)
        units[name] = Unit(name, arguments, setting, parent, incoming, outgoing, axes, name in gathering)
    return units


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _placed(found: Any, name: str, setting: Setting) -> list[Placed]:
    """What a rule says of one module -> a rule for each tensor."""
    if found is None:
        return []
    if isinstance(found, Mapping):
        each: Iterable[tuple[Any, Any]] = found.items()
    elif isinstance(found, tuple | list):
        each = [(i, text) for i, text in enumerate(found) if text is not None]
    else:
        each = [(None, found)]
    placed = []
    for place, text in each:
        if not isinstance(text, str):
            raise XshardError(
                f"{shown(text)} is no rule for {name or 'the model'}",
                hint='"b s/tp c -> b s c | copy(tp)", or a dict by name, or a tuple by place, of such texts',
            )
        try:
            placed.append(Placed(place, rule_of(text, setting.axes)))
        except XshardError as error:
            raise with_path(error, name or "the model") from None
    return placed


def _around(
    name: str, units: Mapping[str, Unit], *, itself: bool = False, gathers: bool = False
) -> Unit | None:
    """The nearest unit around a name that has a rule for its input, or that gathers."""
    parts = name.split(".") if name else []
    for n in range(len(parts) - (not itself), -1, -1):
        unit = units.get(".".join(parts[:n]))
        if unit is not None and (unit.gathers if gathers else unit.inputs):
            return unit
    return None


def _kept(
    model: nn.Module, setting: Setting, rules: Rules, units: Mapping[str, Unit]
) -> tuple[list[Kept], dict[str, Use]]:
    """Every parameter and buffer, tied ones once, and the use of each parameter by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    ruled = [*parameters, *(name for name in buffers if rules.pattern_for(name) is not None)]
    texts = rules.match(ruled, what="parameter")
    kept: dict[int, Kept] = {}
    uses: dict[str, Use] = {}
    later: dict[int, list[Use]] = {}
    for name, x in {**parameters, **buffers}.items():
        path, _, attribute = name.rpartition(".")
        owner, unit = model.get_submodule(path), _around(path, units, itself=True)
        if unit is None and name in parameters:
            raise PlanError(
                f"{name}: no rule says how activations lie in '{path or 'the model'}'",
                hint='inputs= has a rule for it, or for a module around it; "" is the model',
            )
        try:
            use = use_of(texts.get(name, "..."), x.ndim, setting.axes, unit.varying if unit else frozenset())
            if name in buffers:  # nothing gathers it
                use = use._replace(stored=use.used)
            sharding = Sharding(use.stored, setting.axes, tuple(x.shape))
            Sharding(use.used.in_order(use.stored.names), setting.axes, tuple(x.shape))
        except XshardError as error:
            raise with_path(error, name) from None
        known = kept.setdefault(id(x), Kept([], [], sharding))
        if [d.shards for d in known.sharding.layout.dims] != [d.shards for d in sharding.layout.dims]:
            raise PlanError(
                f"{name} is {known.name}, and stored as '{sharding.layout}', not '{known.sharding.layout}'",
                hint="tied parameters are stored in one way; uses may differ, as in 'v c -> v/tp c'",
            )
        known.names.append(name)
        known.places.append((owner, attribute))
        if name in parameters:
            uses[name] = use
            later.setdefault(id(x), []).append(use)
    for name, use in uses.items():
        _check_bias(name, use, uses, model)
    for key, of in later.items():
        each = kept[key]
        each.later = summed_later(of)
        for name, use, (owner, attribute) in zip(each.names, of, each.places, strict=True):
            _prepare_use(name, use, each, owner, attribute, units)
    return list(kept.values()), uses


def _prepare_use(
    name: str, use: Use, each: Kept, owner: nn.Module, attribute: str, units: Mapping[str, Unit]
) -> None:
    unit = _around(name.rpartition(".")[0], units, itself=True, gathers=True)
    assert unit is not None  # the nearest one with a rule, or the model
    if use.apart:
        owner.register_forward_pre_hook(partial(check_apart, name, use), with_kwargs=True)
    move = use.move(each.later)
    if move is None:
        return
    text = f"{move[0]} -> {move[1]}"
    same = [g for g in unit.gathered if g.move == text and g.tensor is owner._parameters[attribute]]
    if same:  # a tied parameter, which is gathered once
        same[0].places.append((owner, attribute))
    else:
        unit.gathered.append(Gathered(name, [(owner, attribute)], text, each.sharding.shape))


def _check_bias(name: str, use: Use, uses: Mapping[str, Use], model: nn.Module) -> None:
    """Raise PlanError for the bias of a linear layer whose products are addends, if each adds it."""
    path, _, attribute = name.rpartition(".")
    weight = uses.get(f"{path}.weight" if path else "weight")
    if attribute == "bias" and weight is not None and isinstance(model.get_submodule(path), nn.Linear):
        missing = [axis for axis in weight.used.dims[1].axes if axis not in use.used.tagged("sum")]
        if missing:
            raise PlanError(
                f"{name} would be added by each process along '{missing[0]}', where the products are addends",
                text=str(use.used),
                hint=f"write {use.stored} -> {use.used} | sum({','.join(missing)}), which adds it once",
            )


def check_apart(name: str, use: Use, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise PlanError where activations need a gradient, of which each process would have its part alone."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
        axes = ",".join(sorted(use.apart))
        raise PlanError(
            f"{name} is cut over '{axes}', and what comes into its module is equal along it",
            text=str(use.used),
            hint=f"their gradient would lack other processes' parts: write copy({axes}) on the right side "
            "of the rule for the input of this module, or of one around it",
        )
