"""What all domain-parallel layers share: made from an ordinary module, called on a block.

Decides how a module becomes a layer that knows its mesh, and where a layer's input and output stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn.placed import Placement, placed_as, record, recorded
from xshard import Layout, ShapeError, XshardError

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Layer:
    """Mixed in before the torch class that a layer is the counterpart of.

    A layer takes this process's block and returns this process's block of the outputs; where these stand is
    recorded (`sharding_of`). An input that no other layer made stands as the layer's `layout` says.
    """

    options: ClassVar[dict[str, Any]] = {}  # what `from_module` takes beside, with defaults

    layout: Layout
    mesh: MeshLike
    shape: tuple[int | None, ...] | None
    path: str
    follows: bool = False  # part of a model in which every tensor is recorded, or not to be trusted

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise TypeError(
            f"a domain-parallel layer is made of an ordinary one: {name}.from_module(module, mesh, layout)"
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
        """An ordinary module -> the layer that does to blocks what the module does to the whole array.

        Parameters and buffers are the module's own: one optimiser, one state dict. Gradients of parameters
        are summed over all axes that cut the array. layout: of the input, as in "b c h/sp w". shape: the
        input's global shape, where blocks differ in size; a length that is None is the block's, times the
        parts of the dim. path: what errors call the layer. out_rule (convolutions, pools): how outputs are
        cut, "" for as the input is, "balanced" or "aligned". overlap (convolutions): compute what needs no
        other device while the rows of others travel.

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
        layer.layout = Layout.parse(layout) if isinstance(layout, str) else layout
        layer.mesh, layer.path = mesh, path or cls.__name__
        layer.shape = None if shape is None else tuple(shape)
        try:
            layer.check()
        except XshardError as error:
            raise _named(error, layer.path) from None
        return layer

    def check(self) -> None:
        """Raise XshardError for options of the module that have no exact form."""

    def compute(self, x: Tensor, placement: Placement, *arguments: Any) -> tuple[Tensor, Placement]:
        """The block of the outputs, and where it stands."""
        raise NotImplementedError

    if TYPE_CHECKING:  # the options of the torch class

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, input: Tensor, *arguments: Any, **named: Any) -> Tensor:
        try:
            if self.follows and recorded(input) is None:
                raise ShapeError(
                    f"nothing is known of an input of shape {tuple(input.shape)}",
                    hint="it came by a function that cannot be followed, or not from the model's inputs; "
                    "activations are checkpointed by xt.nn.checkpoint",
                )
            placement = placed_as(input, self.layout, self.mesh, self.shape)
            with torch._C.DisableTorchFunction():  # what a layer does inside is no business of `propagation`
                y, result = self.compute(input, placement, *arguments, **named)
        except XshardError as error:
            raise _named(error, self.path) from None
        return record(y, result)

    def extra_repr(self) -> str:
        ordinary = super().extra_repr()  # type: ignore[misc]
        return f"{ordinary}, '{self.layout}'" if ordinary else f"'{self.layout}'"


def same_state(module: nn.Module, kind: type[Any]) -> Any:
    """A module of a kind with the very dicts of parameters and buffers of another, and hooks of its own.

    What one of the two loads or casts, both have.
    """
    new = object.__new__(kind)
    new.__dict__.update(module.__dict__)
    for name in HOOKS:
        new.__dict__[name] = getattr(module, name).copy()
    return new


def _named(error: XshardError, path: str) -> XshardError:
    return type(error)(f"{path}: {error.reason}", text=error.text, span=error.span, hint=error.hint)
