"""Every parameter of a model by its rules: how it is stored, used and gathered, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from torch_bridge.models.embedding import check_frequencies, shard_embedding
from torch_bridge.models.gathered import GatheredParameter
from torch_bridge.models.hooks import ModuleHooks
from torch_bridge.models.names import is_inside, module_of, title_of
from torch_bridge.models.parameters import ParallelContext, ShardedParameter, TensorSlot
from torch_bridge.precision import Precision, parameter_dtypes
from xshard import Layout, Mesh, Rules, Sharding, XshardError, models
from xshard.errors import PlanError, ShapeError, located
from xshard.models import ParameterUse, layout_text, use_of
from xshard.rules import Pattern, match_objects

# Layers of which transformers' attention views the results as heads.
PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "query_key_value.weight")

Hooks = Mapping[str, ModuleHooks]  # by the name of the module, outer ones first
Uses = Mapping[str, ParameterUse]  # by the name of the parameter
# Functions that change modules, to call when nothing can fail any more.
Changes = list[Callable[[], object]]


class ModelParameters(NamedTuple):
    """Every parameter and buffer, tied ones once, and the use of each parameter by name.

    Attributes:
        sharded: The parameters and buffers.
        uses: The use of each parameter, by each of its names.
        used_shardings: The layouts in use, with dims in the order of the tensor, and global shapes.
        changes: Functions that change the model's modules: nothing has changed yet.
    """

    sharded: list[ShardedParameter]
    uses: dict[str, ParameterUse]
    used_shardings: dict[str, Sharding]
    changes: Changes


def nearest_hooks(
    path: str, hooks: Hooks, has: Literal["inputs", "outputs", "gathers", "precision"]
) -> ModuleHooks | None:
    """Return the hooks of this module, or of the nearest around it, whose attribute `has` is set."""
    for candidate in _hooks_around(path, hooks):
        if getattr(candidate, has):
            return candidate
    return None


def _hooks_around(path: str, hooks: Hooks) -> list[ModuleHooks]:
    """Return the hooks of this module and of those around it, inner ones first."""
    paths = [path]
    while paths[-1]:
        paths.append(module_of(paths[-1]))
    return [hooks[outer] for outer in paths if outer in hooks]


def parameters_by_rules(
    model: nn.Module,
    context: ParallelContext,
    rules: Rules,
    hooks: Hooks,
    keep: bool | Pattern = True,
) -> ModelParameters:
    """Read the rule of every parameter and buffer, and note which modules gather which parameters.

    "weight": "o/dp i -> o i" is stored as [o/dp, i] and used as [o, i] in the forward pass, so that
    a module has to gather it. The model stays as it is.

    Args:
        model: The model, with whole tensors.
        context: The mesh and options.
        rules: Rules for names of parameters and buffers.
        hooks: The hooks of modules, by each name, outer ones first. They learn the dims of their
            parameters, and what they gather.
        keep: Which gathered parameters stay in memory until the backward pass, as for
            `parallelize`: True for all, False for none, or a pattern of names.

    Raises:
        XshardError: Rules do not fit the model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    keep_rules = _keep_rules(keep)
    keep_rules.match(list(parameters), partial=True, what="parameter")
    tensors = {**parameters, **buffers}
    _check_no_lazy(tensors)
    slots = {name: _slot_of(name, model) for name in tensors}
    rule_texts = _rule_texts(slots, buffers, rules)

    by_id: dict[int, ShardedParameter] = {}  # a tied parameter is one object
    uses: dict[str, ParameterUse] = {}
    used_shardings = {}
    changes: Changes = []
    for name, x in tensors.items():
        is_buffer = name in buffers
        varying = _varying_around(name, hooks, is_buffer)
        with located(name):
            rule = _read_rule(x, rule_texts.get(name, "..."), is_buffer, context.axes, varying)
            _check_heads(name, rule.used, model, hooks)
            check_frequencies(slots[name].module, module_of(name), varying, context.axes)
            changes += _embedding_changes(slots[name].module, name, rule.used, context, hooks)
        parameter = by_id.setdefault(id(x), ShardedParameter([], [], rule.stored))
        if is_buffer:
            _check_no_parameter(name, parameter, parameters)
        _check_stored_alike(name, rule.stored, parameter)
        parameter.names.append(name)
        parameter.slots.append(slots[name])
        if not is_buffer:
            uses[name] = rule.use
            used_shardings[name] = rule.used
        # The output of a module may have a dim of its parameter, as o of "o i": its length is then
        # known.
        path = module_of(name)
        if path in hooks:
            dims = models.dims_of_parameter(rule.used, context.processes.device)
            hooks[path].parameter_dims += dims

    # These need all uses: those of a tied parameter, and of the other parameters of a module.
    sharded = list(by_id.values())
    _check_biases(uses, used_shardings, hooks)
    for parameter in sharded:
        if parameter.name in uses:
            changes += _plan_uses(parameter, uses, hooks, keep_rules, context)
    return ModelParameters(sharded, uses, used_shardings, changes)


