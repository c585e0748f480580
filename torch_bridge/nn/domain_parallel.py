"""`domain_parallel`: modules become layers, or stay as records follow blocks through them, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bridge.autodiff.blocks import check_no_checkpoint
from torch_bridge.mesh.process_mesh import MeshLike, process_mesh
from torch_bridge.models.calls import call_of_hook, is_running
from torch_bridge.models.parallel import ATTRIBUTE
from torch_bridge.models.parallelize import Model, replicated
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.nn.function_call import tensors_in
from torch_bridge.nn.layers import (
    LAYERS,
    Layer,
    layer_of,
    share_state,
    torch_class_with_layer,
)
from torch_bridge.nn.placed import (
    COPIES,
    Placement,
    placed_as,
    record,
    recorded_placement,
    recorded_placements,
)
from torch_bridge.nn.propagation import Propagation
from torch_bridge.versions.autograd import is_in_backward_pass
from torch_bridge.versions.modes import (
    function_modes,
    remove_function_mode,
    without_torch_function,
)
from torch_bridge.versions.modules import children_of, replace_children, share_tensors_and_children
from xshard import Layout, XshardError
from xshard.errors import api_boundary
from xshard.notation.overlap import OutputRule
from xshard.notation.parser import ELLIPSIS

Converters = Mapping[type[nn.Module], Callable[[Any], nn.Module]]

# Modules of torch that only call functions with rules: records follow blocks through them.
FOLLOWED = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Identity,
    nn.Flatten, nn.Unflatten, nn.Linear, nn.Embedding, nn.Dropout, nn.AlphaDropout, nn.Softmax, nn.Softmax2d,
    nn.Softmin, nn.LogSoftmax, nn.GLU, nn.LocalResponseNorm, nn.ChannelShuffle, nn.PixelShuffle, nn.ELU,
    nn.Hardshrink, nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.LogSigmoid, nn.PReLU, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.CELU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Softplus, nn.Softshrink,
    nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold,
    *(getattr(nn, name) for name in nn.modules.padding.__all__),  # nn.ZeroPad2d and the like
)  # fmt: skip


@api_boundary
def domain_parallel(
    model: Model,
    layout: Layout | str,
    mesh: MeshLike,
    *,
    shape: Sequence[int | None] | None = None,
    outputs: OutputRule = "",
    sum_gradients: bool = True,
    converters: Converters | None = None,
) -> Model:
    """Return a model of blocks with the outputs and gradients that `model` has on whole arrays.

        parallel = xt.nn.domain_parallel(model, "b c h/sp w", mesh)
        y = parallel(x)     # [b, c, h/2, w] -> this process's block of model(whole x), on 2 processes

    The result shares parameters and buffers with `model`, which is left as it is: one optimiser and one state
    dict serve both. Code between layers (skip connections, cat along channels, gates) is followed as it runs.

    In the model's code `x.shape` is the shape of the block, and dropout draws separately for every block.
    Code that checkpoints activations must call `xt.nn.checkpoint`. The outputs' layout and global shape are
    `sharding_of(y)`. A loss over blocks is this process's share: the sum of all shares is the loss.

    A part of the result may be called by itself, on outputs of other parts or on blocks under `layout`.
    `xt.verify`, `xt.grad_norm`, `xt.clip_grad_norm_`, `xt.check_replicas` and `xt.explain` take the result.

    Args:
        model: The model of one device. Its class and code stay as they are.
        layout: The layout of every input tensor with as many dims, as in "b c h/sp w"; other inputs are
            replicated.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh` over the world.
        shape: The global shape of these inputs, if blocks differ in size. A length of None is the length of
            the block times the number of parts.
        outputs: How the outputs of convolutions and pools are sharded: "" like the input, "balanced" or
            "aligned".
        sum_gradients: Sum gradients of parameters and of replicated inputs over the axes of the layout, all
            in one collective per dtype. Otherwise each process keeps its share.
        converters: Class -> function that converts its modules. The result is called on local blocks, is not
            inspected, and must keep the length of sharded dims.

    Returns:
        A module of the model's class, whose layers work on blocks.

    Raises:
        XshardError: With the path, for a module or, in the forward pass, a function without an exact form.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def turn():
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Sequential(
        ...         torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2)
        ...     )
        ...     parallel = xt.nn.domain_parallel(model, "b c h/sp w", Mesh(sp=2))
        ...     x = torch.arange(64.0).view(1, 1, 8, 8)
        ...     y = parallel(x.chunk(2, 2)[torch.distributed.get_rank()])
        ...     return torch.equal(y, model(x).split([2, 1], 2)[torch.distributed.get_rank()])
        >>> xt.testing.run_ranks(2, turn)
        [True, True]
    """
    layout = Layout.parse(layout)
    conversion = _Conversion(layout, mesh, outputs, {} if converters is None else converters)
    root: Any = conversion.converted(model, "")
    processes = process_mesh(mesh)
    axes = tuple(axis for axis in processes.mesh.axes if axis in layout.axes)
    lengths = None if shape is None else tuple(shape)
    shares = () if sum_gradients else axes
    entrance = _Entrance(
        layout=layout,
        mesh=mesh,
        shape=lengths,
        paths=conversion.paths,
        outputs=outputs,
        shares=shares,
    )
    entrance.attach(root)
    # What `xt.verify`, `xt.grad_norm` and others look for.
    if sum_gradients:
        parallel = replicated(root, ParallelContext(processes.submesh(axes)))
        parallel.original = model
        parallel.find_arrivals = entrance.arrivals
        setattr(root, ATTRIBUTE, parallel)
    return root


@dataclass(eq=False, repr=False)
class _Conversion:
    """The modules of a model that have become modules of blocks."""

    layout: Layout
    mesh: MeshLike
    outputs: str
    converters: Converters
    paths: dict[nn.Module, str] = field(default_factory=dict)  # of followed modules
    done: dict[int, nn.Module] = field(default_factory=dict)  # by the ids of the model's modules

    def converted(self, module: nn.Module, path: str) -> nn.Module:
        """Return the module of blocks; the same one again for a module that the model has twice."""
        if id(module) not in self.done:
            self.done[id(module)] = self._convert(module, path)
        return self.done[id(module)]

    def _convert(self, module: nn.Module, path: str) -> nn.Module:
        """Convert one module of a model, so that it takes blocks of a sharded array.

        In this order: a converter that the user gave for its class; for a class such as `Conv2d`,
        our layer with the same parameters; else its own code, which runs on blocks while a torch
        function mode keeps track of their layouts, over converted children.

        Args:
            module: The module.
            path: Its name in the model, "" for the model itself.
        """
        # The user's own converters come first, also for classes that we have a layer for.
        for kind, converter in self.converters.items():
            if isinstance(module, kind):
                return _Converted(converter(module), path)
        if type(module) in LAYERS:
            return layer_of(module, self.layout, self.mesh, path, self.outputs)
        # Its own code runs on blocks; only its children are replaced.
        _check_followed(module, path)
        new = share_state(module, type(module))
        prefix = f"{path}." if path else ""
        children = dict(children_of(module))
        for name, child in children.items():
            if child is not None:
                children[name] = self.converted(child, prefix + name)
        replace_children(new, children)
        self.paths[new] = path
        return new


def _check_followed(module: nn.Module, path: str) -> None:
    """Raise XshardError for a module whose own code cannot run on blocks of a sharded array.

    Refused: modules converted before, subclasses that inherit `forward` from a class we replace,
    classes of `torch.nn` without an exact form on blocks, and lazy modules. Any other code is run,
    and each torch function that it calls must have a rule for blocks.

    Args:
        module: The module.
        path: Its name in the model; "" for the model itself.
    """
    module_class = type(module)
    if module_class in FOLLOWED:
        return
    torch_class = torch_class_with_layer(module_class)
    if isinstance(module, Layer):
        fault = "is domain-parallel already"
        hint = "pass the ordinary model"
    elif torch_class is not None and module_class.forward is torch_class.forward:
        fault = f"is a subclass of {torch_class.__name__}"
        hint = "its effect on blocks is not known: converters="
    elif module_class.__module__.startswith("torch.nn."):
        fault = "lacks an exact form on blocks"
        hint = "converters=, or redistribute what it needs whole"
    elif any(nn.parameter.is_lazy(x) for x in module.parameters(recurse=False)):
        fault = "is lazy"
        hint = "run the ordinary model once first"
    else:
        return  # the user's own code, which is followed as it runs
    name = path if path else "the model"
    raise XshardError(f"{name} ({module_class.__name__}) {fault}", hint=hint)


class _RunningModule(NamedTuple):
    """A call of a module, and what ends with it."""

    call: FrameType | None
    ending: ExitStack


@dataclass(eq=False, repr=False)
class _Entrance:
    """The hooks where tensors enter a model, or a part of it that is called by itself, and leave it."""

    layout: Layout
    mesh: MeshLike
    shape: tuple[int | None, ...] | None
    paths: dict[nn.Module, str]
    outputs: str  # how the outputs of convolutions and pools are sharded
    shares: tuple[str, ...]  # axes along which processes keep their shares of gradients
    running: list[_RunningModule] = field(default_factory=list)  # outer ones first

    def attach(self, model: nn.Module) -> None:
        """Add the hooks to all modules: parts may be called by themselves."""
        for module in model.modules():
            enter = partial(self._enter, is_model=module is model)
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def arrivals(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the layout and global shape of every sharded input of the model."""
        arrivals = {}
        for key, x in values.items():
            if isinstance(x, Tensor) and self._has_layout(x):
                placement = self._placement_of_input(x, is_model=True)
                arrivals[key] = (placement.layout, placement.shape)
        return arrivals

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_model: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare a call of a module: note how its inputs are sharded, and watch its functions.

        A record is a note on a tensor: the layout and global shape of the array whose block it is.
        From here on a torch function mode derives the record of each result.

        Returns the inputs with records. None: leave the inputs as they are, as an outer module has
        prepared them, or a checkpoint computes them again.

        Args:
            module: The module.
            args: Its arguments by position.
            kwargs: Its arguments by keyword.
            is_model: Whether it is the whole model, which the user calls with plain blocks; a part
                of it is called with recorded ones.
        """
        self._end_unfinished()
        self.running.append(_RunningModule(call_of_hook(), ExitStack()))
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        has_record = bool(recorded_placements(inputs))
        # A mode of an outer module is active.
        is_followed = any(isinstance(mode, Propagation) for mode in function_modes())
        if is_followed and (has_record or not is_model):
            return None
        # A part called in a backward pass, with blocks that have no record, is a checkpoint that
        # computes activations again: it restores what was recorded in the forward pass.
        if not is_model and not has_record and is_in_backward_pass():
            return None
        blocks = [x for x in inputs if recorded_placement(x) or self._has_layout(x)]
        if not blocks:
            raise XshardError(f"no input has the dims of '{self.layout}'")
        # Replicated inputs, and parameters, are on the processes of the first block.
        first_placement = self._placement_of_input(blocks[0], is_model=is_model)
        with_record = partial(self._with_record, first_placement=first_placement, is_model=is_model)
        args = tuple(map(with_record, args))
        kwargs = {name: with_record(x) for name, x in kwargs.items()}
        self._copy_parameters(module, first_placement)
        if not is_followed:
            mode = Propagation(self.paths, self.outputs)
            self.running[-1].ending.callback(remove_function_mode, mode)
            mode.__enter__()
        return args, kwargs

    def _end_unfinished(self) -> None:
        """End calls that run no more: torch tells no hook of KeyboardInterrupt or the like."""
        while self.running:
            call = self.running[-1].call
            if call is None or is_running(call):
                return
            self._leave()

    def _with_record(self, x: Any, first_placement: Placement, *, is_model: bool) -> Any:
        """Return an input with a note of its layout and global shape (a record).

        A tensor that has the dims of the model's layout is a block under it; any other tensor is
        replicated, on the devices of `first_placement`, the placement of the first block among the inputs.
        The note is on an alias, so that the caller's own tensor has none. Values that are not
        tensors are returned as they are.
        """
        if not isinstance(x, Tensor):
            return x
        placement = recorded_placement(x)
        if placement is None:
            if self._has_layout(x):
                placement = self._placement_of_input(x, is_model=is_model)
            else:
                # Where it is used beside blocks, the gradients of all devices are summed. If the user
                # asked for shares of gradients, the backward pass of this copy makes one of the sum.
                placement = first_placement.replicated_like(x)
                [x] = placement.parameter_copies([x])
        return record(x.view_as(x), placement)

    def _copy_parameters(self, module: nn.Module, placement: Placement) -> None:
        """Make copies of all parameters until the module ends: their gradients are summed together."""
        if placement.needs_copies:
            parameters = [x for x in module.parameters() if x.requires_grad]
            copies = placement.make_copies(parameters)
            if copies:
                self.running[-1].ending.callback(COPIES.reset, COPIES.set(copies))

    def _has_layout(self, x: Tensor) -> bool:
        """Return whether a tensor has as many dims as the layout: it is sharded, unless it has a record."""
        rank = len(self.layout.dims)
        if ELLIPSIS in self.layout.names:
            return x.ndim >= rank - 1
        return x.ndim == rank

    def _placement_of_input(self, x: Tensor, *, is_model: bool) -> Placement:
        """Return the placement of an input under the layout of the call."""
        layout = self.layout.resolved(x.ndim)
        shape = self.shape
        if shape is not None and not is_model:
            # A part of the model has other channels: only the lengths of sharded dims are known.
            dims_and_lengths = zip(layout.dims, shape, strict=True)
            shape = tuple(length if dim.axes else None for dim, length in dims_and_lengths)
        return replace(placed_as(x, layout, self.mesh, shape), gradient_share_axes=self.shares)

    def _leave(self, *_: Any) -> None:
        # It is empty if a pre-hook before `_enter` has raised: torch calls this hook then too.
        if self.running:
            self.running.pop().ending.close()


class _Converted(nn.Module):
    """Calls a module of the user's own, which keeps the lengths of sharded dims, on blocks."""

    module: nn.Module

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__()
        self.path = path
        # The module is not a child: names of parameters, and the state dict, stay as they are.
        self.__dict__["module"] = module
        share_tensors_and_children(self, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a module that the user's own converter made for blocks.

        Its parameters are replaced by copies whose gradients are summed over the devices. Its
        outputs are noted as sharded like the first input that has such a note; without one, the
        module just runs. Torch functions inside are not watched: the converter answers for them.
        """
        # `train()` and `eval()` do not reach the module, which is no child: pass the mode on.
        self.module.training = self.training
        placements = recorded_placements((*args, *kwargs.values()))
        if not placements:
            with without_torch_function():
                return self.module(*args, **kwargs)
        first_placement = placements[0]
        with without_torch_function():
            y = self._run_with_copies(first_placement, args, kwargs)
        for output in tensors_in((y,)):
            if recorded_placement(output) is None:
                self._record(output, first_placement)
        return y

    def _run_with_copies(
        self, placement: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module on copies of its parameters, whose gradients are summed over the devices.

        Raises as `check_no_checkpoint`: torch's checkpoint would run it again without these copies.
        """
        copies = self._copies_by_name(placement)
        y = torch.func.functional_call(self.module, copies, args, kwargs)
        if copies:
            inputs = (*args, *kwargs.values())
            check_no_checkpoint(self.path, tensors_in((y,)), tensors_in(inputs))
        return y

    def _copies_by_name(self, placement: Placement) -> dict[str, Any]:
        """Return copies of its parameters, except parameters of layers, which copy their own."""
        # Buffers are used as they are: they have no gradients.
        parameters = {}
        for prefix, module in self.module.named_modules():
            if not isinstance(module, Layer):
                parameters.update(module.named_parameters(prefix, recurse=False))
        copies = placement.parameter_copies(list(parameters.values()))
        return dict(zip(parameters, copies, strict=True))

    def _record(self, y: Tensor, placement: Placement) -> None:
        """Record that an output is sharded like the first input. Raises ShapeError if it is not as long."""
        shape = tuple(y.shape)
        has_dims = y.ndim == placement.ndim
        if not has_dims or placement.like_block(y).local_shape != shape:
            message = f"{self.path}: a block of shape {placement.local_shape} became one of {shape}"
            hint = "sharded dims keep their lengths, unless a layer returns them"
            raise placement.shape_error(message, hint)
        record(y, placement.like_block(y))
