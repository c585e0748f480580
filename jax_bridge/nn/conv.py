"""Convolutions along sharded dims."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
from jax import lax

from jax_bridge.nn.sharded import Sharded
from jax_bridge.nn.window import Boundaries, apply_windows
from xshard.errors import ShapeError
from xshard.notation.overlap import Window

Padding = str | Sequence[tuple[int, int]]


def conv_general_dilated(
    lhs: Sharded,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    feature_group_count: int = 1,
    *,
    boundary: Boundaries = None,
    outputs: str = "",
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> Sharded:
    """`lax.conv_general_dilated` of the global array: blocks [n, c, *space] -> blocks [n, features, *space].

    Takes the arguments of `lax`, for the global array; spatial dims may be sharded in any way.
    rhs: this device's copy of the kernel. With `check_vma=True` JAX adds the gradients of a kernel
    that all devices share; without, `copy_to(rhs, axes)` does. boundary: the rows of `padding`: zeros by
    default, or `periodic`, `reflect`, `edge`, `pole`, ... for all spatial dims or by name. outputs: how the
    outputs are sharded: like the dim (""), `balanced`, or `aligned` (each on the device where its stride
    begins). Raises ShapeError for sharded features, and as `redistribute` does.

    >>> import jax.numpy as jnp
    >>> def blur(x):
    ...     return conv_general_dilated(Sharded(x, "n c h/sp"), jnp.ones((1, 1, 3)), (1,), "SAME")
    >>> jax.pmap(blur, "sp")(jnp.ones((1, 1, 1, 4))).block  # one block on one device
    Array([[[[2., 3., 3., 2.]]]], dtype=float32)
    """
    shape = lhs.sharding.shape
    numbers = lax.conv_dimension_numbers(shape, rhs.shape, dimension_numbers)
    (_, channel, *space), (out, _, *taps) = numbers.lhs_spec, numbers.rhs_spec
    if lhs.layout.dims[channel].axes:
        raise ShapeError(
            f"features {str(lhs.layout.dims[channel])!r} are sharded, and a convolution adds over them",
            text=str(lhs.layout),
            hint="x.to(...) a layout with unsharded features",
        )
    base, dilation = (tuple(d or (1,) * len(space)) for d in (lhs_dilation, rhs_dilation))
    convolve = partial(
        lax.conv_general_dilated,
        lhs_dilation=base,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
        feature_group_count=feature_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    # On the global array: lax raises its own errors for arguments that do not fit.
    whole = jax.ShapeDtypeStruct(shape, lhs.block.dtype), jax.ShapeDtypeStruct(rhs.shape, rhs.dtype)
    jax.eval_shape(lambda x, kernel: convolve(x, kernel, tuple(window_strides), padding), *whole)
    kernel, strides = [rhs.shape[d] for d in taps], tuple(window_strides)
    windows = windows_of([shape[d] for d in space], kernel, strides, dilation, padding)
    # Dim lhs_spec[i] of the input becomes dim out_spec[i] of the output.
    order = [dict(zip(numbers.out_spec, numbers.lhs_spec, strict=True))[d] for d in range(len(shape))]
    return apply_windows(
        lhs,
        dict(zip(space, windows, strict=True)),
        lambda x, local: convolve(
            x, rhs, [local[d].stride for d in space], [local[d].padding for d in space]
        ),
        fill=0.0,
        boundary=boundary,
        outputs=outputs,
        base=dict(zip(space, base, strict=True)),
        order=order,
        features={channel: rhs.shape[out]},
    )


def windows_of(
    lengths: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int] | None,
    dilation: Sequence[int] | None,
    padding: Padding,
) -> list[Window]:
    """The window over every dim of the global array."""
    strides, dilation = (tuple(numbers or (1,) * len(sizes)) for numbers in (strides, dilation))
    if isinstance(padding, str):
        spans = [d * (k - 1) + 1 for k, d in zip(sizes, dilation, strict=True)]
        padding = lax.padtype_to_pads(lengths, spans, strides, padding)
    pads = [(int(before), int(after)) for before, after in padding]
    return list(map(Window, sizes, strides, dilation, pads))