def _check_no_lazy(tensors: Mapping[str, Tensor]) -> None:
    """Raise XshardError for a tensor of a lazy module, which has no shape before its first call."""
    for name, x in tensors.items():
        if nn.parameter.is_lazy(x):
            hint = "call the model with a batch before parallelize"
            raise XshardError(f"{name} is of a lazy module, and has no shape yet", hint=hint)


def _rule_texts(
    slots: Mapping[str, TensorSlot], buffers: Mapping[str, Tensor], rules: Rules
) -> dict[str, str]:
    """Return the rule of each parameter, and of the buffers that have one, by every name."""
    # A tied parameter may have a rule for each slot; a buffer has one.
    objects: dict[str, Hashable] = {**slots, **buffers}
    # A parameter without a rule is an error; a buffer without one is replicated.
    with_rule = {x for name, x in buffers.items() if rules.pattern_for(name) is not None}
    for name, x in buffers.items():
        if x not in with_rule:
            del objects[name]
    return match_objects(rules, objects, "parameter", partial=False)


def _slot_of(name: str, model: nn.Module) -> TensorSlot:
    """Return the slot of a parameter or buffer: "up.weight" -> the module `up`, "weight"."""
    return TensorSlot(model.get_submodule(module_of(name)), name.rpartition(".")[2])


def _keep_rules(keep: bool | Pattern) -> Rules:
    """Return rules that match the parameters to keep: all, none, or those of a pattern."""
    pattern = "**" if keep is True else keep
    return Rules({pattern: "..."} if pattern else {})


def _varying_around(name: str, hooks: Hooks, is_buffer: bool) -> frozenset[str]:
    """Return the axes along which activations differ between processes, in the module of a tensor.

    Raises PlanError for a parameter of a module whose activations no rule lays out.
    """
    path = module_of(name)
    outer_hooks = nearest_hooks(path, hooks, "inputs")
    if outer_hooks is not None:
        return outer_hooks.varying
    if not is_buffer:
        hint = 'inputs= has a rule for it, or for a module around it; "" is the model'
        reason = f"{name}: no rule says how activations lie in '{title_of(path)}'"
        raise PlanError(reason, hint=hint)
    return frozenset()


class _ReadRule(NamedTuple):
    """The rule of one tensor: its use, and how it is stored and used, with its global shape."""

    use: ParameterUse
    stored: Sharding
    used: Sharding


