"""The pytest plugin: functions on torch ranks and JAX devices. It loads with pytest: imports nothing slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from xshard.errors import XshardError
from xshard.runtimes.backends import BACKENDS, check_size, kit_process
from xshard.testing.pickling import packed
from xshard.testing.runs import parse_meshes

DEFAULT_MESHES = "dp=2,tp=2; tp=4"
TIMEOUT_S = 120.0

OnRanks = Callable[..., list[Any]]
OnDevices = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    meaning = 'the meshes of tests that take `xshard_mesh`, as in "dp=2,cp=2;cp=4"'
    parser.getgroup("xshard").addoption("--xshard-meshes", metavar="MESHES", help=meaning)


def pytest_configure(config: pytest.Config) -> None:
    meaning = "the meshes of this test, as in 'cp=2', 'cp=4'; --xshard-meshes comes first"
    config.addinivalue_line("markers", f"xshard_meshes(*meshes): {meaning}")
    if (text := config.getoption("--xshard-meshes")) is not None:
        try:
            meshes = parse_meshes(text)
        except XshardError as error:
            raise pytest.UsageError(f"--xshard-meshes: {error}") from None
        if not meshes:
            raise pytest.UsageError('--xshard-meshes: no mesh; as in "dp=2,cp=2;cp=4"')


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `xshard_mesh` once per mesh of the option, of its marker, or of the default."""
    if "xshard_mesh" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("xshard_meshes")
    own = "; ".join(marker.args) if marker else DEFAULT_MESHES
    text = metafunc.config.getoption("--xshard-meshes") or own
    metafunc.parametrize("xshard_mesh", parse_meshes(text), ids=str)


@pytest.fixture
def torch_ranks() -> Callable[..., OnRanks]:
    """`torch_ranks(n)(function, *args)`: the results of the function on n forked gloo ranks, by rank.

    A failure in one is raised here with the rank's own traceback; closures are allowed.
    `torch_ranks(n, preload=["transformers"])`: ranks begin with these modules imported.
    """

    def ranks(n: int, preload: Sequence[str] = ()) -> OnRanks:
        check_size(n)
        return lambda function, *args: _asked("torch", preload, (n,), function, args)

    return ranks


@pytest.fixture
def jax_devices() -> Callable[[int], OnDevices]:
    """`jax_devices(n)(function, *args)`: the result of the function where JAX has n host devices or more.

    A failure is raised here with its own traceback; closures are allowed. Results must be picklable: as numpy
    arrays, since JAX arrays start JAX in this process.
    """

    def devices(n: int) -> OnDevices:
        check_size(n)
        return lambda function, *args: _asked("jax", (), (), function, args)

    return devices


def _asked(
    name: str, preload: Sequence[str], ranks: tuple[int, ...], function: Any, args: Any
) -> Any:
    sent = packed(function, *args)
    call = BACKENDS[name].function("worker.call_packed")
    return kit_process(name, preload).ask(call, *ranks, sent, timeout_s=TIMEOUT_S)
