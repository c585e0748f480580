"""Attention and cross entropy of both bridges: their options, and the flow of attention around kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from xshard.cost.model import ProfileLike
from xshard.errors import XshardError
from xshard.layout import Layout, Sharding
from xshard.nn import attention as core
from xshard.nn.attention import HEADS, REDUCE, SEQUENCE, Attention
from xshard.ops import A, M


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The options of `attention` in both bridges, and its flow. documents: numbers for queries and for keys;
    for scores, with all rows: `[batch or 1, rows]`. A bridge adds `xp`, its functions, and `empty`, the score
    of a key that does not count; `enter`, `move`, `choose` and `compute` for the flow; `held`, the numbers of
    this device's batches, heads or queries; `product` of rows and rows, `wide` constants, in the dtype of
    scores, and `whole` numbers.
    """

    how: str
    causal: bool
    documents: tuple[Any, Any]
    window: Any
    offset: int
    scale: float | None
    softcap: float | None
    alibi: Any
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

    def run(self, q: Any, k: Any, v: Any, layout: Layout | str) -> list[Any]:
        """The result, in the order of `layout`; with `return_lse` the log-sum-exps too, as arrays 1 wide."""
        xp, layout, kv_layout = (
            self.xp,
            Layout.parse(layout),
            Layout.parse(self.kv_layout or layout),
        )
        names = core.dim_order(layout, self.sequence, self.heads)
        q, of_q = self.enter(q, layout, self.shape)
        kv_names = core.key_order(kv_layout, names)
        kv_shape = core.key_lengths(of_q, kv_layout, self.heads, self.kv_heads, self.kv_length)
        (k, of_k), (v, of_v) = (self.enter(x, kv_layout, kv_shape) for x in (k, v))

        def ordered(x: Any, src: Sequence[str], dst: Sequence[str]) -> Any:
            return xp.moveaxis(x, tuple(map(src.index, dst)), tuple(range(x.ndim)))

        q, (k, v) = (
            ordered(q, layout.names, names),
            (ordered(x, kv_layout.names, kv_names) for x in (k, v)),
        )
        in_order = of_q.in_order(names), of_k.in_order(kv_names), of_v.in_order(kv_names)
        sight = {"causal": self.causal, "window": self.window, "offset": self.offset}
        attn = core.attention(*in_order, how=self.how, **sight)
        self._check(attn)
        has_more = self.softcap or self.dropout or self.return_lse
        is_plain = attn.sees_some(self.documents[0] is not None) and not has_more
        attn = self.choose(attn, is_plain)
        documents = list[Any]()
        for numbers, order in zip(self.documents, (layout, kv_layout), strict=True):
            if numbers is not None:
                layouts, whole, dims = core.document_move(
                    attn, order, numbers.ndim, bool(documents)
                )
                numbers = xp.moveaxis(
                    self.move(numbers, layouts, whole), dims, tuple(range(len(dims)))
                )
                documents.append(numbers.reshape(-1, numbers.shape[-1]))
        both = (documents[0], documents[-1]) if documents else (None, None)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        blocks = replace(self, attn=attn, documents=both, scale=scale)
        batch = q.shape[:HEADS]
        q = blocks.moved(q, attn.q, attn.queries)
        kv = blocks.moved(xp.concat((k, v), axis=-1), attn.kv, attn.keys)
        q, kv = (x.reshape(math.prod(batch), *x.shape[HEADS:]) for x in (q, kv))
        y, lse = blocks.compute(q, kv, is_plain)
        y, lse = (x.reshape(*batch, *x.shape[1:]) for x in (y, lse[..., None]))
        if attn.how == REDUCE:
            y, lse = blocks._merged(y, lse)
        results = [y, lse] if self.return_lse else [y]
        if attn.how != REDUCE:
            results = [blocks.moved(x, attn.result, attn.target) for x in results]
        return [ordered(x, names, layout.names) for x in results]

    def moved(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        """An array of any width."""
        if src.layout == dst.layout:
            return x
        return self.move(x, (src.layout, dst.layout), (*src.shape[:-1], x.shape[-1]))

    def _merged(self, y: Any, lse: Any) -> tuple[Any, Any]:
        """Results and log-sum-exps of queries by each device's keys -> by all keys."""
        xp = self.xp
        result = self.attn.result
        target = self.attn.target
        dims = result.layout.dims
        whole, highest = (
            result.with_layout(Layout(dims, tags)) for tags in ((), (("max", self.attn.axes),))
        )
        top = xp.clip(self.moved(self.wide(lse), highest, whole), xp.finfo(lse.dtype).min)
        weight = xp.exp(lse - top)
        total = self.moved(xp.concat((y * weight, weight), axis=-1), result, target)
        total, share = total[..., :-1], total[..., -1:]
        counted = xp.where(share == 0, 1, share)
        lse = xp.where(share == 0, -math.inf, self.moved(top, whole, target) + xp.log(counted))
        return total / counted, lse

    def _check(self, attn: Attention) -> None:
        """Raise XshardError for options that make no sense."""
        softcap = self.softcap
        alibi = self.alibi
        dropout = self.dropout
        heads = attn.q.shape[HEADS]
        is_constant = not getattr(alibi, "requires_grad", False)
        shape = tuple(getattr(alibi, "shape", ()))
        of_rows, of_keys = (numbers is not None for numbers in self.documents)
        fits = of_rows == of_keys or not (of_keys or attn.q.layout.names != attn.kv.layout.names)
        has_seed = self.seed is not None
        for is_right, what, hint in (
            (
                softcap is None or softcap > 0,
                f"softcap={softcap}",
                "scores lie between -softcap and softcap",
            ),
            (is_constant, "alibi with a gradient", "alibi.detach(): slopes are constants"),
            (
                alibi is None or shape == (heads,),
                f"alibi {shape}, {heads} heads",
                "one slope for each head",
            ),
            (
                0 <= dropout < 1,
                f"dropout={dropout}",
                "the part of weights that is dropped, less than 1",
            ),
            (
                not dropout or has_seed,
                f"dropout={dropout} without seed=",
                "one number on all devices",
            ),
            (fits, "documents of one sequence", "documents= and kv_documents="),
        ):
            if not is_right:
                raise XshardError(what, text=str(attn.kv.layout), hint=hint)

    def visible(self, rows: Any, keys: Any) -> Any:
        """The scores that count, `[batch or 1, 1, rows, keys]`."""
        visible: Any = self.attn.visible(rows[:, None], keys)[None, None]
        if self.documents[0] is not None:
            of_rows, of_keys = (d[:, x] for d, x in zip(self.documents, (rows, keys), strict=True))
            visible = visible & (of_rows[:, None, :, None] == of_keys[:, None, None])
        return visible

    def bias(self, rows: Any, keys: Any) -> Any:
        """`[1, heads, rows, keys]`: minus the slope of a head times the distance; None without slopes."""
        if self.alibi is None:
            return None
        slopes = self.wide(self.alibi)[self.held(HEADS)][None, :, None, None]
        return -slopes * abs(rows[:, None] + self.attn.offset - keys)

    def scores(self, q: Any, k: Any, rows: Any, keys: Any) -> tuple[Any, Any]:
        """The scores, and their derivative by the products."""
        slope: Any = self.scale
        scores = self.product(q, k) * slope
        if self.softcap is not None:
            part = self.xp.tanh(scores / self.softcap)
            scores = part * self.softcap
            slope = (1 - part * part) * slope
        if self.alibi is not None:
            scores = scores + self.bias(rows, keys)
        return self.xp.where(self.visible(rows, keys), scores, self.empty), slope

    def kept(self, rows: Any, keys: Any) -> Any:
        """The factors of weights, `[batch, heads, rows, keys]`, some of them dropped."""
        if not self.dropout:
            return 1.0
        cells: Any = self.whole(0)
        for dim, length in enumerate(self.attn.q.shape[:SEQUENCE]):
            cells = cells[..., None] * length + self.whole(self.held(dim))
        numbers = cells.reshape(-1, cells.shape[-1], 1, 1), rows[:, None], keys
        drop = core.dropped(*map(self.whole, (self.seed, *numbers)), part=self.dropout)
        return self.wide(~drop) / (1 - self.dropout)


@dataclass(frozen=True)
class Verb(Generic[A, M]):
    """A function of `nn` in both bridges, by the `call` that computes it from the arguments."""

    call: Callable[..., Any]

    def attention(
        self,
        q: A,
        k: A,
        v: A,
        layout: Layout | str,
        mesh: M | None = None,
        *,
        how: str = core.AUTO,
        causal: bool = False,
        documents: A | None = None,
        kv_documents: A | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        offset: int = 0,
        scale: float | None = None,
        softcap: float | None = None,
        alibi: A | None = None,
        dropout: float = 0.0,
        seed: int | A | None = None,
        return_lse: bool = False,
        kv_layout: Layout | str | None = None,
        shape: Sequence[int | None] | None = None,
        kv_heads: int | None = None,
        kv_length: int | None = None,
        sequence: str = "s",
        heads: str = "h",
        profile: ProfileLike = "auto",
        implementation: str | None = None,
    ) -> Any:
        """Blocks of queries, keys and values -> this device's block of `softmax(q @ k * scale) @ v`.

        All processes of the mesh call it. Blocks have the dims of `layout`, the width of heads last.
        Sequences, heads and batch may be sharded in any order: masks follow from the rows' positions.

        how: "gather" brings all keys and values to a device's queries; "ulysses" shards heads instead of the
        sequence; "ring" passes blocks of keys and values on; "reduce", for few queries and many keys, brings
        all queries to a device's keys and adds results up; "auto" takes the cheapest on the machine of
        `profile`.
        kv_layout: layout of keys and values, by default as of queries. Rows of another sequence have another
        name, as in `b t/cp h k`, and their own length. Keys may have fewer heads, also fewer than devices.
        causal: a row sees no later row. window: a row sees rows fewer than that away; (left, right): so many
        rows before and after its own, None: all. offset: row i of queries stands at row i + offset of keys.
        documents: whole numbers `[*batch, sequence]` or `[sequence]`, sharded like the dims of `q`: rows see
        only their own document. kv_documents: the same for keys, sharded like `k`.
        scale: by default `width ** -0.5`. softcap: scores become `softcap * tanh(score / softcap)`. alibi:
        slopes `[heads]` of the whole array, times the distance of rows and subtracted from scores (Press et
        al. 2021), constants. dropout: the part of weights that is dropped, by `seed` and positions: the same
        on any devices, in torch and in JAX.
        return_lse: return `(y, lse)`, lse `[*batch, heads, sequence]` in the order of `layout`: the natural
        logarithm of the sum of the exponentials of scores, in float32 or wider; y = 0 and lse = -inf where a
        row sees nothing.
        mesh: in JAX, by default the context's. shape, kv_heads, kv_length: global shape of `q`, heads and
        rows of keys, if blocks differ in size; None: equal blocks. sequence, heads: the names of these dims.
        implementation: passed to `jax.nn.dot_product_attention`, which "gather" and "ulysses" use unless in
        float64 or with softcap, dropout, return_lse or masks of two sequences; in torch, `sdpa_kernel()`.

        A ring has first derivatives only, in reverse mode. In torch the same holds for "reduce", softcap,
        dropout, return_lse and masks between two sequences, and torch.func refuses them. torch.compile calls
        it between two graphs.

        Raises as `redistribute` does; XshardError for options that make no sense, or miss each other.
        """
        return self.call(
            (q, k, v), layout, mesh, profile, implementation, how, causal, (documents, kv_documents), window,
            offset, scale, softcap, alibi, dropout, seed, return_lse, kv_layout, shape, kv_heads, kv_length,
            sequence, heads,
        )  # fmt: skip

    def cross_entropy(
        self,
        logits: A,
        labels: A,
        layout: Layout | str,
        mesh: M | None = None,
        *,
        reduction: Literal["mean", "sum", "none"] = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        shape: Sequence[int | None] | None = None,
        classes: str = "v",
        profile: ProfileLike = "auto",
    ) -> A:
        """Blocks of logits, and labels -> the cross entropy of the whole batch, without gathering logits.

        All processes of the mesh call it. Labels are numbers of classes, sharded as the dims of `layout`
        without the one of classes: `[b, s]` beside `"b/dp s v/tp"`. Two reductions along the axes that shard
        classes send three numbers per token; the backward pass sends nothing.

        reduction: "mean" over all labels of the whole batch that are not ignored, "sum", both on all devices;
        or "none", this device's block of losses, 0 where the label is ignored and in padding.
        ignore_index, label_smoothing: as in torch's `cross_entropy`. mesh: in JAX, by default the context's.
        shape: the global shape of the logits, if blocks differ in size. classes: the name of their dim. The
        loss of float16 and bfloat16 is in float32. torch.compile calls it between two graphs.

        Raises as `redistribute` does; DtypeError for labels that are not whole numbers; ShapeError unless
        each token has one. A label that is not a class is an IndexError there in torch, and NaN in JAX.
        """
        options = reduction, ignore_index, label_smoothing, shape, classes, profile
        return cast(A, self.call(logits, labels, layout, mesh, *options))
