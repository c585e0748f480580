"""Attention over a sharded sequence by torch's fused kernels, in blocks merged by log-sum-exps.

>>> import torch_bridge as xt
>>> from xshard import Mesh
>>> def means():
...     v = (
...         xt.positions("b s/zigzag(cp)", Mesh(cp=2), shape=(1, 8), dim="s")
...         .reshape(1, 4, 1, 1)
...         .double()
...     )
...     return xt.nn.attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", Mesh(cp=2), causal=True)
>>> [y.flatten().tolist() for y in xt.testing.run_ranks(2, means)]
[[0.0, 0.5, 3.0, 3.5], [1.0, 1.5, 2.0, 2.5]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.autodiff.turns import with_pauses_in_function
from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.machine import machine_profile
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, process_mesh
from torch_bridge.nn.placed import placed_as
from torch_bridge.redistribution import redistribute
from torch_bridge.versions import kernels
from torch_bridge.versions.functorch import is_transformed
from torch_bridge.versions.modes import without_modes
from xshard import Layout, ProfileLike, Sharding, load_profile
from xshard.contractions.attention import AttentionCall, Verb, merged
from xshard.contractions.joint_attention import JointVerb
from xshard.contractions.prices import fastest_attention
from xshard.dtypes import name_of
from xshard.errors import XshardError
from xshard.nn.attention import (
    ALL,
    CAUSAL,
    FIRST_DERIVATIVES,
    METHODS,
    REDUCE,
    RING,
    SEQUENCE,
    Attention,
    Tile,
    rows_of,
    tiles,
)

aten = torch.ops.aten
_GPU_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TileMask(NamedTuple):
    """Which scores of a tile count, and what is added to them.

    A causal mask without anything else has no tensors: kernels make it themselves.
    """

    rows: Any  # numbers of the queries, and of the keys
    keys: Any
    # The scores that count, `[batch or 1, 1, rows, keys]`; None: all, or as `is_causal` says.
    visible: Tensor | None
    is_causal: bool
    bias: Tensor | None  # added to scores, `[1, heads, rows, keys]`

    def as_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the mask as one bias, -inf where scores do not count; None if all count alike."""
        bias = self.bias
        if self.visible is not None:
            if bias is None:
                bias = torch.zeros((), device=self.visible.device)
            bias = torch.where(self.visible, bias, float("-inf"))
        return None if bias is None else bias.to(dtype)

    def for_gpu(self, q: Tensor) -> Tensor | None:
        """Return a bias for all heads, as the kernel reads it: rows begin at multiples of 16 bytes."""
        bias = self.as_bias(q.dtype)
        if bias is None:
            return None
        n_keys = bias.shape[-1]
        padded = F.pad(bias, (0, -n_keys % 8))
        aligned = padded[..., :n_keys]
        return aligned.expand(*q.shape[:2], -1, -1)


class TileResult(NamedTuple):
    """The result of queries by the keys of one tile, and the log-sum-exp of their scores."""

    y: Tensor
    log_sum: Tensor


class TileGradients(NamedTuple):
    """The addends of one tile to the gradients."""

    q: Tensor
    k: Tensor
    v: Tensor


