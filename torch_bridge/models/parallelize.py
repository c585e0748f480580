"""`parallelize`: rules become the layout of every parameter and the hooks of every module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import nn

from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import DeviceLike, MeshLike, ProcessMesh
from torch_bridge.models.block_guards import check_parametrizations
from torch_bridge.models.experts import Count, route_experts
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.hooks import ModuleHooks, TensorRule
from torch_bridge.models.living import living_models
from torch_bridge.models.module_parameters import ModuleParameters
from torch_bridge.models.names import module_of, title_of
from torch_bridge.models.own_attention import guard_attention
from torch_bridge.models.parallel import ATTRIBUTE, ParallelModel
from torch_bridge.models.parameters import (
    Init,
    ParallelContext,
    ShardedParameter,
    check_whole,
    shard_all,
)
from torch_bridge.models.prefetch import Prefetch
from torch_bridge.models.uses import (
    ModelParameters,
    check_varying_alike,
    nearest_hooks,
    parameters_by_rules,
)
from torch_bridge.precision import Precision, PrecisionLike
from torch_bridge.redistribution.blocks import tensor_device_of
from torch_bridge.versions.modules import has_forward_pre_hooks, modules_by_name
from xshard import ProfileLike, Rules, Sharding, XshardError, models
from xshard.arguments import limit_of
from xshard.cost.machine import with_addends
from xshard.cost.model import FREE, Addends
from xshard.errors import ShapeError, api_boundary, located
from xshard.models import rule_of
from xshard.rules import Pattern, RulesLike, match_objects
from xshard.signatures import Bytes, did_you_mean

Model = TypeVar("Model", bound=nn.Module)


class _ModelRules(NamedTuple):
    """The rules of `parallelize`, as you wrote them."""

    parameters: RulesLike
    inputs: RulesLike
    outputs: RulesLike
    counts: RulesLike
    gathers: Pattern | None
    keep: bool | Pattern
    precision: PrecisionLike


class _PreparedModel(NamedTuple):
    """What rules make of a model, before any tensor is cut."""

    hooks: Mapping[str, ModuleHooks]
    counts: list[Count]
    parameters: ModelParameters


class ParallelizeKeywords(TypedDict, total=False):
    """The keywords of `parallelize`, which `own_experts` hands on."""

    outputs: RulesLike | None
    counts: RulesLike | None
    gathers: Pattern | None
    init: Init
    device: DeviceLike | None
    keep: bool | Pattern
    bucket_bytes: Bytes
    prefetch: Bytes
    comm_dtype: CommDtypeLike
    addends: Addends
    precision: PrecisionLike
    offload: bool
    profile: ProfileLike


@api_boundary
def parallelize(  # noqa: PLR0913  public: rules of several kinds, and how they travel
    model: Model,
    parameters: RulesLike,
    inputs: RulesLike,
    mesh: MeshLike,
    *,
    outputs: RulesLike | None = None,
    counts: RulesLike | None = None,
    gathers: Pattern | None = None,
    init: Init = None,
    device: DeviceLike | None = None,
    keep: bool | Pattern = False,
    bucket_bytes: Bytes = "25MiB",
    prefetch: Bytes = 1,
    comm_dtype: CommDtypeLike = None,
    addends: Addends = FREE,
    precision: PrecisionLike = None,
    offload: bool = False,
    profile: ProfileLike = "auto",
) -> Model:
    """Shard a model of whole tensors in place, by layouts that go by name, and return it.

        xt.parallelize(model, {"**.weight": "o/dp i -> o i", "**": "..."}, {"": "b i -> b/dp i"}, mesh)
        # weights [o, i] are stored as [o/dp, i], and gathered for their modules

    The model keeps its names, optimisers, hooks and code. After `backward()`, `.grad` is this process's block
    of the whole gradient. The axes over which gradients are summed are derived: they are those along which
    activations differ in a module, by the right side of its rule or of the nearest one around it.
    `"o -> o | mean(tp)"` leaves tp out.

    Args:
        model: The model, with whole tensors that are equal on all processes, or on the meta device.
        parameters: Rules for names of parameters, and of buffers, which are replicated without one. A layout
            is how one is stored; `"o/dp i -> o i"` gathers it for its module (a buffer is stored as it is
            used).
        inputs: Rules for names of modules, "" is the model: how the first tensor argument moves. For several
            arguments, a dict by name or a tuple by position; some of them may be absent. One layout says how
            it arrives. With `"t/ep c -> t/to(ep) c"` rows go to the experts that they chose, as in
            `own_experts`, and come back. Axes that a rule does not name are as in the enclosing module.
        mesh: As for `redistribute`.
        outputs: Rules for results, as for inputs.
        counts: Rules for integer attributes of modules, by name, that are lengths of sharded dims: with
            `"**.attn.num_heads": "h/tp"` each process counts its own heads. A number that does not divide
            needs its parts: `"h/sizes(tp,2,1,1)"`.
        gathers: Modules that gather all parameters inside them together, as "layers.*"; the model gathers the
            rest. None: the modules with a rule for their input.
        init: Values for tensors on the meta device: a function of one module that sets its own tensors, or a
            state dict of whole ones.
        device: The device of tensors that were on the meta device; with `offload`, where modules compute.
            None: that of the mesh.
        keep: Keep gathered parameters until the backward pass instead of gathering them again (ZeRO-2 instead
            of ZeRO-3), and for all passes in `no_sync` and the next one. True, or a pattern of parameters.
            The model always keeps its own for one pass.
        bucket_bytes: How much of the gradients travels together, as 2**20 or "25MiB"; None for all.
        prefetch: How much of what modules gather travels ahead, while earlier ones compute, forward and
            backward: a number of modules, bytes as "64MiB", or None for all. It needs memory. Gradients
            travel while the backward pass goes on. 0: each module waits for its own.
        comm_dtype: The dtype in which parameters and gradients travel, as in `redistribute`.
        addends: As in `redistribute`, for gradients and for what rules move.
        precision: The dtypes in which modules use their parameters, and in which gradients are summed:
            one `Precision` for the model and each module that gathers, or a dict by patterns of modules,
            where the nearest one around a parameter counts. Not beside `comm_dtype`.
        offload: Store parameters, and so gradients and an optimizer's states, in the memory of the CPU,
            pinned for a GPU. A module's parameters are copied to `device` and gathered there; gradients
            come back when they are reduced.
        profile: The machine to plan for.

    Returns:
        The model itself.

    Raises:
        XshardError: With the name of the parameter or the module: a name has no rule, a rule fits no name,
            layouts do not fit, or tensors differ between processes. In the forward pass, a block contradicts
            a rule.
        DesyncError: On all processes, if their calls differ.
        ReplicaError: After the first backward pass, if gradients that should be equal are not, or blocks that
            rules take for replicas.

    Examples:
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
        ...     return tuple(model[0].weight.shape), torch.allclose(
        ...         parallel(torch.ones(2, 4)), whole
        ...     )
        >>> xt.testing.run_ranks(2, step)
        [((4, 4), True), ((4, 4), True)]
    """
    if hasattr(model, ATTRIBUTE):
        raise XshardError("the model is parallel already", hint="write all rules in one call")
    _check_dtypes(precision, comm_dtype)
    context = ParallelContext(mesh, with_addends(profile, addends), comm_dtype)
    if offload:
        context = replace(context, device=tensor_device_of(device=device, dst_mesh=mesh))
    ahead = Prefetch(context, prefetch)
    if outputs is None:
        outputs = {}
    if counts is None:
        counts = {}
    rules = _ModelRules(
        parameters=parameters,
        inputs=inputs,
        outputs=outputs,
        counts=counts,
        gathers=gathers,
        keep=keep,
        precision=precision,
    )
    largest_bucket = limit_of(bucket_bytes, "bucket_bytes")

    # Processes compare their calls before any of them cuts a tensor: it would not be undone.
    prepared: list[_PreparedModel] = []

    def facts() -> CallFacts:
        prepared.append(_prepare(model, context, rules, ahead))
        _check_no_blocks(prepared[0].parameters.sharded)
        check_whole(prepared[0].parameters.sharded, init)
        options = (
            context.axes, gathers, keep, bucket_bytes, prefetch, comm_dtype, precision, offload,
            context.profile,
        )  # fmt: skip
        flags = _facts_of(rules, prepared[0]) | {"options": str(options)}
        return CallFacts(flags, peers=context.processes.ranks)

    compare_ranks(context.processes.ranks, "parallelize", facts)  # calls `facts` once
    (ready,) = prepared
    by_rules = ready.parameters

    is_recording = torch.is_grad_enabled()
    # A model made in inference mode can be trained: its blocks are not inference tensors.
    with torch.inference_mode(False), torch.set_grad_enabled(is_recording):
        tensor_device = tensor_device_of(device=device, dst_mesh=mesh)
        shard_all(by_rules.sharded, context, init, tensor_device)
        gradients = Gradients(context, by_rules.sharded, largest_bucket)
    for change in by_rules.changes:
        change()
    gradients.prepare()
    for module_hooks in ready.hooks.values():
        module_hooks.parameters.share_between_passes(gradients)
    # From here on modules count their own part, as of heads.
    for count in ready.counts:
        setattr(count.module, count.attribute, count.local)
    parallel = ParallelModel(
        context,
        by_rules.sharded,
        by_rules.uses,
        by_rules.used_shardings,
        hooks=ready.hooks,
        gradients=gradients,
        prefetch=ahead,
        counts=ready.counts,
    )
    _attach(model, parallel)
    return model


def _check_no_blocks(parameters: Sequence[ShardedParameter]) -> None:
    """Raise XshardError if a parameter is a block already, of a part of the model or of another model."""
    names_of_blocks = {}
    for parallel in living_models():
        for parameter in parallel.cut_parameters:
            names_of_blocks[id(parameter.tensor)] = parameter.name
    for parameter in parameters:
        block_name = names_of_blocks.get(id(parameter.tensor))
        if block_name is not None:
            reason = f"{parameter.name} is a block already: {block_name} of a parallel model"
            raise XshardError(
                reason, hint="write all rules in one call, for a model around all parts"
            )


def _check_dtypes(precision: PrecisionLike, comm_dtype: CommDtypeLike) -> None:
    """Raise XshardError if two options say how parameters travel."""
    if precision is not None and comm_dtype is not None:
        reason = (
            f"comm_dtype={comm_dtype} and precision= both say in which dtypes parameters travel"
        )
        hint = "leave comm_dtype= out: they travel in param_dtype, and gradients in reduce_dtype"
        raise XshardError(reason, hint=hint)


def _prepare(
    model: nn.Module, context: ParallelContext, rules: _ModelRules, prefetch: Prefetch
) -> _PreparedModel:
    """Read the rules of a model. Raises what is wrong with them; the model stays as it is."""
    modules = modules_by_name(model)
    hooks_by_name = _module_hooks(modules, context, rules, prefetch)
    counts = _counts(modules, context.processes, Rules(rules.counts))
    parameters = parameters_by_rules(
        model, context, Rules(rules.parameters), hooks_by_name, rules.keep
    )
    check_parametrizations(parameters.used_shardings)
    # A module with several names has hooks under each, which are registered once.
    hooks = {module_hooks.name: module_hooks for module_hooks in hooks_by_name.values()}
    for module_hooks in hooks.values():
        module_hooks.parameters.count_bytes(parameters.used_shardings)
    counts += route_experts(hooks, context, parameters.sharded, parameters.used_shardings)
    return _PreparedModel(hooks, counts, parameters)


def _facts_of(rules: _ModelRules, prepared: _PreparedModel) -> dict[str, str]:
    """Return the facts about rules and model in which processes have to agree."""
    facts = {}
    for keyword in ("parameters", "inputs", "outputs", "counts"):
        facts[keyword] = str(dict(Rules(getattr(rules, keyword))))
    # Two models may have the same rules.
    shapes = [parameter.sharding.shape for parameter in prepared.parameters.sharded]
    n_elements = sum(math.prod(shape) for shape in shapes)
    facts["model"] = f"of {len(shapes)} tensors, {n_elements} elements"
    return facts


def _attach(model: nn.Module, parallel: ParallelModel) -> None:
    """Register the hooks that carry out the rules on a model, and set its state as an attribute.

    From now on the model runs by its rules. torch calls hooks in the order in which they are
    registered: the model's `begin` comes before all others (`prepend`), and notes on errors come
    after the other hooks of their module.
    """
    parallel.names = {module: name for name, module in model.named_modules()}
    for module, name in parallel.names.items():
        hooks = parallel.hooks.get(name)
        if hooks is not None:
            if hooks.parameters.parameters and has_forward_pre_hooks(module):
                hooks.gathers_first = True
                module.register_forward_pre_hook(hooks.gather_first, prepend=True)
            module.register_forward_pre_hook(hooks.before_forward, with_kwargs=True)
            module.register_forward_hook(hooks.after_forward, always_call=True)
        if hooks is not None or module is model:
            module.register_forward_pre_hook(parallel.penalties.before_forward)
            module.register_forward_hook(parallel.penalties.after_forward, always_call=True)
            module.register_forward_hook(parallel.add_note, always_call=True)
    model.register_forward_pre_hook(parallel.begin, prepend=True)
    guard_attention(model, parallel.hooks)
    model.register_forward_hook(parallel.note_outputs)
    model.register_forward_hook(parallel.end, always_call=True)

    modules_with_blocks = []
    for parameter in parallel.sharded_parameters:
        modules_with_blocks += [slot.module for slot in parameter.slots]
    for module in dict.fromkeys(modules_with_blocks):  # each once
        module.register_state_dict_pre_hook(parallel.refuse_state_dict)
    # It comes first: a copy of the model asks it before tensors are copied, which may be gathered ones
    # of a call that was interrupted.
    attributes = dict(vars(model))
    vars(model).clear()
    vars(model).update({ATTRIBUTE: parallel}, **attributes)


def replicated(model: nn.Module, context: ParallelContext) -> ParallelModel:
    """Describe a model that has no rules as a parallel model, so that `verify` and others take it.

    Its parameters are whole on every process, and layers of the model itself sum their gradients over
    processes, as those of `nn.domain_parallel` do. The model is only described: no hook is
    registered, and no gradient is summed.
    """
    # `parameters_by_rules` reads from hooks along which axes activations differ between processes.
    # These hooks of the whole model ("") say: along all axes. They are never registered.
    no_prefetch = Prefetch(context, 0)
    hooks_of_model = ModuleHooks(
        name="",
        arguments=[],
        context=context,
        parent=None,
        inputs=[TensorRule(None, rule_of("...", context.axes))],
        outputs=(),
        varying=frozenset(context.axes.axes),
        gathers=False,
        parameters=ModuleParameters("", context, no_prefetch),
    )
    all_replicated = Rules({"**": "..."})  # every parameter is replicated
    by_rules = parameters_by_rules(model, context, all_replicated, hooks={"": hooks_of_model})
    no_sums = Gradients(context, (), bucket_bytes=None)
    return ParallelModel(
        context,
        by_rules.sharded,
        by_rules.uses,
        by_rules.used_shardings,
        hooks={},
        gradients=no_sums,
        prefetch=no_prefetch,
    )


def _module_hooks(
    modules: Mapping[str, nn.Module],
    context: ParallelContext,
    rules: _ModelRules,
    prefetch: Prefetch,
) -> dict[str, ModuleHooks]:
    """Make the hooks of each module that has a rule, or that gathers parameters.

    Returns them by every name of the module, outer modules first. Nothing is registered yet, and they
    gather no parameters yet. Raises NotationError or XshardError for a rule that is malformed or
    fits no module.
    """
    modules = _called_modules(modules)
    input_texts = match_objects(Rules(rules.inputs), modules, "module")
    output_texts = match_objects(Rules(rules.outputs), modules, "module")
    gathering_names = _gathering_modules(rules.gathers, modules, input_texts)
    precisions = _precisions(rules.precision, modules, gathering_names)
    rules_of_modules = _RulesOfModules(input_texts, output_texts, gathering_names, precisions)
    hooked_names = {*input_texts, *output_texts, *gathering_names, *precisions}

    hooks: dict[str, ModuleHooks] = {}
    hooks_of_object: dict[nn.Module, ModuleHooks] = {}  # a module with several names has one
    for name, module in modules.items():
        if name not in hooked_names:
            continue
        # The nearest module around this one with a rule for its input; outer modules come first.
        parent = nearest_hooks(module_of(name), hooks, "inputs") if name else None
        by_this_name = _hooks_of_module(name, module, parent, rules_of_modules, context, prefetch)
        hooks[name] = hooks_of_object.setdefault(module, by_this_name)
        if by_this_name.inputs:
            check_varying_alike(hooks[name].title, hooks[name].varying, name, by_this_name.varying)
    return hooks


class _RulesOfModules(NamedTuple):
    """What the rules say of each module, by its names."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    gathering: Collection[str]
    precisions: Mapping[str, Precision]


