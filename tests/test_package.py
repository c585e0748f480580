"""The package installs and imports elsewhere, alone and with each of its extras; without a network.

An sdist is built from a copy of the checkout, and the wheel from the sdist, by the installed build backend.
The wheel is installed into an empty environment. Beside it, links show the packages that an extra declares,
with all that they need: an import of anything else fails; there README's first blocks run. The copy of the
checkout is in a folder called xshard, which no script in the folder above may take for the package.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import xshard as xs

ROOT = Path(__file__).parents[1]
ALONE = f"""
import importlib, xshard as xs
from importlib.metadata import version
assert xs.__version__ == version("xshard") == {xs.__version__!r}, xs.__version__
for name in {sorted(path.stem for path in (ROOT / "xshard/cost/profiles").glob("*.json"))}:
    assert xs.load_profile(name).name == name
assert xs.plan("n/a -> n", xs.Mesh(a=2), (4,)).cost > 0
for name in "torch", "jax", "typer", "matplotlib", "scipy", "pytest":
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name + " is here")
"""
MISSING = """
import importlib
for name in "torch", "jax":
    for bridge in name + "_bridge", "xshard." + name:
        try:
            importlib.import_module(bridge)
        except ModuleNotFoundError as error:
            assert str(error) == f"{name} is not installed: pip install 'xshard[{name}]'", error
            continue
        raise AssertionError(bridge + " is here")
"""
RELABEL = """
import sys, xshard as xs
m = xs.Mesh(a=4)
xs.plan("n/a -> n/zigzag(a)", shape=(8,), src_mesh=m, dst_mesh=m, relabel=True)
assert "scipy" in sys.modules
"""
SUGGEST = """
import xshard as xs
ops = [xs.Op("y", "b i, o i -> b o", ("x", "w")), xs.Op("loss", "b o ->", ("y",), kind="loss")]
step = xs.TrainingStep(ops, dict(b=8, i=8, o=8), inputs={"x": "b i"}, parameters={"w": "o i"})
assert xs.suggest(step, xs.Mesh(a=2)).seconds > 0
"""
OF_TORCH, OF_JAX, OF_PLANS, *_ = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)
# What torchrun sets, on ranks that are forked.
TORCH = f"""
import os, socket
import torch.multiprocessing, torch_bridge.nn, torch_bridge.compat
from xshard.torch import verify

with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])

def run(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    exec({OF_TORCH!r}, dict())

torch.multiprocessing.start_processes(run, nprocs=4, start_method="fork")
"""
JAX = f"""
import os
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
import jax_bridge.nn, jax_bridge.compat.credit
from xshard.jax import reshard
exec({OF_JAX!r})
"""
EXTRAS = {
    "": ALONE + MISSING + OF_PLANS,
    "torch": TORCH,
    "jax": JAX,
    "orbax": "import jax_bridge.state.orbax",
    "cli": "import xshard.cli.app",
    "explore": "import xshard.cli.explore.server; xshard.cli.explore.server.live_page()",
    "plot": "import matplotlib.pyplot",
    "relabel": RELABEL,
    "suggest": SUGGEST,
    "calibrate": "import xshard.runtimes.fit, scipy.optimize",
    "halves": "import greenlet",
    "testing": "import xshard.testing.plugin; from xshard.testing import assert_equivalent",
}


def run(*command: object, status: int = 0, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    """The sdist or the wheel of a source tree, as `python -m build --no-isolation` makes it."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (made,) = into.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return made


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("above") / "xshard"
    left = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=left)
    return source


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    above = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(above, filter="data")
    (source,) = above.iterdir()
    return source.rename(above / "xshard")


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory) -> Path:
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel and nothing else, pip included."""
    made = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", made)
    pip = (sys.executable, "-m", "pip", "--isolated", "--python", made / "bin/python", "install")
    run(*pip, "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    return made


def needed(extra: str, environment: Path) -> set[str]:
    """The distributions that the installed wheel needs with an extra, and what they need in turn."""
    (metadata,) = environment.glob("lib/*/site-packages/xshard-*.dist-info")
    found = set()
    left = [Requirement(f"xshard[{extra}]" if extra else "xshard")]
    while left:
        asked = left.pop()
        if (key := (asked.name, tuple(sorted(asked.extras)))) in found:
            continue
        found.add(key)
        about = Distribution.at(metadata) if asked.name == "xshard" else distribution(asked.name)
        for line in about.requires or ():
            needs = Requirement(line)
            if needs.marker is None or any(
                needs.marker.evaluate({"extra": e}) for e in ("", *asked.extras)
            ):
                left.append(needs)
    return {name for name, _ in found} - {"xshard"}


def top_level(name: str) -> Iterator[Path]:
    """What a distribution has put into site-packages here."""
    installed = distribution(name)
    tops = {path.parts[0] for path in installed.files or ()} - {"..", "__pycache__"}
    return (Path(installed.locate_file(top)) for top in tops)


def test_the_sdist_has_what_its_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "Makefile",
        "constraints.txt",
        "CHANGELOG.md",
        "tests/cases.py",
        "docs/torch.md",
    } <= names
    assert {"benchmarks/__init__.py", "examples/train_parity.py"} & names


def test_the_wheel_has_all_files_of_three_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT))
        for package in ("xshard", "torch_bridge", "jax_bridge")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".pyi", ".json", ".typed", ".css", ".js", ".md")
    }
    assert names == expected
    assert {f"{package}/py.typed" for package in ("xshard", "torch_bridge", "jax_bridge")} <= names


def test_the_metadata_names_all_that_is_offered(environment):
    code = """
