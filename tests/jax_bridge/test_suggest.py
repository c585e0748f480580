"""`suggest` for losses of JAX: their operations, rules that are right, and what `jit` makes of them."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import jax_bridge as xj
import xshard as xs
from jax_bridge.step.primitives import ELEMENTWISE
from jax_bridge.step.suggest import Loss, traced
from tests.jax_bridge.helpers import device_mesh, in_jax, needs_flax
from tests.jax_bridge.losses import LOSSES, shape, transformer
from tests.jax_bridge.prober import equations, judged, operation
from tests.step.prober import disagreeing
from xshard.errors import PlanError

ONE = {"micro_batches": 1, "recompute": False, "gap": 0.05}
NAMES = [pytest.param(n, marks=needs_flax) if "flax" in n else n for n in LOSSES]


@cache
def loss_of(name: str) -> Loss:
    return Loss(*LOSSES[name]())


@pytest.mark.parametrize("name", NAMES)
@in_jax
def test_every_equation_has_a_rule(name: str) -> None:
    loss = loss_of(name)
    step, *_ = traced(loss)
    opaque = {op.name.partition(".")[0] for op in step.ops if op.kind == "opaque"}
    assert opaque == ({"scatter"} if name == "experts" else set())
    assert len(step.ops) <= 30
    assert step.ops[-1].dims[-1] == () and step.moves_anywhere
    n_layers = {"equinox": 1, "recurrent": 8}.get(name, 3)
    assert max(op.times for op in step.ops) == n_layers
    assert all("b" in step.arrays[x].names for x in step.inputs)
    leaves = loss.names[: loss.n_parameters]
    starred = (
        {re.sub(r"(^|\.)\d+\.", r"\1*.", x, count=1) for x in leaves}
        if n_layers == 3
        else set(leaves)
    )
    assert set(step.parameters) == starred


@in_jax
def test_rules_are_right_on_blocks() -> None:
    seen = set()
    wrong = {}
    for name in (n for n in LOSSES if "flax" not in n or not needs_flax.args[0]):
        loss = loss_of(name)
        for eqn in equations(jax.make_jaxpr(loss.run)(*loss.arrays).jaxpr):
            op, lengths = operation(eqn)
            primitive = eqn.primitive.name
            key = (
                primitive,
                op.kind,
                "" if primitive in ELEMENTWISE else re.sub(r"n\d+", "n", op.text),
            )
            if key in seen or op.kind in ("source", "opaque"):
                continue
            seen.add(key)
            stated, right = judged(eqn, op, lengths)
            if any(both := disagreeing(op, stated, right)):
                wrong[op.text] = both
    assert not wrong and len(seen) > 60
    assert "cumsum" in {primitive for primitive, *_ in seen}
    loss = loss_of("recurrent")
    (eqn,) = (
        e
        for e in equations(jax.make_jaxpr(loss.run)(*loss.arrays).jaxpr)
        if e.primitive.name == "cumsum"
    )
    op, lengths = operation(eqn)
    stated, right = judged(eqn, replace(op, whole=()), lengths)
    assert stated - right == {"n8/x n4 n16 -> n8/x n4 n16"}


def _bytes_received(compiled: str) -> int:
    """Bytes that a device receives in the collectives of a compiled program without loops."""
    total = 0
    sizes = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}
    for line in compiled.splitlines():
        match = re.search(
            r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", line
        )
        if match:
            arrays = re.findall(r"(f32|s32|u32|pred)\[([\d,]*)\]", match[1])
            n = sum(
                sizes[kind] * int(np.prod([int(x) for x in dims.split(",") if x]))
                for kind, dims in arrays
            )
            total += 2 * n if match[2] == "all-reduce" else n
    return total


def _filled(args: Any) -> Any:
    rng = np.random.default_rng(0)

    def array(x: Any) -> jax.Array:
        random = (
            rng.normal(0, 0.1, x.shape) if x.dtype == jnp.float32 else rng.integers(0, 32, x.shape)
        )
        return jnp.asarray(random, x.dtype)

    return jax.tree.map(array, args)


@in_jax
def test_constraints_save_bytes() -> None:
    """Without them XLA goes on with the layout in which rows of the embedding arrive."""
    loss, args = transformer(False, batch=32, sequence=64, c=256, n=1)
    mesh = device_mesh(xs.Mesh(dp=2, tp=2))
    fixed = {"embed": "v c/tp", "head": "c/tp v"}
    plan = xj.suggest(loss, args, mesh, profile="h100:2", fixed=fixed, **ONE)
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), plan.specs, is_leaf=is_spec)
    arrays = _filled(args)
    results = []
    received = []
    for f in (loss, plan.constrain(loss)):
        step = jax.jit(
            jax.value_and_grad(f), in_shardings=shardings, out_shardings=(None, shardings[0])
        )
        received.append(_bytes_received(step.lower(*args).compile().as_text()))
        results.append(step(*arrays))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *results)
    assert received[1] < 0.7 * received[0], received


@in_jax
def test_names_of_equations_are_told_from_those_of_arguments() -> None:
    """Lists of parameters are called like a jitted function or a primitive; a place like an argument."""

    @jax.jit
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    mesh = device_mesh(xs.Mesh(tp=2))
    plans = []
    for key, mark in (("w", "h"), ("layer", "h"), ("tanh", "x"), ("dot_general", "down")):

        def loss(p: Any, x: Any, key: str = key, mark: str = mark) -> Any:
            for w in p[key]:
                x = checkpoint_name(layer(x, w), mark)
            return (jnp.tanh(x @ p["down"]) ** 2).sum()

        args = {key: [shape(64, 64)] * 2, "down": shape(64, 8)}, shape(32, 64)
        plan = xj.suggest(loss, args, mesh, fixed={f"{key}.0": "i o/tp"}, **ONE)
        arrays = _filled(args)
        constrained = jax.jit(plan.constrain(loss))(*arrays)
        np.testing.assert_allclose(constrained, loss(*arrays), rtol=1e-5)
        layouts = sorted(map(str, plan.layouts.values()))
        plans.append((plan.seconds, plan.specs[0][key], plan.specs[1], layouts))
    assert all(plan == plans[0] for plan in plans), plans
    with pytest.raises(xs.XshardError, match=r"two leaves are called 'a\.b'"):
        xj.suggest(lambda p: p["a.b"].sum(), ({"a.b": shape(4), "a": {"b": shape(4)}},), mesh)


@in_jax
def test_a_scan_is_constrained_inside() -> None:
    loss, args = transformer(True)
    mesh = device_mesh(xs.Mesh(tp=2))
    fixed = {"layers.up": "i o/tp", "layers.down": "o/tp i", "layers.q": "o i/tp"}
    plan = xj.suggest(loss, args, mesh, fixed=fixed, micro_batches=1, gap=0.05)
    assert plan.recompute
    assert plan.parameters.find("layers.up").startswith("... o i/tp")
    assert plan.specs[0]["layers"]["up"] == PartitionSpec(None, None, "tp")
    arrays = _filled(args)
    np.testing.assert_allclose(plan.constrain(loss)(*arrays), loss(*arrays), rtol=1e-5)
    text = str(jax.make_jaxpr(plan.constrain(loss))(*args))
    assert text.count("sharding_constraint") > 4 and text.count("remat2[") == 1
    for once in (
        False,
        True,
    ):  # the gradient needs the layers' parameters as they came, or as gathered
        object.__setattr__(plan, "once", "layers.up" if once else "")
        gradient = jax.make_jaxpr(jax.grad(plan.constrain(loss)))(*args)
        forward = next(eqn for eqn in gradient.eqns if eqn.primitive.name == "scan")
        stacked = [v.aval.shape for v in forward.outvars].count(args[0]["layers"]["up"].shape)
        assert stacked == once


@in_jax
def test_what_is_no_loss_is_refused() -> None:
    w = shape(8, 4)
    x = shape(16, 8)

    def step(p, x):
        loss, gradients = jax.value_and_grad(lambda p: (x @ p["w"]).sum())(p)
        return loss, jax.tree.map(lambda w, g: w - 1e-3 * g, p, gradients)

    with pytest.raises(
        PlanError, match=r"the function returns float32\[\], float32\[8,4\]\n  pass the loss"
    ):
        xj.suggest(step, ({"w": w}, x), xs.Mesh(dp=2))
