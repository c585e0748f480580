"""Attention and cross entropy of both bridges: their options, and the flow of attention around kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypedDict,
    Unpack,
    cast,
    overload,
)

from xshard.cost.model import ProfileLike
from xshard.dtypes import name_of
from xshard.errors import DtypeError, XshardError, api_boundary
from xshard.layout import Layout, Sharding
from xshard.nn import attention as core
from xshard.nn.attention import HEADS, REDUCE, SEQUENCE, Attention, Method
from xshard.notation.parser import Dim
from xshard.ops import A, M
from xshard.signatures import Count, Length, Positive, ZeroToOne, short_repr


class Operand(NamedTuple):
    """A block with dims (*batch, heads, sequence, width), and the sharding of its whole array."""

    block: Any
    sharding: Sharding


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The options of `attention` in both bridges, and what happens around a bridge's kernel.

    documents: document numbers for queries and for keys, as the caller gives them; while scores are
    computed, of all rows: `[batch or 1, rows]`.

    A bridge derives from this class and adds what depends on its framework:

    - `xp`: its array functions, `torch` or `jax.numpy`;
    - `dtype`: of queries, keys and values;
    - `masked_score`: the score of a key that a query does not see;
    - `enter(x, layout, shape)`: an argument -> its block, and its sharding;
    - `move(x, layouts, shape)`: redistribute a block;
    - `choose(attn, is_plain)`: the attention with its method chosen;
    - `compute(q, kv, is_plain)`: the result and the log-sum-exps of this device's blocks;
    - `global_positions(dim)`: the numbers of this device's batches, heads or queries;
    - `product(q, k)`: sums over the width, for each query and key, in the dtype of scores;
    - `in_score_dtype(x)`: a constant in the dtype of scores;
    - `as_integers(x)`: whole numbers as an array.
    """

    # Both bridges pass these by position, in this order.
    method: str
    causal: bool
    documents: tuple[Any, Any]
    window: Any
    chunk: int | None
    offset: int
    scale: float | None
    softcap: float | None
    alibi: Any
    sinks: Any
    dropout: float
    seed: Any
    return_lse: bool
    kv_layout: Layout | str | None
    shape: Sequence[int | None] | None
    kv_heads: int | None
    kv_length: int | None
    sequence: str
    heads: str
    attn: Any = field(default=None, kw_only=True)  # an `Attention`, once its method is chosen

    if TYPE_CHECKING:  # the attributes of a framework

        def __getattr__(self, name: str) -> Any: ...

    @property
    def score_dtype(self) -> Any:
        """The dtype of scores: float32, or the arrays' own if that is wider."""
        return self.xp.promote_types(self.dtype, self.xp.float32)

    def run(self, q: Any, k: Any, v: Any, layout: Layout | str) -> list[Any]:
        """Compute attention from this device's blocks of queries, keys and values.

        q, k, v: blocks with the dims of `layout`, in its order; keys and values with those of
        `kv_layout` if that is given. Returns `[y]`, or `[y, lse]` with `return_lse` or sinks: blocks
        under `layout`, where the last dim of lse (log of the sum of exponentials of scores) is 1 long.
        """
        if not q.dtype == k.dtype == v.dtype or "float" not in name_of(q.dtype):
            reason = f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}"
            raise DtypeError(reason, hint="one floating dtype")
        q_layout = Layout.parse(layout)
        kv_layout = q_layout
        if self.kv_layout:
            kv_layout = Layout.parse(self.kv_layout)
        names = core.dim_order(q_layout, self.sequence, self.heads)
        query = self._enter_operand(q, q_layout, self.shape, names)
        kv_names = core.key_order(kv_layout, names)
        kv_shape = core.key_lengths(
            query.sharding, kv_layout, self.heads, self.kv_heads, self.kv_length
        )
        key = self._enter_operand(k, kv_layout, kv_shape, kv_names)
        value = self._enter_operand(v, kv_layout, kv_shape, kv_names)
        attn = core.attention(
            query.sharding,
            key.sharding,
            value.sharding,
            how=self.method,
            causal=self.causal,
            window=self.window,
            offset=self.offset,
            chunk=self.chunk,
        )
        # All options are checked before anything is sent: a process that raised would let others wait.
        self._check(attn, query.block.shape[HEADS])
        is_plain = self._is_plain(attn)
        attn = self.choose(attn, is_plain)
        # The method decides which rows each device uses, so document numbers move only now.
        documents = self._gather_documents(attn, q_layout, kv_layout)
        scale = query.block.shape[-1] ** -0.5 if self.scale is None else self.scale
        call = replace(self, attn=attn, documents=documents, scale=scale)
        results = call._move_and_compute(query.block, key.block, value.block, is_plain)
        if self.sinks is not None:
            results = call._with_sinks(results)
        return [self._reorder_dims(x, names, q_layout.names) for x in results]

    def _enter_operand(
        self, x: Any, layout: Layout, shape: Sequence[int | None] | None, names: Sequence[str]
    ) -> Operand:
        """Return the block of an argument, with its dims in the order of `names`."""
        block, sharding = self.enter(x, layout, shape)
        return Operand(self._reorder_dims(block, layout.names, names), sharding.in_order(names))

    def _reorder_dims(self, x: Any, names: Sequence[str], target_names: Sequence[str]) -> Any:
        """Bring the dims of an array from the order `names` into the order `target_names`."""
        sources = tuple(names.index(name) for name in target_names)
        return self.xp.moveaxis(x, sources, tuple(range(x.ndim)))

    def _is_plain(self, attn: Attention) -> bool:
        """Return whether every query sees a key, and no option needs the scores themselves.

        A framework's fused attention computes this case alone.
        """
        if self.softcap or self.dropout or self.return_lse or self.sinks is not None:
            return False
        return attn.sees_some(self.documents[0] is not None)

    def _gather_documents(
        self, attn: Attention, q_layout: Layout, kv_layout: Layout
    ) -> tuple[Any, Any]:
        """Bring the document numbers of all queries and of all keys here: `[batch or 1, rows]` each."""
        of_queries, of_keys = self.documents
        if of_queries is None:
            return None, None
        of_queries = self._gather_document_numbers(attn, of_queries, q_layout, of_keys=False)
        if of_keys is None:  # queries and keys are rows of one sequence
            return of_queries, of_queries
        return of_queries, self._gather_document_numbers(attn, of_keys, kv_layout, of_keys=True)

    def _gather_document_numbers(
        self, attn: Attention, documents: Any, layout: Layout, *, of_keys: bool
    ) -> Any:
        """Gather a block of document numbers along the sequence -> `[batch or 1, rows]`.

        For queries `b/dp h s/cp k`: `b/dp s/cp -> b/dp s`. Masks need the numbers of all rows, and
        only of this device's batches.

        layout: of the queries or the keys, whichever the numbers are for, in the caller's order of
        dims.
        """
        array = attn.kv if of_keys else attn.q
        dims = (*array.layout.dims[:HEADS], array.layout.dims[SEQUENCE])
        shape = (*array.shape[:HEADS], array.shape[SEQUENCE])
        whole_sequence = (*attn.q.layout.dims[:HEADS], Dim(dims[-1].name))
        if documents.ndim == 1:  # the same documents in all batches
            dims = dims[-1:]
            shape = shape[-1:]
            whole_sequence = whole_sequence[-1:]
        names = [dim.name for dim in dims]
        written_names = [name for name in layout.names if name in names]
        documents = self._reorder_dims(documents, written_names, names)
        documents = self.move(documents, (Layout(dims), Layout(whole_sequence)), shape)
        return documents.reshape(math.prod(documents.shape[:-1]), documents.shape[-1])

    def _move_and_compute(self, q: Any, k: Any, v: Any, is_plain: bool) -> list[Any]:
        """Redistribute q, k and v for the method, call the kernel, and redistribute the results.

        "gather", for example, all-gathers keys and values first; "ulysses" shards heads instead of
        the sequence, and changes that back at the end.

        q, k, v: blocks `[*batch, heads, sequence, width]`. is_plain: every query sees a key, and no
        option needs the scores, so that a fused kernel will do. Returns `[y]`, or `[y, lse]` with
        `return_lse` or sinks, both sharded as the queries are: `[*batch, heads, sequence, width or 1]`.
        """
        attn = self.attn
        batch_shape = q.shape[:HEADS]
        q = self.move_any_width(q, attn.q, attn.queries)
        # Side by side, so that keys and values travel in one message.
        kv = self.move_any_width(self.xp.concat((k, v), axis=-1), attn.kv, attn.keys)

        # Kernels have exactly one batch dim.
        n_batches = math.prod(batch_shape)
        q = q.reshape((n_batches, *q.shape[HEADS:]))
        kv = kv.reshape((n_batches, *kv.shape[HEADS:]))
        y, lse = self.compute(q, kv, is_plain)
        y = y.reshape((*batch_shape, *y.shape[1:]))
        lse = lse.reshape((*batch_shape, *lse.shape[1:], 1))

        if attn.method == REDUCE:  # each device has seen its own keys only
            y, lse = self._merge_over_keys(y, lse)
        results = [y]
        # Without need some kernels return no lse, but a placeholder.
        if self.return_lse or self.sinks is not None:
            results.append(lse)
        if attn.method == REDUCE:
            return results  # merging reduced them into the queries' layout already
        return [self.move_any_width(x, attn.result, attn.target) for x in results]

    def move_any_width(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        """Redistribute an array of any width, whatever the width of `src` and `dst`."""
        if src.layout == dst.layout:  # nothing to do, and nothing to differentiate
            return x
        # The layouts do not shard the width, so that any fits.
        return self.move(x, (src.layout, dst.layout), (*src.shape[:-1], x.shape[-1]))

    def _merge_over_keys(self, y: Any, lse: Any) -> tuple[Any, Any]:
        """Combine attention over each device's own keys into attention over all keys.

        y: `[*batch, heads, sequence, width]`, lse: the same with a width of 1, as every device got
        them from its part of the keys. Returns both over all keys, sharded as the queries are.

        Sums are over the devices, and m = max(lse) over them:
        y = sum(exp(lse - m) * y) / sum(exp(lse - m)), and lse = m + log(sum(exp(lse - m))).
        """
        xp = self.xp
        result = self.attn.result
        target = self.attn.target
        dims = result.layout.dims
        replicated = result.with_layout(Layout(dims))
        maxima = result.with_layout(Layout(dims, (("max", self.attn.axes),)))

        # Subtracting the greatest keeps exp() from overflowing. It is -inf where no device saw a key:
        # the clip keeps the difference from being nan.
        max_lse = xp.clip(
            self.move_any_width(self.in_score_dtype(lse), maxima, replicated),
            xp.finfo(lse.dtype).min,
        )
        weight = xp.exp(lse - max_lse)
        # The numerator and the denominator lie side by side along the width:
        # one reduction for both.
        sums = self.move_any_width(xp.concat((y * weight, weight), axis=-1), result, target)
        weighted_sum = sums[..., :-1]
        total_weight = sums[..., -1:]
        sees_nothing = total_weight == 0
        divisor = xp.where(sees_nothing, 1, total_weight)  # 0 / 1: such a row is 0, not nan
        log_sum = self.move_any_width(max_lse, replicated, target) + xp.log(divisor)
        return weighted_sum / divisor, xp.where(sees_nothing, -math.inf, log_sum)

    def _with_sinks(self, results: Sequence[Any]) -> Any:
        """Count the sinks as one key more, whose value is 0: `[y, lse]` -> the same."""
        q = self.attn.q
        heads = q.layout.dims[HEADS]
        # Devices with other rows of these heads use the sinks, too: the gradients of copies are summed.
        copies = tuple(axis for axis in q.layout.axes if axis not in heads.axes)
        layouts = (Layout((heads,)), Layout((heads,), (("copy", copies),)))
        sinks = self.move(self.sinks, layouts, q.shape[HEADS:SEQUENCE])
        return merged(self.xp, results, (0, sinks[:, None, None]))

    def _check(self, attn: Attention, n_local_heads: int) -> None:
        """Raise XshardError for values of alibi, sinks, dropout or documents that make no sense.

        Layouts, shapes, the method and the window were checked when `attn` was made.
        """

        def wrong(reason: str, hint: str) -> XshardError:
            return XshardError(reason, text=str(attn.kv.layout), hint=hint)

        # Slopes are taken as constants: a gradient would be lost in silence.
        if getattr(self.alibi, "requires_grad", False):
            raise wrong("alibi with a gradient", "alibi.detach(): slopes are constants")
        n_heads_of = {"alibi": attn.q.shape[HEADS], "sinks": n_local_heads}
        for name, n_heads in n_heads_of.items():
            array = getattr(self, name)
            shape = tuple(getattr(array, "shape", ()))
            if array is not None and shape != (n_heads,):
                hint = "a slope for each head of the whole array; a sink for each head of the block"
                raise wrong(f"{name} {shape}, {n_heads} heads", hint)
        if not 0 <= self.dropout < 1:
            hint = "the part of weights that is dropped, less than 1"
            raise wrong(f"dropout={self.dropout}", hint)
        # Devices that hold one weight twice have to drop it alike, also in the backward pass.
        if self.dropout and self.seed is None:
            raise wrong(f"dropout={self.dropout} without seed=", "one number on all devices")
        if any(not hasattr(numbers, "ndim") for numbers in self.documents if numbers is not None):
            raise wrong(f"documents={short_repr(self.documents)}", "arrays of whole numbers")
        has_numbers = [numbers is not None for numbers in self.documents]  # of queries, of keys
        if has_numbers == [False, True] or (
            has_numbers == [True, False] and not attn.is_one_sequence
        ):
            raise wrong("documents of one sequence", "documents= and kv_documents=")

    def visible(self, rows: Any, keys: Any) -> Any:
        """Return which keys each query sees, `[batch or 1, 1, rows, keys]`."""
        is_visible: Any = self.attn.visible(rows[:, None], keys)[None, None]
        of_queries, of_keys = self.documents
        if of_queries is not None:  # `[batch or 1, rows]` each
            of_queries = of_queries[:, rows][:, None, :, None]
            of_keys = of_keys[:, keys][:, None, None]
            is_visible = is_visible & (of_queries == of_keys)
        return is_visible

    def bias(self, rows: Any, keys: Any) -> Any:
        """Return minus the slope of a head times the distance, `[1, heads, rows, keys]`, or None."""
        if self.alibi is None:
            return None
        # Slopes are of all heads, and this device has some of them.
        slopes = self.in_score_dtype(self.alibi)[self.global_positions(HEADS)][None, :, None, None]
        return -slopes * abs(rows[:, None] + self.attn.offset - keys)

    def scores(self, q: Any, k: Any, rows: Any, keys: Any) -> tuple[Any, Any]:
        """Return the masked scores of queries and keys, and the slope d(score) / d(q @ k).

        Without softcap and alibi: scores = scale * q @ k, and the slope is the number `scale`. A
        backward pass written by hand multiplies by the slope.

        q, k: blocks `[batch, heads, rows or keys, width]`. rows, keys: the numbers of these rows in
        the whole arrays, `[rows]` and `[keys]`, for masks. Scores are `[batch, heads, rows, keys]`,
        and `masked_score` where the query does not see the key.
        """
        slope: Any = self.scale
        scores = self.product(q, k) * slope
        if self.softcap is not None:
            squashed = self.xp.tanh(scores / self.softcap)  # between -1 and 1
            scores = squashed * self.softcap
            slope = (1 - squashed * squashed) * slope  # tanh' = 1 - tanh ** 2
        if self.alibi is not None:  # after the cap, as a bias that does not depend on products
            scores = scores + self.bias(rows, keys)
        return self.xp.where(self.visible(rows, keys), scores, self.masked_score), slope

    def dropout_factors(self, rows: Any, keys: Any) -> Any:
        """Return what dropout multiplies each attention weight by: 0, or 1 / (1 - dropout).

        dropout=0.5 gives 0 or 2, so that the expected sum stays. Which weights are dropped depends
        on the seed and on a weight's position in the whole array (batch, head, query, key), so that
        any number of devices drops the same ones.

        rows, keys: the numbers of the queries and keys in the whole arrays. Returns
        `[batch, heads, rows, keys]`, or the number 1.0 without dropout.
        """
        if not self.dropout:
            return 1.0  # a number: no array of ones is made
        # Number each pair of a batch and a head in the whole array, row-major: with 8 heads, batch
        # 2 and head 3 is 2 * 8 + 3. Each turn of the loop adds one dim to the number: `cells`
        # becomes cells * length + this device's indices in the dim.
        cells: Any = self.as_integers(0)
        for dim, length in enumerate(self.attn.q.shape[:SEQUENCE]):
            cells = cells[..., None] * length + self.as_integers(self.global_positions(dim))
        n_batches = math.prod(cells.shape[:-1])
        cells = cells.reshape(n_batches, cells.shape[-1], 1, 1)
        position = (
            self.as_integers(cells),
            self.as_integers(rows[:, None]),
            self.as_integers(keys),
        )
        is_dropped = core.drop_mask(self.as_integers(self.seed), position, share=self.dropout)
        return self.in_score_dtype(~is_dropped) / (1 - self.dropout)


def merged(xp: Any, first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, Any]:
    """Merge attention over some keys with that over other keys.

    Each is a softmax over its own keys. With the sums of exponentials s1 and s2 the joint one is
    (y1 s1 + y2 s2) / (s1 + s2).

    first, second: pairs of a result and the logarithms of its sums, `[..., width]` and `[..., 1]`.
    """
    first_y, first_lse = first
    second_y, second_lse = second
    merged_lse = xp.logaddexp(first_lse, second_lse)
    # -inf for rows that have seen no key: -inf - -inf would be nan.
    finite = xp.clip(merged_lse, xp.finfo(merged_lse.dtype).min)
    return first_y * xp.exp(first_lse - finite) + second_y * xp.exp(second_lse - finite), merged_lse


class AttentionKeywords(TypedDict, Generic[A], total=False):
    """The keywords of `attention` on which the type of its result does not depend."""

    how: Method
    causal: bool
    documents: A | None
    kv_documents: A | None
    window: int | tuple[int | None, int | None] | None
    chunk: Count | None
    offset: int
    scale: float | None
    softcap: Positive | None
    alibi: A | None
    sinks: A | None
    dropout: ZeroToOne
    seed: int | A | None
    kv_layout: Layout | str | None
    shape: Sequence[int | None] | None
    kv_heads: Count | None
    kv_length: Length | None
    sequence: str
    heads: str
    profile: ProfileLike
    implementation: str | None


@dataclass(frozen=True)
class Verb(Generic[A, M]):
    """A function of `nn` in both bridges, by the `call` that computes it from the arguments."""

    call: Callable[..., Any]

    @overload
    def attention(
        self,
        q: A,
        k: A,
        v: A,
        layout: Layout | str,
        mesh: M | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[AttentionKeywords[A]],
    ) -> tuple[A, A]: ...

    @overload
    def attention(
        self,
        q: A,
        k: A,
        v: A,
        layout: Layout | str,
        mesh: M | None = None,
        *,
        return_lse: bool = False,
        **options: Unpack[AttentionKeywords[A]],
    ) -> A: ...

    @api_boundary
    def attention(  # noqa: PLR0913  public, with the options of the papers it covers
        self,
        q: A,
        k: A,
        v: A,
        layout: Layout | str,
        mesh: M | None = None,
        *,
        how: Method = core.AUTO,
        causal: bool = False,
        documents: A | None = None,
        kv_documents: A | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        chunk: Count | None = None,
        offset: int = 0,
        scale: float | None = None,
        softcap: Positive | None = None,
        alibi: A | None = None,
        sinks: A | None = None,
        dropout: ZeroToOne = 0.0,
        seed: int | A | None = None,
        return_lse: bool = False,
        kv_layout: Layout | str | None = None,
        shape: Sequence[int | None] | None = None,
        kv_heads: Count | None = None,
        kv_length: Length | None = None,
        sequence: str = "s",
        heads: str = "h",
        profile: ProfileLike = "auto",
        implementation: str | None = None,
    ) -> Any:
        """Compute `softmax(q @ k * scale) @ v` over a sharded sequence: blocks -> this device's block.

            y = attention(q, k, v, "b s/cp h k", mesh, causal=True)   # [b, s/cp, h, k], as q

        All processes of the mesh call it. Sequences, heads and batch may be sharded in any order: masks
        follow from the rows' positions.

        A ring has first derivatives only, in reverse mode. In torch the same holds for "reduce", softcap,
        sinks, dropout, return_lse and masks between two sequences, and torch.func refuses them.
        torch.compile calls it between two graphs.

        Args:
            q: This device's block of queries, with the dims of `layout`.
            k: This device's block of keys, with the dims of `kv_layout`. There may be fewer heads of
                keys than of queries, also fewer than devices.
            v: This device's block of values, with the dims of `kv_layout`.
            layout: The layout of `q` and of the result; the width of heads is last.
            mesh: The mesh; in JAX, by default the context's.
            how: The method. "gather" brings all keys and values to a device's queries. "ulysses" shards
                heads instead of the sequence. "ring" passes blocks of keys and values on. "reduce", for
                few queries and many keys, brings all queries to a device's keys and adds results up.
                "auto" takes the cheapest on the machine of `profile`.
            causal: A row sees no later row.
            documents: Whole numbers `[*batch, sequence]` or `[sequence]`, sharded like the dims of `q`:
                rows see only their own document.
            kv_documents: The same for keys, sharded like `k`.
            window: A row sees rows fewer than that away; (left, right): so many rows before and after
                its own, None: all.
            chunk: A row sees rows of its own chunk: the first is rows 0 ... chunk - 1 (Llama 4).
            offset: Row i of queries stands at row i + offset of keys.
            scale: The factor of products, by default `width ** -0.5`.
            softcap: Scores become `softcap * tanh(score / softcap)`.
            alibi: Slopes `[heads]` of the whole array, times the distance of rows and subtracted from
                scores (Press et al. 2021); constants.
            sinks: A logit per head, `[heads]`, cut over devices as the heads of `q` are: softmax counts it
                as a key whose value is 0 (gpt-oss). Each device gets its gradient by all rows.
            dropout: The part of weights that is dropped, by `seed` and positions: the same on any
                devices, in torch and in JAX.
            seed: A number for `dropout`, the same on all devices.
            return_lse: Return `(y, lse)`.
            kv_layout: The layout of keys and values, by default as of queries. Rows of another sequence
                have another name, as in `b t/cp h k`, and their own length.
            shape: The global shape of `q`, if blocks differ in size; None: equal blocks.
            kv_heads: The global number of heads of keys, if blocks differ in size.
            kv_length: The global number of rows of keys, if blocks differ in size.
            sequence: The name of the dim of the sequence.
            heads: The name of the dim of heads.
            profile: The machine that "auto" chooses a method for.
            implementation: Passed to `jax.nn.dot_product_attention`, which "gather" and "ulysses" use
                unless in float64 or with softcap, sinks, dropout, return_lse or masks of two sequences. In
                torch, `sdpa_kernel()` chooses.

        Returns:
            The block of the result, under `layout`. With `return_lse`, `(y, lse)`: lse
            `[*batch, heads, sequence]`, in the order of `layout`, is the natural logarithm of the sum of
            the exponentials of scores, in float32 or wider. Where a row sees nothing, y = 0, and
            lse = -inf or the sink.

        Raises:
            XshardError: Options make no sense, or miss each other. It also raises as `redistribute` does.
        """
        return self.call(
            (q, k, v), layout, mesh, profile, implementation, how, causal, (documents, kv_documents), window,
            chunk, offset, scale, softcap, alibi, sinks, dropout, seed, return_lse, kv_layout, shape,
            kv_heads, kv_length, sequence, heads,
        )  # fmt: skip

    @api_boundary
    def cross_entropy(  # noqa: PLR0913  public, with the options of torch's
        self,
        logits: A,
        labels: A,
        layout: Layout | str,
        mesh: M | None = None,
        *,
        reduction: Literal["mean", "sum", "none"] = "mean",
        ignore_index: int = -100,
        label_smoothing: ZeroToOne = 0.0,
        shape: Sequence[int | None] | None = None,
        classes: str = "v",
        profile: ProfileLike = "auto",
    ) -> A:
        """Compute the cross entropy loss from sharded logits and labels, without gathering logits.

            loss = cross_entropy(logits, labels, "b/dp s v/tp", mesh)   # labels: [b/dp, s] -> []

        All processes of the mesh call it. Two reductions along the axes that shard classes send three
        numbers per token; the backward pass sends nothing. The loss of float16 and bfloat16 is in
        float32. torch.compile calls it between two graphs.

        Args:
            logits: This device's block of logits, with the dims of `layout`.
            labels: Numbers of classes, sharded as the dims of `layout` without the one of classes:
                `[b, s]` beside `"b/dp s v/tp"`.
            layout: The layout of `logits`.
            mesh: The mesh; in JAX, by default the context's.
            reduction: "mean" over all labels of the whole batch that are not ignored, or "sum", both on
                all devices; "none" is this device's block of losses, 0 where the label is ignored and in
                padding.
            ignore_index: The label that does not count, as in torch's `cross_entropy`.
            label_smoothing: As in torch's `cross_entropy`.
            shape: The global shape of the logits, if blocks differ in size.
            classes: The name of the dim of classes.
            profile: The machine to plan for.

        Returns:
            The loss, or this device's block of losses.

        Raises:
            DtypeError: Labels are not whole numbers.
            ShapeError: A token has no label, or more than one, or one that is no class (in JAX: NaN; on a
                GPU: its own assertion); devices have whole logits in the place of blocks. It also raises as
                `redistribute` does.
        """
        options = (reduction, ignore_index, label_smoothing, shape, classes, profile)
        return cast(A, self.call(logits, labels, layout, mesh, *options))
