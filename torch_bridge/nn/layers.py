"""Layers: they share the state of a torch module, and compute this process's block of what it computes.

Each class here has the name of the torch class that it stands for; sizes and `normalized_shape` are global.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from torch_bridge.nn import conv as convs
from torch_bridge.nn import norm as norms
from torch_bridge.nn.placed import Outputs, Placement, placed_as, record, recorded_placement
from torch_bridge.nn.window import interpolate, per_dim
from torch_bridge.ops import halo_exchange, trim_halo
from torch_bridge.versions.modes import without_torch_function
from torch_bridge.versions.modules import copy_forward_hooks
from xshard import Layout, Mesh, XshardError
from xshard.errors import MeshError, ShapeError, api_boundary, with_path
from xshard.ops import Axes, HaloWidth

# Torch class -> its class of layers, whose second base it is.
LAYERS: dict[type[nn.Module], type[Any]] = {}


class OnlyOption(NamedTuple):
    """The one value of an option of a torch class that has an exact form on blocks."""

    name: str
    value: int
    hint: str


class Layer:
    """A mixin before the torch class of a layer: block -> block of the outputs, with their placement."""

    layout: Layout
    mesh: MeshLike
    path: str  # its name in the model, or its class: for errors
    outputs: str  # how the outputs of a convolution or a pool are sharded
    in_model: bool  # inputs must have a record
    only_option: ClassVar[OnlyOption | None] = None

    def __init_subclass__(cls) -> None:
        _, *torch_classes = cls.__bases__
        for torch_class in torch_classes:  # none for a mixin of several layers
            LAYERS[torch_class] = cls

    if TYPE_CHECKING:  # the attributes of the torch class

        def __getattr__(self, name: str) -> Any: ...

    def compute(self, x: Tensor, placement: Placement) -> Outputs:
        """Return the outputs of a block, and their placement."""
        raise NotImplementedError

    def _forward(self, input: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """Compute the outputs of a block, with their record; errors name the layer."""
        try:
            if self.in_model and recorded_placement(input) is None:
                reason = f"nothing is known of an input of shape {tuple(input.shape)}"
                hint = (
                    "it comes from a function that cannot be followed, or not from the model's inputs; "
                    "activations are checkpointed by xt.nn.checkpoint"
                )
                raise ShapeError(reason, hint=hint)
            placement = placed_as(input, self.layout, self.mesh)
            with without_torch_function():
                y, result = self.compute(input, placement, *arguments, **named)
        except XshardError as error:
            raise with_path(error, self.path) from None
        return record(y, result)

    # Declared like torch's own: the `forward` of each torch class has another signature.
    forward: Callable[..., Any] = _forward

    def extra_repr(self) -> str:
        options = super().extra_repr()  # type: ignore[misc]  # of the torch class
        separator = ", " if options else ""
        return f"{options}{separator}'{self.layout}'"


# The functions of `convs` and `norms` take a layer first: they are methods.


class _ConvLayer(Layer):
    compute = convs.conv_layer


class _ConvTransposeLayer(Layer):
    compute = convs.conv_transpose


class _AvgPoolLayer(Layer):
    compute = convs.avg_pool


class _GlobalAvgPoolLayer(Layer):
    compute = convs.global_avg_pool
    only_option = OnlyOption("output_size", 1, "1 has an exact form for sharded dims")


class _MaxPoolLayer(Layer):
    compute = convs.max_pool
    only_option = OnlyOption(
        "return_indices", False, "positions in the whole array are not computed"
    )


class _BatchNormLayer(Layer):
    compute = norms.batch_norm


class _InstanceNormLayer(Layer):
    compute = norms.instance_norm
    only_option = OnlyOption("track_running_stats", False, "statistics of one sample")


class _LayerNormLayer(Layer):
    compute = norms.layer_norm


class _UpsampleLayer(Layer):
    def compute(self, x: Tensor, placement: Placement) -> Outputs:
        return interpolate(
            x,
            placement,
            self.size,
            self.scale_factor,
            self.mode,
            align_corners=self.align_corners,
            recompute_scale_factor=self.recompute_scale_factor,
        )


class Conv1d(_ConvLayer, nn.Conv1d):
    """Torch's layer on blocks `(b, c, w)`."""


class Conv2d(_ConvLayer, nn.Conv2d):
    """Torch's layer on blocks `(b, c, h, w)`."""


class Conv3d(_ConvLayer, nn.Conv3d):
    """Torch's layer on blocks `(b, c, d, h, w)`."""


