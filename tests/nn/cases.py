"""Convolutions, pools, interpolations and halos of sharded arrays, and their results in numpy.

The published cases stand in `tests/data/halo.json`. The oracle gathers the rows of every tap by index.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from tests import oracle
from xshard.nn.windows import taps

PAIR = xs.Mesh(sp=2)
ROW = xs.Mesh(sp=4)
GRID = xs.Mesh(x=2, y=2)
# Boundaries, as numpy's padding modes.
PAD_MODES = {"zero": "constant", "periodic": "wrap", "reflect": "reflect", "edge": "edge"}
Ints = tuple[int, ...]


class Case(NamedTuple):
    """An op over the spatial dims of an array `(batch, channels, *space)`.

    op: conv, transposed, max, avg or interpolate. layout: layout of the array, or of its spatial dims.
    k, s, p, d: kernel, stride, padding before and after, and dilation of every spatial dim. extra: padding of
    a transposed convolution's outputs. size: spatial lengths of an interpolation. out_sizes: expected lengths
    of the blocks of some dims of the outputs.
    """

    op: str
    shape: Ints
    layout: str
    mesh: xs.Mesh
    k: Ints = ()
    s: Ints = ()
    p: tuple[Ints, ...] = ()
    d: Ints = ()
    extra: Ints = ()
    groups: int = 1
    boundary: str = "zero"
    ceil: bool = False
    include_pad: bool = True
    size: Ints = ()
    mode: str = ""
    align_corners: bool = False
    outputs: str = ""
    out_sizes: dict[int, list[int]] = {}  # noqa: RUF012

    @property
    def kernel_shape(self) -> Ints:
        """The kernel of a convolution to 2 features for each group."""
        first = 2 * self.groups
        second = self.shape[1] // self.groups
        return (self.shape[1], 2, *self.k) if self.op == "transposed" else (first, second, *self.k)


def case(
    op: str, space: Ints, layout: str, mesh: xs.Mesh, k: Any = (), channels: int = 2, **options: Any
) -> Case:
    """A case with one number for all spatial dims, or one for each."""
    each = {
        "k": k,
        **{name: options.pop(name, n) for name, n in (("s", 1), ("p", 0), ("d", 1), ("extra", 0))},
    }
    spread = {name: (n,) * len(space) if isinstance(n, int) else n for name, n in each.items()}
    spread["p"] = tuple((n, n) if isinstance(n, int) else n for n in spread["p"])
    shape = (options.pop("batch", 1), channels, *space)
    return Case(
        op, shape, layout if layout[:2] == "b/" else f"b c {layout}", mesh, **spread, **options
    )


conv, transposed, interpolate = (partial(case, op) for op in ("conv", "transposed", "interpolate"))
max_pool = partial(case, "max")
avg_pool = partial(case, "avg")
CASES = {
    # Libraries get these wrong: values, lengths, gradients, or they hang.
    "patch embedding, k3 s3 over 9+9": conv((18,), "h/sp", PAIR, 3, s=3),
    "k3 s2 p0 over 8+8": conv((16,), "h/sp", PAIR, 3, s=2),
    "k5 p2 over 4+1+4": conv((9,), "h/sizes(sp,4,1,4)", xs.Mesh(sp=3), 5, p=2),
    "k3 p2 d2, groups": conv((16,), "h/sp", PAIR, 3, 4, p=2, d=2, groups=2),
    "k5 s2 p2": conv((16,), "h/sp", PAIR, 5, s=2, p=2),
    "k4 p1": conv((16,), "h/sp", PAIR, 4, p=1),
    "circular, the second dim sharded": conv((8, 6), "h w/sp", PAIR, 3, p=1, boundary="periodic"),
    "17 rows over 2": conv((17,), "h/sp", PAIR, 3, p=1),
    "average pool k2 s2 p1": avg_pool((16,), "h/sp", PAIR, 2, s=2, p=1),
    "average pool k3": avg_pool((8, 6), "h/sp w", PAIR, 3, p=1),
    "max pool k3 s2 p1": max_pool((8, 6), "h/sp w", PAIR, 3, s=2, p=1),
    "bilinear, align_corners": interpolate(
        (8, 6), "h/sp w", PAIR, size=(16, 12), mode="linear", align_corners=True,
    ),
    # More boundaries, blocks without rows or outputs, several sharded dims.
    "devices without outputs": conv((2,), "h/sp", ROW, 3, p=1),
    "zigzag": conv((16,), "h/zigzag(sp)", ROW, 5, p=2),
    "even kernel, circular, groups": conv(
        (16, 12), "h/x w/y", GRID, (3, 4), 4, batch=2, p=((1, 1), (1, 2)), groups=2, boundary="periodic",
    ),
    "reflect over two axes": conv((16, 12), "h/(x,y) w", GRID, (3, 5), batch=2, p=(1, 2), boundary="reflect"),
    "edge": conv((7, 5), "h/x w/y", GRID, 3, p=1, boundary="edge"),
    "batch sharded too": conv((17, 12), "b/x c h/y w", GRID, (3, 4), batch=3, s=2, p=(1, 2)),
    "3-D": conv((7, 6, 5), "d/x h/y w", GRID, (3, 2, 1), s=(1, 2, 1)),
    "transposed, groups, dilation": transposed((9, 7), "h/x w/y", GRID, 3, s=2, p=1, extra=1, groups=2, d=2),
    "transposed, gaps between inputs": transposed((5, 7), "h/x w/y", GRID, 2, s=5, extra=3),
    "transposed, empty blocks": transposed((2,), "h/sp", ROW, 2, s=2),
    "transposed, aligned blocks": transposed((9,), "h/sizes(sp,4,0,2,3)", ROW, 4, s=2, p=1),
    "transposed 3-D": transposed((5, 4, 3), "d/x h w/y", GRID, 3, s=2, p=1),
    "max pool, ceil": max_pool((14, 12), "h/x w/y", GRID, 3, s=2, p=1, ceil=True),
    "max pool, dilated": max_pool((13, 11), "h/x w/y", GRID, 3, p=1, d=2),
    "max pool, empty blocks": max_pool((3,), "h/sp", ROW, 2, s=2),
    "max pool 3-D": max_pool((7, 6, 5), "d/x h/y w", GRID, 3, s=2, p=1),
    "average pool, ceil": avg_pool((14, 12), "h/x w/y", GRID, 3, s=2, p=1, ceil=True),
    "average pool, padding not counted": avg_pool((13, 11), "h/sp w", ROW, 3, s=2, p=1, include_pad=False),
    "average pool 1-D, ceil, padding not counted": avg_pool(
        (14,), "h/sp", ROW, 3, s=2, p=1, ceil=True, include_pad=False,
    ),
    "nearest, down": interpolate((14, 9), "h/x w/y", GRID, size=(9, 31), mode="nearest"),
    "bicubic": interpolate((14, 9), "h/x w/y", GRID, size=(23, 5), mode="cubic"),
    "trilinear": interpolate(
        (5, 4, 3), "d/x h/y w", GRID, size=(10, 8, 6), mode="linear", align_corners=True,
    ),
    "upsampling of empty blocks": interpolate((5,), "h/sp", ROW, size=(7,), mode="linear"),
    "outputs like the input": conv((10,), "h/sp", ROW, 3, s=2, p=1, out_sizes={2: [2, 2, 1, 0]}),
    "outputs balanced": conv(
        (10,), "h/sp", ROW, 3, s=2, p=1, outputs="balanced", out_sizes={2: [2, 1, 1, 1]},
    ),
    "outputs aligned": conv((10,), "h/sp", ROW, 3, s=2, p=1, outputs="aligned", out_sizes={2: [2, 1, 2, 0]}),
}  # fmt: skip

# -- published cases ---------------------------------------------------------------------------------------

DATA = json.loads((Path(__file__).parents[1] / "data" / "halo.json").read_text())
OPS = {
    "conv": "conv",
    "causal": "conv",
    "conv_transpose": "transposed",
    "maxpool": "max",
    "avgpool": "avg",
}
OPS |= {"interpolate": "interpolate"}


def sharded_layout(data: dict[str, Any]) -> str:
    """The case's dims: sharded in balanced parts, or in the order or the parts that it gives."""
    names = [f"d{d}" for d in range(len(data["global_shape"]))]
    for i, d in enumerate(data["sharded_dims"]):
        sizes = (data.get("shard_sizes") or {i: None})[i]
        parts = data["mesh"][i]
        order = f"zigzag(m{i})" if data.get("layout") == "zigzag" else f"balanced(m{i})"
        even = [len(part) for part in np.array_split(range(data["global_shape"][d]), parts)]
        if sizes not in (None, even):
            order = f"sizes(m{i},{','.join(map(str, sizes))})"
        names[d] += f"/{order}"
    return " ".join(names)


