"""`domain_parallel`: an ordinary model -> the same model on blocks of cut activations.

Decides which modules become layers, which stay because records follow blocks through them, and which are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn import layers
from torch_bridge.nn.custom_module import Converted
from torch_bridge.nn.layer import Layer, same_state
from torch_bridge.nn.placed import Placement, placed_as, record, recorded
from torch_bridge.nn.propagation import Propagation, is_followed
from torch_bridge.nn.propagation_rules import whole_placement
from xshard import Layout, XshardError
from xshard.notation.parser import ELLIPSIS

# The torch class of every layer -> the layer.
LAYERS: dict[type[nn.Module], Any] = {
    getattr(nn, name): layer
    for name, layer in vars(layers).items()
    if isinstance(layer, type) and issubclass(layer, Layer) and hasattr(nn, name)
} | {nn.UpsamplingNearest2d: layers.Upsample, nn.UpsamplingBilinear2d: layers.Upsample}

# Modules of torch whose functions `propagation` follows.
FOLLOWED = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Identity,
    nn.Flatten, nn.Unflatten, nn.Embedding, nn.Dropout, nn.AlphaDropout, nn.Softmax, nn.Softmax2d,
    nn.Softmin, nn.LogSoftmax, nn.GLU, nn.LocalResponseNorm, nn.ChannelShuffle, nn.ELU, nn.Hardshrink,
    nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.LogSigmoid, nn.PReLU, nn.ReLU, nn.ReLU6,
    nn.SELU, nn.CELU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d,
    nn.ReplicationPad2d, nn.ReplicationPad3d,
)  # fmt: skip


def domain_parallel(
    model: nn.Module,
    mesh: MeshLike,
    layout: Layout | str,
    *,
    shape: Sequence[int | None] | None = None,
    outputs: str = "",
    sum_gradients: bool = True,
    converters: Mapping[type[nn.Module], Callable[[Any], nn.Module]] | None = None,
) -> nn.Module:
    """A model of whole arrays -> the same model of blocks: outputs and gradients are those of the whole.

    The result shares parameters and buffers with `model`, which is left as it is: one optimiser and one state
    dict serve both. Every layer that reads neighbours or reduces becomes its counterpart in `xt.nn`; code
    between them (skip connections, cat along channels, gates) is followed as it runs.

    layout: of every input tensor with as many dims, as in "b c h/sp w"; other inputs are whole. shape: its
    global shape, where blocks differ in size; None for a length: the block's, times the number of
    parts. outputs: of convolutions and pools, as in `from_module`. sum_gradients: whether gradients
    of what is whole (parameters, other inputs) are summed over the axes of the layout, or stay each process's
    share. converters: of modules of these classes, which are not looked into: what they return works on a
    block as it is, and leaves cut dims as long as they are.
    In the model's code `x.shape` is the block's, and dropout draws separately for every block. Code that
    checkpoints activations must call `xt.nn.checkpoint`. The outputs' layout and global shape are
    `sharding_of(y)`. A loss over blocks is this process's share: the sum of all shares is the loss.

    A part of the result may be called by itself, on outputs of other parts or on blocks under `layout`.

    Raises XshardError, with its path in the model, for a module that has no exact form; in the forward pass,
    for a function that has none.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def turn():
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Sequential(
    ...         torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2)
    ...     )
    ...     parallel = xt.nn.domain_parallel(model, Mesh(sp=2), "b c h/sp w")
    ...     x = torch.arange(64.0).view(1, 1, 8, 8)
    ...     y = parallel(x.chunk(2, 2)[torch.distributed.get_rank()])
    ...     return torch.equal(y, model(x).split([2, 1], 2)[torch.distributed.get_rank()])
    >>> xt.testing.run_ranks(2, turn)
    [True, True]
    """
    layout = Layout.parse(layout)
    paths: dict[int, str] = {}
    made: dict[int, nn.Module] = {}

    def swapped(module: nn.Module, path: str) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        layer = LAYERS.get(type(module))
        converter = next((c for kind, c in (converters or {}).items() if isinstance(module, kind)), None)
        if converter is not None:
            new = Converted(converter(module), path)
        elif layer is not None:
            options = {"outputs": outputs} if "outputs" in layer.options else {}
            new = layer.from_module(module, mesh, layout, path=path, **options)
            new.follows = True
        else:
            _check_followed(module, path)
            new = same_state(module, type(module))
            inside = f"{path}." if path else ""
            new._modules = {
                name: child if child is None else swapped(child, inside + name)
                for name, child in module._modules.items()
            }
            paths[id(new)] = path
        made[id(module)] = new
        return new

    root = swapped(model, "")
    _Entrance(layout, mesh, None if shape is None else tuple(shape), paths, sum_gradients).attach(root)
    return root


@dataclass(eq=False, repr=False)
class _Entrance:
    """The hooks where tensors enter a model, or a part of it that is called by itself, and leave it.

    running: one for each module that is being called.
    """

    layout: Layout
    mesh: MeshLike
    shape: tuple[int | None, ...] | None
    paths: dict[int, str]
    sum_gradients: bool
    running: list[Propagation | None] = field(default_factory=list)

    def attach(self, model: nn.Module) -> None:
        for module in model.modules():
            enter = partial(self._enter, is_model=module is model)
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_model: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        follows, knows = is_followed(), any(map(recorded, inputs))
        # In a backward pass, a part that is given blocks of unknown origin is computed again by a checkpoint.
        again = not knows and torch._C._current_graph_task_id() != -1
        if (follows and knows) or (not is_model and (follows or again)):
            self.running.append(None)
            return None
        blocks = [x for x in inputs if recorded(x) or self._is_cut(x)]
        if not blocks:
            raise XshardError(f"no input has the dims of '{self.layout}'")
        like = self._placed(blocks[0], is_model)

        def known(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            placement = recorded(x)
            if placement is None and self._is_cut(x):
                placement = self._placed(x, is_model)
            # The record is set on an alias: the caller's tensor is left as it is.
            return record(x.view_as(x), placement or whole_placement(x, like))

        args, kwargs = tuple(map(known, args)), {k: known(v) for k, v in kwargs.items()}
        self.running.append(None if follows else Propagation(self.paths).__enter__())
        return args, kwargs

    def _is_cut(self, x: Tensor) -> bool:
        """Whether an input has the dims of the layout."""
        rank = len(self.layout.dims)
        return x.ndim >= rank - 1 if ELLIPSIS in self.layout.names else x.ndim == rank

    def _placed(self, x: Tensor, is_model: bool) -> Placement:
        layout, shape = self.layout.resolved(x.ndim), self.shape
        if shape is not None and not is_model:  # a part of the model has other channels
            shape = tuple(n if dim.axes else None for dim, n in zip(layout.dims, shape, strict=True))
        placement = placed_as(x, layout, self.mesh, shape)
        return placement if self.sum_gradients else replace(placement, copies=False)

    def _leave(self, *_: Any) -> None:
        if self.running and (propagation := self.running.pop()) is not None:
            propagation.__exit__(None, None, None)


def _check_followed(module: nn.Module, path: str) -> None:
    kind, name = type(module), f"{path or 'the model'} ({type(module).__name__})"
    if kind in FOLLOWED:
        return
    if isinstance(module, Layer):
        raise XshardError(f"{name} is domain-parallel already", hint="pass the ordinary model")
    known = next((c for c in kind.__mro__ if c in LAYERS), None)
    if known is not None:
        raise XshardError(
            f"{name} is a subclass of {known.__name__}",
            hint=f"its effect on blocks is not known: use {known.__name__}",
        )
    if kind.__module__.startswith("torch.nn."):
        raise XshardError(
            f"{name} has no exact form on blocks", hint="redistribute what it needs whole, outside"
        )
    if any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
        raise XshardError(f"{name} is lazy", hint="run the ordinary model once first")
