"""What cannot be compared is refused before anything runs, and what raises says where."""

from __future__ import annotations

import os
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.testing.programs import normal
from xshard.testing import EquivalenceError, FunctionError, StructureError, assert_equivalent

OPTIONS: dict[str, Any] = {
    "args": [normal(8, 4)],
    "layouts": (["n/tp d"], "n/tp d"),
    "mesh": "tp=2",
}
LOCK = threading.Lock()


def same(x):
    return x


def message_of(kind: type[Exception], torch_fn=same, jax_fn=same, **options: Any) -> str:
    with pytest.raises(kind) as raised:
        assert_equivalent(torch_fn, jax_fn, **{**OPTIONS, **options})
    return str(raised.value)


# fmt: off
REFUSED = {
    "too few dims": ({"args": [normal(3, 4)], "layouts": (["n/tp"], "n/tp")}, xs.errors.ShapeError,
        "x of shape (3, 4) does not fit its layout: "),
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
    assert message_of(kind, **changed).startswith(message)


def test_a_number_of_devices_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XSHARD_HOST_DEVICES", "many")
    message = message_of(xs.errors.MeshError)
    assert "XSHARD_HOST_DEVICES='many' in the environment: a number of devices" in message


def test_layouts_must_fit_one_device_or_there_is_a_reference() -> None:
    options = {"args": [normal(8)], "layouts": (["n/sizes(tp,3,5)"], "n/sizes(tp,3,5)")}
    message = message_of(StructureError, **options)
    assert "a layout does not fit one device: 2 sizes for 1 parts" in message
    assert message.endswith("\n  pass reference=")
    assert_equivalent(same, same, **{**OPTIONS, **options}, reference=same)


def is_second_of_two(mesh: xs.Mesh) -> bool:
    return mesh.n_devices > 1 and dist.get_rank() == 1


def unlucky(x, mesh):
    if is_second_of_two(mesh):
        raise RuntimeError("no luck here")
    return xt.redistribute(x, "n/tp d -> n d/tp", mesh)


def waits(x, mesh):
    if is_second_of_two(mesh):
        dist.barrier()
        dist.barrier()
    return x


def dies(x):
    os.write(2, b"my last words")
    os._exit(3)


def locked(x):
    with LOCK:
        return x


def longer_on_one(x, mesh):
    """No rank sends a gradient where another cannot."""
    y = xt.redistribute(xt.redistribute(x, "n/tp d -> n d/tp", mesh), "n d/tp -> n/tp d", mesh)
    return y.repeat(2, 1) if is_second_of_two(mesh) else y


# fmt: off
RAISED = {
    "another tree in JAX": ({"jax_fn": lambda x: {"y": x}}, StructureError,
        "the JAX function returns output['y'], the reference returns output\n", ""),
    "another tree in torch": ({"torch_fn": lambda x: (x, x), "reference": same}, StructureError,
        "the torch function returns output[0], output[1], the reference returns output\n", ""),
    "no array": ({"torch_fn": lambda x: 1.0}, StructureError, "",
        "output of the torch function is a float, not a tensor"),
    "a forgotten return": ({"torch_fn": lambda x: None, "jax_fn": lambda x: None}, StructureError,
        "the torch function returns nothing that can be compared\n", "return the arrays"),
    "layouts of another tree": ({"layouts": (["n/tp d"], {"y": "n/tp d"})}, StructureError,
        "output: one array, but layouts {'y': ", ""),
    "an output of more dims than its layout": ({"layouts": (["n/tp d"], "n/tp")}, xs.errors.ShapeError, "",
        "'n/tp' has 1 dims, the array has 2"),
    "a rank that raises": ({"torch_fn": unlucky}, FunctionError,
        "the torch function failed on tp=2: rank 1 of 2 failed\n",
        "RuntimeError: no luck here\non device 1 of tp=2: tp=1"),
    "a JAX function that raises": ({"jax_fn": lambda x: jnp.ones(3) + jnp.ones(4)}, FunctionError,
        "the JAX function failed on tp=1, where all devices run one program: TypeError",
        "add got incompatible shapes for broadcasting: (3,), (4,)"),
    "an error of xshard": ({"torch_fn": lambda x, mesh: xt.redistribute(x, "n/cq d -> n d", mesh)},
        FunctionError, "", "unknown mesh axis 'cq' in\n    'n/cq d -> n d'"),
    "what cannot be sent": ({"torch_fn": locked}, FunctionError,
        "locked cannot be sent to another process: cannot pickle '_thread.lock'", ""),
    "blocks of another shape on one rank": ({"torch_fn": longer_on_one, "timeout_s": 20.0}, EquivalenceError,
        "", "device 1 (tp=1): shape (8, 4) in place of (4, 4)"),
    "a rank that hangs": ({"torch_fn": waits, "timeout_s": 4.0}, FunctionError,
        "the torch function failed on tp=2: ", ""),
    "a process that dies": ({"jax_fn": dies}, FunctionError,
        "jax_bridge.testing.worker.answers ended its process with status 3\n", "my last words"),
}
# fmt: on


@pytest.mark.parametrize("name", RAISED)
def test_what_raises_is_reported_with_its_place(name: str) -> None:
    options, kind, start, words = RAISED[name]
    message = message_of(kind, **options)
    assert message.startswith(start) and words in message
    if options.get("torch_fn") is waits or options.get("jax_fn") is dies:  # the process is replaced
        assert_equivalent(same, same, **OPTIONS)
