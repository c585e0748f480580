"""xshard is neutral: no framework is loaded before its bridge is."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import xshard
from tests.modules import ALIASES, modules_of_xshard

FRAMEWORKS = {"torch", "jax", "jaxlib", "ml_dtypes"}
COMFORTS = {"typer", "rich", "matplotlib", "scipy"}


def loaded(code):
    """The top-level packages that a fresh process has loaded after some code."""
    code += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_a_plan_runs_with_numpy_alone():
    code = """
import numpy as np, xshard as xs
plan = xs.plan("n/a d -> n d/a | sum(b)", xs.Mesh(a=2, b=2), (4, 4), "bfloat16")
xs.reference.run(plan.backward, xs.reference.scatter(np.ones((4, 4)), plan.backward.src, plan.mesh))
print(plan, plan.to_json())
xs.errors, xs.steps, xs.contractions.einsum_type, xs.state.plan_transfer  # rooms that the docs name
"""
    assert loaded(code) & (FRAMEWORKS | COMFORTS) == set()


def test_no_module_of_xshard_loads_a_framework():
    """The command line included, which may load its comforts only."""
    modules = modules_of_xshard()
    code = "\n".join(f"import {name}" for name in modules)
    assert "xshard.cli.main" in modules and loaded(code) & FRAMEWORKS == set()


def test_two_modules_are_exempt_and_they_alone_name_a_bridge():
    """Without the exemption they would be found: their rooms load a framework."""
    assert loaded("import xshard.torch.ops, xshard.jax.ops") >= {"torch", "jax"}
    root = Path(xshard.__file__).parent
    bridge = re.compile(r"^import (?:torch|jax)_bridge$", re.MULTILINE)
    found = {path.parent.name for path in root.glob("*/*.py") if bridge.search(path.read_text())}
    assert {f"xshard.{name}" for name in found} == ALIASES.keys()
    contracts = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    ignored = [line for each in contracts["contracts"] for line in each.get("ignore_imports", ())]
    assert ignored == [f"{alias} -> {bridge}" for alias, bridge in ALIASES.items()]


@pytest.mark.parametrize(
    ("bridge", "own", "other"), [("torch_bridge", "torch", "jax"), ("jax_bridge", "jax", "torch")]
)
def test_a_bridge_loads_its_own_framework_alone(bridge, own, other):
    code = f"import {bridge} as bridge, {bridge}.testing.worker\nbridge.redistribute, bridge.einsum"
    packages = loaded(code)
    assert packages & {"torch", "jax"} == {own}
    # A backward pass imports it: half a second on each rank, unless the process that forks them has it.
    assert own != "torch" or "sympy" in packages


def test_one_package_imports_both_frameworks():
    """All other files of the bridges import one, or neither."""
    root = Path(xshard.__file__).parents[1]
    imports = re.compile(r"^\s*(?:from|import) (torch|jax)\b", re.MULTILINE)
    files = [*root.glob("torch_bridge/**/*.py"), *root.glob("jax_bridge/**/*.py")]
    both = {path.parent.name for path in files if len(set(imports.findall(path.read_text()))) == 2}
    assert both == {"torch_interop"}
