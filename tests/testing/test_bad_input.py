"""What cannot be compared is refused before anything runs, and what raises says where."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.testing.programs import normal
from xshard.testing import EquivalenceError, FunctionError, StructureError, assert_equivalent


def same(x):
    return x


def test_the_names_in_messages_are_those_of_the_function() -> None:
    with pytest.raises(xs.errors.ShapeError, match=r"x of shape \(3, 4\) does not fit its layout: "):
        assert_equivalent(same, same, args=[normal(3, 4)], layouts=(["n/tp"], "n/tp"), mesh="tp=2")


# fmt: off
REFUSED = {
    "an axis that is not there": ({"layouts": (["n/dp d"], "n d")}, xs.errors.NotationError,
        "x of shape (8, 4) does not fit its layout: unknown mesh axis 'dp' in\n    'n/dp d'\n"),
    "an axis that is not there, of an output": ({"layouts": (["n/tp d"], "n/cq d")}, xs.errors.NotationError,
        "unknown mesh axis 'cq' in\n    'n/cq d'\n"),
    "a max lacks a dual": ({"layouts": (["n d | max(tp)"], "n d")}, xs.errors.LinearityError,
        "'n d | max(tp)'"),
    "one layout for two sides": ({"layouts": "n/tp d"}, StructureError,
        "layouts= is a pair: of the arguments, and of what is returned\n",),
    "too few layouts": ({"layouts": ([], "n d")}, StructureError, "1 arguments, layouts of 0\n"),
    "a layout of another tree": ({"layouts": ([{"w": "n d"}], "n d")}, StructureError,
        "x: one array, but layouts {'w': 'n d'}"),
    "a number among the arguments": ({"args": [3.0]}, StructureError, "x is a float, arguments are arrays\n"),
    "a tensor that numpy cannot read": ({"args": [torch.ones(8, 4, requires_grad=True)]}, StructureError,
        "x cannot be read as a numpy array: Can't call numpy() on Tensor that requires grad"),
    "a mesh that is too large": ({"mesh": "tp=1000"}, xs.errors.MeshError,
        "1000 devices, this host has 1 to ",),
    "no mesh": ({"mesh": " ; "}, xs.errors.MeshError, "no mesh\n"),
    "parameters without optimisers": ({"parameters": [0]}, StructureError,
        "parameters= and optimisers= belong together\n",),
    "a parameter that is not there": ({"parameters": [1], "optimisers": (same, same)}, StructureError,
        "no argument 1 of 1\n"),
    "a parameter whose gradient is contributions": ({"parameters": [0], "optimisers": (same, same),
        "layouts": (["n d | copy(tp)"], "n d")}, StructureError,
        "x has gradients under 'n d | sum(tp)', which no optimiser can add up in 'n d | copy(tp)'\n"),
    "integers that JAX would narrow": ({"args": [np.full((8, 4), 2**40)]}, xs.errors.DtypeError,
        "x has whole numbers of more than 32 bits"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, kind, message = REFUSED[name]
    monkeypatch.setattr("xshard.runtimes.processes.Process.ask", None)  # nobody is asked
    options = {"args": [normal(8, 4)], "layouts": (["n/tp d"], "n/tp d"), "mesh": "tp=2", **changed}
    with pytest.raises(kind) as raised:
        assert_equivalent(same, same, **options)
    assert str(raised.value).startswith(message), raised.value


def test_a_number_of_devices_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XSHARD_HOST_DEVICES", "many")
    with pytest.raises(
        xs.errors.MeshError, match="XSHARD_HOST_DEVICES='many' in the environment: a number of devices"
    ):
        assert_equivalent(same, same, args=[normal(8)], layouts=(["n/tp"], "n/tp"), mesh="tp=2")


def raised_by(torch_fn, jax_fn, kind, mesh: str = "tp=2", **options) -> str:
    with pytest.raises(kind) as raised:
        assert_equivalent(
            torch_fn, jax_fn, args=[normal(8, 4)], layouts=(["n/tp d"], "n/tp d"), mesh=mesh, **options
        )
    return str(raised.value)


def test_other_structures_are_told_from_both_sides() -> None:
    message = raised_by(same, lambda x: {"y": x}, StructureError)
    assert message.startswith("the JAX function returns output['y'], the reference returns output\n")
    message = raised_by(lambda x: (x, x), same, StructureError, reference=same)
    assert message.startswith(
        "the torch function returns output[0], output[1], the reference returns output\n"
    )


def test_outputs_must_be_arrays() -> None:
    assert "output of the torch function is a float, not a tensor" in raised_by(
        lambda x: 1.0, same, StructureError
    )


def test_output_layouts_must_fit_the_outputs() -> None:
    with pytest.raises(StructureError) as raised:
        assert_equivalent(same, same, args=[normal(8)], layouts=(["n/tp"], {"y": "n/tp"}), mesh="tp=2")
    assert str(raised.value).startswith("output: one array, but layouts {'y': ")


def test_layouts_must_fit_one_device_or_there_is_a_reference() -> None:
    options = {"args": [normal(8)], "layouts": (["n/sizes(tp,3,5)"], "n/sizes(tp,3,5)"), "mesh": "tp=2"}
    with pytest.raises(
        StructureError, match="a layout does not fit one device: 2 sizes for 1 parts"
    ) as raised:
        assert_equivalent(same, same, **options)
    assert str(raised.value).endswith("\n  pass reference=")
    assert_equivalent(same, same, **options, reference=same)


def test_an_output_of_another_rank_than_its_layout() -> None:
    with pytest.raises(xs.errors.ShapeError, match=r"'n/tp' has 1 dims, the array has 2"):
        assert_equivalent(same, same, args=[normal(8, 4)], layouts=(["n/tp d"], "n/tp"), mesh="tp=2")


def test_a_rank_that_raises_says_where_and_keeps_its_message() -> None:
    def unlucky(x, mesh):
        if mesh.n_devices > 1 and dist.get_rank() == 1:
            raise RuntimeError("no luck here")
        return xt.redistribute(x, "n/tp d -> n d/tp", mesh)

    message = raised_by(unlucky, same, FunctionError)
    assert message.startswith("the torch function failed on tp=2: rank 1 of 2 failed\n")
    assert "RuntimeError: no luck here\non device 1 of tp=2: tp=1" in message


def test_a_jax_function_that_raises_keeps_its_message() -> None:
    def unlucky(x):
        return jnp.ones(3) + jnp.ones(4)

    message = raised_by(same, unlucky, FunctionError)
    assert message.startswith("the JAX function failed on tp=1, where all devices run one program: TypeError")
    assert "add got incompatible shapes for broadcasting: (3,), (4,)" in message


def test_errors_of_xshard_come_whole() -> None:
    message = raised_by(lambda x, mesh: xt.redistribute(x, "n/cq d -> n d", mesh), same, FunctionError)
    assert "unknown mesh axis 'cq' in\n    'n/cq d -> n d'" in message


def test_a_rank_that_hangs_is_ended() -> None:
    def waits(x, mesh):
        if mesh.n_devices > 1 and dist.get_rank() == 1:
            dist.barrier()
            dist.barrier()
        return x

    message = raised_by(waits, same, FunctionError, timeout_s=4.0)
    assert message.startswith("the torch function failed on tp=2: ")
    assert_equivalent(same, same, args=[normal(4)], layouts=(["n/tp"], "n/tp"), mesh="tp=2")


def test_a_process_that_dies_is_replaced() -> None:
    import os

    def dies(x):
        os.write(2, b"my last words")
        os._exit(3)

    message = raised_by(same, dies, FunctionError)
    assert message.startswith("jax_bridge.testing.worker.answers ended its process with status 3\n")
    assert message.endswith("my last words")
    assert_equivalent(same, same, args=[normal(4)], layouts=(["n/tp"], "n/tp"), mesh="tp=2")


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def locked(x):
        with lock:
            return x

    message = raised_by(locked, same, FunctionError)
    assert message.startswith("locked cannot be sent to another process: cannot pickle '_thread.lock'")


def test_blocks_of_another_shape_on_some_ranks_hang_nobody() -> None:
    """No rank sends a gradient where another cannot."""

    def longer_on_one(x, mesh):
        y = xt.redistribute(xt.redistribute(x, "n/tp d -> n d/tp", mesh), "n d/tp -> n/tp d", mesh)
        return y.repeat(2, 1) if mesh.n_devices > 1 and dist.get_rank() == 1 else y

    message = raised_by(longer_on_one, same, EquivalenceError, timeout_s=20.0)
    assert "device 1 (tp=1): shape (8, 4) in place of (4, 4)" in message