def _read_rule(
    x: Tensor, text: str, is_buffer: bool, axes: Mesh, varying: frozenset[str]
) -> _ReadRule:
    """Parse the rule of a tensor: "o/dp i -> o i" is stored as "o/dp i", and used as "o i".

    Args:
        x: The whole tensor.
        text: Its rule.
        is_buffer: Whether it is a buffer.
        axes: The mesh.
        varying: Axes along which activations in its module differ.
    """
    use = use_of(text, x.ndim, axes, varying)
    if is_buffer:  # never gathered: it is stored as it is used
        use = use._replace(stored=use.used)
    stored = Sharding(use.stored, axes, tuple(x.shape))
    # Both sides may name dims in another order; a tensor has one.
    used = Sharding(use.used.in_order(use.stored.names), axes, stored.shape)
    return _ReadRule(use, stored, used)


def _embedding_changes(
    module: nn.Module, name: str, used: Sharding, context: ParallelContext, hooks: Hooks
) -> Changes:
    """Return the changes by which a module looks rows up in its block, if this is an embedding's weight."""
    path = module_of(name)
    outer_hooks = nearest_hooks(path, hooks, "outputs")
    summed_axes = outer_hooks.summed_axes if outer_hooks is not None else frozenset[str]()
    return shard_embedding(module, path, used, summed_axes, context.processes.device)


def _check_heads(name: str, used: Sharding, model: nn.Module, hooks: Hooks) -> None:
    """Raise ShapeError if a block of a projection ends inside a head, as attention will view its result.

    With 2 heads of 4 rows, "o/tp i" on tp=4 leaves 2 rows to each process, and no head.
    """
    path = module_of(name)
    has_output_rule = path in hooks and hooks[path].outputs
    if has_output_rule or not name.endswith(PROJECTIONS):
        return
    attention = model.get_submodule(module_of(path))
    head_dim = getattr(attention, "head_dim", getattr(attention, "head_size", 1))
    for rows in used.local_sizes[0]:
        if rows % head_dim:
            raise ShapeError(
                f"a block of {rows} of {used.shape[0]} rows ends inside a head of {head_dim}",
                text=layout_text(used.written),
                hint=f"blocks of whole heads: '(h {head_dim})/tp i', of queries, keys and values; or fewer "
                "blocks than processes: 'o/kv i' of keys and values, 'o/(kv,rep) i' of queries",
            )


def _check_no_parameter(
    name: str, buffer: ShardedParameter, parameters: Mapping[str, Tensor]
) -> None:
    """Raise PlanError if a buffer is a parameter under another name."""
    if not parameters.keys().isdisjoint(buffer.names):
        hint = "register it as a parameter under both names, or a copy of it as the buffer"
        raise PlanError(f"the buffer {name} is the parameter {buffer.name}", hint=hint)


def _check_stored_alike(name: str, stored: Sharding, parameter: ShardedParameter) -> None:
    """Raise PlanError if a tied parameter is stored in two ways; names of dims may differ."""
    layout = stored.layout
    first_layout = parameter.sharding.layout  # by the rule for its first name
    if [dim.shards for dim in first_layout.dims] != [dim.shards for dim in layout.dims]:
        stored_as = layout_text(stored.written)
        reason = f"{name} is {parameter.name}, stored as '{stored_as}', "
        reason += f"not '{layout_text(first_layout)}'"
        hint = "tied parameters are stored in one way; uses may differ, as in 'v c -> v/tp c'"
        raise PlanError(reason, hint=hint)


