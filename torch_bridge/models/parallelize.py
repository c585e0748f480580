"""`parallelize`: rules become the layout of every parameter and the hooks of every module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.models.embedding import shard_embedding
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.hooks import GatheredParameter, ModuleHooks, TensorRule
from torch_bridge.models.parallel import ATTRIBUTE, Count, ParallelModel
from torch_bridge.models.parameters import Init, ParallelContext, ShardedParameter, shard_all
from xshard import Profile, Rules, Sharding, XshardError
from xshard.arguments import explained, limit_of
from xshard.errors import PlanError, ShapeError, with_path
from xshard.models import (
    ParameterUse,
    dims_of_parameter,
    repeated,
    rule_of,
    summed_later,
    use_of,
    varying,
    written,
)
from xshard.rules import Pattern

RulesLike = Rules | Mapping[Any, Any]
Uses = Mapping[str, ParameterUse]


@explained(params="parameters", parallelize_plan="parameters", plan="parameters", device_mesh="mesh")
def parallelize(
    model: nn.Module,
    parameters: RulesLike,
    inputs: RulesLike,
    mesh: MeshLike,
    *,
    outputs: RulesLike | None = None,
    counts: RulesLike | None = None,
    gathers: Pattern | None = None,
    init: Init = None,
    device: torch.device | str | None = None,
    keep: bool = False,
    bucket_bytes: int | str | None = "25MiB",
    comm_dtype: CommDtypeLike = None,
    profile: str | Path | Profile = "auto",
) -> nn.Module:
    """Shard a model of whole tensors in place, by layouts that go by name, and return it.

    The model keeps its names, optimisers, hooks and code. After `backward()`, `.grad` is this process's block
    of the whole gradient.

    parameters: rules for names of parameters, and of buffers, which are replicated without one. A layout is
    how one is stored; `"o/dp i -> o i"` gathers it for its module (a buffer is stored as it is used).
    inputs: rules for names of modules, "" is the model: how the first tensor argument moves, or several, as a
    dict by name or a tuple by position; some of them may be absent. One layout says how it arrives.
    Axes that a rule does not name are as in the enclosing module. outputs: rules for results.
    The axes over which gradients are summed are derived: the axes along which activations differ in a module,
    by the right side of its rule or of the nearest one around it.
    counts: rules for integer attributes of modules, by name, that are lengths of sharded dims: with
    `"**.attn.num_heads": "h/tp"` each process counts its own heads. Each has to divide.
    gathers: pattern of the modules that gather parameters, all inside them at once, as "layers.*"; the model
    gathers the rest. None: the modules with a rule for their input. keep: keep gathered parameters until the
    backward pass instead of gathering them again (ZeRO-2 instead of ZeRO-3); the model always keeps its own.

    init: values for tensors on the meta device: a function of one module that sets its own tensors, or a
    state dict of whole ones. device: device of these. bucket_bytes: how much of the gradients travels
    together, as 2**20 or "25MiB"; None for all. comm_dtype: dtype in which parameters and gradients travel,
    as in `redistribute`.

    Raises XshardError with the name of the parameter or the module: for a name without a rule, a rule
    without a name, layouts that do not fit, tensors that differ between processes, and, in the forward pass,
    for a block that contradicts a rule. DesyncError, on all processes, if their calls differ. After
    the first backward pass, ReplicaError if gradients that should be equal are not.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def step():
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    ...     with torch.no_grad():
    ...         whole = model(torch.ones(2, 4))
    ...     parallel = xt.parallelize(
    ...         model,
    ...         {"0.*": "o/tp ...", "2.weight": "o i/tp", "2.bias": "o -> o | sum(tp)"},
    ...         inputs={"": "b i -> b i | copy(tp)"},
    ...         mesh=Mesh(tp=2),
    ...         outputs={"2": "b o | sum(tp) -> b o"},
    ...     )
    ...     return tuple(model[0].weight.shape), torch.allclose(parallel(torch.ones(2, 4)), whole)
    >>> xt.testing.run_ranks(2, step)
    [((4, 4), True), ((4, 4), True)]
    """
    if hasattr(model, ATTRIBUTE):
        raise XshardError("the model is parallel already", hint="write all rules in one call")
    context, outputs, counts = ParallelContext(mesh, profile, comm_dtype), outputs or {}, counts or {}
    ranks, limit = context.processes.ranks, limit_of(bucket_bytes, "bucket_bytes")
    prepared: list[tuple[dict[str, ModuleHooks], list[Count], list[ShardedParameter], Any]] = []

    def facts() -> CallFacts:
        hooks = _hooks(model, context, inputs, outputs, gathers)
        own = _counts(model, context, Rules(counts))
        prepared.append((hooks, own, *_parameters(model, context, Rules(parameters), hooks)))
        shapes = [each.sharding.shape for each in prepared[0][2]]
        rules = {"parameters": parameters, "inputs": inputs, "outputs": outputs, "counts": counts}
        flags = {name: str(dict(Rules(each))) for name, each in rules.items()}
        flags["model"] = f"of {len(shapes)} tensors, {sum(map(math.prod, shapes))} elements"
        flags["options"] = str((context.axes, gathers, keep, bucket_bytes, comm_dtype, profile))
        return CallFacts(flags, {}, ranks, {})

    compare_ranks(ranks, "parallelize", facts)
    hooks, counted, sharded, uses = prepared[0]
    names, grads = {module: name for name, module in model.named_modules()}, torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grads):
        shard_all(sharded, context, init, _device(mesh, device))
        gradients = Gradients(context, sharded, limit)
        gradients.prepare()
    for count in counted:
        setattr(count.owner, count.name, count.own)
    rest: Any = {"names": names, "counts": counted}
    parallel = ParallelModel(context, sharded, uses, list(hooks.values()), gradients, **rest)
    for module, name in names.items():
        if name in hooks:
            hooks[name].keep = keep or hooks[name].parent is None
            module.register_forward_pre_hook(hooks[name].enter, with_kwargs=True)
            module.register_forward_hook(hooks[name].leave, always_call=True)
        if name in hooks or not name:
            module.register_forward_hook(parallel.leave, always_call=True)
    model.register_forward_pre_hook(parallel.begin, prepend=True)
    for owner in {owner for each in parallel.sharded for owner, _ in each.owners}:
        owner.register_state_dict_pre_hook(parallel.refuse)
    setattr(model, ATTRIBUTE, parallel)
    return model


def _device(mesh: MeshLike, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _hooks(
    model: nn.Module, context: ParallelContext, inputs: RulesLike, outputs: RulesLike, gathers: Pattern | None
) -> dict[str, ModuleHooks]:
    """The modules that have rules, or gather, by name, outer ones first."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    }
    rules = [Rules(each).match(list(modules), partial=True, what="module") for each in (inputs, outputs)]
    gathering = set(rules[0])
    if gathers is not None:
        gathering = {"", *Rules({gathers: "..."}).match(list(modules), partial=True, what="module")}
    hooks: dict[str, ModuleHooks] = {}
    for name, module in modules.items():
        if not any(name in names for names in (*rules, gathering)):
            continue
        incoming, outgoing = (_tensor_rules(each.get(name), name, context) for each in rules)
        parent = _around(name, hooks)
        axes = varying(parent.varying if parent else (), [each.rule for each in incoming])
        signature = list(inspect.signature(module.forward).parameters)
        sides = incoming, outgoing, axes, name in gathering
        hooks[name] = ModuleHooks(name, signature, context, parent, *sides)
    return hooks


