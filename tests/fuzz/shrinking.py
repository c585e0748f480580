"""A case that fails -> the simplest that still does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

import xshard as xs
from xshard.notation.overlap import Fold, Halo, Window
from xshard.notation.parser import Dim, Shard

Case = TypeVar("Case")


def shrunk(case: Case, fails: Callable[[Case], bool], most: int = 500) -> Case:
    """Take the first simpler case that fails, again and again; at most so many are tried."""
    tried = 0
    while tried < most:
        for simpler in _simpler(case):
            tried += 1
            try:
                found = fails(simpler)
            except (xs.XshardError, ValueError, IndexError):  # no case at all
                continue
            if found:
                case = simpler
                break
        else:
            break
    return case


def _simpler(case: Any) -> Iterator[Any]:
    yield from case.shorter()
    plain = {
        f.name: f.default for f in fields(case) if f.default is not MISSING and f.name != "seed"
    }
    for field, value in plain.items():
        if getattr(case, field) != value:
            yield replace(case, **{field: value})
    layouts = case.layouts
    if not layouts:  # a tree shrinks its own
        return
    if case.dtype != "float64":
        yield replace(case, dtype="float64")
    for mesh in filter(None, (case.mesh, case.there)):
        for axis in mesh.axes:
            yield from _attempted(_without_axis, case, axis)
    for at in range(len(case.shape)):
        yield from _attempted(_without_dim, case, at)
    for i, layout in enumerate(layouts):
        for simpler in _simpler_layouts(layout):
            yield replace(case, layouts=(*layouts[:i], simpler, *layouts[i + 1 :]))
    for at, n in enumerate(case.shape):
        for less in {n // 2, n - 1} - {n, -1}:
            yield replace(case, shape=(*case.shape[:at], less, *case.shape[at + 1 :]))
    for which in ("mesh", "there"):
        mesh = getattr(case, which) or xs.Mesh()
        sizes = dict(zip(mesh.axes, mesh.sizes, strict=True))
        for axis, n in sizes.items():
            if n > 1:
                yield replace(case, **{which: xs.Mesh({**sizes, axis: n - 1})})


def _attempted(make: Callable[..., Any], *args: object) -> Iterator[Any]:
    try:
        yield make(*args)
    except xs.XshardError:
        return


def _without_axis(case: Any, gone: str) -> Any:
    def less(mesh: xs.Mesh | None) -> xs.Mesh | None:
        return mesh and xs.Mesh({axis: mesh.size(axis) for axis in mesh.axes if axis != gone})

    def left(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis != gone)

    def cut(dim: Dim) -> Dim:
        shards = (replace(s, axes=left(s.axes)) for s in dim.shards)
        return replace(dim, shards=tuple(s for s in shards if s.axes))

    layouts = (
        xs.Layout(
            tuple(map(cut, layout.dims)), tuple((kind, left(axes)) for kind, axes in layout.tags)
        )
        for layout in case.layouts
    )
    return replace(case, mesh=less(case.mesh), there=less(case.there), layouts=tuple(layouts))


def _without_dim(case: Any, at: int) -> Any:
    name = re.compile(rf"\b{case.names[at]}\b'?")  # of a composed dim the other part stays
    layouts = (
        replace(
            layout,
            dims=tuple(
                replace(dim, name=name.sub("", dim.name))
                for dim in layout.dims
                if name.sub("", dim.name).strip("() ")
            ),
        )
        for layout in case.layouts
    )
    return replace(case, shape=case.shape[:at] + case.shape[at + 1 :], layouts=tuple(layouts))


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
            yield replace(dim, overlap=dim.overlap.overlap)
        elif dim.overlap != Halo(1, 1):
            yield replace(dim, overlap=Halo(1, 1))
            if isinstance(dim.overlap, Window):
                yield replace(dim, overlap=Window(dim.overlap.k))
    for at, shard in enumerate(dim.shards):
        yield replace(dim, shards=dim.shards[:at] + dim.shards[at + 1 :])
        if shard.order != "block":
            yield replace(dim, shards=(*dim.shards[:at], Shard(shard.axes), *dim.shards[at + 1 :]))