class Queries(NamedTuple):
    """What the backward pass needs of queries, `[batch, heads, rows, ...]`."""

    q: Tensor
    cotangent: Tensor
    y: Tensor
    log_sum: Tensor

    def rows(self, rows: slice) -> Queries:
        """Return some of the queries."""
        return Queries._make(x[:, :, rows] for x in self)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProcessAttention(AttentionCall):
    """A call of `attention` in this process. Blocks of keys have their values beside them, `kv`."""

    processes: ProcessMesh
    profile: ProfileLike
    dtype: torch.dtype
    tensor_device: torch.device
    xp = torch
    masked_score = float("-inf")

    # What `AttentionCall` asks of a framework.

    def enter(
        self, x: Tensor, layout: Layout, shape: Sequence[int | None] | None
    ) -> tuple[Tensor, Sharding]:
        return x, placed_as(x, layout, self.processes, shape).sharding

    def move(self, x: Tensor, layouts: tuple[Layout, Layout], shape: Sequence[int]) -> Tensor:
        return redistribute(x, layouts, self.processes, shape=shape)

    def choose(self, attn: Attention, is_plain: bool) -> Attention:
        """Return the attention by the cheapest method. Raises XshardError for what torch.func refuses."""
        # Ring and reduce have first derivatives in reverse mode only, and torch.func asks for others.
        methods: tuple[str, ...] = METHODS
        if is_transformed():
            self._check_transformed(is_plain)
            methods = tuple(method for method in METHODS if method not in FIRST_DERIVATIVES)
        profile = load_profile(machine_profile(self.profile, self.tensor_device))
        return fastest_attention(attn, name_of(self.dtype), profile, methods)

    def _check_transformed(self, is_plain: bool) -> None:
        """Raise XshardError for what has first derivatives in reverse mode only."""
        if self.method in FIRST_DERIVATIVES:
            refused = f"a {self.method}"
        elif not is_plain:
            refused = "softcap, dropout, sinks, return_lse, blind rows"
        else:
            return
        hint = 'how="gather" or "ulysses", without these options'
        raise XshardError(f"{refused} under torch.func", hint=hint)

    def compute(self, q: Tensor, kv: Tensor, is_plain: bool) -> tuple[Tensor, Tensor]:
        """Return the result and the log-sum-exps of queries, by the keys of all rounds."""
        if self.attn.method == RING:
            # Every block is as long as the longest, so that all messages have one size.
            missing_rows = self.attn.block_rows - kv.shape[2]
            kv = F.pad(kv, (0, 0, 0, missing_rows))
        elif is_plain and self.attn.method != REDUCE:
            return self._attend_fused(q, kv), q[..., 0]  # log-sum-exps are not returned
        with with_pauses_in_function():  # while the blocks of a ring travel
            return BlockAttention.apply(self, q, kv)  # type: ignore[no-any-return]  # torch has no type for it

    def global_positions(self, dim: int) -> Tensor:
        return self.as_integers(rows_of(self.attn.queries, dim, self.processes.device))

    def as_integers(self, x: Any) -> Tensor:
        return torch.as_tensor(x, device=self.tensor_device)

    def in_score_dtype(self, x: Tensor) -> Tensor:
        return x.detach().to(self.tensor_device, self.score_dtype)

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).to(self.score_dtype)

    # Attention by torch's own function, which autograd and torch.func know.

    def _attend_fused(self, q: Tensor, kv: Tensor) -> Tensor:
        """Attend with torch's fused kernel, once all keys and values have arrived on this device.

        Returns the outputs of these queries. The scores are computed in tiles: runs of queries with
        the run of keys that they may see.

        Args:
            q: Queries, [batch, heads, rows, width].
            kv: Keys and values in one tensor.
        """
        k, v = self.read(kv)
        tile_outputs = []
        for tile in self.tiles():
            rows = q[:, :, tile.q]
            keys = k[:, :, tile.k]
            values = v[:, :, tile.k]
            # A boolean mask is not converted to a float one: torch's kernels take it as it is.
            mask = self.mask(tile, any_length=True)
            bias = mask.visible if mask.bias is None else mask.as_bias(q.dtype)
            is_causal = mask.is_causal
            if is_causal and rows.shape[2] != keys.shape[2]:
                # torch's `is_causal` lets the first query see the first key only. With more keys
                # than queries, these are the last queries: the last one sees the last key.
                bias = _causal_bias(rows.shape[2], keys.shape[2])
                is_causal = False
            attend = partial(F.scaled_dot_product_attention, is_causal=is_causal, scale=self.scale)
            tile_outputs.append(attend(rows, keys, values, bias))
        if not tile_outputs:
            # Empty, but differentiable: this device must take part in the backward collective.
            return q @ k.mT @ v
        return torch.cat(tile_outputs, 2)

    # Attention by tiles, for `BlockAttention`.

    @cached_property
    def _heads_read(self) -> Tensor | None:
        """The head of keys that each head of queries reads; None if there are as many of both."""
        if self.attn.query_heads_per_key_head == 1:
            return None
        return self.as_integers(self.attn.heads_read(self.processes.device))

    def read(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, for every head of queries."""
        if self._heads_read is not None:
            kv = kv.index_select(1, self._heads_read)
        return self.attn.split(kv)

    def add_gradient(self, block_gradient: Tensor, gradient: Tensor) -> None:
        """Add the gradient of `read`'s result to the gradient of the block."""
        if self._heads_read is None:
            block_gradient += gradient
        else:
            block_gradient.index_add_(1, self._heads_read, gradient.to(block_gradient.dtype))

    def tiles(self, round_index: int = 0) -> Sequence[Tile]:
        """Return the tiles of a round; none without batches or heads, by which kernels divide."""
        batches_and_heads = self.attn.queries.local_shape(self.processes.device)[:SEQUENCE]
        if 0 in batches_and_heads:
            return ()
        return tiles(self.attn, self.processes.device, round_index)

    def mask(self, tile: Tile, round_index: int = 0, *, any_length: bool = False) -> TileMask:
        """Build the mask of a tile, which is a run of queries with a run of keys.

        Args:
            tile: The tile.
            round_index: How many times blocks of keys have been passed around the ring before.
            any_length: Whether a causal mask is allowed with unequal numbers of queries and keys; kernels
                that are called with `is_causal` take equal numbers only.
        """
        device = self.processes.device
        rows: Any = self.attn.query_rows(device)[tile.q]
        keys: Any = self.attn.key_rows(device, round_index)[tile.k]
        is_causal = tile.kind == CAUSAL and (any_length or len(rows) == len(keys))
        is_causal = is_causal and self.alibi is None  # kernels take this or a bias
        # Kernels have causal and full masks built in: no tensor of booleans is needed for them.
        is_built_in = self.documents[0] is None and (is_causal or tile.kind == ALL)
        if is_built_in and self.alibi is None and self.kernel:
            # Nothing to send to a GPU.
            return TileMask(rows, keys, visible=None, is_causal=is_causal, bias=None)
        rows = self.as_integers(rows)
        keys = self.as_integers(keys)
        bias = self.bias(rows, keys)
        if is_built_in:
            return TileMask(rows, keys, visible=None, is_causal=is_causal, bias=bias)
        visible = self.visible(rows, keys)
        return TileMask(rows, keys, visible=visible, is_causal=False, bias=bias)

    @cached_property
    def kernel(self) -> str:
        """The kind of device with a fused kernel for these scores, or empty."""
        device_type = self.tensor_device.type
        has_kernel = device_type == "cpu" or (
            device_type == "cuda" and self.dtype in _GPU_KERNEL_DTYPES
        )
        if self.softcap is not None or self.dropout or not has_kernel:
            return ""
        return device_type

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask) -> TileResult:
        """Return the result of a tile; a row that sees nothing has 0, and a log-sum-exp of -inf."""
        if self.kernel == "cpu":
            y, log_sum = _cpu_attention(q, k, v, mask, self.scale)
        elif self.kernel == "cuda":
            y, log_sum = _gpu_attention(q, k, v, mask, self.scale)
        else:
            y, log_sum = self._plain_attention(q, k, v, mask)
        # Kernels disagree on the log-sum-exp of a row that sees nothing.
        if mask.visible is not None:
            sees_nothing = ~mask.visible.any(-1)
            log_sum = log_sum.masked_fill(sees_nothing, float("-inf"))
        return TileResult(_narrow_like(y, v), log_sum)

    def _plain_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask) -> TileResult:
        """Compute a tile with softcap or dropout, which fused kernels lack."""
        scores, _ = self.scores(q, k, mask.rows, mask.keys)
        log_sum = scores.logsumexp(-1)
        # -inf of a row that sees nothing would make NaN of its weights.
        finite = log_sum.clamp(min=torch.finfo(scores.dtype).min)
        weights = (scores - finite[..., None]).exp()
        weights = weights * self.dropout_factors(mask.rows, mask.keys)
        return TileResult(weights.to(v.dtype) @ v, log_sum)

    def tile_gradients(
        self, queries: Queries, k: Tensor, v: Tensor, mask: TileMask
    ) -> TileGradients:
        """Compute what one tile adds to the gradients of its queries, keys and values.

        A tile is a run of queries with a run of keys `k` and values `v`. `queries` also has the
        outputs and log-sum-exps of the forward pass, taken over all keys and not over this tile's:
        with them the tile's softmax weights are exact.
        """
        if self.kernel == "cpu":
            gradients = _cpu_gradients(queries, k, v, mask, self.scale)
        elif self.kernel == "cuda":
            gradients = _gpu_gradients(queries, k, v, mask, self.scale)
        else:
            gradients = self._plain_gradients(queries, k, v, mask)
        # Queries, keys and values may have been padded to one width: drop these columns.
        return TileGradients(*map(_narrow_like, gradients, (queries.q, k, v)))

    def _plain_gradients(
        self, queries: Queries, k: Tensor, v: Tensor, mask: TileMask
    ) -> TileGradients:
        """Compute the gradients of a tile by formula, for options that no kernel has.

        These are softcap and dropout. With weights P = exp(scores - log_sum) and dropout factors D:
        dV = (P * D)^T dY, dS = P * (dY V^T * D - sum(dY * Y)), dQ = dS K, dK = dS^T Q. dS is also
        multiplied by `slope`, the derivative of the scores by the products of queries and keys.
        """
        q, dy, y, log_sum = queries
        v, dy, y = _pad_to_one_width(v, dy, y)  # see `_with_log_sum_column`
        scores, slope = self.scores(q, k, mask.rows, mask.keys)
        # `log_sum` is over the keys of all tiles, so these weights are those of the whole softmax.
        weights = (scores - log_sum[..., None]).exp()
        dropout_factors = self.dropout_factors(mask.rows, mask.keys)
        wide_dy = dy.to(weights.dtype)
        # `y` is the output over all keys: (dY * Y) summed is the softmax's term of all tiles.
        ds = wide_dy @ v.mT.to(weights.dtype) * dropout_factors
        ds = ds - (wide_dy * y).sum(-1, keepdim=True)
        ds = weights * ds * slope
        dq = ds.to(k.dtype) @ k
        dk = ds.mT.to(q.dtype) @ q
        weights = weights * dropout_factors
        return TileGradients(dq, dk, weights.mT.to(v.dtype) @ dy)

    def send(self, block: Tensor, distance: int) -> Callable[[], Tensor]:
        """Begin to send a block along the ring -> a function that waits for the block that arrives."""
        layouts, shape = self.attn.rotation(block.shape, distance)
        pending = redistribute(block, layouts, self.processes, shape=shape, async_op=True)
        return pending.wait  # type: ignore[union-attr]  # it is pending: async_op