def _hooks_of_module(
    name: str,
    module: nn.Module,
    parent: ModuleHooks | None,
    rules: _RulesOfModules,
    context: ParallelContext,
    prefetch: Prefetch,
) -> ModuleHooks:
    """Make the hooks of a module by its rules under one of its names.

    `parent` has the hooks of the nearest module around it with a rule for its input.
    """
    # Rows may be routed into a module, to experts; they come back without a rule.
    input_rules = _tensor_rules(rules.inputs.get(name), name, context, routes=True)
    arguments = inspect.signature(module.forward).parameters
    _check_arguments(name, arguments, input_rules)
    # Axes along which activations inside differ between processes: those around the module, as
    # its rules change them.
    outer_varying = parent.varying if parent is not None else frozenset[str]()
    varying = models.varying_axes(outer_varying, [rule.rule for rule in input_rules])
    return ModuleHooks(
        name=name,
        arguments=list(arguments),
        context=context,
        parent=parent,
        inputs=input_rules,
        outputs=_tensor_rules(rules.outputs.get(name), name, context, routes=False),
        varying=varying,
        gathers=name in rules.gathering,
        parameters=ModuleParameters(name, context, prefetch),
        precision=rules.precisions.get(name),
    )


def _check_arguments(
    name: str, parameters: Mapping[str, inspect.Parameter], rules: Sequence[TensorRule]
) -> None:
    """Raise XshardError for a rule that names an argument which a module's forward does not take."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for rule in rules:
        if isinstance(rule.key, str) and rule.key not in parameters:
            hint = f"{did_you_mean(rule.key, parameters)}forward({', '.join(parameters)})"
            raise XshardError(f"inputs: module {name!r} takes no argument {rule.key!r}", hint=hint)


def _gathering_modules(
    gathers: Pattern | None,
    modules: Mapping[str, nn.Module],
    names_with_input_rule: Collection[str],
) -> set[str]:
    """Return the names of the modules that gather the parameters inside them for a forward pass.

    "blocks.*" in a model of two blocks -> {"", "blocks.0", "blocks.1"}, where "" is the model.

    Args:
        gathers: The user's pattern of names; None for all modules with a rule for their input.
        modules: All modules by name.
        names_with_input_rule: The names of modules with a rule for their input.
    """
    if gathers is None:
        return set(names_with_input_rule)
    # `Rules` matches patterns to names; its layout "..." is not used.
    matched = match_objects(Rules({gathers: "..."}), modules, "module")
    # The model gathers what no other module does.
    return {"", *matched}


def _precisions(
    precision: PrecisionLike, modules: Mapping[str, nn.Module], gathering_names: Collection[str]
) -> dict[str, Precision]:
    """Return the precision of each module that has one, by name."""
    if precision is None:
        return {}
    if isinstance(precision, Precision):
        return dict.fromkeys(["", *gathering_names], precision)
    return match_objects(Rules(precision), modules, "module")


def _called_modules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that are called, by name: a list of modules, as `ModuleList`, is not."""
    called = {}
    for name, module in modules.items():
        has_forward = type(module).forward is not nn.Module.forward
        if has_forward or "forward" in module.__dict__:
            called[name] = module
    return called


