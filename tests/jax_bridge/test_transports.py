"""How exchanges travel: the buffers of `ragged_all_to_all`, and what other platforms are given.

XLA has that collective for GPUs and TPUs only. Here programs are lowered for them, and run on CPUs with a
stand-in that does what JAX documents.
"""

import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.lower import transports
from jax_bridge.lower.rules import run
from jax_bridge.lower.transports import box_shape, rounds
from jax_bridge.testing.stacked import padded, unpadded
from tests.jax_bridge.domains import sharded
from tests.jax_bridge.helpers import device_mesh, in_jax
from xshard.layout.layout import parse_expression
from xshard.steps import Exchange
from xshard.testing.plans import plan_question

CASES = [
    ("n/a d/b -> n/b d/a", "a=2,b=4", (8, 8), "float32"),
    ("n/a d -> n d/a", "a=8", (13, 11), "float32"),  # uneven both ways
    ("n/zigzag(a) d/b -> n/cyclic(b) d/a", "a=2,b=4", (16, 12), "float32"),
    ("n/a d | sum(b) -> n/b d", "a=2,b=4", (8, 3), "float32"),
    ("n/b d | max(a) -> n d/a", "a=2,b=4", (7, 5), "float32"),
    ("n/a -> n/b", "a=2,b=4", (3,), "bfloat16"),
    ("n/a -> n | sum(b)", "a=4,b=2", (9,), "int32"),
    ("() | sum(a) -> ()", "a=4", (), "float32"),
    # Several messages for one pair of devices.
    ("h/a:fold(halo(3,3,periodic)) -> h/a", "a=4", (8,), "float32"),
    ("h/a w/b -> h/a:halo(2,2,pole(-1)) w/b:halo(1,1,periodic)", "a=2,b=4", (4, 8), "float32"),
]


def exchange_plan(expression, mesh, shape, dtype) -> xs.Plan:
    src, dst = parse_expression(expression)
    return xs.Plan(src, dst, xs.Mesh.parse(mesh), shape, dtype, (Exchange(dst),))


def stand_in(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` as its documentation has it, by gathering everything."""
    me = lax.axis_index(axis_name)
    everyone = [
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    ]
    at = jnp.arange(output.shape[0])
    for src in range(everyone[0].shape[0]):
        data, start, size, target = (x[src] for x in everyone)
        inside = (at >= target[me]) & (at < target[me] + recv_sizes[src])
        got = data[jnp.clip(start[me] + at - target[me], 0, data.shape[0] - 1)]
        # What is announced is what comes: a receiver that expects more would wait for ever.
        got = jnp.where(size[me] == recv_sizes[src], got, jnp.full_like(got, -77))
        output = jnp.where(inside, got, output)
    return output


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@in_jax
def test_slices_of_one_buffer_make_the_same_blocks(case) -> None:
    plan = exchange_plan(*case)
    [inputs] = plan_question(plan).inputs
    moved = jax.jit(sharded(lambda x: run(plan, x, transports.RAGGED), plan.mesh, check_vma=False))
    with mock.patch.object(lax, "ragged_all_to_all", stand_in):
        found = moved(padded(inputs, plan.source, fill=np.nan))
    blocks = unpadded(np.asarray(found), plan.target)
    assert all(map(np.array_equal, blocks, xs.reference.run(plan, inputs)))
    assert np.array_equal(found, padded(blocks, plan.target))  # and nothing of the padding


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_what_is_sent_has_a_place_of_its_own(case) -> None:
    plan = exchange_plan(*case)
    ((step, before, _),) = plan.stages
    local, schedule = rounds(step, before)
    n = plan.mesh.n_devices
    shapes = [box_shape(r) for r in schedule]
    _, sent, offsets, received = transports.ragged_arguments(schedule, shapes, n)
    assert np.array_equal(sent, received.T)
    if local:  # what devices keep is apart, and stays
        assert not np.diagonal(sent).any()
    assert np.trace(sent) == sum(m.size for r in schedule for m in r if m.src == m.dst)
    length = sum(map(math.prod, shapes))
    for device in range(n):
        ends = sorted(
            (offsets[src, device], sent[src, device]) for src in range(n) if sent[src, device]
        )
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ends))
        assert all(a + size <= length for a, size in ends)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu", "cpu"])
@in_jax
def test_each_platform_is_given_what_it_has(platform) -> None:
    local = lambda x: xj.redistribute(x, "n/a d/b -> n/b d/a", profile="h100")  # noqa: E731
    specs = {"in_specs": P("a", "b"), "out_specs": P("b", "a")}
    swap = jax.shard_map(local, mesh=device_mesh(xs.Mesh(a=2, b=4)), **specs)
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    for program in (swap, jax.grad(lambda x: (swap(x) ** 2).sum())):
        text = jax.jit(program).trace(x).lower(lowering_platforms=(platform,)).as_text()
        # Boxes that lie side by side are put together in a branch of a device's own where that is cheap.
        found = [op in text for op in ("collective_permute", "stablehlo.case", "ragged_all_to_all")]
        assert found == ([True, True, False] if platform == "cpu" else [False, False, True])
