"""A parallel model: its parameters, hooks and gradients, and the norm of these."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.models.block_guards import guard_blocks
from torch_bridge.models.claims import check_claims
from torch_bridge.models.experts import Count
from torch_bridge.models.gradients import Gradients
from torch_bridge.models.hooks import ModuleHooks, TensorRule
from torch_bridge.models.living import add_living, is_living
from torch_bridge.models.module_parameters import tensors_with_gradient
from torch_bridge.models.names import is_inside
from torch_bridge.models.notes import has_note, leaves_call_of_hook, note_on
from torch_bridge.models.parameters import ParallelContext, ShardedParameter, TensorSlot
from torch_bridge.models.penalties import Penalties
from torch_bridge.models.prefetch import Prefetch
from torch_bridge.models.structure import check_structure, watch_structures
from xshard import Layout, Sharding, XshardError
from xshard.errors import UnverifiedWarning, api_boundary
from xshard.models import ParameterUse
from xshard.signatures import NonNegative, Positive

UNVERIFIED = """this model trains, and nothing has shown that its rules are right.
xt.verify(model, batch, loss=...) compares a step with one device's. If it has passed elsewhere, as on a small
model of this kind: warnings.simplefilter("ignore", xshard.errors.UnverifiedWarning)"""
ATTRIBUTE = "_xshard_parallel"  # of a model, with its `ParallelModel`


@dataclass(eq=False, repr=False)
class ParallelModel:
    """The state of a parallel model.

    Attributes:
        context: The mesh and options.
        parameters: All parameters and buffers, tied ones once.
        uses: How modules use each parameter, by its names.
        used_shardings: The layouts in use, with global shapes, in the same way.
        hooks: The hooks of modules with rules, by their names.
        gradients: Sums gradients in backward passes.
        prefetch: Lets parameters travel before modules need them.
        find_arrivals: `arrivals` of a model without rules.
        original: The model on one device, if that is another module.
        names: The names of all modules.
        counts: Attributes that count this process's part.
        is_changed: Whether a module has got a child or a parameter since the last pass.
        is_verified: Whether `verify` has found it equal to one device.
    """

    context: ParallelContext
    parameters: Sequence[ShardedParameter]
    uses: dict[str, ParameterUse]
    used_shardings: dict[str, Sharding]
    hooks: Mapping[str, ModuleHooks]
    gradients: Gradients
    prefetch: Prefetch
    find_arrivals: Callable[[Mapping[Any, Any]], dict[Any, Any]] | None = None
    original: nn.Module | None = None
    names: Mapping[nn.Module, str] = field(default_factory=dict)
    counts: Sequence[Count] = ()
    is_changed: bool = False
    is_verified: bool = False

    def __post_init__(self) -> None:
        self.penalties = Penalties(self.parameters, self._gatherers())
        self.gradients.before_pass = self.check_loss
        self.gradients.after_first = self.check_first_pass
        self._become_known()

    def _gatherers(self) -> dict[ShardedParameter, ModuleHooks]:
        """Return the hooks that gather a parameter, where modules use it gathered alone."""
        gatherers = {}
        slots: dict[ShardedParameter, set[TensorSlot]] = {}
        for hooks in self.hooks.values():
            for gathered in hooks.parameters.parameters:
                if gathered.moves:
                    gatherers[gathered.parameter] = hooks
                    slots.setdefault(gathered.parameter, set()).update(gathered.slots)
        return {x: hooks for x, hooks in gatherers.items() if slots[x].issuperset(x.slots)}

    def check_loss(self) -> None:
        """Raise PlanError if the backward pass that begins would give wrong gradients; see `Penalties`.

        The whole graph is searched until a pass has been checked: later ones are the same code.
        """
        self.penalties.check(looks_inside=self.gradients.after_first is not None)

    def _become_known(self) -> None:
        """Let torch's own code know of this model; nothing changes for one that it knows."""
        if not is_living(self):
            add_living(self)
            guard_blocks()
            watch_structures()

    def arrivals(
        self, values: Mapping[Any, Any]
    ) -> dict[Any, tuple[Layout, tuple[int, ...] | None]]:
        """Return layouts and global shapes of the sharded inputs of the model, by position or name.

        Args:
            values: The arguments of a call, in the same way.
        """
        if self.find_arrivals is not None:
            return self.find_arrivals(values)
        if "" not in self.hooks:
            return {}
        root = self.hooks[""]  # inputs of inner modules are made by the model itself
        return {root.argument(rule.key, values): (rule.rule.src, None) for rule in root.inputs}

    def begin(self, module: nn.Module, args: Any) -> None:
        """Get ready for a forward pass; a hook of the model, before all others."""
        if torch.compiler.is_compiling():
            if not self.gradients.is_following:  # a copy, whose first call this is
                torch.compiler.disable(self.gradients.prepare)()
        else:
            self._become_known()  # it may be a copy
            if self.is_changed:
                check_structure(module, self)
                self.is_changed = False
            self.end_unfinished_passes()
            self.gradients.prepare()
            self.prefetch.begin_pass()

    def end(self, module: nn.Module, args: Any, result: Any) -> None:
        """End a forward pass; a hook of the model, after all others, also after an error."""
        if not torch.compiler.is_compiling():
            self.prefetch.end_pass()

    def end_unfinished_passes(self) -> None:
        """Give blocks back to modules whose call was interrupted."""
        for hooks in self.hooks.values():
            hooks.parameters.end_unfinished_passes()
        self.prefetch.end_unfinished_pass()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has. It is asked before the modules are copied, which need their blocks."""
        self.end_unfinished_passes()
        return vars(self)

    def note_outputs(self, module: nn.Module, args: Any, result: Any) -> None:
        """Let a backward pass begin where it comes into the model; a hook of the model.

        A reentrant checkpoint runs backward passes of its own, inside: they are parts of this one.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for x in tensors_with_gradient(result):
                x.register_hook(self.gradients.note_pass)

    def add_note(self, module: nn.Module, args: Any, result: Any) -> None:
        """Add a note to an error that leaves a module, once; a hook of modules, always called."""
        if torch.compiler.is_compiling():
            return
        error = sys.exc_info()[1]
        if error is not None and not has_note(error) and leaves_call_of_hook(error):
            error.add_note(note_on(error, self))

    def refuse_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raise XshardError unless `keep_vars` asks for the tensors; a hook before `state_dict()`."""
        if not keep_vars:
            reason = f"state_dict() of a parallel model has blocks, as of {self.sharded_parameters[0].name}"
            hint = "xt.state_dict(model) has DTensors, .full_tensor() is whole; keep_vars=True has blocks"
            raise XshardError(reason, hint=hint)

    @property
    def has_unsummed_gradients(self) -> bool:
        """Whether gradients are each process's share, after passes inside `no_sync` alone."""
        if self.gradients.has_unsummed:
            return True
        return any(hooks.parameters.has_unsummed_gradients for hooks in self.hooks.values())

    @property
    def sharded_parameters(self) -> list[ShardedParameter]:
        """Parameters and buffers with less than the whole on a process."""
        return [parameter for parameter in self.parameters if parameter.sharding.layout.axes]

    @property
    def cut_parameters(self) -> list[ShardedParameter]:
        """Parameters and buffers of which a process has less than the whole, and that are still in the model.

        A layout may shard over an axis of one process, which cuts nothing.
        """
        return [
            parameter
            for parameter in self.sharded_parameters
            if parameter.sharding.mesh.size(*parameter.sharding.layout.axes) > 1
            and parameter.is_in_model
        ]

    @property
    def trained_parameters(self) -> list[ShardedParameter]:
        """Parameters that get a gradient."""
        return [parameter for parameter in self.parameters if parameter.tensor.requires_grad]

    @property
    def by_name(self) -> dict[str, ShardedParameter]:
        """Parameters and buffers under each of their names."""
        by_name = {}
        for parameter in self.parameters:
            by_name.update(dict.fromkeys(parameter.names, parameter))
        return by_name

    def used_inside(self, path: str) -> dict[str, Sharding]:
        """Return how modules use the parameters inside a module, by name; tied ones together."""
        names = [
            name for name in self.by_name if name in self.used_shardings and is_inside(name, path)
        ]
        return {name: self.used_shardings[name] for name in names}

    def check_first_pass(self) -> None:
        """Raise XshardError, on all processes, if the first pass contradicts the rules.

        A pipeline learns shapes by a pass over memory without values, which asks for gradients of
        inputs alone: then the next pass is the first.
        """
        if self.trained_parameters and not self._has_gradients():
            self.gradients.after_first = self._check_pass
        else:
            self._check_pass()

    def _has_gradients(self) -> bool:
        """Return whether a parameter has a gradient, on any process."""
        has_gradient = any(
            parameter.tensor.grad is not None for parameter in self.trained_parameters
        )
        flag = torch.tensor([float(has_gradient)], device=self.trained_parameters[0].tensor.device)
        return bool(self.context.all_reduce(flag, "max"))

    def _check_pass(self) -> None:
        """Raise XshardError, on all processes, if the pass that ends contradicts the rules."""
        self._check_called()
        self._check_claims()
        self.compare()
        if not self.is_verified and self.context.processes.device == 0:
            warnings.warn(UNVERIFIED, UnverifiedWarning, stacklevel=2)

    def _check_called(self) -> None:
        """Raise XshardError, on all processes, if a module's rule did not run, but its parameters were used.

        Code around a module may read its parameters, as torch's MultiheadAttention reads those of
        `out_proj`, and never call it.
        """
        hooks = list(self.hooks.values())
        if not hooks or not self.trained_parameters:
            return
        flags = torch.tensor([float(self._is_bypassed(module_hooks)) for module_hooks in hooks])
        flags = self.context.all_reduce(flags.to(self.trained_parameters[0].tensor.device), "max")
        for module_hooks, is_bypassed in zip(hooks, flags.tolist(), strict=True):
            if is_bypassed:
                reason = f"{module_hooks.title} is never called, but its parameters are used: "
                reason += "its rules do not run"
                hint = "write rules for a module around it, which is called"
                raise XshardError(reason, hint=hint)

    def _check_claims(self) -> None:
        """Raise ReplicaError, on all processes, if what rules call replicated has come different."""
        rules: list[TensorRule] = []
        for hooks in self.hooks.values():
            rules += [*hooks.inputs, *hooks.outputs]
        if rules and self.trained_parameters:
            claims = [rule.claim for rule in rules]
            for rule in rules:
                rule.takes_claims = False
                rule.claim = None
            check_claims(claims, self.context, self.trained_parameters[0].tensor.device)

    def _is_bypassed(self, hooks: ModuleHooks) -> bool:
        """Return whether parameters of a module have a gradient, though its rules did not run."""
        if hooks.was_called:
            return False
        for parameter in self.trained_parameters:
            # A tied parameter may have been used elsewhere.
            is_own = all(is_inside(name, hooks.name) for name in parameter.names)
            if is_own and parameter.tensor.grad is not None:
                return True
        return False

    def compare(self) -> None:
        """Raise ReplicaError, on all processes, if parameters or gradients that should be equal are not."""
        blocks = []
        for parameter in self.parameters:
            x = parameter.tensor
            if not isinstance(x, nn.Parameter):
                continue  # buffers may differ, as statistics do
            for name, block in ((parameter.name, x), (f"the gradient of {parameter.name}", x.grad)):
                if block is not None and not block.is_meta:
                    blocks.append((name, block, parameter.sharding))
        self.context.compare(blocks)


