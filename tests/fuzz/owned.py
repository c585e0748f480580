"""Random chains in which rows have owners by a map: graphs, empty parts, two dims, beside a formula.

A seed gives the same chain on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

import xshard as xs
from tests import oracle
from tests.fuzz import judge
from tests.fuzz.chains import Chain, random_cut, random_mesh, random_needs, random_owners
from xshard.dtypes import numpy_dtype
from xshard.layout.partition import map_of
from xshard.notation.maps import NamedMap
from xshard.notation.overlap import Fold, Overlap, Reads, unfolded
from xshard.notation.parser import BY, Dim, Shard

LENGTHS = {"n": (0, 1, 2, 3, 5, 8, 12, 16, 24), "m": (1, 2, 3, 4, 6), "d": (1, 2)}


def random_owned(seed: object, devices: int | None = None, mesh: xs.Mesh | None = None) -> Chain:
    """The chain of a seed: one to three moves, at least one layout of each with a map."""
    rng = random.Random(repr(seed))
    mesh = mesh or random_mesh(rng, devices)
    lengths = {
        name: rng.choice(of) for name, of in LENGTHS.items() if name == "n" or rng.random() < 0.5
    }
    layouts: list[xs.Layout] = []
    for i in range(rng.choice((2, 2, 3, 4))):
        layouts.append(_layout(rng, mesh, lengths, by_map=i % 2 == 0 or rng.random() < 0.6))
    dtype = rng.choice(("float64", "float32", "int64"))
    profile = rng.choice(("bandwidth", "h100", "gloo"))
    return Chain(
        mesh, tuple(lengths.values()), dtype, tuple(layouts), profile, seed=rng.randrange(10**9)
    )


def _layout(rng: random.Random, mesh: xs.Mesh, lengths: dict[str, int], by_map: bool) -> xs.Layout:
    axes = rng.sample(mesh.axes, len(mesh.axes))
    cuts: dict[str, tuple[Shard, ...]] = dict.fromkeys(lengths, ())
    for name, length in lengths.items():
        own = tuple(axes[: (n := rng.choice((1, 1, 2)))])
        axes = axes[n:]
        drawn = rng.random()
        if own and (drawn < 0.4 or (name == "n" and by_map)):
            cuts[name] = (_by(rng, own, length, mesh),)
        elif own and drawn < 0.8:
            cuts[name] = (random_cut(rng, own, length, mesh.size(*own)),)
        else:
            axes = [*own, *axes]
    dims = []
    for name, shards in cuts.items():
        dim = Dim(name, shards)
        overlap = None
        if any(shard.order == BY for shard in shards) and rng.random() < 0.65:
            overlap = _reads(rng, dim, lengths[name], mesh)
        dims.append(replace(dim, overlap=overlap))
    tag = rng.choice(("sum", "copy", None, None))
    return xs.Layout(tuple(dims), ((tag, tuple(axes)),) if tag and axes else ())


def _by(rng: random.Random, axes: tuple[str, ...], rows: int, mesh: xs.Mesh) -> Shard:
    return Shard(axes, BY, (NamedMap("cells", random_owners(rng, rows, mesh.size(*axes))),))


def _reads(rng: random.Random, dim: Dim, length: int, mesh: xs.Mesh) -> Overlap:
    """Rows that a graph needs, or any; or the fold. The name of the map says what the graph shows."""
    needs = random_needs(rng, dim, length, mesh)
    name = "any"
    if length and rng.random() < 0.6:
        n, hops, [shard] = rng.choice((0, length, 3 * length)), rng.choice((1, 1, 2, 3)), dim.shards
        edges = [(rng.randrange(length), rng.randrange(length)) for _ in range(n)]
        senders, receivers = zip(*edges, strict=True) if edges else ((), ())
        needs, _ = xs.Needs.of_edges(map_of(shard), senders, receivers, hops)
        shown = {"directed": {*edges} != {(b, a) for a, b in edges}, "hops": hops > 1}
        shown |= {"loops": any(a == b for a, b in edges), "twice": len({*edges}) < n}
        name = "_".join(["graph", *(word for word, is_shown in shown.items() if is_shown)])
    reads = Reads(NamedMap(name, needs))
    return Fold(reads) if rng.random() < 0.25 else reads


WORDS = {
    "directed": "a directed graph",
    "hops": "several hops",
    "loops": "self edges",
    "twice": "edges twice",
}


def features(chain: Chain) -> Iterator[str]:
    """What a chain shows of owners and needs."""
    for layout, next_one in itertools.zip_longest(chain.layouts, chain.layouts[1:]):
        by = [dim for dim in layout.dims if any(shard.order == BY for shard in dim.shards)]
        if len(by) > 1:
            yield "two dims by maps"
        if by and any(dim.shards and dim not in by for dim in layout.dims):
            yield "a map beside a formula"
        for dim in by:
            [shard] = dim.shards
            owners = map_of(shard)
            if 0 in owners.sizes and owners.parts > 1:
                yield "an empty part"
            if len(shard.axes) > 1:
                yield "a map over two axes"
            reads = unfolded(dim.overlap) if dim.overlap is not None else None
            if not isinstance(reads, Reads):
                continue
            yield "a fold" if isinstance(dim.overlap, Fold) else "a need"
            yield from (WORDS[word] for word in reads.rows.name.split("_")[1:])
            read = np.bincount(reads.rows.map.rows, minlength=len(owners.rows))
            if len(read) and owners.parts > 1:
                yield from ["a row nobody reads"] * bool((read == 0).any())
                yield from ["all rows read by all"] * bool((read == owners.parts - 1).all())
                yield from ["a row read by several"] * bool((read > 1).any())
        if next_one and by and any(s.order == BY for dim in next_one.dims for s in dim.shards):
            yield "from map to map"


def judged(trip: judge.Trip, arrived: judge.Arrived) -> None:
    """`judge`, and the bytes: between copies, the bound is what the busiest device lacks, and is met."""
    judge.judge(trip, arrived)
    chain = trip.chain
    for i, plan in enumerate(trip.plans):
        ends = chain.layouts[i : i + 2]
        if any(end.tagged("sum") or "fold" in str(end) for end in ends):
            continue
        lacks = []
        for device in range(chain.mesh.n_devices):
            had, wanted = (
                oracle.elements(end, chain.mesh, chain.shape_at(i), device, False).number
                for end in ends
            )
            lacks.append(len(np.setdiff1d(wanted, had)) * numpy_dtype(chain.dtype).itemsize)
        assert plan.bytes_lower_bound == max(lacks), (
            f"move {i}: the bound is {plan.bytes_lower_bound}"
        )
        assert chain.profile != "bandwidth" or plan.bytes_received == max(lacks), (
            f"move {i}: more bytes"
        )