def _plan_uses(
    parameter: ShardedParameter,
    uses: Uses,
    hooks: Hooks,
    keep_rules: Rules,
    context: ParallelContext,
) -> Changes:
    """Decide where a parameter is gathered, and where its gradient is summed over processes.

    Under "o/dp i -> o i" on dp=2 the nearest module around it that gathers gets the task: before its
    forward pass the block [o/2, i] becomes [o, i], and the gradient [o, i] is summed and scattered on
    the way back. Axes over which that does not sum become `axes_summed_later`, for an all-reduce
    after the backward pass.

    Changes the parameter, and the hooks of gathering modules. Returns the changes of modules: a hook
    that checks their input, where its gradient could be incomplete.

    Args:
        parameter: The parameter; if it is tied, with several names and slots.
        uses: The layouts in storage and in use, by each of its names.
        hooks: The hooks of modules, by name.
        keep_rules: Patterns of the parameters that the user wants kept gathered.
        context: The mesh and options.
    """
    # A tied parameter has one gradient: later come only axes over which no use sums.
    names = parameter.names
    parameter.axes_summed_later = models.axes_summed_after_all_uses([uses[name] for name in names])
    precisions = {name: _precision_around(name, hooks) for name in names}
    parameter.precision = precisions[parameter.name]
    keeps_one = any(keep_rules.pattern_for(name) is not None for name in names)
    changes: Changes = []
    for slot, aliases in _names_of_slots(parameter).items():
        name = aliases[0]
        use = uses[name]
        for alias in aliases:
            check_varying_alike(name, use.varying_axes, alias, uses[alias].varying_axes)
        if use.unsummed_axes:
            check = partial(check_input_gradient, name, use)
            changes.append(partial(slot.module.register_forward_pre_hook, check, with_kwargs=True))
        gather = _gather_of_use(parameter, use, precisions[name], context)
        if gather is None:
            continue
        stored, used = gather
        gatherer = _gatherer(aliases, hooks)
        gathered = GatheredParameter(
            name,
            [slot],
            parameter,
            to_use=f"{stored} -> {used}",
            to_storage=f"{used.dual} -> {stored.dual}",
            # Dropping what the outermost module gathers would save nothing: the backward pass
            # begins with its last parameters, and would gather all of them again at once.
            is_kept=keeps_one or gatherer.parent is None,
            # Passes cannot share a tied parameter: the one gathered tensor would lack the gradients
            # of its other uses.
            is_shared=stored != used and keeps_one and len(names) == 1,
            precision=precisions[name],
        )
        gatherer.parameters.add(gathered)
    return changes


def _names_of_slots(parameter: ShardedParameter) -> dict[TensorSlot, list[str]]:
    """Return the names of each slot of a parameter: several where its module has several."""
    names_of_slot: dict[TensorSlot, list[str]] = {}
    for name, slot in zip(parameter.names, parameter.slots, strict=True):
        names_of_slot.setdefault(slot, []).append(name)
    return names_of_slot


def _gather_of_use(
    parameter: ShardedParameter,
    use: ParameterUse,
    precision: Precision | None,
    context: ParallelContext,
) -> tuple[Layout, Layout] | None:
    """Return the layouts between which a parameter is gathered; None if it is used as it is stored."""
    move = use.move(parameter.axes_summed_later)
    if move is not None:
        return move
    stored_dtype = parameter.tensor.dtype
    is_cast = parameter_dtypes(precision, None, stored_dtype).result != stored_dtype
    if is_cast or context.device is not None:
        return use.stored, use.stored  # it is cast, or copied to another device, alone
    return None


def _precision_around(name: str, hooks: Hooks) -> Precision | None:
    """Return the precision of the nearest module around a parameter that has one."""
    outer_hooks = nearest_hooks(module_of(name), hooks, "precision")
    return None if outer_hooks is None else outer_hooks.precision


def check_varying_alike(
    name: str, varying: frozenset[str], alias: str, varying_of_alias: frozenset[str]
) -> None:
    """Raise PlanError if activations differ along other axes under another name of one object."""
    differing = varying ^ varying_of_alias
    if differing:
        reason = f"{name} is {alias}, and activations differ along '{min(differing)}' in one alone"
        hint = "a rule for the input of the module, or one around both names, that names this axis"
        raise PlanError(reason, hint=hint)


def _gatherer(names: Sequence[str], hooks: Hooks) -> ModuleHooks:
    """Return the hooks of the nearest module around all names of one slot that gathers parameters."""
    hooks_around_names = [_hooks_around(module_of(name), hooks) for name in names]
    for candidate in hooks_around_names[0]:
        is_around_all = all(candidate in hooks_around for hooks_around in hooks_around_names)
        if candidate.gathers and is_around_all:
            return candidate
    hint = 'gathers="", or a rule for the input of a module around them'
    raise PlanError(f"no module around {' and '.join(names)} gathers it", hint=hint)


