"""Caches that can hold maps are registered, so that old maps do not stay in memory."""

import functools
import gc
import importlib
import sys
import types

import numpy as np

import xshard as xs
from tests.modules import modules_of_xshard
from xshard import caches
from xshard.notation.maps import RowMap

CACHE = type(functools.lru_cache(len))

# Neither the arguments nor the results of these can hold a layout.
PLAIN = {
    "xshard.cli.explore.page.live_page",
    "xshard.compat.all_to_all_single",
    "xshard.compat.spmd_transition",
    "xshard.contractions.expression._is_contraction",
    "xshard.cost.machine._load",
    "xshard.cost.machine.machine_of",
    "xshard.cost.machine.shipped",
    "xshard.cost.model._fabric",
    "xshard.cost.model._is_dtype",
    "xshard.dtypes.itemsize",
    "xshard.layout.mesh.all_coords",
    "xshard.layout.mesh._all_groups",
    "xshard.layout.mesh._all_indices",
    "xshard.plans.disk_cache._code_digest",
    "xshard.plans.serialize._field_types",
    "xshard.rules._compiled",
    "xshard.rules.spellings",
    "xshard.signatures.Signature",
    "xshard.step.choose.order.plan_elimination",
    "xshard.step.price.options._distinct_layouts",
    "xshard.steps.exchange.even_traffic._dim_digits",
    "xshard.steps.exchange.traffic.span_axes",
    "xshard.testing.pickling.is_installed",
}


def unregistered(modules):
    """The caches of modules that nobody empties, by name."""
    values = [value for module in modules for value in vars(module).values()]
    ours = [c for c in values if isinstance(c, CACHE) and c.__module__.startswith("xshard")]
    return {
        f"{cache.__module__}.{cache.__qualname__}": cache
        for cache in ours
        if not any(cache is registered for registered in caches._LAYOUT_CACHES)
    }


def imported_modules():
    return [importlib.import_module(name) for name in modules_of_xshard()]


def maps_held(cache):
    """The maps that the arguments and results of a cache lead to."""
    held = []
    seen = set()
    todo = [cache]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type | types.FunctionType | types.ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, RowMap):
            held.append(value)
        todo += gc.get_referents(value)
    return held


def plan_with_maps():
    """Moves and a product over owners and needs, forward and backward, on one mesh and on two."""
    rng = np.random.default_rng(0)
    before = xs.Owners(rng.integers(0, 2, 8), 2)
    after = xs.Owners(rng.integers(0, 2, 8), 2)
    near, _ = xs.Needs.of_edges(before, rng.integers(0, 8, 12), rng.integers(0, 8, 12))
    maps = {"before": before, "after": after, "near": near}
    mesh = xs.Mesh(gp=2)
    plans = [
        xs.plan("n/by(gp,before) d -> n/by(gp,after) d", mesh, (8, 2), maps=maps),
        xs.plan("n/by(gp,before) -> n/by(gp,before):reads(near)", mesh, (8,), maps=maps),
    ]
    for plan in plans:
        xs.reference.run(plan, xs.reference.scatter(np.ones(plan.shape), plan.src, mesh))
        assert plan.backward.bytes_received >= 0
    other_mesh = xs.Mesh(x=4)
    text = "n/by(gp,before) -> n/x"
    plans.append(xs.plan(text, src_mesh=mesh, dst_mesh=other_mesh, shape=(8,), maps=maps))
    product = "n/by(gp,before) d, d k -> n k"
    plans.append(xs.plan(product, mesh, sizes={"n": 8, "d": 2, "k": 2}, maps=maps))
    return plans


def test_every_cache_is_registered_or_plain():
    """A new cache fails here until it is a `layout_cache`, or stands in the list above."""
    assert set(unregistered(imported_modules())) == PLAIN


def test_plain_caches_hold_no_maps():
    modules = imported_modules()
    plans = plan_with_maps()
    assert [maps_held(cache) for cache in unregistered(modules).values()] == [[]] * len(PLAIN)
    assert any(maps_held(cache) for cache in caches._LAYOUT_CACHES)
    del plans


def test_a_cache_of_layouts_that_is_not_registered_is_noticed():
    layouts = functools.lru_cache(lambda layout: layout.names)
    layouts.__module__ = "xshard.forgotten"
    module = types.ModuleType("xshard.forgotten")
    module.layouts = layouts
    cells = xs.Owners([0, 1])
    layouts(xs.Layout.parse("n/by(gp,cells)", {"cells": cells}))
    assert set(maps_held(layouts)) == {cells}
    assert list(unregistered([module]).values()) == [layouts]


def test_all_registered_caches_are_emptied():
    plan_with_maps()
    assert sum(cache.cache_info().currsize for cache in caches._LAYOUT_CACHES) > 100
    caches.empty_layout_caches()
    assert {cache.cache_info().currsize for cache in caches._LAYOUT_CACHES} == {0}


def test_calls_of_the_torch_bridge_are_registered():
    """They keep a plan and what runs it; other caches of the bridge keep few entries."""
    for name in ("calls.move", "contractions.call", "lower.rules"):
        importlib.import_module(f"torch_bridge.{name}")
    names = {f"{cache.__module__}.{cache.__name__}" for cache in caches._LAYOUT_CACHES}
    assert {
        "torch_bridge.calls.move._executable",
        "torch_bridge.contractions.call._executable",
        "torch_bridge.lower.rules._lower_steps",
    } <= names
    assert "torch" in sys.modules
