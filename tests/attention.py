"""Attentions that both bridges compute on four devices, and what one device makes of them, in numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from xshard import reference

LENGTH, BATCH, WIDTH, VALUE_WIDTH = 19, 2, 6, 4
ROW, GRID = xs.Mesh(cp=4), xs.Mesh(tp=2, cp=2)
DIMS = "bshk"


class Case(NamedTuple):
    """heads: of queries and of keys. kv_layout: that of keys, if it is another. factor: of the queries."""

    mesh: xs.Mesh
    layout: str
    heads: tuple[int, int]
    kv_layout: str | None = None
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the queries, in the order of the layout."""
        lengths = {"b": BATCH, "s": LENGTH, "h": self.heads[0], "k": WIDTH}
        return tuple(lengths[name] for name in xs.Layout.parse(self.layout).names)

    def block_layout(self, dims: str = DIMS, of_keys: bool = False) -> xs.Layout:
        """The layout of an array with some of the dims."""
        layout = xs.Layout.parse(self.kv_layout if of_keys and self.kv_layout else self.layout)
        return xs.Layout(tuple(dim for dim in layout.dims if dim.name in dims), layout.tags)

    def blocks(self, x: NDArray, dims: str = DIMS, of_keys: bool = False) -> list[NDArray]:
        """An array with such dims -> the blocks of all devices."""
        layout = self.block_layout(dims, of_keys)
        kept = "".join(dim for dim in dims if dim in layout.names)
        x = x.reshape([n for n, dim in zip(x.shape, dims, strict=True) if dim in kept])
        x = x.transpose([kept.index(name) for name in layout.names])
        return reference.scatter(x, str(layout), self.mesh)


class Mask(NamedTuple):
    causal: bool = False
    window: int | None = None
    has_documents: bool = False


ORDERS = {
    "contiguous": Case(ROW, "b s/cp h k", (6, 2)),
    "zigzag, fewer heads of keys than devices": Case(ROW, "b s/zigzag(cp) h k", (6, 2)),
    "zigzag of documents, any width of scores": Case(ROW, "b s/zigzag(cp,5,8,6) h k", (4, 4), factor=300.0),
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


class Problem(NamedTuple):
    """Arrays with the dims `b s h k`, and the documents `b s` if there are some."""

    q: NDArray
    k: NDArray
    v: NDArray
    cotangent: NDArray
    documents: NDArray | None


def problem(case: Case, mask: Mask, seed: int = 0) -> Problem:
    """Random arrays; without a batch dim there is one batch."""
    draw, (heads, kv_heads) = np.random.default_rng(seed), case.heads
    batch = BATCH if "b" in xs.Layout.parse(case.layout).names else 1
    shapes = [(heads, WIDTH), (kv_heads, WIDTH), (kv_heads, VALUE_WIDTH), (heads, VALUE_WIDTH)]
    q, *others = (draw.normal(size=(batch, LENGTH, *shape)) for shape in shapes)
    documents = (np.arange(LENGTH) + 2 * np.arange(batch)[:, None]) // 6 if mask.has_documents else None
    return Problem(case.factor * q, *others, documents)


def one_device(given: Problem, mask: Mask) -> list[NDArray]:
    """The result, and the gradients of q, k and v, by products of whole arrays."""
    q, k, v, cotangent, documents = given
    group, scale, at = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5, np.arange(q.shape[1])
    k, v = (x.repeat(group, 2) for x in (k, v))
    seen = np.ones((1, 1, len(at), len(at)), bool)
    if mask.causal:
        seen = seen & (at[:, None] >= at)
    if mask.window:
        seen = seen & (abs(at[:, None] - at) < mask.window)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    scores = np.where(seen, np.einsum("bqhk,bshk->bhqs", q, k) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = np.einsum("bhqs,bshk->bqhk", weights, v)
    change = np.einsum("bqhk,bshk->bhqs", cotangent, v)
    change = weights * (change - (weights * change).sum(-1, keepdims=True)) * scale
    of_k, of_v = np.einsum("bhqs,bqhk->bshk", change, q), np.einsum("bhqs,bqhk->bshk", weights, cotangent)
    of_k, of_v = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (of_k, of_v))
    return [y, np.einsum("bhqs,bshk->bqhk", change, k), of_k, of_v]