def _counts(modules: Mapping[str, nn.Module], processes: ProcessMesh, rules: Rules) -> list[Count]:
    """Read the rules for integer attributes of modules, as numbers of heads: whole, and local.

    `attention.n_heads` = 12 under the rule "h/tp" on tp=4 -> 3 on each process; 4 under
    "h/sizes(tp,2,1,1)" -> 2 on the first process. Nothing is set yet. Raises ShapeError if a number
    does not divide evenly, and the rule does not say how it is divided.
    """
    attributes = _integer_attributes(modules)
    counts = []
    texts = match_objects(rules, attributes, "integer attribute")
    for full_name, text in texts.items():
        count = attributes[full_name]
        with located(full_name):
            # The count is the length of a dim, and its rule the layout of an array of this dim.
            rule = rule_of(text, processes.mesh)
            heads = Sharding(rule.src, processes.mesh, shape=(count.whole,))
            [dim] = heads.layout.dims
            # Rows of an array in plain blocks would be cut within heads: on 3 processes 4 heads of 4
            # rows are 2, 2 and 0 heads, but the 16 rows are 6, 6 and 4.
            if not heads.is_even and all(shard.order == "block" for shard in dim.shards):
                hint = f"say what each process counts of {count.whole}, as in 'h/sizes(tp,2,1,1)'"
                reason = f"{count.whole} is not divisible by {processes.mesh.size(*dim.axes)}"
                raise ShapeError(reason, text=text, hint=hint)
        [local] = heads.local_shape(processes.device)
        counts.append(count._replace(local=local))
    return list(dict.fromkeys(counts))  # a module may have several names


