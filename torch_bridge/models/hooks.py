"""The hooks of a module that has rules: its inputs and outputs move, and its parameters are gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bridge.autodiff.turns import PerPart
from torch_bridge.models.claims import Claim, claim_of
from torch_bridge.models.module_parameters import ModuleParameters
from torch_bridge.models.names import title_of
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.precision import Precision
from torch_bridge.redistribution import redistribute
from torch_bridge.versions.autograd import is_in_backward_pass
from torch_bridge.versions.modules import beside_graphs
from xshard import XshardError
from xshard.errors import ShapeError, with_path
from xshard.models import ActivationRule, KnownDim, arriving_shape, known_inside

if TYPE_CHECKING:
    from torch_bridge.models.experts import RoutedExperts

Key = str | int | None  # of an argument or of a part of a result; None: the first tensor
KnownDims = tuple[KnownDim, ...]


class _Arrival(NamedTuple):
    """What follows from the shape of a block by a rule: the global shape, and the dims known then."""

    shape: tuple[int, ...]
    known_dims: KnownDims


class TensorFacts(NamedTuple):
    """What the bytes of a move depend on: the global shape, the dtype, and whether a gradient returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Moved(NamedTuple):
    """A block after its rule, and the dims known then."""

    block: Tensor
    known_dims: KnownDims


@dataclass(eq=False, repr=False)
class TensorRule:
    """A rule for one tensor that goes into a module, or comes out of it.

    Attributes:
        key: Which tensor it is.
        rule: Its layouts before and after.
        last: The tensor that it last moved, for `explain`.
        takes_claims: Whether processes have not yet compared what comes as replicas.
        claim: About the newest block, until then: processes may have made other calls before.
    """

    key: Key
    rule: ActivationRule
    last: TensorFacts | None = None
    takes_claims: bool = True
    claim: Claim | None = None
    _arrivals: dict[Any, _Arrival] = field(default_factory=dict)  # by block shape and known dims

    def move(
        self, x: Tensor, context: ParallelContext, outer_known_dims: KnownDims, title: str
    ) -> Moved:
        """Redistribute an input or output of a module as its rule says.

        "b i/tp -> b i" on tp=4: [b, i/4] -> [b, i]. A block alone may not tell the global shape: it is
        found with the help of known dims, names with their global lengths, as i = 16. What is found
        is kept for the next block of this shape. Sets `last`, which tells `explain` what has moved.

        Args:
            x: This process's block.
            context: The mesh and options.
            outer_known_dims: The dims that are known around the module.
            title: The name of the tensor in errors.

        Returns:
            The block afterwards, and the dims that are known from then on, inside the module.
        """
        if torch.compiler.is_compiling():
            # No cache here: looking it up would make the graph valid for this shape alone. The
            # global shape is not given but inferred, by which all blocks count as equally long.
            return Moved(self._redistribute(x, None, context), ())

        # Hot: only passes of the first step take samples.
        if self.takes_claims and torch.is_grad_enabled():
            self.claim = claim_of(self.rule, x, context, title)
        key = (x.shape, outer_known_dims)
        arrival = self._arrivals.get(key)
        if arrival is not None:  # most passes: the rule has been checked for such a block
            return Moved(self._redistribute(x, arrival.shape, context), arrival.known_dims)

        device = context.processes.device
        shape = arriving_shape(self.rule, context.axes, device, tuple(x.shape), outer_known_dims)
        y = self._redistribute(x, shape, context)
        inner_known_dims = known_inside(self.rule, shape, y.shape, outer_known_dims, title)
        # Only now that all has succeeded: a block that fails a check is checked again in the next
        # call.
        self._arrivals[key] = _Arrival(shape, inner_known_dims)
        self.last = TensorFacts(shape, x.dtype, x.requires_grad)
        return Moved(y, inner_known_dims)

    def _redistribute(
        self, x: Tensor, shape: tuple[int, ...] | None, context: ParallelContext
    ) -> Tensor:
        if not self.rule.moves:
            return x
        return redistribute(x, self.rule.text, context.mesh, shape=shape, profile=context.profile)


