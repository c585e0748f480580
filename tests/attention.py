"""Attentions that both bridges compute on four devices, and what one device makes of them, in numpy."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from xshard import reference
from xshard.nn.attention import drop_mask

LENGTH = 19
BATCH = 2
WIDTH = 6
VALUE_WIDTH = 4
ROW = xs.Mesh(cp=4)
GRID = xs.Mesh(tp=2, cp=2)
DIMS = "bshk"


class Case(NamedTuple):
    """heads: of queries and of keys. kv_layout: that of keys, if it is another, with rows `t` of another
    sequence, `kv_length` of them. factor: of the queries."""

    mesh: xs.Mesh
    layout: str
    heads: tuple[int, int]
    kv_layout: str | None = None
    factor: float = 1.0
    kv_length: int | None = None
    length: int = LENGTH
    batch: int = BATCH

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the queries, in the order of the layout."""
        lengths = {"b": self.batch, "s": self.length, "h": self.heads[0], "k": WIDTH}
        return tuple(lengths[name] for name in xs.Layout.parse(self.layout).names)

    def block_layout(self, dims: str = DIMS, of_keys: bool = False) -> xs.Layout:
        """The layout of an array with some of the dims."""
        layout = xs.Layout.parse(self.kv_layout if of_keys and self.kv_layout else self.layout)
        dims = dims if "s" in layout.names else dims.replace("s", "t")
        return xs.Layout(tuple(dim for dim in layout.dims if dim.name in dims), layout.tags)

    def blocks(self, x: NDArray, dims: str = DIMS, of_keys: bool = False) -> list[NDArray]:
        """An array with such dims -> the blocks of all devices."""
        return [x.reshape(-1)[numbers] for numbers in _numbers(self, x.shape, dims, of_keys)]


@cache
def _numbers(case: Case, shape: tuple[int, ...], dims: str, of_keys: bool) -> list[NDArray]:
    """The numbers of the elements that are the blocks of all devices."""
    layout = case.block_layout(dims, of_keys)
    dims = dims if "s" in layout.names else dims.replace("s", "t")
    lengths = {dim: n for n, dim in zip(shape, dims, strict=True) if dim in layout.names}
    x = np.arange(math.prod(shape)).reshape(*lengths.values())
    x = x.transpose([[*lengths].index(name) for name in layout.names])
    return reference.scatter(x, str(layout), case.mesh)


class Mask(NamedTuple):
    causal: bool = False
    window: Any = None
    has_documents: bool = False
    offset: int = 0
    softcap: float | None = None
    has_alibi: bool = False
    dropout: float = 0.0
    return_lse: bool = False
    chunk: int | None = None
    has_sinks: bool = False

    def options(self, case: Case) -> dict[str, Any]:
        """The options of `attention`, except arrays."""
        names = ("causal", "window", "chunk", "offset", "softcap", "dropout", "return_lse")
        lengths = {"shape": case.shape, "kv_heads": case.heads[1], "kv_length": case.kv_length}
        own = {name: getattr(self, name) for name in names} | {"seed": SEED}
        return {**own, **lengths, "kv_layout": case.kv_layout}


ORDERS = {
    "contiguous": Case(ROW, "b s/cp h k", (6, 2)),
    "zigzag, fewer heads of keys than devices": Case(ROW, "b s/zigzag(cp) h k", (6, 2)),
    "zigzag of documents, any width of scores": Case(
        ROW, "b s/zigzag(cp,5,8,6) h k", (4, 4), factor=300.0
    ),
    "stripes": Case(ROW, "b s/cyclic(cp) h k", (5, 1)),
    "wide stripes": Case(ROW, "b s/cyclic(cp,3) h k", (6, 3)),
    "blocks of any length, one of none": Case(ROW, "b h s/sizes(cp,3,0,9,7) k", (6, 2)),
    "no batch": Case(ROW, "s/intervals(cp,[0,4,12,16],[4,12],[16,18],[18,19]) h k", (2, 2)),
    "batch cut too": Case(GRID, "b/tp s/zigzag(cp) h k", (4, 2)),
    "heads cut too, unequally": Case(GRID, "b s/cp h/balanced(tp) k", (9, 3)),
    "two axes, sequence last": Case(GRID, "h b s/zigzag(tp,cp) k", (6, 2)),
    "keys on fewer devices": Case(GRID, "b s/zigzag(cp) h/tp k", (6, 1), "b s/zigzag(cp) h k"),
    "keys cut elsewhere": Case(GRID, "b s/zigzag(cp) h/tp k", (4, 2), "b s/cp h/tp k"),
    "nothing to move": Case(GRID, "b s h/(tp,cp) k", (4, 4)),
}
MASKS = [Mask(), Mask(True), Mask(True, has_documents=True), Mask(True, 4), Mask(False, 5)]
MASKS += [Mask(True, chunk=5), Mask(chunk=4, has_documents=True)]