def _integer_attributes(modules: Mapping[str, nn.Module]) -> dict[str, Count]:
    """Return the integers of all modules by full names, as "layers.0.attn.num_heads", still whole."""
    attributes = {}
    for path, module in modules.items():
        for name, value in vars(module).items():
            if type(value) is int:  # a bool is an int, too
                full_name = f"{path}.{name}" if path else name
                attributes[full_name] = Count(module, name, whole=value, local=value)
    return attributes


def _tensor_rules(
    value: Any, name: str, context: ParallelContext, *, routes: bool
) -> list[TensorRule]:
    """Read the layout rules that a user wrote for the inputs, or the outputs, of one module.

    "b s/tp c -> b s c" is a rule for the first tensor; {"labels": "b s"} is one for an argument by
    name; ("b s", None, "b c") are rules for positions 0 and 2.

    Args:
        value: One layout for the first tensor, or several by name or position; None for no rule.
        name: The name of the module, for errors.
        context: The mesh and options.
        routes: Whether a rule may send rows to experts, as "t/ep c -> t/to(ep) c".

    Returns:
        The rules; the key of one for the first tensor is None.
    """
    texts: dict[Any, Any]
    if value is None:
        texts = {}
    elif isinstance(value, Mapping):
        texts = dict(value)
    elif isinstance(value, tuple | list):
        texts = {i: text for i, text in enumerate(value) if text is not None}
    else:
        texts = {None: value}
    with located(title_of(name)):
        return [
            TensorRule(key, rule_of(text, context.axes, routes=routes))
            for key, text in texts.items()
        ]
