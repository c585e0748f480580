"""Three ways to mix a sequence that is cut over devices, in torch, each with the result of one device.

They take blocks, some rows of a sequence, and return as many. Expressions say what moves between devices.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from context import layouts
from xshard import Layout, Mesh


class Context(NamedTuple):
    """A sequence of `length` rows that is cut over a mesh, and the device of this process.

    move: (block, expression, global shape) -> the block it becomes.
    """

    mesh: Mesh
    cut: str
    length: int
    device: int
    move: Callable[[Tensor, str, Sequence[int]], Tensor]

    def numbers(self, dim: str, length: int) -> Tensor:
        """The global numbers of this device's part of a dim: the rows it has, or the heads."""
        return torch.from_numpy(Layout.parse(dim).positions(self.mesh, (length,), 0, self.device))

    @property
    def rows(self) -> Tensor:
        return self.numbers(self.cut, self.length)


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """Causal attention; devices trade rows for heads, and back. Any number of heads, and of kv heads.

    q: [batch, rows, heads, width]; k, v: [batch, rows, kv heads, width] -> as q.
    """
    batch, _, n_heads, width = q.shape
    n_kv = k.shape[2]
    group = n_heads // k.shape[2]
    shared = layouts.heads(n_heads, n_kv, context.mesh.n_devices)
    shape = (batch, context.length, n_heads, width)
    kv_shape = (batch, context.length, n_kv, width)
    q = context.move(q, layouts.to_heads(context.cut, shared.result), shape)
    k, v = (context.move(x, layouts.to_heads(context.cut, shared.source), kv_shape) for x in (k, v))
    mine = context.numbers(str(shared.result), n_heads) // group
    reads = mine - context.numbers(str(shared.source), n_kv)[:1]
    y = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k[:, :, reads], v[:, :, reads])), is_causal=True
    )
    return context.move(y.transpose(1, 2), layouts.from_heads(context.cut, shared.result), shape)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """Causal attention; every device gathers all keys and values for the queries of its own rows.

    It looks at no key after the last that a run of its rows may see. In a zigzag all devices look at equally
    many. Shapes as in `ulysses_attention`.
    """
    (batch, _, n_heads, width), n_kv = q.shape, k.shape[2]
    shape = (batch, context.length, n_kv, width)
    k, v = (
        context.move(x, layouts.gather(context.cut), shape)
        .repeat_interleave(n_heads // n_kv, 2)
        .transpose(1, 2)
        for x in (k, v)
    )
    rows = context.rows
    done = []
    runs = (rows.diff() != 1).nonzero().flatten() + 1
    for mine, queries in zip(
        rows.tensor_split(runs), q.transpose(1, 2).tensor_split(runs, 2), strict=True
    ):
        seen = int(mine[-1]) + 1
        mask = mine[:, None] >= torch.arange(seen)
        done.append(F.scaled_dot_product_attention(queries, k[:, :, :seen], v[:, :, :seen], mask))
    return torch.cat(done, 2).transpose(1, 2)


def long_convolution(x: Tensor, filters: Tensor, context: Context) -> Tensor:
    """Each channel convolved with a filter as long as the sequence, by FFT; devices trade rows for channels.

    x: [batch, rows, channels]; filters: [channels, length], one value for all devices -> as x. Causal.
    """
    shape = (x.shape[0], context.length, x.shape[2])
    wide = context.move(x, layouts.to_channels(context.cut), shape)
    mine = context.move(filters, layouts.FILTERS, filters.shape)
    n = 2 * context.length  # so that nothing comes round from the end
    y = torch.fft.irfft(torch.fft.rfft(wide, n, dim=1) * torch.fft.rfft(mine.T, n, dim=0), n, dim=1)
    return context.move(y[:, : context.length], layouts.to_rows(context.cut), shape)
