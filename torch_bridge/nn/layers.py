"""Layers: they share the state of a torch module, and compute this process's block of what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn import conv as convs
from torch_bridge.nn import norm as norms
from torch_bridge.nn.conv import Convolution, conv, each, padding_pairs
from torch_bridge.nn.placed import Outputs, Placement, placed_as, record, recorded
from torch_bridge.nn.window import interpolate
from torch_bridge.ops import halo_exchange, trim_halo
from xshard import Layout, Mesh, XshardError
from xshard.errors import MeshError, ShapeError, with_path
from xshard.ops import Axes, HaloWidth

HOOKS = ("hooks", "hooks_with_kwargs", "hooks_always_called", "pre_hooks", "pre_hooks_with_kwargs")


class Form(NamedTuple):
    """How the modules of a class compute on blocks, and the one value of an option that has an exact form."""

    compute: Callable[..., Outputs]
    option: str = ""
    only: int = 0
    hint: str = ""


class Layer:
    """A mixin before the torch class of a layer: block -> block of the outputs, with their placement."""

    form: Form
    layout: Layout
    mesh: MeshLike
    path: str
    outputs: str
    in_model: bool

    if TYPE_CHECKING:  # the attributes of the torch class

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, input: Tensor, *arguments: Any, **named: Any) -> Tensor:
        try:
            if self.in_model and recorded(input) is None:
                what = f"nothing is known of an input of shape {tuple(input.shape)}"
                hint = "it comes from a function that cannot be followed, or not from the model's inputs; "
                raise ShapeError(
                    what, hint=hint + "activations are checkpointed by xt.nn.checkpoint"
                )
            placement = placed_as(input, self.layout, self.mesh)
            with torch._C.DisableTorchFunction():  # `propagation` does not look into layers
                y, result = self.form.compute(self, input, placement, *arguments, **named)
        except XshardError as error:
            raise with_path(error, self.path) from None
        return record(y, result)

    def extra_repr(self) -> str:
        ordinary = super().extra_repr()  # type: ignore[misc]
        return f"{ordinary}, '{self.layout}'" if ordinary else f"'{self.layout}'"


def layer_of(
    module: nn.Module,
    layout: Layout | str,
    mesh: MeshLike,
    path: str | None = None,
    outputs: str = "",
) -> Any:
    """A module of a class in `LAYERS` -> the layer with its parameters; path: its name in a model, if any."""
    layer = same_state(
        module, next(LAYERS[kind] for kind in type(module).__mro__ if kind in LAYERS)
    )
    layer.layout = Layout.parse(layout)
    layer.mesh = mesh
    layer.path = path or type(module).__name__
    layer.outputs = outputs
    layer.in_model = path is not None
    _, option, only, hint = layer.form
    if option and {*each(value := getattr(module, option), 1)} != {only}:
        raise with_path(XshardError(f"{option}={value}", hint=hint), layer.path)
    return layer


def same_state(module: nn.Module, kind: type[Any]) -> Any:
    """A module of a class that shares the parameters and buffers of another; its hooks are copies."""
    new = object.__new__(kind)
    new.__dict__.update(module.__dict__)
    for hooks in HOOKS:
        new.__dict__[f"_forward_{hooks}"] = getattr(module, f"_forward_{hooks}").copy()
    return new


def _conv(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    padding = padding_pairs(layer.padding, layer.kernel_size, layer.dilation)
    windows = (layer.kernel_size, layer.stride, padding, layer.dilation)
    convolution = Convolution(*windows, layer.groups, layer.padding_mode, layer.outputs)
    return conv(x, placement, layer.weight, layer.bias, convolution)


def _upsample(layer: Any, x: Tensor, placement: Placement) -> Outputs:
    options = {name: getattr(layer, name) for name in ("align_corners", "recompute_scale_factor")}
    return interpolate(x, placement, layer.size, layer.scale_factor, layer.mode, **options)


_BY_RANK = {
    "AdaptiveAvgPool": Form(
        convs.global_avg_pool, "output_size", 1, "1 has an exact form for sharded dims"
    ),
    "AvgPool": Form(convs.avg_pool),
    "BatchNorm": Form(norms.batch_norm),
    "Conv": Form(_conv),
    "ConvTranspose": Form(convs.conv_transpose),
    "InstanceNorm": Form(
        norms.instance_norm, "track_running_stats", False, "statistics of one sample"
    ),
    "MaxPool": Form(
        convs.max_pool, "return_indices", False, "positions in the whole array are not computed"
    ),
}
# Every torch class with a layer -> its form; sizes and `normalized_shape` are global.
FORMS: dict[type[nn.Module], Form] = {
    nn.GroupNorm: Form(norms.group_norm),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), Form(norms.layer_norm)),
    **dict.fromkeys(
        (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), Form(_upsample)
    ),
    **{
        getattr(nn, f"{name}{rank}d"): form for name, form in _BY_RANK.items() for rank in (1, 2, 3)
    },
}

LAYERS: dict[type[nn.Module], type[Any]] = {
    kind: type(kind.__name__, (Layer, kind), {"form": form, "__module__": __name__})
    for kind, form in FORMS.items()
}
globals().update(
    {layer.__name__: layer for layer in LAYERS.values()}
)  # pickle looks them up by name


class HaloExchange(nn.Module):
    """Widens blocks by rows of their neighbours; `trim` drops them again.

    halo_width: rows at both sides, or before and after. dim: the dim that `axis` of `mesh` shards; without a
    mesh, all processes of the world shard it, in their order. boundary: the values beyond the edges of the
    array, as in a layout. shape: the global shape, if blocks differ in size.

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
        self.options: Any = {"boundary": boundary, "shape": shape}
        if mesh is None and not isinstance(axis, str):
            raise MeshError(
                f"axes {axis} without a mesh", hint="pass mesh=, or one axis for all processes"
            )

    def forward(self, x: Tensor) -> Tensor:
        """`n/axis -> n/axis:halo(...)`; the gradients of copied rows are added at their owner."""
        return halo_exchange(x, self.halo_width, self.dim, self.axis, self._mesh(), **self.options)

    def trim(self, x: Tensor) -> Tensor:
        """`n/axis:halo(...) -> n/axis`."""
        return trim_halo(x, self.halo_width, self.dim, self.axis, self._mesh(), **self.options)

    def _mesh(self) -> MeshLike:
        return Mesh({str(self.axis): dist.get_world_size()}) if self.mesh is None else self.mesh

    def extra_repr(self) -> str:
        return f"{self.halo_width}, dim={self.dim}, axis={self.axis!r}, boundary={self.options['boundary']!r}"
