"""`parallelize`: rules become the layout of every parameter and the hooks of every module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.models.embedding import shard_embedding
from torch_bridge.models.experts import Uses, route_experts
from torch_bridge.models.gathered import GatheredParameter, KeptParameters
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.hooks import ModuleHooks, TensorRule
from torch_bridge.models.parallel import ATTRIBUTE, ParallelModel
from torch_bridge.models.parameters import Init, ParallelContext, ShardedParameter, shard_all
from torch_bridge.redistribution.blocks import tensor_device_of
from xshard import Mesh, ProfileLike, Rules, Sharding, XshardError, models
from xshard.arguments import explained, limit_of
from xshard.errors import PlanError, ShapeError, located
from xshard.models import ParameterUse, rule_of, use_of, written
from xshard.rules import Pattern, RulesLike

Hooks = Mapping[str, ModuleHooks]


@explained(
    params="parameters", parallelize_plan="parameters", plan="parameters", device_mesh="mesh"
)
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
    keep: bool | Pattern = False,
    bucket_bytes: int | str | None = "25MiB",
    comm_dtype: CommDtypeLike = None,
    profile: ProfileLike = "auto",
) -> nn.Module:
    """Shard a model of whole tensors in place, by layouts that go by name, and return it.

    The model keeps its names, optimisers, hooks and code. After `backward()`, `.grad` is this process's block
    of the whole gradient.

    parameters: rules for names of parameters, and of buffers, which are replicated without one. A layout is
    how one is stored; `"o/dp i -> o i"` gathers it for its module (a buffer is stored as it is used).
    inputs: rules for names of modules, "" is the model: how the first tensor argument moves, or several, as a
    dict by name or a tuple by position; some of them may be absent. One layout says how it arrives. With
    `"t/ep c -> t/to(ep) c"` rows go to the experts that they chose, as in `own_experts`, and come back.
    Axes that a rule does not name are as in the enclosing module. outputs: rules for results.
    The axes over which gradients are summed are derived: the axes along which activations differ in a module,
    by the right side of its rule or of the nearest one around it; `"o -> o | mean(tp)"` leaves tp out.
    counts: rules for integer attributes of modules, by name, that are lengths of sharded dims: with
    `"**.attn.num_heads": "h/tp"` each process counts its own heads. Each has to divide.
    gathers: pattern of the modules that gather parameters, all inside them at once, as "layers.*"; the model
    gathers the rest. None: the modules with a rule for their input. keep: keep gathered parameters until the
    backward pass instead of gathering them again (ZeRO-2 instead of ZeRO-3), and for all passes in `no_sync`
    and the next one; the model always keeps its own for one pass.

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
    ...     model = torch.nn.Sequential(
    ...         torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ...     )
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
    context = ParallelContext(mesh, profile, comm_dtype)
    outputs = outputs or {}
    counts = counts or {}
    ranks = context.processes.ranks
    limit = limit_of(bucket_bytes, "bucket_bytes")
    prepared: list[tuple[dict[str, ModuleHooks], Any, list[ShardedParameter], Any]] = []

    def facts() -> CallFacts:
        hooks = _hooks(model, context, inputs, outputs, gathers)
        own = _counts(model, context.axes, Rules(counts))
        state = _parameters(model, context, Rules(parameters), hooks, keep)
        prepared.append((hooks, own + route_experts(hooks, context, *state), *state))
        shapes = [each.sharding.shape for each in prepared[0][2]]
        rules = {"parameters": parameters, "inputs": inputs, "outputs": outputs, "counts": counts}
        flags = {name: str(dict(Rules(each))) for name, each in rules.items()}
        flags["model"] = f"of {len(shapes)} tensors, {sum(map(math.prod, shapes))} elements"
        flags["options"] = str((context.axes, gathers, keep, bucket_bytes, comm_dtype, profile))
        return CallFacts(flags, {}, ranks, {})

    compare_ranks(ranks, "parallelize", facts)
    hooks, counted, sharded, uses = prepared[0]
    grads = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grads):
        shard_all(sharded, context, init, tensor_device_of(None, device, mesh))
        gradients = Gradients(context, sharded, limit)
    for each in hooks.values():
        each.kept = KeptParameters(
            [part for part in each.gathered if part.once], context, gradients
        )
    for owner, attribute, _, n in counted:
        setattr(owner, attribute, n)
    parallel = ParallelModel(
        context, sharded, uses, hooks, gradients, counts=[each[:3] for each in counted]
    )
    parallel.names = {module: name for name, module in model.named_modules()}
    for module, name in parallel.names.items():
        if name in hooks:
            module.register_forward_pre_hook(hooks[name].enter, with_kwargs=True)
            module.register_forward_hook(hooks[name].leave, always_call=True)
        if name in hooks or not name:
            module.register_forward_hook(parallel.leave, always_call=True)
    model.register_forward_pre_hook(parallel.begin, prepend=True)
    for owner in {owner for each in parallel.sharded for owner, _ in each.owners}:
        owner.register_state_dict_pre_hook(parallel.refuse)
    setattr(model, ATTRIBUTE, parallel)
    return model


