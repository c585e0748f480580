"""Errors of the verbs end at the user's line: eager, under `jit`, and with gradients."""

import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax

WRONG = "s/ c -> s c"


def blocks_of_user(x: jax.Array) -> jax.Array:
    """A user's function inside `shard_map`, with a mistake."""
    return xj.redistribute(x, WRONG)


def reduced_by_user(x: jax.Array) -> jax.Array:
    """A user's function that gives an argument a wrong value."""
    return xj.ops.all_reduce(x, "cp", grad="what")


def frames(function: Callable[[], Any]) -> list[str]:
    """The functions of this package's frames, and of the user's, in an error's traceback."""
    with pytest.raises(xs.XshardError) as caught:
        function()
    shown = traceback.extract_tb(caught.value.__traceback__)
    return [frame.name for frame in shown if "site-packages" not in frame.filename]


@in_jax
def test_tracebacks_end_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XSHARD_TRACEBACK", raising=False)
    mesh = device_mesh(xs.Mesh(cp=2))
    x = jnp.ones((4, 2))

    def in_shard_map(f: Callable[..., Any]) -> Callable[..., Any]:
        return xj.shard_map(f, "s/cp c -> s/cp c", mesh)

    verbs: dict[str, Callable[[], Any]] = {
        "reshard": lambda: xj.reshard(x, WRONG, mesh),
        "place": lambda: xj.place({"w": x}, {"v": "s c"}, mesh),
        "einsum": lambda: xj.einsum("s/cp c, c -> ", x, x, mesh=mesh),
        "spec": lambda: xj.specs.to_partition_spec("s/"),
        "mask": lambda: xj.ops.valid_mask("s/nowhere", mesh, shape=(4,)),
        "shard_map": lambda: xj.shard_map(jnp.sin, "s/ -> s", mesh)(x),
        "transfer": lambda: xj.transfer({"w": x}, {"v": "s c"}, mesh),
        "layer": lambda: xj.nn.Sharded(x, "s/", mesh),
        "jit of reshard": lambda: jax.jit(lambda y: xj.reshard(y, WRONG, mesh))(x),
        "grad of reshard": lambda: jax.grad(lambda y: xj.reshard(y, WRONG, mesh).sum())(x),
    }
    for name, verb in verbs.items():
        assert set(frames(verb)) <= {"frames", "<lambda>"}, name
    for function in (blocks_of_user, reduced_by_user):
        mapped = in_shard_map(function)
        for name, call in {
            "eager": lambda f=mapped: f(x),
            "jit": lambda f=mapped: jax.jit(f)(x),
            "grad": lambda f=mapped: jax.grad(lambda y: f(y).sum())(x),
        }.items():
            assert frames(call)[-1] == function.__name__, (name, function)


@in_jax
def test_all_frames_are_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XSHARD_TRACEBACK", "full")
    mesh = device_mesh(xs.Mesh(cp=2))
    assert len(frames(lambda: xj.reshard(jnp.ones((4, 2)), WRONG, mesh))) > 4