class ConvTranspose1d(_ConvTransposeLayer, nn.ConvTranspose1d):
    """Torch's layer on blocks `(b, c, w)`."""


class ConvTranspose2d(_ConvTransposeLayer, nn.ConvTranspose2d):
    """Torch's layer on blocks `(b, c, h, w)`."""


class ConvTranspose3d(_ConvTransposeLayer, nn.ConvTranspose3d):
    """Torch's layer on blocks `(b, c, d, h, w)`."""


class AvgPool1d(_AvgPoolLayer, nn.AvgPool1d):
    """Torch's layer on blocks `(..., w)`."""


class AvgPool2d(_AvgPoolLayer, nn.AvgPool2d):
    """Torch's layer on blocks `(..., h, w)`."""


class AvgPool3d(_AvgPoolLayer, nn.AvgPool3d):
    """Torch's layer on blocks `(..., d, h, w)`."""


class AdaptiveAvgPool1d(_GlobalAvgPoolLayer, nn.AdaptiveAvgPool1d):
    """Torch's layer on blocks `(..., w)`, for an output of one row."""


class AdaptiveAvgPool2d(_GlobalAvgPoolLayer, nn.AdaptiveAvgPool2d):
    """Torch's layer on blocks `(..., h, w)`, for an output of one row along each dim."""


class AdaptiveAvgPool3d(_GlobalAvgPoolLayer, nn.AdaptiveAvgPool3d):
    """Torch's layer on blocks `(..., d, h, w)`, for an output of one row along each dim."""


class MaxPool1d(_MaxPoolLayer, nn.MaxPool1d):
    """Torch's layer on blocks `(..., w)`."""


class MaxPool2d(_MaxPoolLayer, nn.MaxPool2d):
    """Torch's layer on blocks `(..., h, w)`."""


class MaxPool3d(_MaxPoolLayer, nn.MaxPool3d):
    """Torch's layer on blocks `(..., d, h, w)`."""


class BatchNorm1d(_BatchNormLayer, nn.BatchNorm1d):
    """Torch's layer on blocks `(b, c)` or `(b, c, w)`."""


class BatchNorm2d(_BatchNormLayer, nn.BatchNorm2d):
    """Torch's layer on blocks `(b, c, h, w)`."""


class BatchNorm3d(_BatchNormLayer, nn.BatchNorm3d):
    """Torch's layer on blocks `(b, c, d, h, w)`."""


class InstanceNorm1d(_InstanceNormLayer, nn.InstanceNorm1d):
    """Torch's layer on blocks `(b, c, w)`."""


class InstanceNorm2d(_InstanceNormLayer, nn.InstanceNorm2d):
    """Torch's layer on blocks `(b, c, h, w)`."""


class InstanceNorm3d(_InstanceNormLayer, nn.InstanceNorm3d):
    """Torch's layer on blocks `(b, c, d, h, w)`."""


class GroupNorm(Layer, nn.GroupNorm):
    """Torch's layer on blocks `(b, c, ...)`."""

    compute = norms.group_norm


class LayerNorm(_LayerNormLayer, nn.LayerNorm):
    """Torch's layer on blocks whose last dims may be sharded."""


class RMSNorm(_LayerNormLayer, nn.RMSNorm):
    """Torch's layer on blocks whose last dims may be sharded."""


class Upsample(_UpsampleLayer, nn.Upsample):
    """Torch's layer on blocks `(b, c, *spatial)`."""


class UpsamplingNearest2d(_UpsampleLayer, nn.UpsamplingNearest2d):
    """Torch's layer on blocks `(b, c, h, w)`."""


class UpsamplingBilinear2d(_UpsampleLayer, nn.UpsamplingBilinear2d):
    """Torch's layer on blocks `(b, c, h, w)`."""


def torch_class_with_layer(module_class: type[nn.Module]) -> type[nn.Module] | None:
    """Return the nearest class of `LAYERS` that a class is or inherits from."""
    for ancestor in module_class.__mro__:
        if ancestor in LAYERS:
            return ancestor
    return None