def replicated(model: nn.Module, context: ParallelContext) -> ParallelModel:
    """The state of a model with replicated parameters, which sums their gradients by itself."""
    varies = (
        [TensorRule(None, rule_of("...", context.axes))],
        (),
        frozenset(context.axes.axes),
        False,
    )
    root = ModuleHooks("", [], context, None, *varies)
    state = _parameters(model, context, Rules({"**": "..."}), {"": root})
    return ParallelModel(context, *state, {}, Gradients(context, (), None))


def _hooks(
    model: nn.Module,
    context: ParallelContext,
    inputs: RulesLike,
    outputs: RulesLike,
    gathers: Pattern | None,
) -> dict[str, ModuleHooks]:
    """The modules that have rules, or gather, by name, outer ones first."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    }
    every = (inputs, outputs, {} if gathers is None else {gathers: "..."})
    rules = [Rules(each).match(list(modules), partial=True, what="module") for each in every]
    gathering = {*rules[0]} if gathers is None else {"", *rules[2]}
    hooks: dict[str, ModuleHooks] = {}
    for name, module in modules.items():
        if any(name in names for names in (*rules, gathering)):
            enter = _tensor_rules(rules[0].get(name), name, context, True)
            leave = _tensor_rules(rules[1].get(name), name, context, False)
            parent = _around(name, hooks)
            axes = models.varying(parent.varying if parent else (), [each.rule for each in enter])
            signature = list(inspect.signature(module.forward).parameters)
            hooks[name] = ModuleHooks(
                name, signature, context, parent, enter, leave, axes, name in gathering
            )
    return hooks


def _counts(model: nn.Module, axes: Mesh, rules: Rules) -> list[tuple[nn.Module, str, int, int]]:
    """Modules, their integer attributes that have a rule, the whole and this one's. Raises ShapeError."""
    attributes = {
        f"{path}.{name}".lstrip("."): (module, name, n)
        for path, module in model.named_modules()
        for name, n in vars(module).items()
        if type(n) is int
    }
    counts = []
    for where, text in rules.match(
        list(attributes), partial=True, what="integer attribute"
    ).items():
        owner, name, n = attributes[where]
        with located(where):
            parts = axes.size(*Sharding(rule_of(text, axes).src, axes, (n,)).layout.axes)
            if n % parts:
                hint = f"processes would count unlike parts of {n}; shard it over fewer of them"
                raise ShapeError(f"{n} is not divisible by {parts}", text=text, hint=hint)
        counts.append((owner, name, n, n // parts))
    return counts


def _tensor_rules(
    value: Any, name: str, context: ParallelContext, routes: bool
) -> list[TensorRule]:
    """The value of a rule for one module -> a rule for each tensor."""
    texts: dict[Any, Any] = {None: value} if value is not None else {}
    if isinstance(value, Mapping):
        texts = dict(value)
    elif isinstance(value, tuple | list):
        texts = {i: text for i, text in enumerate(value) if text is not None}
    with located(name or "the model"):
        return [TensorRule(key, rule_of(text, context.axes, routes)) for key, text in texts.items()]


def _path(name: str) -> str:
    """The name of the module around a module or a parameter."""
    return name.rpartition(".")[0]


def _around(path: str, hooks: Hooks, what: str = "inputs") -> ModuleHooks | None:
    """This module, or the nearest around it, that has rules for its inputs or outputs, or that gathers."""
    each = hooks.get(path)
    if each is not None and getattr(each, what):
        return each
    return _around(_path(path), hooks, what) if path else None


def _parameters(
    model: nn.Module,
    context: ParallelContext,
    rules: Rules,
    hooks: Hooks,
    keep: bool | Pattern = True,
) -> tuple[list[ShardedParameter], dict[str, ParameterUse]]:
    """Every parameter and buffer, tied ones once, and the use of each parameter by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    kept = Rules({} if keep is False or keep == "" else {"**" if keep is True else keep: "..."})
    kept.match(list(parameters), partial=True, what="parameter")
    ruled = [*parameters, *(name for name in buffers if rules.pattern_for(name) is not None)]
    texts = rules.match(ruled, what="parameter")
    sharded: dict[int, ShardedParameter] = {}
    uses: dict[str, ParameterUse] = {}
    for name, x in {**parameters, **buffers}.items():
        path, _, attribute = name.rpartition(".")
        around = _around(path, hooks)
        module = model.get_submodule(path)
        if around is None and name in parameters:
            hint = 'inputs= has a rule for it, or for a module around it; "" is the model'
            raise PlanError(
                f"{name}: no rule says how activations lie in '{path or 'the model'}'", hint=hint
            )
        with located(name):
            inside = around.varying if around else frozenset()
            use = use_of(texts.get(name, "..."), x.ndim, context.axes, inside)
            if name in buffers:  # a buffer is never gathered
                use = use._replace(stored=use.used)
            sharding = Sharding(use.stored, context.axes, tuple(x.shape))
            used = Sharding(use.used.in_order(use.stored.names), context.axes, tuple(x.shape))
            sums = _around(path, hooks, "outputs")
            shard_embedding(module, path, used, sums.sums if sums else (), context.processes.device)
        each = sharded.setdefault(id(x), ShardedParameter([], [], sharding))
        if [d.shards for d in each.sharding.layout.dims] != [
            d.shards for d in sharding.layout.dims
        ]:
            ways = written(sharding.layout), written(each.sharding.layout)
            hint = "tied parameters are stored in one way; uses may differ, as in 'v c -> v/tp c'"
            raise PlanError(
                f"{name} is {each.name}, stored as '{ways[0]}', not '{ways[1]}'", hint=hint
            )
        each.names.append(name)
        each.owners.append((module, attribute))
        if name in parameters:
            uses[name] = use
        if path in hooks:
            hooks[path].own += models.dims_of_parameter(used, context.processes.device)
    _check_added(
        uses, {name: each.sharding.shape for each in sharded.values() for name in each.names}, hooks
    )
    for each in sharded.values():
        if each.name in uses:
            _prepare_uses(each, uses, hooks, kept)
    return list(sharded.values()), uses


def _prepare_uses(each: ShardedParameter, uses: Uses, hooks: Hooks, kept: Rules) -> None:
    """Let the nearest modules that gather gather the parameter for its uses."""
    each.later = models.summed_later([uses[name] for name in each.names])
    for name, owner in zip(each.names, each.owners, strict=True):
        use = uses[name]
        if use.unsummed:
            owner[0].register_forward_pre_hook(partial(check_apart, name, use), with_kwargs=True)
        if (move := use.move(each.later)) is None:
            continue
        gatherer = _around(_path(name), hooks, "gathers")
        assert gatherer is not None  # the nearest one with a rule, or the model
        text = f"{move[0]} -> {move[1]}"
        if same := [g for g in gatherer.gathered if g.move == text and g.tensor is each.tensor]:
            same[0].owners.append(owner)  # a tied parameter, which is gathered once
        else:
            is_named = kept.pattern_for(name) is not None
            flags = gatherer.parent is None or is_named, is_named and len(each.names) == 1
            back = f"{move[1].dual} -> {move[0].dual}"
            part = GatheredParameter(name, [owner], text, back, each.sharding.shape, *flags)
            gatherer.gathered.append(part)


def _check_added(uses: Uses, shapes: Mapping[str, Any], hooks: Hooks) -> None:
    """Raise PlanError for a parameter that each process would add, as a bias, to what is sharded."""
    for path, names in groupby(sorted(uses, key=_path), _path):
        sums = hooks[path].sums if path in hooks else ()
        inside = [
            use for name, use in uses.items() if sums and name.startswith(path and f"{path}.")
        ]
        summed = {
            axis for use in inside for dim in use.used.dims for axis in dim.axes if axis in sums
        }
        for name in (own := [*names]):
            axes = summed | models.repeated(shapes[name], [(uses[n], shapes[n]) for n in own])
            if axes := axes - set(uses[name].used.axes) - uses[name].whole:
                over = ",".join(sorted(axes))
                used = written(uses[name].used)
                what = f"{name} is whole along '{over}', which shards its module: each process would add it"
                hint = f"shard it too; or, where the output is a sum, write '{used} -> {used} | sum({over})'"
                hint += f", which adds it once; or '{used} -> {used} | copy({over})' if it is meant"
                raise PlanError(what, text=used, hint=hint)


def check_apart(name: str, use: ParameterUse, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise PlanError if activations need a gradient, which would lack the parts of other processes."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
        axes = ",".join(sorted(use.unsummed))
        what = f"{name} is sharded over '{axes}', and its module's input is equal along it"
        hint = f"their gradient would lack other processes' parts: write copy({axes}) on the right side "
        hint += "of the rule for the input of this module, or of one around it"
        raise PlanError(what, text=written(use.used), hint=hint)
