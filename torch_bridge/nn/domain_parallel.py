"""`domain_parallel`: modules become layers, or stay as records follow blocks through them, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from torch_bridge.autodiff.blocks import check_no_checkpoint
from torch_bridge.mesh.process_mesh import MeshLike, process_mesh
from torch_bridge.models.parallel import ATTRIBUTE
from torch_bridge.models.parallelize import replicated
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.nn.layers import LAYERS, Layer, layer_of, same_state
from torch_bridge.nn.placed import COPIES, Placement, placed_as, record, recorded
from torch_bridge.nn.propagation import Propagation, tensors_in
from xshard import Layout, XshardError
from xshard.errors import ShapeError
from xshard.notation.parser import ELLIPSIS

# Modules of torch that call functions with rules.
_PADS = ("Constant", "Zero", "Circular", "Reflection", "Replication")
FOLLOWED = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Identity,
    nn.Flatten, nn.Unflatten, nn.Linear, nn.Embedding, nn.Dropout, nn.AlphaDropout, nn.Softmax, nn.Softmax2d,
    nn.Softmin, nn.LogSoftmax, nn.GLU, nn.LocalResponseNorm, nn.ChannelShuffle, nn.ELU, nn.Hardshrink,
    nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.LogSigmoid, nn.PReLU, nn.ReLU, nn.ReLU6,
    nn.SELU, nn.CELU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold, *(getattr(nn, f"{pad}Pad{n}d") for pad in _PADS for n in (1, 2, 3)),
)  # fmt: skip


def domain_parallel(
    model: nn.Module,
    layout: Layout | str,
    mesh: MeshLike,
    *,
    shape: Sequence[int | None] | None = None,
    outputs: str = "",
    sum_gradients: bool = True,
    converters: Mapping[type[nn.Module], Callable[[Any], nn.Module]] | None = None,
) -> nn.Module:
    """Return a model of blocks with the outputs and gradients that `model` has on whole arrays.

    The result shares parameters and buffers with `model`, which is left as it is: one optimiser and one state
    dict serve both. Code between layers (skip connections, cat along channels, gates) is followed as it runs.

    layout: layout of every input tensor with as many dims, as in "b c h/sp w"; other inputs are replicated.
    shape: global shape of these inputs, if blocks differ in size; a length of None is the length of the block
    times the number of parts. outputs: how the outputs of convolutions and pools are sharded: "" like the
    input, "balanced" or "aligned". sum_gradients: sum gradients of parameters and of replicated inputs over
    the axes of the layout, all in one collective per dtype; else each process keeps its share.
    converters: class -> function that converts its modules. The result is called on local blocks, is not
    inspected, and must keep the length of sharded dims.
    In the model's code `x.shape` is the shape of the block, and dropout draws separately for every block.
    Code that checkpoints activations must call `xt.nn.checkpoint`. The outputs' layout and global shape are
    `sharding_of(y)`. A loss over blocks is this process's share: the sum of all shares is the loss.

    A part of the result may be called by itself, on outputs of other parts or on blocks under `layout`.
    `xt.verify`, `xt.grad_norm`, `xt.clip_grad_norm_`, `xt.check_replicas` and `xt.explain` take the result.

    Raises XshardError, with the path, for a module or, in the forward pass, a function without an exact form.

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
    lengths = None if shape is None else tuple(shape)
    paths: dict[int, str] = {}
    swapped: dict[int, nn.Module] = {}

    def swap(module: nn.Module, path: str) -> nn.Module:
        if id(module) in swapped:
            return swapped[id(module)]
        converter = next(
            (c for kind, c in (converters or {}).items() if isinstance(module, kind)), None
        )
        if converter is not None:
            new: nn.Module = _Converted(converter(module), path)
        elif type(module) in LAYERS:
            new = layer_of(module, layout, mesh, path, outputs)
        else:
            _check_followed(module, path)
            new = same_state(module, type(module))
            inside = f"{path}." if path else ""
            children = module._modules.items()
            new._modules = {
                name: None if x is None else swap(x, inside + name) for name, x in children
            }
            paths[id(new)] = path
        swapped[id(module)] = new
        return new

    root = swap(model, "")
    axes = tuple(axis for axis in process_mesh(mesh).mesh.axes if axis in layout.axes)
    entrance = _Entrance(layout, mesh, lengths, paths, () if sum_gradients else axes)
    entrance.attach(root)
    if sum_gradients:
        parallel = replicated(root, ParallelContext(process_mesh(mesh).along(axes)))
        parallel.original = model
        parallel.arrives = entrance.arrivals
        setattr(root, ATTRIBUTE, parallel)
    return root


