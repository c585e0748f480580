"""Moves between two meshes: random ones, the public cases, and what is asked of every plan for them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.plans.test_public_cases import layout_of, small
from tests.strategies import UNIT, layouts, meshes, shapes

TWO_MESHES = json.loads((Path(__file__).parent / "data" / "reshard_two_meshes.json").read_text())


@st.composite
def crossings(draw):
    """Options of `xs.plan` for two small meshes on the same, other, shuffled or shared devices."""
    src_mesh = draw(meshes(8))
    dst_mesh = draw(meshes(8))
    shape = draw(shapes())
    src, dst = (draw(layouts(mesh, len(shape))) for mesh in (src_mesh, dst_mesh))
    numbers = draw(st.permutations(range(16)))
    first = draw(st.sampled_from((0, 0, src_mesh.n_devices, 3)))
    devices = draw(st.sampled_from((None, range(first, first + dst_mesh.n_devices), numbers)))
    devices = None if devices is None else tuple(devices)[: dst_mesh.n_devices]
    return {
        "expression": (src, dst),
        "src_mesh": src_mesh,
        "dst_mesh": dst_mesh,
        "dst_devices": devices,
        "shape": shape,
    }


def planned(move, **options):
    return xs.plan(**move, dtype="float64", **options)


def crossing(src_text, dst_text, src_mesh, dst_mesh, shape, **options):
    """A plan for integers between two meshes given as text."""
    options = {"dtype": "int64", "profile": "bandwidth", **options}
    meshes = {"src_mesh": xs.Mesh.parse(src_mesh), "dst_mesh": xs.Mesh.parse(dst_mesh)}
    return xs.plan((src_text, dst_text), **meshes, shape=shape, **options)


def assert_right(plan, move, rng, unit=UNIT):
    """For the ends of the move, which may have other axes than those of the plan."""
    src, dst = move["expression"]
    oracle.assert_right(plan, rng, unit, (src, move["src_mesh"], dst, move["dst_mesh"]))


def public(case, full=False, disjoint=True):
    ends = tuple(layout_of(case[end], case[f"{end}_partial"]) for end in ("src", "dst"))
    src_mesh, dst_mesh = (xs.Mesh(case[f"{end}_mesh"]) for end in ("src", "dst"))
    parts = [
        math.lcm(
            *(mesh.size(*layout.dims[d].axes) for layout, mesh in zip(ends, meshes, strict=True))
        )
        for meshes in [(src_mesh, dst_mesh)]
        for d in range(len(case["shape"]))
    ]
    scaled = (small(n, max(p, 4)) for n, p in zip(case["shape"], parts, strict=True))
    first = src_mesh.n_devices if disjoint else 0
    return {
        "expression": ends,
        "src_mesh": src_mesh,
        "dst_mesh": dst_mesh,
        "dst_devices": range(first, first + dst_mesh.n_devices),
        "shape": tuple(case["shape"]) if full else tuple(scaled),
    }


def run_tree(plan, blocks):
    """`TreePlan` in numpy: the blocks of every array on the first mesh, by name -> on the second."""
    arrived = {}
    for array in plan.arrays:
        n = plan.dst_mesh.n_devices
        outs = arrived[array.name] = [
            np.empty(array.sharding.local_shape(d), array.dtype) for d in range(n)
        ]
        for move in array.moves:
            parts = [
                x[move.src.numpy_index(d)].astype(move.plan.dtype)
                for d, x in enumerate(blocks[move.name])
            ]
            for d, part in enumerate(xs.reference.run(move.plan, parts)):
                outs[d][move.dst.numpy_index(d)] = part
    return arrived
