"""The pytest plugin, in a pytest of its own: fixtures, the option, the marker, and what loads when."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

from xshard.runtimes.processes import FunctionError
from xshard.testing import plugin

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0  # a few seconds, as a rule

FIXTURES = """
import os

import pytest
import torch.distributed as dist


def rank(factor):
    return factor * dist.get_rank()


def test_ranks(torch_ranks):
    assert torch_ranks(3)(rank, 10) == [0, 10, 20]
    parents = torch_ranks(2)(lambda: os.getppid())
    assert parents == torch_ranks(2)(lambda: os.getppid())  # one process forks all


def test_a_failure_on_a_rank(torch_ranks):
    def fails():
        assert dist.get_rank() == 0, "not the first"

    with pytest.raises(ValueError, match="AssertionError: not the first"):
        torch_ranks(2)(fails)


def test_devices(jax_devices):
    def total(n):
        import jax
        import jax.numpy as jnp

        mesh = jax.make_mesh((n,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = jax.shard_map(lambda x: jax.lax.psum(x, "tp"), mesh=mesh, in_specs=jax.P("tp"), out_specs=jax.P())
        return jax.jit(f)(jnp.arange(4.0)).tolist()

    assert jax_devices(4)(total, 4) == [6.0]


def test_a_failure_on_devices(jax_devices):
    def fails():
        raise KeyError("lost")

    with pytest.raises(ValueError, match="KeyError in JAX(.|\\n)*KeyError: 'lost'"):
        jax_devices(2)(fails)


def test_too_many(torch_ranks, jax_devices):
    for start in (torch_ranks, jax_devices):
        with pytest.raises(ValueError, match="1000 devices, this host has 1 to "):
            start(1000)
"""

MESHES = """
import sys

import pytest

import xshard as xs

assert not {"torch", "jax"} & set(sys.modules)


def test_any(xshard_mesh):
    assert isinstance(xshard_mesh, xs.Mesh)


@pytest.mark.xshard_meshes("cp=2", "cp=4")
def test_own(xshard_mesh):
    assert xshard_mesh.axes == ("cp",)
"""


def pytest_in(folder: Path, texts: dict[str, str], *options: str) -> tuple[int, str]:
    """Exit status and output of a pytest that runs files with these texts."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xshard.testing.plugin",
        "-p",
        "no:cacheprovider",
        "-v",
    ]
    done = subprocess.run(
        [*command, "-oaddopts=", *options, *texts],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_fixtures_are_as_documented(tmp_path: Path) -> None:
    """Together, since they share one process of torch and one of JAX."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/testing.md").read_text(), re.M | re.S
    )
    example = next(block for block in blocks if "torch_ranks" in block)
    status, said = pytest_in(tmp_path, {"test_fixtures.py": FIXTURES, "test_document.py": example})
    assert status == 0, said
    for name, n in (("test_fixtures", 5), ("test_document", 4)):
        assert len(re.findall(rf"^{name}.py::\S+ PASSED", said, re.M)) == n, said


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--strict-markers"], "test_any[dp=2,tp=2] test_any[tp=4] test_own[cp=2] test_own[cp=4]"),
        (
            ["--xshard-meshes", "cp=3; cp=8"],
            "test_any[cp=3] test_any[cp=8] test_own[cp=3] test_own[cp=8]",
        ),
    ],
    ids=["default and marker", "option"],
)
def test_meshes_come_from_the_nearest_setting(
    options: list[str], names: str, tmp_path: Path
) -> None:
    status, said = pytest_in(tmp_path, {"test_it.py": MESHES}, *options)
    assert status == 0 and "4 passed" in said, said
    assert all(f"{name} PASSED" in said for name in names.split()), said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cp", "--xshard-meshes: an axis reads NAME=SIZE in\n    'cp'"),
        ("cp=4096", "--xshard-meshes: 4096 devices, this host has 1 to "),
        (";", '--xshard-meshes: no mesh; as in "dp=2,cp=2;cp=4"'),
    ],
)
def test_meshes_that_cannot_be(given: str, message: str) -> None:
    config = Mock(**{"getoption.side_effect": {"--xshard-meshes": given}.__getitem__})
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        plugin.pytest_configure(config)


def test_the_plugin_is_declared_under_the_name_of_its_module() -> None:
    """So that it is one plugin, whether pytest finds it or `-p` names it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "pytest11"
    ]
    assert declared == {"xshard.testing.plugin": "xshard.testing.plugin"}


def test_ranks_begin_with_preloaded_modules() -> None:
    def loaded() -> bool:
        return "wave" in sys.modules

    assert plugin._ask("torch", loaded, n_ranks=2, preload=()) == [False, False]
    assert plugin._ask("torch", loaded, n_ranks=2, preload=["wave"]) == [True, True]
    with pytest.raises(FunctionError, match="preload: 'no_such_module' cannot be imported\n"):
        plugin._ask("torch", loaded, n_ranks=2, preload=["no_such_module"])
