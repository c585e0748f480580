"""`profile="auto"` in JAX: the kind and number of its devices."""

from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_bridge as xj
import xshard as xs
from jax_bridge.mesh.context import _machine_of_device, machine_profile
from jax_bridge.torch_interop.route import Options
from tests.jax_bridge.helpers import in_jax, placed


@in_jax
def test_host_devices_have_a_profile() -> None:
    mesh = jax.make_mesh((2,), ("a",))
    assert machine_profile("auto").name == machine_profile("auto", mesh).name == "host"


@in_jax
def test_a_named_profile_overrides_it() -> None:
    mesh = jax.make_mesh((2,), ("a",))
    with xs.use_profile("h100:2"):
        assert (
            machine_profile("auto", mesh).name == "h100:2"
            and machine_profile("a100", mesh) == "a100"
        )


@in_jax
def test_moves_on_host_devices() -> None:
    mesh = jax.make_mesh((2,), ("a",))
    x = placed(jnp.arange(8.0).reshape(4, 2), mesh, "a")
    y = xj.reshard(x, "n/a d -> n d/a", mesh)
    assert y.sharding.spec == jax.P(None, "a") and np.array_equal(x, y)
    z = xj.einsum("n/a d, d e -> n/a e", x, jnp.eye(2), mesh=mesh)
    assert np.array_equal(z, x)


@in_jax
def test_both_sides_of_a_hand_over() -> None:
    with xs.use_profile("h100:2"):
        assert Options().profiles == (xs.load_profile("h100:2"),) * 2
    names = [profile.name for profile in Options(profile={"torch": "auto", "jax": "auto"}).profiles]
    assert names == ["gloo", "host"] and Options(profile="a100").profiles == ("a100", "a100")


class Device(NamedTuple):
    """What is asked of a device of JAX."""

    id: int
    process_index: int
    slice_index: int | None
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


@in_jax
def test_nodes_are_what_shares_fast_links() -> None:
    for of_process, of_island, launcher, platform, wanted in (
        (4, None, "", "gpu", "h100:4"),
        (1, None, "", "gpu", "h100"),
        (1, None, "2", "gpu", "h100:2"),
        (2, None, "2", "gpu", "h100:4"),
        (1, 4, "", "gpu", "h100:4"),
        (8, None, "", "gpu", "h100"),
        (2, None, "", "cpu", "host:2"),
        (8, None, "", "cpu", "host"),
    ):
        islands = [None if of_island is None else i // of_island for i in range(8)]
        devices = [Device(i, i // of_process, island, platform) for i, island in enumerate(islands)]
        environment = mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": launcher})
        with environment, mock.patch.object(jax, "devices", lambda *_, n=devices: n):
            _machine_of_device.cache_clear()
            assert machine_profile("auto").name == wanted
    _machine_of_device.cache_clear()