def device_mesh(data: dict[str, Any]) -> xs.Mesh:
    return xs.Mesh({f"m{i}": n for i, n in enumerate(data["mesh"])})


def _published(data: dict[str, Any]) -> Case:
    """A layer with at most two samples and channels, and unsharded dims no longer than two windows."""
    op = data["op"].split()[0]
    n = len(data["global_shape"]) - 2
    numbers = {
        a: ast.literal_eval(b) for a, b in re.findall(r"(\w+)=(\[.*?\]|\d+|True|False)", data["op"])
    }
    shape = [*(min(m, 2) for m in data["global_shape"][:2]), *data["global_shape"][2:]]
    numbers = {a: (b,) * n if isinstance(b, int) and a in "kd" else b for a, b in numbers.items()}
    k = numbers.get("k", ())
    d = numbers.get("d", (1,) * n)
    for i, width in enumerate(k):
        if i + 2 not in data["sharded_dims"]:
            shape[i + 2] = min(shape[i + 2], 2 * (d[i] * (width - 1) + 1))
    pads = [(k[0] - 1, 0)] if op == "causal" else [(m, m) for m in numbers.get("p", ())]
    mode = re.search(r"mode=(\w+)", data["op"])
    return Case(
        OPS[op],
        tuple(shape),
        sharded_layout(data),
        device_mesh(data),
        tuple(k),
        tuple(numbers.get("s", (1,) * n)),
        tuple(pads),
        tuple(d),
        tuple(numbers.get("op", (0,) * n)),
        shape[1] if op == "causal" else 1,
        "periodic" if data["boundary"] == "circular" else "zero",
        size=(numbers["size"],) if "size" in numbers else (),
        mode=mode[1] if mode else "",
        align_corners=bool(numbers.get("align_corners")),
        outputs="" if op == "conv_transpose" else data.get("out_rule") or "",
        out_sizes=dict(zip(data["sharded_dims"], data.get("out_sizes") or (), strict=False)),
    )


