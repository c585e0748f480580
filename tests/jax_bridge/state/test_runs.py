"""A run of optax in one folder: resumed on another mesh it trains as one device does."""

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax
from xshard.state.files import background, latest, open_checkpoint

TRAINED = {"**.up": "i/dp o/tp", "**.down": "i/tp o", "**": "..."}
RESUMED = {"**.{up,down}": "i o/dp", "**": "..."}
OPTIMIZERS = {
    "adamw": optax.adamw(optax.linear_schedule(0.05, 0.01, 20)),
    "lion": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.01)),
    "momentum, with an average": optax.chain(optax.sgd(0.01, 0.9, nesterov=True), optax.ema(0.9)),
    "accumulated": optax.MultiSteps(optax.adamw(0.05), 3).gradient_transformation(),
}


def begun(optimizer: optax.GradientTransformation) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(keys[0], (8, 16)),
        "down": jax.random.normal(keys[1], (16, 8)),
    }
    return {"params": params, "opt": optimizer.init(params), "step": 0}


def trained(
    state: dict[str, Any], optimizer: optax.GradientTransformation, n: int
) -> dict[str, Any]:
    def loss_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - 1).mean()

    @jax.jit
    def step(params: Any, opt: Any, number: jax.Array) -> Any:
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (8, 8))
        updates, opt = optimizer.update(jax.grad(loss_of)(params, x), opt, params)
        return optax.apply_updates(params, updates), opt

    params, opt = state["params"], state["opt"]
    for number in range(state["step"], state["step"] + n):
        params, opt = step(params, opt, number)
    return {"params": params, "opt": opt, "step": state["step"] + n}


@in_jax
def test_a_run_goes_on_as_one_device_on_another_mesh(tmp_path: Path) -> None:
    four, two = device_mesh(xs.Mesh(dp=2, tp=2)), device_mesh(xs.Mesh(dp=8))
    for name, optimizer in OPTIMIZERS.items():
        alone = trained(begun(optimizer), optimizer, 25)
        before = trained(xj.place(begun(optimizer), TRAINED, four), optimizer, 5)
        xj.save(before, tmp_path / name)
        expected = trained(before, optimizer, 20)
        for rules, mesh in ((RESUMED, two), (TRAINED, four), (None, device_mesh(xs.Mesh(one=1)))):
            like = jax.eval_shape(lambda made=optimizer: begun(made)) | {"step": 0}
            found = xj.load(tmp_path / name, rules, mesh, like=like)
            assert found["step"] == 5
            after = trained(found, optimizer, 20)
            for x, y, z in zip(*map(jax.tree.leaves, (after, alone, expected)), strict=True):
                np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5, err_msg=name)
                if rules is TRAINED:
                    np.testing.assert_array_equal(x, z, err_msg=name)


@in_jax
def test_numbers_and_texts_come_back_without_a_tree(tmp_path: Path) -> None:
    here = device_mesh(xs.Mesh(dp=8))
    xj.save({"w": jnp.ones(8), "step": 3, "run": {"name": "a", "best": float("inf")}}, tmp_path)
    found = xj.load(tmp_path, {"w": "n/dp"}, here)
    assert found.pop("w").sharding.spec == jax.P("dp")
    assert found == {"step": 3, "run.name": "a", "run.best": float("inf")}


@in_jax
def test_numbers_and_texts_are_in_both_the_tree_and_the_checkpoint(tmp_path: Path) -> None:
    here = device_mesh(xs.Mesh(dp=8))
    tree = {"w": jnp.ones(8), "losses": [1, 2.5], "name": "a"}
    xj.save(tree, tmp_path)
    like = {"w": jnp.zeros(8), "losses": [0, 0], "name": ""}
    assert xj.load(tmp_path, None, here, like=like)["losses"] == [1, 2.5]
    for wanted, words in (
        (like | {"step": 0}, "in the tree alone: step\n"),
        (like | {"losses": [0]}, "in the checkpoint alone: losses.1\n"),
        (like | {"losses": [0, 0, 0]}, "in the tree alone: losses.2\n"),
        ({"w": like["w"]}, "in the checkpoint alone: losses.0, losses.1, name\n"),
    ):
        with pytest.raises(xs.XshardError, match=words):
            xj.load(tmp_path, None, here, like=wanted)
    with pytest.warns(UserWarning, match="in the tree alone: step, and skipped"):
        found = xj.load(tmp_path, None, here, like=like | {"step": 4}, strict=False)
    assert (found["step"], found["losses"], found["name"]) == (4, [1, 2.5], "a")


@in_jax
def test_arrays_may_be_donated_beside_a_save(tmp_path: Path) -> None:
    here = device_mesh(xs.Mesh(dp=8))
    state = xj.place({"w": jnp.arange(16.0), "b": jnp.ones(3)}, {"w": "n/dp", "b": "n"}, here)
    hold = threading.Event()
    write = background.write

    def late(*args: Any) -> Any:
        assert hold.wait(60)
        return write(*args)

    with mock.patch.object(background, "write", late):
        saving = xj.async_save(state | {"step": 1}, tmp_path / "step_1", keep=1)
        jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
        assert not saving.done() and latest(tmp_path) is None
        hold.set()
        saving.wait()
    with open_checkpoint(latest(tmp_path)) as checkpoint:
        assert np.array_equal(checkpoint.read("w"), np.arange(16.0))
        assert np.array_equal(checkpoint.read("b"), np.ones(3))
    xj.save({"step": 2}, tmp_path / "step_2", keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    with pytest.raises(xs.XshardError, match="has no number at its end"):
        xj.save({"step": 2}, tmp_path / "last", keep=1)