def _narrow_like(x: Tensor, like: Tensor) -> Tensor:
    """Return as many columns as another tensor has."""
    return x[..., : like.shape[-1]]


def _causal_bias(row_count: int, key_count: int) -> Any:
    """Return torch's causal mask in which the last row sees the last key."""
    from torch.nn.attention.bias import causal_lower_right  # slow: it imports torch._dynamo

    with without_modes():  # a mode makes a plain tensor of it
        return causal_lower_right(row_count, key_count)


def _cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float | None
) -> TileResult:
    """Attend to one tile with the kernel for CPUs."""
    q, k, v = _pad_to_one_width(q, k, v)
    y, log_sum = kernels.cpu_attention(
        q, k, v, is_causal=mask.is_causal, attn_mask=mask.as_bias(q.dtype), scale=scale
    )
    return TileResult(y, log_sum)


def _cpu_gradients(
    queries: Queries, k: Tensor, v: Tensor, mask: TileMask, scale: float | None
) -> TileGradients:
    """Return the gradients of one tile from the kernel for CPUs."""
    q, cotangent, y, log_sum = queries
    q, k, v, cotangent, y = _pad_to_one_width(q, k, v, cotangent, y)
    dropout = 0.0
    bias = mask.as_bias(q.dtype)
    dq, dk, dv = kernels.cpu_attention_gradients(
        cotangent, q, k, v, y, log_sum, dropout, mask.is_causal, attn_mask=bias, scale=scale
    )
    return TileGradients(dq, dk, dv)


