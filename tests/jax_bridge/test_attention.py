"""Attention over a cut sequence in JAX, beside that of one device: orders, ways, masks; transformations."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xshard as xs
from jax_bridge import nn
from jax_bridge.testing.stacked import DeviceProgram, padded
from tests.attention import (
    CROSS,
    JOINT,
    MASKS,
    ORDERS,
    ROW,
    Case,
    Mask,
    joint_problem,
    one_device,
    problem,
)
from tests.jax_bridge.domains import difference, sharded
from tests.jax_bridge.helpers import device_mesh, in_jax

ROWS = [
    ("zigzag, fewer heads of keys than devices", "ring", "vma", 2),
    ("zigzag of documents, any width of scores", "ring", "pmap", 3),
    ("blocks of any length, one of none", "gather", "vma", 2),
    ("no batch", "ulysses", "novma", 4),
    ("heads cut too, unequally", "ring", "novma", 5),
    ("chunks of another sequence", "ring", "vma", None),
    ("whole queries, sharded keys", "reduce", "vma", None),
    ("a prompt before, keys in any order", "ring", "pmap", None),
    ("a prompt before, keys in any order", "reduce", "novma", None),
    ("rows that see nothing", "reduce", "vma", None),
    ("rows that see nothing", "ring", "novma", None),
    ("sinks beside a window", "gather", "vma", None),
    ("sinks of rows that see nothing, heads sharded unequally", "reduce", "novma", None),
    ("before and after", "auto", "vma", None),
    ("keys over an axis of their own", "ring", "vma", None),
    ("keys over an axis of their own", "ulysses", "novma", None),
]


@pytest.mark.parametrize(("order", "how", "mode", "mask"), ROWS)
@in_jax
def test_every_combination_is_that_of_one_device(order, how, mode, mask) -> None:
    """Values and the gradients of queries, keys and values; what is in the padding does not count."""
    with jax.enable_x64(True):
        case = (ORDERS[order], MASKS[mask]) if order in ORDERS else CROSS[order]
        assert error(*case, how, mode) < 1e-12


def error(case: Case, mask: Mask, how: str, mode: str, dtype: type = np.float64) -> float:
    """The largest difference from one device of the gradients, the result and the log-sum-exps."""
    given = problem(case, mask)
    n = 4 + mask.return_lse
    kinds = [(False, "bshk"), (True, "bshk"), (True, "bshk"), (False, "bshk"), (False, "bsh")][:n]
    x = [x.astype(dtype) for x in (*given[:4], given.lse_cotangent)[:n]]
    numbers = {name: getattr(given, name) for name in ("documents", "kv_documents")}
    numbers = {name: x for name, x in numbers.items() if x is not None}
    sinks = [given.sinks.astype(dtype)] if mask.has_sinks else []
    placed = [blocks_of(case, *each) for each in zip(x, *zip(*kinds, strict=True), strict=True)]
    placed += [blocks_of(case, x, name == "kv_documents", "bs") for name, x in numbers.items()]
    placed += [blocks_of(case, x, False, "h") for x in sinks]
    n_arrays = len(placed) - len(sinks)

    def both(*x):
        options = {**dict(zip(numbers, x[n:n_arrays], strict=True)), "alibi": given.alibi}

        def of_blocks(q, k, v, *sinks):
            named = dict(zip(["sinks"], sinks, strict=False))
            return attended(case, mask, how, q, k, v, **options, **named)

        y, pull = jax.vjp(of_blocks, *x[:3], *x[n_arrays:])
        results = y if mask.return_lse else (y,)
        assert results[0].dtype == dtype
        gradients = pull(x[3:n] if mask.return_lse else x[3])
        return [*gradients[:3], *results, *gradients[3:]]

    y, *others = one_device(given, mask)
    kinds += [(False, "h")] * mask.has_sinks
    wanted = [
        blocks_of(case, x, *kind)
        for x, kind in zip([*others[:3], y, *others[3:]], kinds, strict=True)
    ]
    program = DeviceProgram(both, case.mesh, placed, [end for _, end in wanted], mode, np.nan)
    sides = program.blocks(program()), [blocks for blocks, _ in wanted]
    found = (
        [np.maximum(np.concatenate([*map(np.ravel, y)]), -1e4) for y in side] for side in sides
    )
    return difference(*found)


def attended(case: Case, mask: Mask, how: str, q, k, v, **arrays):
    return nn.attention(q, k, v, case.layout, how=how, **mask.options(case) | arrays)


def blocks_of(case: Case, x, of_keys: bool = False, dims: str = "bshk"):
    """The blocks of an array, and its sharding."""
    layout = case.block_layout(dims, of_keys)
    shape = [x.shape[dims.index(name if name in dims else "s")] for name in layout.names]
    return case.blocks(x, dims, of_keys), xs.Sharding(layout, case.mesh, tuple(shape))


@pytest.mark.parametrize(
    ("number", "how", "mode"), [(0, "ring", "vma"), (1, "gather", "pmap"), (2, "ulysses", "novma")]
)
@in_jax
def test_joint_attention_is_that_of_one_device(number, how, mode) -> None:
    case, *others = JOINT[number]
    cases, given, wanted = joint_problem(case, *others)
    options = {"how": how, "causal": others[-1], "shape": case.shape, "kv_heads": case.heads[1]}

    def placed(pairs, kinds):
        return [
            blocks_of(of_one, x, of_keys)
            for pair, of_keys in zip(pairs, kinds, strict=True)
            for of_one, x in zip(cases, pair, strict=True)
        ]

    def both(q, text_q, k, text_k, v, text_v, *cotangents):
        def attend(q, text_q, k, text_k, v, text_v):
            of_text = {"text_q": text_q, "text_k": text_k, "text_v": text_v}
            return nn.joint_attention(q, k, v, case.layout, **of_text, **options)

        results, pull = jax.vjp(attend, q, text_q, k, text_k, v, text_v)
        return [*results, *pull(cotangents)]

    with jax.enable_x64(True):
        ends = placed(wanted, (False, False, True, True))
        arrays = placed(given, (False, True, True, False))
        program = DeviceProgram(both, case.mesh, arrays, [end for _, end in ends], mode, np.nan)
        sides = program.blocks(program()), [blocks for blocks, _ in ends]
        found = ([np.concatenate([*map(np.ravel, y)]) for y in side] for side in sides)
        assert difference(*found) < 1e-12


@in_jax
def test_methods_agree_under_transformations() -> None:
    """Layers in a scan, each computed again, under vmap; in float32, where JAX's own attention is used."""
    case = Case(xs.Mesh(cp=2), "b s/zigzag(cp) h k", (4, 4))
    mask = Mask(True, has_alibi=True)
    given = problem(case, mask)
    x = np.stack([padded(*blocks_of(case, y)) for y in (given.q, given.k)], 1)

    def model(how, x):
        layer = jax.checkpoint(
            lambda x, _: (x + attended(case, mask, how, x, 2 * x, x, alibi=given.alibi), None)
        )
        return jax.lax.scan(layer, x, jnp.arange(2))[0]

    def gradients(how):
        loss = jax.value_and_grad(lambda x: jnp.cos(model(how, x)).sum())
        return jax.jit(sharded(jax.vmap(loss), case.mesh))(x)

    with jax.enable_x64(True):
        (y, found), (wanted_y, wanted) = gradients("ring"), gradients("gather")
    assert np.allclose(y, wanted_y, rtol=1e-12) and np.allclose(found, wanted, atol=1e-12)
    assert np.allclose(gradients("gather")[1], wanted, atol=1e-4)
    assert error(case, mask, "auto", "vma", np.float32) < 1e-5
    # All but a ring has tangents, also where a row sees nothing.
    q = jnp.ones((1, 3, 1, 2))
    kv = jax.random.normal(jax.random.key(0), (4, 1, 2, 1, 2))
    few = {"layout": "b s h k", "kv_layout": "b t/cp h k", "causal": True, "offset": -1}
    ways = (
        lambda x, how=how: nn.attention(q, x, x, how=how, **few) for how in ("reduce", "gather")
    )
    one, other = (jax.jvp(jax.jit(jax.vmap(way, axis_name="cp")), (kv,), (kv,))[1] for way in ways)
    assert np.allclose(one, other, atol=1e-6) and not one[:, :, 0].any()
    q = jnp.ones((2, 19, 3, 6))
    with pytest.raises(xs.errors.ShapeError, match="3 heads of queries, 2 of keys"):
        attended(Case(ROW, "b s h k", (3, 2)), mask, "ring", q, q[:, :, :2], q[:, :, :2])


@in_jax
def test_a_ring_sends_a_block_in_each_round() -> None:
    """A block waits for the round before: else XLA sends all of them first, and computes afterwards."""
    mesh, spec = device_mesh(xs.Mesh(cp=4)), P(None, "cp")
    inside = partial(nn.attention, layout="b s/cp h k", how="ring")
    ring = jax.shard_map(inside, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    x = jnp.ones((1, 8, 2, 4))

    def order(program) -> str:
        """What a program does: waits, sends, computes; several of one kind count as one."""
        names = re.findall("optimization_barrier|collective_permute|dot_general", program)
        return "".join(kind for kind, _ in itertools.groupby(name[0] for name in names))

    forward = jax.jit(ring).lower(x, x, x).as_text()
    assert order(forward) == "ocd" * 3
    # The barrier takes the log-sum-exps of the round before, which its `case` returns.
    assert len(re.findall(r"optimization_barrier %\w+, %\d+#1 ", forward)) == 2
    both = jax.grad(lambda *blocks: ring(*blocks).sum(), (0, 1, 2))
    assert jax.jit(both).lower(x, x, x).as_text().count("optimization_barrier") == 6