def layer_of(
    module: nn.Module,
    layout: Layout | str,
    mesh: MeshLike,
    path: str | None = None,
    outputs: str = "",
) -> Any:
    """Make a layer for blocks of a sharded array, with the parameters of an ordinary module.

    The parameters are shared, not copied. Raises XshardError for an option that has no exact form
    on blocks, with the only value that is possible.

    Args:
        module: A module of a class in `LAYERS`, such as `nn.Conv2d`, or of a subclass.
        layout: The layout of the inputs.
        mesh: The mesh.
        path: The module's name in the model that contains it; None for a layer used alone.
        outputs: How the outputs of convolutions and pools are sharded.
    """
    layer_class = torch_class_with_layer(type(module))
    assert layer_class is not None, f"{type(module)} has no layer"
    layer = share_state(module, LAYERS[layer_class])
    layer.layout = Layout.parse(layout)
    layer.mesh = mesh
    layer.path = path if path else type(module).__name__
    layer.outputs = outputs
    # Used alone, a layer takes plain tensors as blocks under its layout. In a model, blocks carry a
    # note of their layout; one without it comes from code that lost track, which is an error.
    layer.in_model = path is not None
    only = layer.only_option
    if only is not None:
        value = getattr(module, only.name)
        if set(per_dim(value, 1)) != {only.value}:
            raise with_path(XshardError(f"{only.name}={value}", hint=only.hint), layer.path)
    return layer


def share_state(module: nn.Module, new_class: type[Any]) -> Any:
    """Return a module of another class that shares parameters and buffers; its hooks are copies."""
    new = object.__new__(new_class)  # `__init__` would make parameters
    new.__dict__.update(module.__dict__)
    copy_forward_hooks(new, module)
    return new


@api_boundary
class HaloExchange(nn.Module):
    """Widen blocks by rows of their neighbours; `trim` drops them again.

        halo = xt.nn.HaloExchange(halo_width=1, dim=-2)
        y = halo(x)                 # [h/2, w] -> [h/2 + 2, w] on 2 processes
        halo.trim(y)                # x again

    Args:
        halo_width: Rows at both sides, or a pair (before, after).
        dim: The dim that `axis` of `mesh` shards.
        axis: The mesh axis, or axes, that shard the dim.
        mesh: A mesh that has the axis. Without one, all processes of the world shard the dim, in their order.
        boundary: The values beyond the edges of the array, as in a layout: "zero", "periodic", ...
        shape: The global shape, if blocks differ in size.

    Raises:
        MeshError: For several axes without a mesh.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> def turn():
        ...     halo = xt.nn.HaloExchange(halo_width=1, dim=-2, boundary="periodic")
        ...     x = torch.tensor([[1], [2]]) + 2 * torch.distributed.get_rank()
        ...     return halo(x).flatten().tolist(), torch.equal(halo.trim(halo(x)), x)
        >>> xt.testing.run_ranks(2, turn)
        [([4, 1, 2, 3], True), ([2, 3, 4, 1], True)]
    """

    def __init__(
        self,
        halo_width: HaloWidth,
        dim: int = -2,
        *,
        axis: Axes = "sp",
        mesh: MeshLike | None = None,
        boundary: str = "zero",
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.halo_width = halo_width
        self.dim = dim
        self.axis = axis
        self.mesh = mesh
        self.boundary = boundary
        self.shape = shape
        if mesh is not None:
            mesh_of(mesh)  # raises for what is no mesh
        elif not isinstance(axis, str):
            raise MeshError(
                f"axes {axis} without a mesh", hint="pass mesh=, or one axis for all processes"
            )

    @api_boundary
    def forward(self, x: Tensor) -> Tensor:
        """Add the neighbours' border rows to a block: `n/axis -> n/axis:halo(...)`.

        With a halo of 1, 4 rows become 6. Gradients of copied rows are added at their owner.

        Args:
            x: This process's block. All processes of the axes call it.
        """
        return self._move(halo_exchange, x)

    @api_boundary
    def trim(self, x: Tensor) -> Tensor:
        """Drop the rows of neighbours from a block: `n/axis:halo(...) -> n/axis`.

        With a halo of 1, 6 rows become 4: the inverse of `forward`.

        Args:
            x: A block with a halo, such as the result of this module.
        """
        return self._move(trim_halo, x)

    def _move(self, move: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Call one of the functions of `torch_bridge.ops` for halos with this module's options."""
        mesh = self.mesh
        if mesh is None:
            mesh = Mesh({str(self.axis): dist.get_world_size()})
        return move(
            x, self.halo_width, self.dim, self.axis, mesh, boundary=self.boundary, shape=self.shape
        )

    def extra_repr(self) -> str:
        return f"{self.halo_width}, dim={self.dim}, axis={self.axis!r}, boundary={self.boundary!r}"