@dataclass(eq=False, repr=False)
class _Entrance:
    """The hooks where tensors enter a model, or a part of it that is called by itself, and leave it."""

    layout: Layout
    mesh: MeshLike
    shape: tuple[int | None, ...] | None
    paths: dict[int, str]
    shares: tuple[str, ...]
    running: list[ExitStack] = field(default_factory=list)  # one for each running module

    def attach(self, model: nn.Module) -> None:
        for module in model.modules():
            enter = partial(self._enter, is_model=module is model)
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def arrivals(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        sharded = (
            (key, x) for key, x in values.items() if isinstance(x, Tensor) and self._is_sharded(x)
        )
        placements = {key: self._placed(x, True) for key, x in sharded}
        return {key: (placement.layout, placement.shape) for key, placement in placements.items()}

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_model: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        follows = any(isinstance(mode, Propagation) for mode in _get_current_function_mode_stack())
        knows = any(map(recorded, inputs))
        self.running.append(ExitStack())
        # In a backward pass, a part that is given blocks of unknown origin is computed again by a checkpoint.
        again = not knows and torch._C._current_graph_task_id() != -1
        if (follows and knows) or (not is_model and (follows or again)):
            return None
        blocks = [x for x in inputs if recorded(x) or self._is_sharded(x)]
        if not blocks:
            raise XshardError(f"no input has the dims of '{self.layout}'")
        first = self._placed(blocks[0], is_model)

        def known(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            placement = recorded(x)
            if placement is None and self._is_sharded(x):
                placement = self._placed(x, is_model)
            elif placement is None:
                placement = first.whole(x)
                (x,) = placement.copied(x)
            # The record is set on an alias: the caller's tensor is left as it is.
            return record(x.view_as(x), placement)

        args = tuple(map(known, args))
        kwargs = {name: known(x) for name, x in kwargs.items()}
        self._copy_parameters(module, first)
        if not follows:
            self.running[-1].enter_context(Propagation(self.paths))
        return args, kwargs

    def _copy_parameters(self, module: nn.Module, placement: Placement) -> None:
        """Make copies of all parameters until the module ends: their gradients are summed together."""
        axes = placement.axes
        own = [p for p in module.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
        if own and axes != placement.shares:
            ready = {
                (id(p), axes): copy
                for p, copy in zip(own, placement.copies_of(own, axes), strict=True)
            }
            self.running[-1].callback(COPIES.reset, COPIES.set(ready))

    def _is_sharded(self, x: Tensor) -> bool:
        rank = len(self.layout.dims)
        return x.ndim >= rank - 1 if ELLIPSIS in self.layout.names else x.ndim == rank

    def _placed(self, x: Tensor, is_model: bool) -> Placement:
        layout = self.layout.resolved(x.ndim)
        shape = self.shape
        if shape is not None and not is_model:  # a part of the model has other channels
            shape = tuple(
                n if dim.axes else None for dim, n in zip(layout.dims, shape, strict=True)
            )
        return replace(placed_as(x, layout, self.mesh, shape), shares=self.shares)

    def _leave(self, *_: Any) -> None:
        if self.running:
            self.running.pop().close()


def _check_followed(module: nn.Module, path: str) -> None:
    kind = type(module)
    known = next((c for c in kind.__mro__ if c in LAYERS), None)
    what = hint = ""
    if kind in FOLLOWED:
        return
    if isinstance(module, Layer):
        what = "is domain-parallel already"
        hint = "pass the ordinary model"
    elif known is not None and kind.forward is known.forward:
        what = f"is a subclass of {known.__name__}"
        hint = "its effect on blocks is not known: converters="
    elif kind.__module__.startswith("torch.nn."):
        what = "lacks an exact form on blocks"
        hint = "converters=, or redistribute what it needs whole"
    elif any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
        what = "is lazy"
        hint = "run the ordinary model once first"
    if what:
        raise XshardError(f"{path or 'the model'} ({kind.__name__}) {what}", hint=hint)


class _Converted(nn.Module):
    """Calls a module of the user's own, which keeps the lengths of sharded dims, on blocks."""

    module: nn.Module

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__()
        self.path = path
        # The module is not a child: names of parameters, and the state dict, stay as they are.
        self.__dict__["module"] = module
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = getattr(module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.module.training = self.training
        placement = next(
            (p for p in map(recorded, (*args, *kwargs.values())) if p is not None), None
        )
        with torch._C.DisableTorchFunction():  # `propagation` does not look inside
            if placement is None:
                return self.module(*args, **kwargs)
            copies = self._copies(placement)
            y = torch.func.functional_call(self.module, copies, args, kwargs)
            if copies:
                check_no_checkpoint(
                    self.path, tensors_in((y,)), tensors_in((*args, *kwargs.values()))
                )
        if isinstance(y, tuple | list):
            return type(y)(self._recorded(part, placement) for part in y)
        return self._recorded(y, placement)

    def _copies(self, placement: Placement) -> dict[str, Any]:
        """Copies of its parameters, except parameters of layers, which copy their own."""
        own = {
            name: parameter
            for prefix, module in self.module.named_modules()
            if not isinstance(module, Layer)
            for name, parameter in module.named_parameters(prefix, recurse=False)
        }
        return dict(zip(own, placement.copied(*own.values()), strict=True))

    def _recorded(self, y: Any, placement: Placement) -> Any:
        if not isinstance(y, Tensor) or recorded(y) is not None:
            return y
        local = placement.local_shape
        if y.ndim != len(local) or any(
            n != local[d] for d, n in enumerate(y.shape) if placement.cuts(d)
        ):
            what = f"{self.path}: a block of shape {local} became one of {tuple(y.shape)}"
            hint = "sharded dims keep their lengths, unless a layer returns them"
            raise ShapeError(what, text=str(placement.layout), hint=hint)
        lengths = [placement.shape[d] if placement.cuts(d) else n for d, n in enumerate(y.shape)]
        return record(y, placement.remade(placement.layout.dims, lengths))