@dataclass(eq=False, repr=False)
class ModuleHooks:
    """The rules of one module, and the hooks that carry them out.

    Attributes:
        name: The module's; "" is the model.
        arguments: The names of the arguments of its `forward`.
        context: The mesh and options.
        parent: The hooks of the nearest module around it with a rule for its input.
        inputs: Rules for its arguments.
        outputs: Rules for its results.
        varying: Axes along which activations differ inside.
        gathers: Whether it gathers the parameters inside it.
        parameters: What it gathers.
        precision: The dtypes of the parameters inside it, and of what it takes and returns.
        parameter_dims: Sharded dims of its own parameters, which its output may have, too.
        experts: The routing of rows, if a rule sends them to experts.
        was_called: Whether the module has ever been called.
        batch_dim_in_parts: The name of the batch's dim, if `halves` computes it in parts.
        gathers_first: Whether `gather_first` is a hook, too.
    """

    name: str
    arguments: list[str]
    context: ParallelContext
    parent: ModuleHooks | None
    inputs: Sequence[TensorRule]
    outputs: Sequence[TensorRule]
    varying: frozenset[str]
    gathers: bool
    parameters: ModuleParameters
    precision: Precision | None = None
    parameter_dims: KnownDims = ()
    experts: RoutedExperts | None = None
    was_called: bool = False
    batch_dim_in_parts: str | None = None
    gathers_first: bool = False
    _known_dims: PerPart[KnownDims] = field(default_factory=partial(PerPart[KnownDims], ()))

    @property
    def known_dims(self) -> KnownDims:
        """The dims known inside, in the running forward pass, or where a checkpoint computes a part of it."""
        if self.batch_dim_in_parts is None:
            return self._known_dims.value
        # A checkpoint may compute any part again, and what is compiled computes all of them.
        if torch.compiler.is_compiling() or is_in_backward_pass():
            return self.known_in_part
        return self._known_dims.value

    @known_dims.setter
    def known_dims(self, known_dims: KnownDims) -> None:
        self._known_dims.value = known_dims
        self._known_dims.outside = known_dims  # which checkpoints read in a backward pass

    @property
    def known_in_part(self) -> KnownDims:
        """What any part of the batch knows: the dims that are not in parts."""
        known_dims = self._known_dims.value
        return tuple(dim for dim in known_dims if dim.name != self.batch_dim_in_parts)

    def begin_part(self, known_dims: KnownDims) -> None:
        """Let the part of a batch that begins know of this module, which is around it."""
        self._known_dims.value = known_dims

    @property
    def title(self) -> str:
        """The module in errors."""
        return title_of(self.name)

    @property
    def summed_axes(self) -> frozenset[str]:
        """Axes over which one of the outputs is a sum."""
        axes = [output.rule.src.tagged("sum") for output in self.outputs]
        return frozenset[str]().union(*axes)

    @beside_graphs
    def gather_first(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Gather parameters before the hooks that the module had, which may compute weights of them.

        A hook before all others, of a module that had some: `torch.nn.utils.weight_norm` is one.
        """
        self._end_unfinished_passes()
        self.parameters.begin_pass()

    @beside_graphs
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Redistribute a module's arguments by their rules, then gather its parameters.

        A hook: torch calls `forward` with the arguments that it returns. Where a rule routes rows,
        they are sent to the processes of their experts. `after_forward` undoes both.
        """
        self.was_called = True
        if self.precision is not None:
            args, kwargs = self.precision.before_forward(module, args, kwargs)
        if not self.gathers_first:
            self._end_unfinished_passes()
        # Modules around this one know the global lengths of some named dims, as s = 8192. A name
        # has one length everywhere, so that these help where a block alone does not tell.
        known_dims = self.parent.known_dims if self.parent is not None else ()
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for rule in self.inputs:
            key = self.argument(rule.key, values)
            if key is None:  # the caller has left this argument out
                continue
            values[key], known_dims = self._move(rule, values[key], known_dims, "input")
            if rule.rule.routed_axes:
                assert self.experts is not None
                self.experts.dispatch(key, values)
        self.known_dims = known_dims
        # Parameters are gathered last: after an error above, there is nothing to undo.
        if not self.gathers_first:
            self.parameters.begin_pass()
        moved_args = tuple(values[i] for i in range(len(args)))
        return moved_args, {name: values[name] for name in kwargs}

    @beside_graphs
    def after_forward(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Give the module its blocks back, and move the results; a hook of the module.

        It is always called, also after an error: then `result` is None.
        """
        self.parameters.end_pass(result)
        if self.precision is not None:
            result = self.precision.after_forward(module, args, result)
        if self.experts is not None:
            result = self.experts.combine(result)
        if result is None:
            return None
        for rule in self.outputs:
            result = self._move_output(rule, result)
        return result

    def _end_unfinished_passes(self) -> None:
        """Forget calls that were interrupted."""
        if self.parameters.end_unfinished_passes() and self.experts is not None:
            self.experts.forget_passes()

    def _move(self, rule: TensorRule, x: Tensor, known_dims: KnownDims, direction: str) -> Moved:
        """Move one tensor by its rule; `direction` is "input" or "output", and errors have it."""
        title = f"{direction} of {self.title}"
        try:
            if direction == "output" and not torch.compiler.is_compiling():
                known_dims = self._with_parameter_dims(rule, x, known_dims)
            return rule.move(x, self.context, known_dims, title)
        except XshardError as error:
            # The same error with its place in front; what caused it stays its cause.
            raise with_path(error, title) from error.__cause__

    def _with_parameter_dims(self, rule: TensorRule, x: Tensor, known_dims: KnownDims) -> KnownDims:
        """Add the dims of an output that are as long as one of the parameters: its global length counts."""
        names = rule.rule.src.resolved(x.ndim).names
        lengths = dict(zip(names, x.shape, strict=True))
        dims = [dim for dim in self.parameter_dims if lengths.get(dim.name) == dim.local_length]
        return (*dims, *known_dims)

    def argument(self, key: Key, values: Mapping[Any, Any]) -> int | str | None:
        """Find the argument that a rule is for: the position or the name that this call uses for it.

        A rule for position 1, or for "mask", finds 1 in `f(x, mask)`, and "mask" in `f(x, mask=mask)`.
        Returns None if the argument is absent in this call or no tensor. Raises ShapeError if the
        rule is for the first tensor, and there is none.

        Args:
            key: The argument in the rule: its position, its name, or None for the first tensor.
            values: All arguments of a call, by position or name as they were passed.
        """
        if key is None:
            first_key = _first_tensor(values)
            if first_key is None:
                reason = f"input of {self.title}: none of the arguments is a tensor"
                hint = 'rules for several, or for some that may be absent, go by name: {"labels": "b s"}'
                raise ShapeError(reason, hint=hint)
            return first_key  # type: ignore[no-any-return]  # a key of `values`
        key = passed_as(key, values, self.arguments)
        return key if isinstance(values.get(key), Tensor) else None

    def results(self, result: Any) -> list[Any]:
        """Return the items of a result that rules are for; without rules the first tensor."""
        items: dict[Any, Any] = {}
        if isinstance(result, Tensor | Mapping | tuple | list):
            items = _items_of(result)
        keys = [rule.key for rule in self.outputs] if self.outputs else [None]
        return [items.get(_item_key(key, items)) for key in keys]

    def _move_output(self, rule: TensorRule, result: Any) -> Any:
        """Redistribute one tensor in the result of a module, and return the result with it.

        The result may be a tensor, a tuple, a list, a NamedTuple or a dict; it keeps its type. The
        rule's key says which item is meant: a position, a name, or None for the first tensor. A
        result in which that is no tensor, or is missing, is returned as it is.
        """
        items = _items_of(result)
        key = _item_key(rule.key, items)
        if not isinstance(items.get(key), Tensor):
            return result
        moved = self._move(rule, items[key], self.known_dims, "output")
        if isinstance(result, Tensor):
            return moved.block
        if isinstance(result, Mapping):
            # Changed in place: transformers' are dicts with attributes.
            result[key] = moved.block  # type: ignore[index]  # it is mutable
            return result
        items[key] = moved.block
        result_class = type(result)
        if hasattr(result, "_fields"):  # a NamedTuple takes its fields one by one
            return result_class(*items.values())
        return result_class(items.values())


def passed_as(key: str | int, values: Mapping[Any, Any], arguments: Sequence[str]) -> str | int:
    """Return the key of an argument in a call: rules and calls may use positions or names.

    Args:
        key: Its position or name.
        values: The arguments of the call, in the same way.
        arguments: The names of all arguments, in order.
    """
    if isinstance(key, str):
        if key in values or key not in arguments:  # that of a `**kwargs`
            return key
        return arguments.index(key)
    if 0 <= key < len(arguments) and arguments[key] in values:
        return arguments[key]
    return key


def _items_of(result: Any) -> dict[Any, Any]:
    """Return the items of a module's result by position or name; a tensor by itself has the key None.

    (x, y) -> {0: x, 1: y}; {"logits": x} -> {"logits": x}; x -> {None: x}.
    """
    if isinstance(result, Tensor):
        return {None: result}
    if isinstance(result, Mapping):
        return dict(result)
    return dict(enumerate(result))


def _item_key(key: Key, items: Mapping[Any, Any]) -> Any:
    """Return the key of the item that a rule is for; a rule without a key is for the first tensor."""
    if key is not None and None not in items:
        return key
    return _first_tensor(items)


def _first_tensor(values: Mapping[Any, Any]) -> Any:
    """Return the key of the first tensor; None if there is none, or if it is that of a tensor alone."""
    for key, x in values.items():
        if isinstance(x, Tensor):
            return key
    return None