def _check_biases(uses: Uses, shardings: Mapping[str, Sharding], hooks: Hooks) -> None:
    """Raise PlanError for a replicated bias that a sum over processes would count several times.

    With a weight "o i/tp", each process has an addend of the module's output, which is then summed
    over tp. If each adds a whole bias [o] to its addend, the bias is in the sum 4 times on tp=4.

    Two signs show that a module has addends over tp: the rule for its output says "sum(tp)", or a
    larger parameter of the module, such as the weight beside a bias, is sharded over tp.
    """
    names_by_module: dict[str, list[str]] = {}
    for name in sorted(uses, key=module_of):
        names_by_module.setdefault(module_of(name), []).append(name)
    for path, names in names_by_module.items():
        output_axes = _axes_of_addends(path, uses, hooks)
        uses_and_shapes = [(uses[name], shardings[name].shape) for name in names]
        for name in names:
            shape = shardings[name].shape
            addend_axes = output_axes | models.axes_of_larger_parameters(shape, uses_and_shapes)
            repeated_axes = addend_axes - _axes_without_repetition(uses[name])
            if repeated_axes:
                _refuse_added(name, uses[name], repeated_axes)


def _axes_without_repetition(use: ParameterUse) -> set[str]:
    """Return the axes along which processes may use a parameter each, and nothing counts twice.

    For a bias used as "o/tp": tp, as each process has other rows of it. For a bias with the rule
    "o -> o | copy(tp)": tp, too, as the user says that each process is meant to use all of it.
    """
    axes_of_layout = use.used.axes
    axes_by_rule_copy = use.whole_axes
    return {*axes_of_layout, *axes_by_rule_copy}


def _axes_of_addends(path: str, uses: Uses, hooks: Hooks) -> set[str]:
    """Return the axes over which a module's output is a sum, and that shard a parameter inside it."""
    if path not in hooks:
        return set()
    sharding_axes: set[str] = set()
    for name, use in uses.items():
        if is_inside(name, path):
            sharding_axes.update(use.used.sharding_axes)
    return sharding_axes & hooks[path].summed_axes


def _refuse_added(name: str, use: ParameterUse, axes: set[str]) -> None:
    """Raise PlanError for a parameter that is whole where its module is sharded, and say what to write."""
    over = ",".join(sorted(axes))
    used = layout_text(use.used)
    reason = f"{name} is whole along '{over}', which shards its module: each process would add it"
    hint = f"shard it too; or, where the output is a sum, write '{used} -> {used} | sum({over})'"
    hint += f", which adds it once; or '{used} -> {used} | copy({over})' if it is meant"
    raise PlanError(reason, text=used, hint=hint)


def check_input_gradient(
    name: str, use: ParameterUse, module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Raise PlanError if a module's input would get an incomplete gradient; a pre-forward hook.

    With a weight "o/tp i", each process has some rows of it. The input's gradient that a process
    computes from these rows is one addend of a sum over tp, and no rule asks for this sum. An input
    without a gradient, as in a first layer, is fine.

    Args:
        name: The name of the weight; the hook is registered with it.
        use: Its layouts; likewise.
        module: The module.
        args: Its arguments by position.
        kwargs: Its arguments by keyword.
    """
    if not any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
        return
    axes = ",".join(sorted(use.unsummed_axes))
    reason = f"{name} is sharded over '{axes}', and its module's input is equal along it"
    hint = (
        f"their gradient would lack other processes' parts: write copy({axes}) on the right side "
    )
    hint += "of the rule for the input of this module, or of one around it"
    raise PlanError(reason, text=layout_text(use.used), hint=hint)