def _gpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float | None
) -> TileResult:
    """Attend to one tile with the memory-efficient kernel for GPUs."""
    q, k, v = _pad_to_one_width(q, k, v, multiple=8)
    with_log_sum = True
    dropout = 0.0
    y, log_sum, *_ = kernels.gpu_attention(
        q, k, v, mask.for_gpu(q), with_log_sum, dropout, mask.is_causal, scale=scale
    )
    # It is padded to whole tiles of the kernel.
    return TileResult(y, log_sum[..., : q.shape[2]])


def _gpu_gradients(
    queries: Queries, k: Tensor, v: Tensor, mask: TileMask, scale: float | None
) -> TileGradients:
    """Compute the gradients of one tile by torch's memory-efficient attention kernel for GPUs.

    Widths are padded to one multiple of 8, so the gradients may have more columns than the inputs.

    Args:
        queries: With outputs, their gradient, and log-sum-exps over all keys.
        k: Keys.
        v: Values.
        mask: The mask of the tile.
        scale: The factor of scores.
    """
    q, cotangent, y, log_sum = queries
    q, k, v, cotangent, y = _pad_to_one_width(q, k, v, cotangent, y, multiple=8)
    # The kernel takes the strides of its own result for granted.
    y = y.transpose(1, 2).contiguous().transpose(1, 2)
    # It reads log-sum-exps padded to a multiple of 32 rows, and a state of dropout, which it
    # ignores at a rate of 0.
    padding = -q.shape[2] % 32
    log_sum = F.pad(log_sum, (0, padding), value=float("inf"))
    dropout = 0.0
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    is_needed = [True, True, True, False]  # the bias has no gradient
    dq, dk, dv, *_ = kernels.gpu_attention_gradients(
        cotangent, q, k, v, mask.for_gpu(q), y, log_sum, state, state, dropout, is_needed, mask.is_causal,
        scale=scale,
    )  # fmt: skip
    return TileGradients(dq, dk, dv)


