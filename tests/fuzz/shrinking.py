"""A chain that fails -> the simplest that still does.

Decides what is simpler. Knows no runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import xshard as xs
from tests.fuzz.chains import Chain
from xshard.notation.overlap import Fold, Halo, Window
from xshard.notation.parser import Dim, Shard


def shrunk(chain: Chain, fails: Callable[[Chain], bool], most: int = 500) -> Chain:
    """Take the first simpler chain that fails, again and again; at most so many are tried."""
    tried = 0
    while tried < most:
        for simpler in _simpler(chain):
            tried += 1
            try:
                found = fails(simpler)
            except (xs.XshardError, ValueError, IndexError):  # no chain at all
                continue
            if found:
                chain = simpler
                break
        else:
            break
    return chain


def _simpler(chain: Chain) -> Iterator[Chain]:
    layouts = chain.layouts
    if len(layouts) > 2:
        yield replace(chain, layouts=layouts[:-1])
        yield replace(chain, layouts=layouts[1:], shape=chain.shape_at(1))
        for i in range(1, len(layouts) - 1):
            yield replace(chain, layouts=layouts[:i] + layouts[i + 1 :])
    for axis in chain.mesh.axes:
        yield from _attempted(_without_axis, chain, axis)
    for at in range(len(chain.shape)):
        yield from _attempted(_without_dim, chain, at)
    for i, layout in enumerate(layouts):
        for simpler in _simpler_layouts(layout):
            yield replace(chain, layouts=(*layouts[:i], simpler, *layouts[i + 1 :]))
    for at, n in enumerate(chain.shape):
        for less in {n // 2, n - 1} - {n, -1}:
            yield replace(chain, shape=(*chain.shape[:at], less, *chain.shape[at + 1 :]))
    for axis, n in zip(chain.mesh.axes, chain.mesh.sizes, strict=True):
        if n > 1:
            sizes = dict(zip(chain.mesh.axes, chain.mesh.sizes, strict=True))
            yield replace(chain, mesh=xs.Mesh({**sizes, axis: n - 1}))
    plain = {"dtype": "float64", "profile": "h100", "strides": "plain"}
    for field, value in plain.items():
        if getattr(chain, field) != value:
            yield replace(chain, **{field: value})


def _attempted(make: Callable[..., Chain], *args: object) -> Iterator[Chain]:
    try:
        yield make(*args)
    except xs.XshardError:
        return


def _without_axis(chain: Chain, gone: str) -> Chain:
    sizes = dict(zip(chain.mesh.axes, chain.mesh.sizes, strict=True))
    del sizes[gone]

    def left(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis != gone)

    def cut(dim: Dim) -> Dim:
        shards = (replace(s, axes=left(s.axes)) for s in dim.shards)
        return replace(dim, shards=tuple(s for s in shards if s.axes))

    layouts = (
        xs.Layout(tuple(map(cut, layout.dims)), tuple((kind, left(axes)) for kind, axes in layout.tags))
        for layout in chain.layouts
    )
    return replace(chain, mesh=xs.Mesh(sizes), layouts=tuple(layouts))


def _without_dim(chain: Chain, at: int) -> Chain:
    name = chain.layouts[0].names[at]
    layouts = (
        replace(layout, dims=tuple(dim for dim in layout.dims if dim.name != name))
        for layout in chain.layouts
    )
    return replace(chain, shape=chain.shape[:at] + chain.shape[at + 1 :], layouts=tuple(layouts))


def _simpler_layouts(layout: xs.Layout) -> Iterator[xs.Layout]:
    for at in range(len(layout.tags)):
        yield replace(layout, tags=layout.tags[:at] + layout.tags[at + 1 :])
    for at, dim in enumerate(layout.dims):
        for simpler in _simpler_dims(dim):
            yield replace(layout, dims=(*layout.dims[:at], simpler, *layout.dims[at + 1 :]))


def _simpler_dims(dim: Dim) -> Iterator[Dim]:
    if dim.overlap is not None:
        yield replace(dim, overlap=None)
        if isinstance(dim.overlap, Fold):
            yield replace(dim, overlap=dim.overlap.of)
        elif dim.overlap != Halo(1, 1):
            yield replace(dim, overlap=Halo(1, 1))
            if isinstance(dim.overlap, Window):
                yield replace(dim, overlap=Window(dim.overlap.k))
    for at, shard in enumerate(dim.shards):
        yield replace(dim, shards=dim.shards[:at] + dim.shards[at + 1 :])
        if shard.order != "block":
            yield replace(dim, shards=(*dim.shards[:at], Shard(shard.axes), *dim.shards[at + 1 :]))