def parallel_of(model: nn.Module) -> ParallelModel:
    """Return the state of a parallel model. Raises XshardError for any other."""
    state = getattr(model, ATTRIBUTE, None)
    if isinstance(state, ParallelModel):
        state.end_unfinished_passes()
        return state
    is_module = isinstance(model, nn.Module)
    hint = "parallelize(model, ...)" if is_module else "pass the model itself"
    raise XshardError(f"a {type(model).__name__} that is not parallel", hint=hint)


@api_boundary
def check_replicas(model: nn.Module) -> None:
    """Check that parameters and gradients which should be equal on several processes are.

        xt.check_replicas(model)        # None, or ReplicaError on all processes

    All processes call it. `parallelize` checks every model after its first backward pass.

    Args:
        model: A parallel model.

    Raises:
        ReplicaError: On all processes, with the name of the first parameter that differs.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> from xshard.errors import ReplicaError
        >>> def changed_on_one():
        ...     layer = torch.nn.Linear(2, 1)
        ...     model = xt.parallelize(layer, {"**": "..."}, {"": "b i -> b/dp i"}, Mesh(dp=2))
        ...     xt.check_replicas(model)
        ...     with torch.no_grad():
        ...         model.weight += torch.distributed.get_rank()
        ...     try:
        ...         xt.check_replicas(model)
        ...     except ReplicaError as error:
        ...         return "weight" in str(error)
        >>> xt.testing.run_ranks(2, changed_on_one)
        [True, True]
    """
    parallel_of(model).compare()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each process; the next backward pass outside sums them over all.

        with xt.no_sync(model):
            loss_of(model, first_half).backward()       # .grad is this process's share
        loss_of(model, second_half).backward()          # .grad is the gradient of both

    Parameters that are gathered for use, as "o/dp i -> o i", are of two kinds. Those that `keep=`
    of `parallelize` names are gathered once, by the first pass inside, and their gradients are
    summed once, at the end. All others are gathered, and their gradients summed, in every pass.

    Args:
        model: A parallel model.

    Yields:
        Nothing.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def gradients():
        ...     layer = torch.nn.Linear(1, 1, bias=False)
        ...     model = xt.parallelize(layer, {"**": "..."}, {"": "b i -> b/dp i"}, Mesh(dp=2))
        ...     with xt.no_sync(model):
        ...         model(torch.ones(2, 1)).sum().backward()
        ...     share = model.weight.grad.item()
        ...     model(torch.ones(2, 1)).sum().backward()
        ...     return share, model.weight.grad.item()
        >>> xt.testing.run_ranks(2, gradients)
        [(1.0, 4.0), (1.0, 4.0)]
    """
    gradients = parallel_of(model).gradients
    # Backward passes ask this flag whether to sum over processes. It may be False already: contexts
    # may be nested.
    earlier_syncs = gradients.syncs
    gradients.syncs = False
    try:
        yield
    finally:
        gradients.syncs = earlier_syncs


@api_boundary
@torch.no_grad()
def grad_norm(model: nn.Module, norm_type: Positive = 2.0) -> Tensor:
    """Return the norm of all gradients of a parallel model, as one process would compute it: a scalar.

        norm = xt.grad_norm(model)      # tensor(1.73), the same on all processes

    Every element of the whole gradient counts once. All processes call it, after `backward()`.

    Args:
        model: A parallel model.
        norm_type: As for `torch.nn.utils.get_total_norm`; `math.inf` is the largest element.

    Returns:
        A scalar, at least in float32.

    Raises:
        XshardError: Gradients are not yet summed, after passes inside `no_sync` alone.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def norm():
        ...     layer = torch.nn.Linear(4, 1, bias=False)
        ...     model = xt.parallelize(
        ...         layer, {"**": "o i/dp -> o i"}, {"": "b i -> b/dp i"}, Mesh(dp=2)
        ...     )
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     return model.weight.grad.tolist(), xt.grad_norm(model).item()
        >>> xt.testing.run_ranks(2, norm)[0]
        ([[2.0, 2.0]], 4.0)
    """
    parallel = parallel_of(model)
    if parallel.has_unsummed_gradients:
        raise XshardError(
            "gradients are each process's share", hint="a pass outside of no_sync sums them"
        )
    # Each block is counted on one process: the sum over all of them counts every element once.
    norms = _norms_to_count(parallel, norm_type)
    if math.isinf(norm_type):
        return parallel.context.all_reduce(norms.max(), "max")
    total = parallel.context.all_reduce((norms**norm_type).sum(), "sum")
    return total ** (1 / norm_type)


def _norms_to_count(parallel: ParallelModel, norm_type: float) -> Tensor:
    """Return the norms of those gradient blocks that count on this process, so that each counts once.

    Replicas of a block count on the first process that has one. On dp=2, tp=2 a gradient "o/tp i"
    counts on the two processes with dp=0, one half on each.

    Returns a tensor `[1 + n]`, float32 or wider. The first norm is 0, so that it is never empty.
    """
    device = parallel.context.processes.device
    example = parallel.parameters[0].tensor if parallel.parameters else torch.zeros(())
    # All processes agree on it, whichever gradients count there.
    dtype = torch.float32
    for parameter in parallel.parameters:
        dtype = torch.promote_types(dtype, parameter.tensor.dtype)
    dtype = dtype.to_real()  # a norm of complex numbers is real

    norms = [torch.zeros((), dtype=dtype, device=example.device)]
    for parameter in parallel.parameters:
        gradient = parameter.tensor.grad
        if gradient is None or not gradient.numel():
            continue
        # Along an axis that does not shard this gradient, an earlier process has the same block.
        sharding = parameter.sharding
        replica_axes = [axis for axis in sharding.mesh.axes if axis not in sharding.layout.axes]
        if sharding.mesh.index(device, replica_axes) > 0:
            continue
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=wide)
        norms.append(norm.to(norms[0]))
    return torch.stack(norms)


@api_boundary
@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: NonNegative, norm_type: Positive = 2.0) -> Tensor:
    """Scale all gradients of a parallel model so that their norm is at most `max_norm`.

        norm_before = xt.clip_grad_norm_(model, 1.0)

    torch's `clip_grad_norm_` would take the norm of each process's blocks; this one takes the norm of
    the whole gradient, on all processes. All call it, after `backward()`.

    Args:
        model: A parallel model.
        max_norm: The largest norm afterwards.
        norm_type: The p of the norm; `math.inf` is the largest element.

    Returns:
        The norm before, the same on all processes.

    Raises:
        XshardError: Gradients are not yet summed, after passes inside `no_sync` alone.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def norms():
        ...     layer = torch.nn.Linear(4, 1, bias=False)
        ...     model = xt.parallelize(
        ...         layer, {"**": "o i/dp -> o i"}, {"": "b i -> b/dp i"}, Mesh(dp=2)
        ...     )
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     before = xt.clip_grad_norm_(model, 2.0)
        ...     return round(before.item(), 3), round(xt.grad_norm(model).item(), 3)
        >>> xt.testing.run_ranks(2, norms)[0]
        (4.0, 2.0)
    """
    total = grad_norm(model, norm_type)
    # Given the norm of the whole gradient, scaling a block needs nothing else: torch does it.
    tensors = [parameter.tensor for parameter in parallel_of(model).parameters]
    with_gradient = [x for x in tensors if x.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, total)
    return total