from importlib.metadata import distribution
found = distribution("xshard")
print(*sorted(found.metadata.get_all("Provides-Extra")))
print(*sorted(f"{point.group}:{point.name}={point.value}" for point in found.entry_points))
"""
    extras, points = run(environment / "bin/python", "-c", code, cwd=environment).splitlines()
    assert set(extras.split()) == {*EXTRAS, "demo", "ray", "dev", "dev-jax", "docs"} - {""}
    plugin = "pytest11:xshard.testing.plugin=xshard.testing.plugin"
    assert points == f"console_scripts:xshard=xshard.cli.main:main {plugin}"


SCRIPT = """
import xshard as xs, xshard.torch as xt
assert xs.plan("n/a -> n", xs.Mesh(a=2), (4,)).cost > 0
print(xs.__file__)
"""


@pytest.mark.parametrize("kind", ["checkout", "sdist", "wheel"])
def test_a_script_in_the_folder_above_finds_the_package(
    kind, checkout, unpacked, environment, tmp_path
):
    """Installed with -e from the checkout or from the unpacked sdist, as `pip` does it, or as a wheel."""
    source = unpacked if kind == "sdist" else checkout
    for name in needed("", environment) | needed("torch", environment):
        for path in top_level(name):
            if not (tmp_path / path.name).exists():
                (tmp_path / path.name).symlink_to(path)
    python = environment / "bin/python"
    installed = environment
    if kind != "wheel":
        installed = tmp_path / "editable"
        run(sys.executable, "-m", "venv", "--without-pip", installed)
        python = installed / "bin/python"
        with zipfile.ZipFile(build("editable", source, tmp_path)) as archive:
            archive.extractall(next(installed.glob("lib/*/site-packages")))
    script = source.parent / "script.py"
    script.write_text(SCRIPT)
    alone = {"PYTHONPATH": str(tmp_path)}
    found = Path(run(python, script, cwd=source.parent, env=alone).strip())
    assert found.is_relative_to(installed if kind == "wheel" else source)
    # mypy looks for it where this Python does; it reads no more than it has to.
    mypy = (sys.executable, "-m", "mypy", "--python-executable", python, "--follow-imports", "skip")
    code = "import xshard, xshard.torch.nn, torch_bridge, no_such_package"
    cache = ("--cache-dir", tmp_path)
    said = run(*mypy, *cache, "-c", code, cwd=source.parent, status=1).splitlines()
    assert '"no_such_package"' in said[0] and said[-1].startswith("Found 1 error")


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra or "alone")
def test_an_extra_declares_all_that_it_imports(extra, environment, tmp_path):
    for name in needed(extra, environment):
        for path in top_level(name):
            link = tmp_path / path.name
            if not link.exists():  # folders that several distributions share, as nvidia/
                link.symlink_to(path)
    alone = {"PYTHONPATH": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    run(environment / "bin/python", "-c", EXTRAS[extra], cwd=tmp_path, env=alone)
    if extra == "cli":
        shown = run(
            environment / "bin/xshard", "show", "n/a", "--mesh", "a=2", "--shape", "4", env=alone
        )
        assert "n is cut over a" in shown
