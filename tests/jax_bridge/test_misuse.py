"""Every public verb of JAX refuses wrong arguments by name, while it is traced or before it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge import specs
from tests.misuse import WRONG, Call, Calls, faults, verbs_of

ANYTHING = ", ".join(WRONG)


def inside(function: Any) -> Any:
    """The function, as it is traced inside of `shard_map` on one device."""
    mesh = jax.make_mesh((1,), ("tp",))

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        def body(x: jax.Array) -> jax.Array:
            function(*args, **kwargs)
            return x

        jax.eval_shape(
            jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False),
            jax.ShapeDtypeStruct((1,), "float32"),
        )

    return called


@functools.wraps(xj.async_save)
def async_save(*args: Any, **kwargs: Any) -> None:
    xj.async_save(*args, **kwargs).wait()


def calls(path: str) -> dict[str, Callable[[], Call]]:
    made = Calls()
    add = made.add

    mesh = jax.make_mesh((1,), ("tp",))
    x = jnp.ones((4, 4))
    labels = jnp.zeros(4, int)
    queries = jnp.ones((2, 4, 2, 8))
    images = xj.nn.Sharded(jnp.ones((2, 4, 4, 2)), "n h w c", xs.Mesh(tp=1))
    xj.save({"a": x}, path)
    jax_reads = {"precision": "text"}
    later = {"profile": "text"}  # read where blocks move
    add(
        "einsum",
        xj.einsum,
        jax_reads,
        expression="a/tp b, b c -> a/tp c",
        operands=[x, x],
        mesh=mesh,
    )
    add("load", xj.load, later, path=path, rules={"**": "..."}, mesh=mesh)
    placed = {**later, "layouts": "a mapping"}  # its key is named
    add("place", xj.place, placed, tree=x, layouts="a/tp b", mesh=mesh)
    add("positions", xj.positions, layout="a/tp b", mesh=mesh, shape=(4, 4), dim=0)
    add("redistribute", inside(xj.redistribute), {"x": ANYTHING}, x=x, layouts="a/tp b -> a b")
    add("reshard", xj.reshard, later, arrays=x, layouts="a b -> a/tp b", mesh=mesh)
    add("route", inside(xj.route), x=x, to=labels, axis="tp")
    add("async_save", async_save, {"mesh": ANYTHING}, tree={"a": x}, path=f"{path} meanwhile")
    add("save", xj.save, {"mesh": ANYTHING}, tree={"a": x}, path=path)  # read with rules
    decorator = {"f": "nothing", "profile": "text"}
    layouts = "a/tp b -> a/tp b"
    add("shard_map", xj.shard_map, decorator, f=jnp.sin, layouts=layouts, mesh=mesh)
    add("stored_as", xj.stored_as, array=x, layout="a b", mesh=mesh)
    loss = lambda p, x: (x @ p["w"]).sum()  # noqa: E731
    add("suggest", xj.suggest, f=loss, args=({"w": x}, x), mesh=mesh)
    placed = xj.place({"a": x}, "a/tp b", mesh)
    add("transfer", xj.transfer, later, tree=placed, rules={"**": "a/tp ..."}, dst_mesh=mesh)
    add("nn.Sharded", inside(xj.nn.Sharded), block=x, sharding="a b")
    arrays = {"q": queries, "k": queries, "v": queries}
    unused = {"seed": ANYTHING, "implementation": "text"}  # without dropout; JAX reads it
    add("nn.attention", inside(xj.nn.attention), unused, **arrays, layout="b s/tp h k")
    arrays |= {f"text_{name}": x for name, x in arrays.items()}
    add("nn.joint_attention", inside(xj.nn.joint_attention), **arrays, layout="b s/tp h k")
    add("nn.cross_entropy", inside(xj.nn.cross_entropy), logits=x, labels=labels, layout="b v/tp")
    for verb in ("avg_pool", "max_pool"):
        add(f"nn.{verb}", inside(getattr(xj.nn, verb)), x=images, window_shape=(2, 2))
    window = {"window_dimensions": (1, 2, 2, 1), "init_value": 0.0, "computation": jax.lax.add}
    jax_calls = {"computation": "a function", "init_value": "a fraction, a number below 0"}
    add("nn.reduce_window", inside(xj.nn.reduce_window), jax_calls, operand=images, **window)
    kernel = {"rhs": jnp.ones((1, 1, 2, 2)), "window_strides": (1, 1), "padding": "SAME"}
    kernel["dimension_numbers"] = ("NHWC", "HWIO", "NHWC")
    jax_reads = {"precision": "text", "dimension_numbers": "nothing"}
    convolve = inside(xj.nn.conv_general_dilated)
    add(
        "nn.conv_general_dilated",
        convolve,
        jax_reads,
        lhs=images,
        **kernel,
    )
    add("nn.batch_norm", inside(xj.nn.batch_norm), x=images)
    add("nn.group_norm", inside(xj.nn.group_norm), x=images, num_groups=2)
    add("nn.layer_norm", inside(xj.nn.layer_norm), x=images, dims=[-1])
    add("nn.moments", inside(xj.nn.moments), x=images, dims=[-1])
    add("nn.resize", inside(xj.nn.resize), x=images, shape=(2, 8, 8, 2), method="linear")
    add("nn.interpolate", inside(xj.nn.interpolate), x=images, scale_factor=2)
    whatever = {"x": ANYTHING}  # numbers and lists are arrays for JAX, whose shape does not fit
    widths = whatever | {"width": "a number below 0"}  # drops rows
    for verb, also, options in (
        ("all_gather", whatever, {"dim": 0, "grad": "sum"}),
        ("all_reduce", whatever, {"grad": "sum"}),
        ("all_to_all", whatever, {"split_dim": 0, "concat_dim": 1}),
        ("copy_to", whatever, {}),
        ("halo_exchange", widths, {"width": 1, "dim": 0}),
        ("reduce_scatter", whatever, {"dim": 0}),
        ("shard", whatever, {"dim": 0, "grad": "sum"}),
        ("trim_halo", widths, {"width": 1, "dim": 0}),
    ):
        add(f"ops.{verb}", inside(getattr(xj.ops, verb)), also, x=x, axis="tp", **options)
    add("ops.valid_mask", inside(xj.ops.valid_mask), layout="a/tp b", shape=(4, 4))
    add("specs.from_partition_spec", specs.from_partition_spec, spec=P("tp"), ndim=2)
    add("specs.to_named_sharding", specs.to_named_sharding, layout="a/tp b", mesh=mesh)
    add("specs.to_partition_spec", specs.to_partition_spec, layout="a/tp b")
    return made


def test_wrong_arguments_are_refused_by_name(tmp_path: Path) -> None:
    made = calls(str(tmp_path / "checkpoint"))
    *found, count = faults(made)
    assert found == []
    assert int(count.split()[0]) > 900
    assert verbs_of([xj, xj.nn, xj.ops, specs], ["", "nn.", "ops.", "specs."]) == made.keys()


X = jnp.ones((4, 4))
MESH = jax.make_mesh((1,), ("tp",))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: xj.suggest(lambda p, x: (p * x).sum(), (3.0, X), MESH), "args.0. is 3.0, without arrays"),
        (lambda: xj.suggest(lambda p, x: (p * x).sum(), (X,), MESH), "args: missing .* 'x'"),
        (lambda: xj.shard_map(jnp.sin, "a b -> a b", MESH, donate_argnums=7)(X), "donate_argnums is .7,."),
        (lambda: xj.einsum("a b -> a", X, mesh=MESH, preferred_element_type="nope"), "unknown dtype 'nope'"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_each_other(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(xs.XshardError, match=message):
        call()