ALL = {"causal": True, "softcap": 2.0, "has_alibi": True, "dropout": 0.25, "return_lse": True}
ALL |= {"chunk": 8, "has_sinks": True}
FEW = "b s h k"
MANY = "b t/cp h k"
ELSEWHERE = "b t/tp h k"
# Two sequences, and what becomes of scores and weights.
CROSS = {
    "whole queries, sharded keys": (Case(ROW, FEW, (4, 2), MANY, kv_length=23), Mask()),
    "chunks of another sequence": (
        Case(ROW, "b s/zigzag(cp) h k", (4, 2), MANY, kv_length=23),
        Mask(True, has_documents=True, offset=-3, chunk=6, return_lse=True),
    ),
    "sinks beside a window": (
        Case(GRID, "b/cp s/zigzag(tp) h k", (6, 2)),
        Mask(True, 4, has_sinks=True),
    ),
    "sinks of rows that see nothing, heads sharded unequally": (
        Case(GRID, "h/balanced(tp) b s/cp k", (5, 1), "h b t/cp k", kv_length=9),
        Mask(True, offset=-7, has_sinks=True, return_lse=True),
    ),
    "sharded queries, whole keys": (
        Case(ROW, "b s/cp h k", (4, 2), "b t h k", kv_length=5),
        Mask(softcap=2.0),
    ),
    "a prompt before, keys in any order": (
        Case(ROW, "b s/zigzag(cp) h k", (4, 4), "b t/sizes(cp,9,0,3,11) h k", kv_length=23),
        Mask(True, None, True, 4, has_alibi=True, return_lse=True),
    ),
    "rows that see nothing": (
        Case(ROW, FEW, (4, 1), MANY, kv_length=23),
        Mask(True, offset=-7, return_lse=True),
    ),
    "before and after": (
        Case(ROW, "b s/cp h k", (4, 2), MANY, kv_length=30),
        Mask(False, (2, None), dropout=0.5),
    ),
    "keys over the axis of heads": (
        Case(GRID, "b s/cp h/tp k", (4, 2), ELSEWHERE, kv_length=9),
        Mask(False, (3, 1)),
    ),
    "keys over an axis of their own": (
        Case(GRID, "b s/cp h k", (4, 2), ELSEWHERE, kv_length=9),
        Mask(**ALL),
    ),
    "one sequence, all at once": (Case(ROW, "b s/zigzag(cp) h k", (6, 2)), Mask(**ALL)),
    "heads and batch sharded, all at once": (Case(GRID, "h/tp b s/cp k", (6, 3)), Mask(**ALL)),
}
SEED = 5

# An image, the layout of its text, the rows of the text, and whether masks are causal.
JOINT = [
    (Case(ROW, "b s/zigzag(cp) h k", (6, 2)), "b s h k", 5, False),
    (Case(ROW, "b h s/sizes(cp,3,0,9,7) k", (4, 4)), "b h s k", 3, True),
    (Case(GRID, "h/balanced(tp) b s/cp k", (6, 3)), "h/balanced(tp) b s k", 7, True),
]


class Joint(NamedTuple):
    """A case of `JOINT`, and pairs (of the image, of the text): q, k, v, cotangent; y and gradients."""

    cases: tuple[Case, Case]
    given: list[tuple[NDArray, NDArray]]
    wanted: list[tuple[NDArray, NDArray]]


def joint_problem(case: Case, text_layout: str, n_text: int, causal: bool) -> Joint:
    """One sequence, whose first rows are the text."""
    text = case._replace(layout=text_layout, length=n_text)
    whole = problem(case._replace(length=n_text + case.length), Mask(causal))

    def split(arrays: Any) -> list[tuple[NDArray, NDArray]]:
        return [(x[:, n_text:], x[:, :n_text]) for x in arrays]

    return Joint((case, text), split(whole[:4]), split(one_device(whole, Mask(causal))))


class Problem(NamedTuple):
    """Arrays with the dims `b s h k`, and the documents `b s` of queries and of keys if there are some."""

    q: NDArray
    k: NDArray
    v: NDArray
    cotangent: NDArray
    documents: NDArray | None
    kv_documents: NDArray | None
    alibi: NDArray | None
    lse_cotangent: NDArray
    sinks: NDArray | None