def _pad_to_one_width(*blocks: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Return blocks padded with zeros to one width, which fused kernels need; zeros change nothing."""
    width = max(x.shape[-1] for x in blocks)
    width += -width % multiple
    padded = []
    for x in blocks:
        n_zeros = width - x.shape[-1]
        padded.append(F.pad(x, (0, n_zeros)) if n_zeros else x)
    return tuple(padded)


class BlockAttention(torch.autograd.Function):
    """Merge the results of all tiles of all rounds; the backward pass goes through the tiles again.

    `BlockAttention.apply(call, q, kv)`: a device's result and its log-sum-exps.
    """

    @staticmethod
    def forward(ctx: Any, call: ProcessAttention, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to one block of keys and values after the other, as they come round the ring.

        q: [batch, heads, rows, width]. Returns the outputs in q's dtype, and their log-sum-exps
        [batch, heads, rows], -inf for rows that see no key.
        """
        dtype = call.score_dtype
        rows_shape = q.shape[:3]
        y = q.new_zeros((*rows_shape, call.attn.value_width), dtype=dtype)
        log_sum = q.new_full(rows_shape, float("-inf"), dtype=dtype)
        # Each process passes on every block, also one that its queries do not see: the next
        # process in the ring waits for it.
        for round_index, block in call.attn.blocks_by_round(kv, call.send):
            for tile in call.tiles(round_index):
                k, v = call.read(block[:, :, tile.k])
                mask = call.mask(tile, round_index)
                tile_result = call.attend(q[:, :, tile.q], k, v, mask)
                _merge_tile(y[:, :, tile.q], log_sum[:, :, tile.q], tile_result)
        # Partial results were merged in float32 or wider; the log-sum-exps stay in that dtype.
        y = y.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, kv, y, log_sum)
        ctx.set_materialize_grads(False)
        return y, log_sum

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, cotangent: Tensor | None, log_sum_cotangent: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Pass the blocks of keys and values round again, each with its gradient behind it.

        A device adds its part to the gradient of the block that it has, and sends both on. None
        for a cotangent means that nothing depends on that output.
        """
        q, kv, y, log_sum = ctx.saved_tensors
        call: ProcessAttention = ctx.call
        if cotangent is None:
            cotangent = torch.zeros_like(y)
        # Weights are exp(score - log_sum). Rows that see no key have -inf: +inf makes them 0.
        log_sum = log_sum.masked_fill(log_sum == float("-inf"), float("inf"))
        queries = Queries(q, cotangent, y, log_sum)
        if log_sum_cotangent is not None:
            queries = _with_log_sum_column(queries, log_sum_cotangent)
        q_gradient = torch.zeros_like(q, dtype=log_sum.dtype)
        wait: Callable[[], Tensor] | None = None
        for round_index, block in call.attn.blocks_by_round(kv, call.send):
            kv_gradient = _add_gradients_of_block(call, queries, block, round_index, q_gradient)
            if wait is not None:  # what other devices have added to the gradient of this block
                kv_gradient = wait() + kv_gradient
            if call.attn.method == RING:
                wait = call.send(kv_gradient, call.attn.distance_after(round_index))
        if wait is not None:
            kv_gradient = wait()
        return None, q_gradient.to(q.dtype), kv_gradient.to(kv.dtype)


def _merge_tile(y: Tensor, log_sum: Tensor, tile_result: TileResult) -> None:
    """Merge the result by some keys, in place, with the one by other keys: weights add up to 1 again."""
    so_far = (y, log_sum[..., None])
    merged_y, merged_log_sum = merged(
        torch, so_far, (tile_result.y, tile_result.log_sum[..., None])
    )
    y.copy_(merged_y)
    log_sum.copy_(merged_log_sum.squeeze(-1))


def _with_log_sum_column(queries: Queries, log_sum_cotangent: Tensor) -> Queries:
    """Add the cotangent of the log-sum-exps as one more column of results.

    Every kernel subtracts `(cotangent * y).sum(-1)` from the gradients of scores: a column of ones in y, and
    of minus the cotangent, adds it there. Values are padded to the width of results, with zeros.
    """
    column = -log_sum_cotangent[..., None].to(queries.y.dtype)
    return queries._replace(
        cotangent=torch.cat((queries.cotangent, column), -1),
        y=F.pad(queries.y, (0, 1), value=1.0),
    )


def _add_gradients_of_block(
    call: ProcessAttention, queries: Queries, block: Tensor, round_index: int, q_gradient: Tensor
) -> Tensor:
    """Compute the gradient of one block of keys and values, and add to that of the queries.

    Returns this device's part of the block's gradient, in the block's shape.

    Args:
        call: The call.
        queries: The queries of this process.
        block: The block of keys and values.
        round_index: How many times blocks have been passed on before.
        q_gradient: The gradient of the queries, changed in place.
    """
    kv_gradient = torch.zeros_like(block, dtype=queries.log_sum.dtype)
    for tile in call.tiles(round_index):
        k, v = call.read(block[:, :, tile.k])
        mask = call.mask(tile, round_index)
        addends = call.tile_gradients(queries.rows(tile.q), k, v, mask)
        q_gradient[:, :, tile.q] += addends.q
        kv_addend = torch.cat((addends.k, addends.v), -1)
        call.add_gradient(kv_gradient[:, :, tile.k], kv_addend)
    return kv_gradient


@between_graphs
def _attention(
    qkv: Sequence[Tensor],
    layout: Layout | str,
    mesh: Any,
    profile: Any,
    implementation: str | None,
    *options: Any,
) -> Any:
    """Check the arguments of the public functions, and attend over a sharded sequence.

    Returns the block of outputs; with `return_lse`, a pair of it and the log-sum-exps.

    Args:
        qkv: This process's blocks of queries, keys and values.
        layout: The layout of all three.
        mesh: The mesh.
        profile: The machine to plan for.
        implementation: An argument of JAX's attention, refused unless None.
        *options: The fields of `AttentionCall`, in order.
    """
    if implementation is not None:
        hint = "it is JAX's: torch.nn.attention.sdpa_kernel() chooses torch's"
        raise XshardError(f"implementation={implementation!r}", hint=hint)
    q, k, v = map(as_tensor, qkv, "qkv")
    processes = process_mesh(mesh)
    call = ProcessAttention(
        *options, processes=processes, profile=profile, dtype=q.dtype, tensor_device=q.device
    )
    results = call.run(q, k, v, layout)
    y = results[0].to(q.dtype)
    if call.return_lse:
        return (y, results[1].squeeze(-1))
    return y


attention = Verb[Tensor, MeshLike](_attention).attention
joint_attention = JointVerb[Tensor, MeshLike](attention, torch, Tensor.to).joint_attention
