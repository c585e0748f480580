"""Hand-overs that are refused before anything is sent, with both sides in the message."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import xshard as xs
from jax_bridge.torch_interop import to_jax, to_torch
from jax_bridge.torch_interop.devices import MeshPair
from tests.interop.helpers import jax_mesh
from tests.jax_bridge.helpers import in_jax


def pair(*shape: int, **options: object) -> list[torch.Tensor]:
    return [torch.zeros(shape or (4, 6), **options) for _ in range(2)]


def uneven() -> list[torch.Tensor]:
    return [torch.zeros(4, 6), torch.zeros(3, 6)]


TO_JAX = {
    "unknown mesh axis 'c' in\n    'n/c d'\n *\\^\n  the mesh has: a=2": (pair, "n/c d", {}),
    "'n/a' has 1 dims, the array has 2": (pair, "n/a", {}),
    r"cpu:1 has shape \(3, 6\), not \(4, 6\) in 'n/a d'\n.*device 1 of Mesh\(a=2\) of a \(8, 6\) array":
        (uneven, "n/a d", {}),
    r"needs equal blocks: \(7, 6\) does not divide on JAX's Mesh\(a=2\) in 'n/a d'":
        (uneven, "n/a d", {"shape": (7, 6)}),
    "1 tensors of torch for 2 devices of its mesh in this process": (lambda: torch.zeros(4, 6), "n/a d", {}),
    "2 tensors of torch for 4 devices of its mesh in this process":
        (pair, "n/x d -> n/a d", {"torch_mesh": xs.Mesh(x=4)}),
    r"torch's Mesh\(x=99\) has 99 devices, JAX has \d+\n":
        (pair, "n/x d -> n/a d", {"torch_mesh": xs.Mesh(x=99)}),
    "several dtypes: bfloat16, float32": (lambda: [torch.zeros(4), torch.zeros(4).bfloat16()], "n/a", {}),
    "JAX has no torch.complex32": (lambda: pair(4, dtype=torch.complex32), "n/a", {}),
    "ndarray is not a tensor": (lambda: [x.numpy() for x in pair()], "n/a d", {}),
    "Tensor of torch.sparse_coo on cpu is not dense memory":
        (lambda: [x.to_sparse() for x in pair()], "n/a d", {}),
    "on meta is not dense memory": (lambda: pair(device="meta"), "n/a d", {}),
    "via is 'numpy', not Literal.*\n.*'torch', 'jax'":
        (pair, "n/a d -> n d/a", {"via": "numpy"}),
}  # fmt: skip


@pytest.mark.parametrize("message", TO_JAX)
@in_jax
def test_tensors_that_do_not_fit(message) -> None:
    made, layout, options = TO_JAX[message]
    with pytest.raises(xs.XshardError, match=message):
        to_jax(made(), layout, jax_mesh(a=2), **options)


@in_jax
def test_fake_tensors() -> None:
    with FakeTensorMode():
        fake = torch.zeros(4)
    with pytest.raises(xs.XshardError, match=r"a FakeTensor of .* is not dense memory"):
        to_jax(fake, "n", jax_mesh(a=1))


@in_jax
def test_meshes_without_devices() -> None:
    with pytest.raises(xs.errors.MeshError, match=r"AbstractMesh .* is not a mesh of devices"):
        to_jax(torch.zeros(4), "n", jax_mesh(a=1).abstract_mesh)


@in_jax
def test_devices_of_another_kind() -> None:
    """There are none here: a mesh that says it is of such."""
    with mock.patch.object(MeshPair, "kind", "cuda"), pytest.raises(xs.errors.MeshError) as caught:
        to_jax(torch.zeros(4), "n", jax_mesh(never_used_before=1))
    assert str(caught.value).startswith("the tensor is on cpu, JAX's mesh has ")
    assert "move the tensor: x.to('cuda')" in str(caught.value)


def array() -> jax.Array:
    return jax.device_put(jnp.zeros((8, 6)), jax.NamedSharding(jax_mesh(a=2), jax.P("a")))


def donated(x: jax.Array) -> jax.Array:
    return jax.jit(lambda x: x + 1, donate_argnums=0)(x)


@in_jax
def test_arrays_that_do_not_fit() -> None:
    x = array()
    gone = array()
    one = jax_mesh(a=1)
    errors = xs.errors
    donated(gone)
    for call, kind, message in (
        (lambda: to_torch(x, "n d/a"), errors.ShapeError,
            "the array is not sharded as 'n d/a' says in 'n d/a'\n  it has NamedSharding"),
        (lambda: to_torch(x, "n/b d"), errors.NotationError, "unknown mesh axis 'b'"),
        (lambda: to_torch(x, "n/a d | sum(b)"), errors.NotationError, "unknown mesh axis 'b'"),
        (lambda: to_torch(x, "n/a"), errors.ShapeError, "'n/a' has 1 dims, the array has 2"),
        (lambda: to_torch(jnp.zeros(3), "n"), errors.MeshError,
            "the array is not on a mesh: SingleDeviceSharding"),
        (lambda: to_torch(x, "n/a d", dtensor=True), errors.MeshError, "a DTensor is on a DeviceMesh"),
        (lambda: to_torch(x.__array__(), "n/a d"), xs.XshardError, "ndarray is not a jax.Array"),
        (lambda: to_torch(gone, "n/a d"), xs.XshardError,
            r"float32\[8, 6\], was donated or deleted: torch cannot"),
        (lambda: jax.jit(lambda x: to_torch(x, "n/a d"))(array()), xs.XshardError,
            r"is a tracer, float32\[8,6\].*\n.*torch_interop.from_torch"),
        (lambda: to_torch(jnp.zeros(4, "int4"), "n", one), errors.DtypeError, "torch has no int4"),
        (lambda: to_torch(jax.random.split(jax.random.key(0), 4), "n", one), errors.DtypeError,
            "torch has no key<fry>"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            call()
    assert to_torch(jnp.zeros(3), "n", one).tolist() == [0, 0, 0]


@in_jax
def test_memory_in_use_by_torch_is_not_given_away() -> None:
    """Donating an array that torch reads leaves torch's memory alone."""
    x = array()
    held = to_torch(x, "n/a d")
    y = donated(x)
    assert all((block == 0).all() for block in held) and (y == 1).all()
