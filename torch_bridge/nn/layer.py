"""What all domain-parallel layers share: made from an ordinary module, called on a block.

Decides how a module becomes a layer that knows its mesh, and which placement its input and output have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn.placed import Placement, placed_as, record, recorded
from xshard import Layout, XshardError
from xshard.errors import ShapeError, with_path

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Layer:
    """A mixin, before the torch class whose counterpart a layer is.

    A layer takes this process's block and returns this process's block of the outputs, with a record of
    their sharding (`sharding_of`). An input without a record has the layer's `layout`.
    """

    options: ClassVar[dict[str, Any]] = {}  # more options of `from_module`, with defaults

    layout: Layout
    mesh: MeshLike
    shape: tuple[int | None, ...] | None
    path: str
    follows: bool = False  # whether it is part of a model, where an input without a record is an error

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise TypeError(
            f"a domain-parallel layer is made from an ordinary one: {name}.from_module(module, mesh, layout)"
        )

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        mesh: MeshLike,
        layout: Layout | str,
        *,
        shape: Sequence[int | None] | None = None,
        path: str = "",
        **options: Any,
    ) -> Self:
        """An ordinary module -> the layer whose blocks equal those of the module on the whole array.

        Parameters and buffers are the module's own: one optimiser, one state dict. Gradients of parameters
        are summed over all axes that cut the array. layout: of the input, as in "b c h/sp w". shape: the
        input's global shape, where blocks differ in size; None for a length: the block's, times the
        number of parts. path: the layer's name in errors. outputs (convolutions, pools): how outputs are
        cut: "" like the input, "balanced" or "aligned".

        Raises XshardError for a module of another kind, and for one that has no exact form.
        """
        torch_class = next(c for c in cls.__mro__ if c.__module__.startswith("torch.nn.modules"))
        if not isinstance(module, torch_class):
            raise XshardError(f"a {type(module).__name__} is no {torch_class.__name__}")
        for name in options:
            if name not in cls.options:
                known = ", ".join(cls.options) or "it has none"
                raise XshardError(f"{cls.__name__} has no option {name!r}", hint=f"options: {known}")
        layer = same_state(module, cls)
        layer.__dict__.update(cls.options | options)
        layer.layout = Layout.parse(layout)
        layer.mesh, layer.path = mesh, path or cls.__name__
        layer.shape = None if shape is None else tuple(shape)
        try:
            layer.check()
        except XshardError as error:
            raise with_path(error, layer.path) from None
        return layer

    def check(self) -> None:
        """Raise XshardError for options of the module that have no exact form."""

    def compute(self, x: Tensor, placement: Placement, *arguments: Any) -> tuple[Tensor, Placement]:
        """The block of the outputs, and its placement."""
        raise NotImplementedError

    if TYPE_CHECKING:  # the options of the torch class

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, input: Tensor, *arguments: Any, **named: Any) -> Tensor:
        try:
            if self.follows and recorded(input) is None:
                raise ShapeError(
                    f"nothing is known of an input of shape {tuple(input.shape)}",
                    hint="it comes from a function that cannot be followed, or not from the model's inputs; "
                    "activations are checkpointed by xt.nn.checkpoint",
                )
            placement = placed_as(input, self.layout, self.mesh, self.shape)
            with torch._C.DisableTorchFunction():  # `propagation` does not look into layers
                y, result = self.compute(input, placement, *arguments, **named)
        except XshardError as error:
            raise with_path(error, self.path) from None
        return record(y, result)

    def extra_repr(self) -> str:
        ordinary = super().extra_repr()  # type: ignore[misc]
        return f"{ordinary}, '{self.layout}'" if ordinary else f"'{self.layout}'"


def same_state(module: nn.Module, kind: type[Any]) -> Any:
    """A module of a kind that shares the dicts of parameters and buffers of another; its hooks are copies.

    Loading or casting one of the two changes both.
    """
    new = object.__new__(kind)
    new.__dict__.update(module.__dict__)
    for name in HOOKS:
        new.__dict__[name] = getattr(module, name).copy()
    return new
