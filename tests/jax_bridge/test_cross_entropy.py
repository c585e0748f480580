"""The loss of logits with sharded classes: values, exact gradients, and what is sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.testing.stacked import DeviceProgram, collectives
from tests.jax_bridge.helpers import in_jax
from xshard import errors

MESH = xs.Mesh(dp=2, tp=4)
CASES = (
    ("b/dp s v/tp", (4, 3, 8), {}),
    ("b/dp s/zigzag(tp) v", (3, 9, 5), {"reduction": "none"}),
    ("s v/cyclic(tp,2)", (5, 7), {"reduction": "sum", "label_smoothing": 0.25}),
    ("v/(dp,tp) t", (5, 6), {"reduction": "none", "label_smoothing": 0.5}),
    ("c/zigzag(tp) t/dp", (9, 4), {"classes": "c", "ignore_index": -1}),
)


def whole(logits, labels, d, reduction="mean", label_smoothing=0.0, ignore_index=-100, classes="v"):
    """On one device."""
    logs = jax.nn.log_softmax(logits, d)
    counted = labels != ignore_index
    chosen = jnp.take_along_axis(
        logs, jnp.expand_dims(jnp.where(counted, labels, 0), d), d
    ).squeeze(d)
    losses = -(1 - label_smoothing) * chosen - label_smoothing * logs.mean(d)
    losses = jnp.where(counted, losses, 0)
    reduced = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted.sum()}
    return reduced[reduction]


@pytest.mark.parametrize("mode", ["vma", "novma"])
@in_jax
def test_results_are_those_of_one_device(mode) -> None:
    """NaN in the padding of logits and of cotangents; zeros in that of results."""
    draw = np.random.default_rng(0)
    given = []
    made = []
    expected = []
    ways = []
    for text, shape, options in CASES:
        layout = xs.Layout.parse(text)
        d = xs.Layout.parse(text).dim_index(options.get("classes", "v"))
        logits = xs.Sharding(layout, MESH, shape)
        rest = xs.Layout((*layout.dims[:d], *layout.dims[d + 1 :]))
        tokens = xs.Sharding(rest, MESH, (*shape[:d], *shape[d + 1 :]))
        loss = (
            tokens if options.get("reduction") == "none" else xs.Sharding(xs.Layout(()), MESH, ())
        )
        x = draw.integers(-9, 9, shape) / 4
        labels = draw.integers(0, shape[d], tokens.shape)
        labels.flat[1] = options.get("ignore_index", -100)
        cotangent = draw.integers(1, 5, loss.shape).astype(float)
        with jax.enable_x64(True):
            y, pull = jax.vjp(lambda x, labels=labels, d=d, o=options: whole(x, labels, d, **o), x)
            expected += [y, *pull(jnp.asarray(cotangent))]
        ends = (x, logits), (labels, tokens), (cotangent, loss)
        given += [(xs.reference.scatter(a, e.layout, MESH), e) for a, e in ends]
        made += [loss, logits.with_layout(logits.layout.dual)]
        ways.append(functools.partial(xj.nn.cross_entropy, layout=text, shape=shape, **options))

    def local(*blocks):
        triples = zip(ways, *(blocks[i::3] for i in range(3)), strict=True)
        pulled = [(*jax.vjp(lambda x, f=f, y=y: f(x, y), x), dy) for f, x, y, dy in triples]
        return [each for y, pull, dy in pulled for each in (y, *pull(dy))]

    with jax.enable_x64(True):
        program = DeviceProgram(local, MESH, given, made, mode, np.nan)
        for blocks, end, one in zip(program.blocks(program()), made, expected, strict=True):
            found = xs.reference.gather(blocks, end.layout, MESH, end.shape)
            assert np.abs(found - one).max() < 1e-14, end
    assert {each.op for each in collectives(program.compiled.as_text(), 8)} == {"all-reduce"}


@in_jax
def test_labels_that_are_no_classes() -> None:
    logits = np.ones((4, 8), np.float32)
    e = errors

    def loss(x, y, **options):
        one = functools.partial(xj.nn.cross_entropy, layout="n v/tp", **options)
        return jax.vmap(one, axis_name="tp")(x, y)

    found = loss(np.stack([logits] * 2), np.array([[0, 15, 16, -100]] * 2), reduction="none")
    assert np.allclose(found, [[np.log(16), np.log(16), np.nan, 0]] * 2, equal_nan=True)
    for labels, options, kind, words in (
        (
            np.ones((2, 4)),
            {},
            e.DtypeError,
            "labels float32 in 'n v/tp'\n  labels are numbers of classes",
        ),
        (
            np.ones((2, 8), int),
            {},
            e.ShapeError,
            r"labels of shape \(8,\), logits of shape \(4, 8\)",
        ),
        (
            np.ones((2, 4), int),
            {"shape": (4,)},
            e.ShapeError,
            r"shape \(4,\) of a block with 2 dims",
        ),
        (
            np.ones((2, 4), int),
            {"reduction": "max"},
            xs.XshardError,
            "reduction is 'max', not Literal",
        ),
        (np.ones((2, 4), int), {"classes": "c"}, xs.XshardError, "'c'"),
    ):
        with pytest.raises(kind, match=words):
            loss(np.stack([logits] * 2), labels, **options)


@in_jax
def test_whole_logits_are_refused_by_their_type() -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    logits = jnp.arange(24.0).reshape(3, 8) % 5
    labels = jnp.array([1, 0, 3])
    for layout, cut, is_right in (
        ("b v/tp", P(None, "tp"), True),
        ("b v", P(), True),
        ("b v/tp", P(), False),
        ("b v/(dp,tp)", P(None, "tp"), False),
    ):
        loss = functools.partial(xj.nn.cross_entropy, layout=layout)
        for check_vma in (True, False):
            mapped = jax.jit(
                jax.shard_map(
                    loss, mesh=mesh, in_specs=(cut, P()), out_specs=P(), check_vma=check_vma
                )
            )
            if is_right:
                assert abs(mapped(logits, labels) - whole(logits, labels, 1)) < 1e-6
            elif check_vma:
                with pytest.raises(errors.ShapeError, match="the same logits on all devices along"):
                    mapped(logits, labels)