def _counts(model: nn.Module, context: ParallelContext, rules: Rules) -> list[Count]:
    """The integer attributes that have a rule, as one process counts. Raises ShapeError."""
    attributes = {
        f"{path}.{name}".lstrip("."): (module, name, n)
        for path, module in model.named_modules()
        for name, n in vars(module).items()
        if type(n) is int
    }
    counts = []
    for where, text in rules.match(list(attributes), partial=True, what="integer attribute").items():
        owner, name, n = attributes[where]
        try:
            sharding = Sharding(rule_of(text, context.axes).src, context.axes, (n,))
            parts = context.axes.size(*sharding.layout.axes)
            if n % parts:
                hint = f"processes would count unlike parts of {n}; shard it over fewer of them"
                raise ShapeError(f"{n} is not divisible by {parts}", text=text, hint=hint)
        except XshardError as error:
            raise with_path(error, where) from None
        counts.append(Count(owner, name, n, n // parts))
    return counts


def _tensor_rules(value: Any, name: str, context: ParallelContext) -> list[TensorRule]:
    """The value of a rule for one module -> a rule for each tensor."""
    if value is None:
        return []
    each: Iterable[tuple[Any, Any]] = [(None, value)]
    if isinstance(value, Mapping):
        each = value.items()
    elif isinstance(value, tuple | list):
        each = [(i, text) for i, text in enumerate(value) if text is not None]
    rules, where = [], name or "the model"
    for key, text in each:
        try:
            rules.append(TensorRule(key, rule_of(text, context.axes)))
        except XshardError as error:
            raise with_path(error, where) from None
    return rules


def _path(name: str) -> str:
    """The name of the module that has a parameter."""
    return name.rpartition(".")[0]


def _around(
    name: str, hooks: Mapping[str, ModuleHooks], *, itself: bool = False, what: str = "inputs"
) -> ModuleHooks | None:
    """The nearest module around a name that has a rule for its inputs, or its outputs, or that gathers."""
    parts = name.split(".") if name else []
    around = (hooks.get(".".join(parts[:n])) for n in range(len(parts) - (not itself), -1, -1))
    return next((each for each in around if each and getattr(each, what)), None)


def _parameters(
    model: nn.Module, context: ParallelContext, rules: Rules, hooks: Mapping[str, ModuleHooks]
) -> tuple[list[ShardedParameter], dict[str, ParameterUse]]:
    """Every parameter and buffer, tied ones once, and the use of each parameter by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    ruled = [*parameters, *(name for name in buffers if rules.pattern_for(name) is not None)]
    texts = rules.match(ruled, what="parameter")
    sharded: dict[int, ShardedParameter] = {}
    uses: dict[str, ParameterUse] = {}
    for name, x in {**parameters, **buffers}.items():
        path, _, attribute = name.rpartition(".")
        around = _around(path, hooks, itself=True)
        if around is None and name in parameters:
            hint = 'inputs= has a rule for it, or for a module around it; "" is the model'
            raise PlanError(f"{name}: no rule says how activations lie in '{path or 'the model'}'", hint=hint)
        try:
            inside = around.varying if around else frozenset()
            use = use_of(texts.get(name, "..."), x.ndim, context.axes, inside)
            if name in buffers:  # a buffer is never gathered
                use = use._replace(stored=use.used)
            sharding = Sharding(use.stored, context.axes, tuple(x.shape))
            used = Sharding(use.used.in_order(use.stored.names), context.axes, tuple(x.shape))
            sums = _around(path, hooks, itself=True, what="outputs")
            module, process = model.get_submodule(path), context.processes.device
            shard_embedding(module, path, used, sums.sums if sums else (), process)
        except XshardError as error:
            raise with_path(error, name) from None
        each = sharded.setdefault(id(x), ShardedParameter([], [], sharding))
        if [d.shards for d in each.sharding.layout.dims] != [d.shards for d in sharding.layout.dims]:
            ways = written(sharding.layout), written(each.sharding.layout)
            what = f"{name} is {each.name}, and stored as '{ways[0]}', not '{ways[1]}'"
            hint = "tied parameters are stored in one way; uses may differ, as in 'v c -> v/tp c'"
            raise PlanError(what, hint=hint)
        each.names.append(name)
        each.owners.append((model.get_submodule(path), attribute))
        if name in parameters:
            uses[name] = use
        if path in hooks:
            hooks[path].own += dims_of_parameter(used, process)
    shapes = {name: each.sharding.shape for each in sharded.values() for name in each.names}
    for path, names in groupby(sorted(uses, key=_path), _path):
        _check_added(path, [*names], uses, shapes, hooks[path].sums if path in hooks else ())
    for each in sharded.values():
        if each.name in uses:
            _prepare_uses(each, [uses[name] for name in each.names], hooks)
    return list(sharded.values()), uses


def _prepare_uses(
    each: ShardedParameter, uses: Sequence[ParameterUse], hooks: Mapping[str, ModuleHooks]
) -> None:
    """Let the nearest modules that gather gather the parameter for its uses."""
    each.later = summed_later(uses)
    for name, use, owner in zip(each.names, uses, each.owners, strict=True):
        if use.unsummed:
            owner[0].register_forward_pre_hook(partial(check_apart, name, use), with_kwargs=True)
        move = use.move(each.later)
        if move is None:
            continue
        gatherer = _around(name.rpartition(".")[0], hooks, itself=True, what="gathers")
        assert gatherer is not None  # the nearest one with a rule, or the model
        text = f"{move[0]} -> {move[1]}"
        same = [g for g in gatherer.gathered if g.move == text and g.tensor is each.tensor]
        if same:  # a tied parameter, which is gathered once
            same[0].owners.append(owner)
        else:
            gatherer.gathered.append(GatheredParameter(name, [owner], text, each.sharding.shape))


def _check_added(path: str, names: Sequence[str], uses: Uses, shapes: Mapping[str, Any], sums: Any) -> None:
    """Raise PlanError for a parameter that each process would add, as a bias, to what is sharded.

    names: the parameters of module `path`. sums: axes over which its output is a sum, by its rule.
    """
    inside = [use for name, use in uses.items() if sums and name.startswith(path and f"{path}.")]
    summed = {axis for use in inside for dim in use.used.dims for axis in dim.axes if axis in sums}
    for name in names:
        axes = summed | repeated(shapes[name], [(uses[n], shapes[n]) for n in names])
        if axes := axes - set(uses[name].used.axes) - uses[name].whole:
            over, used = ",".join(sorted(axes)), written(uses[name].used)
            raise PlanError(
                f"{name} is whole along '{over}', which shards its module: each process would add it",
                text=used,
                hint=f"shard it too; or, where the output is a sum, write '{used} -> {used} | sum({over})', "
                f"which adds it once; or '{used} -> {used} | copy({over})' if it is meant",
            )


def check_apart(name: str, use: ParameterUse, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise PlanError if activations need a gradient, which would lack the parts of other processes."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
        axes = ",".join(sorted(use.unsummed))
        raise PlanError(
            f"{name} is sharded over '{axes}', and its module's input is equal along it",
            text=written(use.used),
            hint=f"their gradient would lack other processes' parts: write copy({axes}) on the right side "
            "of the rule for the input of this module, or of one around it",
        )