PUBLISHED = {data["name"]: _published(data) for data in DATA if data["op"].split()[0] in OPS}
HALOS = {data["name"]: data for data in DATA if data["op"].startswith("plain")}
NATTEN = next(data for data in DATA if data["op"].startswith("na2d"))
EARTH = "credit-earth-pole-pad"

# -- the oracle --------------------------------------------------------------------------------------------


def _tap_rows(case: Case, i: int) -> NDArray[np.int64]:
    """The row that every tap of every output along a spatial dim reads, (outputs, taps); -1: the fill."""
    n, k, s, d, (before, after) = case.shape[i + 2], case.k[i], case.s[i], case.d[i], case.p[i]
    span = d * (k - 1) + 1
    if case.op == "transposed":  # the output that every tap of every input adds to
        outputs = (n - 1) * s - before - after + span + case.extra[i]
        found = np.arange(n)[:, None] * s - before + d * np.arange(k)
        return np.where((found >= 0) & (found < outputs), found, -1)
    if case.ceil and -(-(n + before + after - span) // s) * s < n + before:
        after += -(n + before + after - span) % s
    fill = {"constant_values": -1} if case.boundary == "zero" else {}
    padded = np.pad(np.arange(n), (before, after), PAD_MODES[case.boundary], **fill)
    outputs = (len(padded) - span) // s + 1
    return padded[np.arange(outputs)[:, None] * s + d * np.arange(k)]


def _gathered(x: NDArray, rows: Sequence[NDArray], fill: float = 0.0) -> NDArray:
    """(n, c, *space) -> (n, c, outputs, taps, outputs, taps, ...)."""
    for i, index in enumerate(rows):
        edge = np.full_like(x.take([0], 2 * i + 2), fill)
        x = np.concatenate([x, edge], 2 * i + 2).take(index, 2 * i + 2)
    return x


def _scattered(y: NDArray, rows_of: Sequence[NDArray], lengths: Sequence[int]) -> NDArray:
    """The adjoint of `_gathered`."""
    for i, index in reversed([*enumerate(rows_of)]):
        y = np.moveaxis(y, (2 * i + 2, 2 * i + 3), (0, 1))
        total = np.zeros((lengths[i] + 1, *y.shape[2:]))
        for rows, tap in zip(index.T, y.swapaxes(0, 1), strict=True):
            if len(np.unique(inside := rows[rows >= 0])) == len(inside):
                total[rows] += tap  # several adds to the last row may be lost, which is dropped
            else:
                np.add.at(total, rows, tap)
        y = np.moveaxis(total[:-1], 0, 2 * i + 2)
    return y


def one_device(
    case: Case, x: NDArray, kernel: NDArray | None, cotangent: Callable[[Ints], NDArray]
) -> list[NDArray]:
    """The output of a case, the gradient of the input and of the kernel, if it has one.

    cotangent: shape of the output -> cotangent.
    """
    rank = len(case.shape) - 2
    axes = "xyz"[: len(case.shape) - 2]
    if case.op == "interpolate":
        matrices = [np.zeros((m, n)) for m, n in zip(case.size, case.shape[2:], strict=True)]
        for matrix, n in zip(matrices, case.shape[2:], strict=True):
            inputs, weights = taps(case.mode, n, len(matrix), align_corners=case.align_corners)
            np.add.at(matrix, (np.arange(len(matrix))[:, None], inputs), weights)
        product = f"nc{axes},{','.join(a.upper() + a for a in axes)}->nc{axes.upper()}"
        y = np.einsum(product, x, *matrices)
        return [y, np.einsum(product, cotangent(y.shape), *(m.T for m in matrices))]
    rows = [_tap_rows(case, i) for i in range(rank)]
    if kernel is not None:
        taps_of = "".join(a + a.upper() for a in axes)
        size = case.groups
        features = kernel.shape[0] // case.groups
        weights = kernel.reshape(size, features, *kernel.shape[1:])
        grouped = lambda z: z.reshape(z.shape[0], size, -1, *z.shape[2:])  # noqa: E731
        flat = lambda z: z.reshape(z.shape[0], -1, *z.shape[3:])  # noqa: E731
        wide = f"ngi{taps_of}"
        narrow = f"ngo{axes}"
        of_kernel = f"goi{axes.upper()}"
        if case.op == "conv":
            patches = grouped(_gathered(x, rows))
            y = flat(np.einsum(f"{wide},{of_kernel}->{narrow}", patches, weights))
            dy = grouped(cotangent(y.shape))
            of_patches = flat(np.einsum(f"{narrow},{of_kernel}->{wide}", dy, weights))
            of_x = _scattered(of_patches, rows, x.shape[2:])
            of_weights = np.einsum(f"{wide},{narrow}->{of_kernel}", patches, dy)
        else:  # the adjoint of a convolution: its outputs are a convolution's inputs
            numbers = zip(case.shape[2:], case.s, case.p, case.d, case.k, case.extra, strict=True)
            lengths = [
                (n - 1) * s - sum(p) + d * (k - 1) + 1 + more for n, s, p, d, k, more in numbers
            ]
            added = flat(np.einsum(f"{narrow},{of_kernel}->{wide}", grouped(x), weights))
            y = _scattered(added, rows, lengths)
            dy = grouped(_gathered(cotangent(y.shape), rows))
            of_x = flat(np.einsum(f"{wide},{of_kernel}->{narrow}", dy, weights))
            of_weights = np.einsum(f"{wide},{narrow}->{of_kernel}", dy, grouped(x))
        return [y, of_x, of_weights.reshape(kernel.shape)]
    over = tuple(range(3, 2 * rank + 3, 2))
    patches = _gathered(x, rows, -np.inf if case.op == "max" else 0.0)
    if case.op == "max":
        y = patches.max(over)
        shares = patches == np.expand_dims(y, over)
    else:
        counts = [_counts(case, i, index) for i, index in enumerate(rows)]
        shares = 1 / reduce(np.multiply.outer, counts)
        y = patches.sum(over) * shares
        shares = np.expand_dims(shares, [axis - 2 for axis in over])
    spread = np.expand_dims(cotangent(y.shape), over) * shares * np.ones_like(patches)
    return [y, _scattered(spread, rows, x.shape[2:])]


def _counts(case: Case, i: int, rows: NDArray) -> NDArray:
    """The number of rows in every window of an average: those of the array, or of its padding too."""
    if not case.include_pad:
        return (rows >= 0).sum(1)
    n, (before, after) = case.shape[i + 2], case.p[i]
    first = np.arange(len(rows)) * case.s[i] - before
    return np.minimum(first + case.k[i], n + after) - first


# -- halos -------------------------------------------------------------------------------------------------

# The boundary of every sharded dim.
RULES = {"zero": "zero", "zero at the poles": "zero", "circular": "periodic", "none": "none"}
RULES |= {"none (edge ranks get no halo)": "none", "constant 1.234": "constant(1.234)"}
RULES |= {"replicate top, constant=1 bottom": "edge,constant(1)"}


def halo_layout(data: dict[str, Any]) -> str:
    dims = sharded_layout(data).split()
    rule = "pole(d3)" if data["name"] == EARTH else RULES[data["boundary"]]
    for d, before, after in zip(
        data["sharded_dims"], data["halo_before"], data["halo_after"], strict=True
    ):
        dims[d] += f":halo([{','.join(map(str, before))}],[{','.join(map(str, after))}],{rule})"
    if data["name"] == EARTH:
        dims[3] += ":halo(3,3,periodic)"
    return " ".join(dims)


def halo_blocks(data: dict[str, Any], x: NDArray) -> list[NDArray]:
    """Pieces of the array that numpy padded."""
    mesh = device_mesh(data)
    layout = xs.Layout(halo_layout(data))
    return [oracle.spread(x, layout, mesh, device) for device in range(mesh.n_devices)]


def adjoint_error(
    data: dict[str, Any], x: NDArray, ys: Sequence[NDArray], gradient: NDArray
) -> float:
    """How far `<halo(x), y>` and `<x, gradient>` differ, for the linear part of the halo."""
    blocks = halo_blocks(data, x)
    zero = halo_blocks(data, np.zeros_like(x))
    return sum(np.vdot(b - z, y) for b, z, y in zip(blocks, zero, ys, strict=True)) - np.vdot(
        x, gradient
    )


def neighbourhood(xp: Any, q: Any, keys: Any, v: Any) -> Any:
    """Attention `(b h w heads f)` over 5 x 5 windows, which move inwards at the ends of the array."""
    h, w = q.shape[1:3]
    rows, columns = (np.clip(np.arange(n) - 2, 0, n - 5)[:, None] + np.arange(5) for n in (h, w))
    near_keys, near_v = (t[:, rows][:, :, :, columns] for t in (keys, v))  # b h k w k heads f
    weights = xp.exp(xp.einsum("bhwnd,bhiwjnd->bhwnij", q, near_keys) / math.sqrt(q.shape[-1]))
    return xp.einsum(
        "bhwnij,bhiwjnd->bhwnd", weights / weights.sum((-2, -1), keepdims=True), near_v
    )
