"""The pytest plugin: functions on torch ranks and JAX devices.

It loads with every run of pytest, so it imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from xshard.errors import XshardError
from xshard.runtimes.backends import BACKENDS, check_size, kit_process
from xshard.testing.pickling import packed
from xshard.testing.problem import parse_meshes

DEFAULT_MESHES = "dp=2,tp=2; tp=4"
TIMEOUT_S = 120.0

OnRanks = Callable[..., list[Any]]
OnDevices = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--xshard-meshes`."""
    parser.getgroup("xshard").addoption(
        "--xshard-meshes",
        metavar="MESHES",
        help='the meshes of tests that take `xshard_mesh`, as in "dp=2,cp=2;cp=4"',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker `xshard_meshes`, and check the option before any test runs."""
    config.addinivalue_line(
        "markers",
        "xshard_meshes(*meshes): the meshes of this test, as in 'cp=2', 'cp=4'; "
        "--xshard-meshes comes first",
    )
    text = config.getoption("--xshard-meshes")
    if text is None:
        return
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
    text = metafunc.config.getoption("--xshard-meshes")
    if not text:
        marker = metafunc.definition.get_closest_marker("xshard_meshes")
        text = "; ".join(marker.args) if marker else DEFAULT_MESHES
    metafunc.parametrize("xshard_mesh", parse_meshes(text), ids=str)


@pytest.fixture
def torch_ranks() -> Callable[..., OnRanks]:
    """Run functions on n ranks of torch.distributed, with gloo on this host: a pytest fixture.

    `torch_ranks(n)(function, *args)` returns the list of results, by rank.

        def test_sum(torch_ranks):
            assert torch_ranks(2)(summed_over_ranks, 1.0) == [2.0, 2.0]

    A failure in one rank is raised here, with the rank's own traceback. Closures are allowed.
    With `torch_ranks(n, preload=["transformers"])`, ranks begin with these modules imported.

    Returns:
        A function of `n`, the number of ranks, and of `preload`. What it returns takes the function
        and its arguments.

    Raises:
        XshardError: More ranks than this host has.
        FunctionError: The function failed, or cannot be sent to another process.
    """

    def make_ranks(n: int, preload: Sequence[str] = ()) -> OnRanks:
        check_size(n)
        return partial(_ask, "torch", n_ranks=n, preload=preload)

    return make_ranks


@pytest.fixture
def jax_devices() -> Callable[[int], OnDevices]:
    """Run functions in a process where JAX has n CPU devices or more: a pytest fixture.

    `jax_devices(n)(function, *args)` returns the function's result.

        def test_mesh(jax_devices):
            assert jax_devices(4)(count_devices) >= 4

    A failure is raised here, with its own traceback. Closures are allowed. Results must be picklable:
    return numpy arrays, since JAX arrays start JAX in this process.

    Returns:
        A function of `n`, the number of devices. What it returns takes the function and its arguments.

    Raises:
        XshardError: More devices than this host has.
        FunctionError: The function failed, or cannot be sent to another process.
    """

    def make_devices(n: int) -> OnDevices:
        check_size(n)
        return partial(_ask, "jax")

    return make_devices


def _ask(
    framework: str,
    function: Callable[..., Any],
    *args: Any,
    n_ranks: int | None = None,
    preload: Sequence[str] = (),
) -> Any:
    """Call a function in the process that the kit keeps for a framework. n_ranks: for torch."""
    sent = packed(function, *args)
    arguments = (sent,) if n_ranks is None else (n_ranks, sent)
    call = BACKENDS[framework].function("worker.call_packed")
    return kit_process(framework, preload).ask(call, *arguments, timeout_s=TIMEOUT_S)