def problem(case: Case, mask: Mask, seed: int = 0) -> Problem:
    """Random arrays; without a batch dim there is one batch."""
    draw, (heads, kv_heads) = np.random.default_rng(seed), case.heads
    batch = case.batch if "b" in xs.Layout.parse(case.layout).names else 1
    n = case.length
    m = case.kv_length or case.length
    shapes = [
        (n, heads, WIDTH),
        (m, kv_heads, WIDTH),
        (m, kv_heads, VALUE_WIDTH),
        (n, heads, VALUE_WIDTH),
    ]
    q, *others = (draw.normal(size=(batch, *shape)) for shape in shapes)
    of_rows, of_keys = ((np.arange(r) + 2 * np.arange(batch)[:, None]) // 6 for r in (n, m))
    documents = (
        (of_rows, of_keys if case.kv_length else None) if mask.has_documents else (None, None)
    )
    alibi = 0.5 ** np.arange(heads) if mask.has_alibi else None
    lse_cotangent = draw.normal(size=(batch, n, heads))
    sinks = draw.normal(size=heads) if mask.has_sinks else None
    return Problem(case.factor * q, *others, *documents, alibi, lse_cotangent, sinks)


def one_device(given: Problem, mask: Mask) -> list[NDArray]:
    """The result, the gradients of q, k and v, by products of whole arrays; log-sum-exps if returned.

    Last the gradient of sinks.
    """
    q, k, v, cotangent, documents, kv_documents, alibi, of_lse, sinks = given
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5
    keys = np.arange(k.shape[1])
    rows = np.arange(q.shape[1])[:, None] + mask.offset
    k, v = (x.repeat(group, 2) for x in (k, v))
    seen = np.ones((1, 1, len(rows), len(keys)), bool)
    if mask.causal:
        seen = seen & (rows >= keys)
    if isinstance(mask.window, int):
        seen = seen & (abs(rows - keys) < mask.window)
    elif mask.window:
        before, after = mask.window
        seen = seen & (rows - keys <= before) & (keys - rows <= (99 if after is None else after))
    if mask.chunk:
        seen = seen & (rows // mask.chunk == keys // mask.chunk)
    if documents is not None:
        kv_documents = documents if kv_documents is None else kv_documents
        seen = seen & (documents[:, None, :, None] == kv_documents[:, None, None])
    scores = np.einsum("bqhk,bshk->bhqs", q, k) * scale
    slope = scale
    if mask.softcap:
        slope = (1 - np.tanh(scores / mask.softcap) ** 2) * scale
        scores = np.tanh(scores / mask.softcap) * mask.softcap
    if alibi is not None:
        scores = scores - alibi[:, None, None] * abs(rows - keys)
    scores = np.where(seen, scores, -np.inf)
    n_keys = scores.shape[-1]
    if sinks is not None:  # one key more
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate((scores, column), -1)
    top = scores.max(-1, keepdims=True).clip(min=-1e30)
    weights = np.exp(scores - top)
    kept = np.ones(())
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total, total, 1)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    if mask.dropout:
        cells = np.arange(q.shape[0] * q.shape[2]).reshape(q.shape[0], -1, 1, 1)
        is_dropped = drop_mask(SEED, (cells, rows - mask.offset, keys), share=mask.dropout)
        kept = ~is_dropped / (1 - mask.dropout)
    weights, of_sinks = weights[..., :n_keys], weights[..., n_keys:]
    y = np.einsum("bhqs,bshk->bqhk", weights * kept, v)
    change = np.einsum("bqhk,bshk->bhqs", cotangent, v) * kept
    shared = (weights * change).sum(-1, keepdims=True)
    if mask.return_lse:
        shared = shared - of_lse.swapaxes(1, 2)[..., None]
    change = change - shared
    change = weights * change * slope
    weights = weights * kept
    of_k = np.einsum("bhqs,bqhk->bshk", change, q)
    of_v = np.einsum("bhqs,bqhk->bshk", weights, cotangent)
    of_k, of_v = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (of_k, of_v))
    found = [y, np.einsum("bhqs,bshk->bqhk", change, k), of_k, of_v]
    if mask.return_lse:
        found.append(lse[..., 0].swapaxes(1, 2))
    if sinks is not None:
        found.append(-(of_sinks * shared).sum((0, 2, 3)))
    return found
