"""How the suite is run: tests that `--without` and `--quick` skip, and the table of the longest files."""

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from tests.order import LONGEST, PLACES
from tests.without import left_out

ROOT = Path(__file__).parents[1]
LOADS = "import torch\ndef test_it(): pass\n"
DOES = """
import subprocess, sys

def test_loads(): import jax
def test_starts(): subprocess.run([sys.executable, "-c", ""], check=True)
def test_catches():
    try:
        import torch
    except BaseException as error:
        raise ValueError from error
def test_neither(): pass
"""


def in_pytest(folder: Path, *arguments: str) -> str:
    (folder / "test_loads.py").write_text(LOADS)
    (folder / "test_does.py").write_text(DOES)
    words = (
        "-m",
        "pytest",
        "-pxdist.plugin",
        "-ptests.without",
        "-pno:cacheprovider",
        "-rs",
        *arguments,
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = {"cwd": folder, "env": environment, "text": True}
    return subprocess.run(
        [sys.executable, *words], stdout=subprocess.PIPE, check=False, **options
    ).stdout


def test_quick_tells_why_it_skips_a_test(tmp_path):
    (tmp_path / "test_long.py").write_text(
        "import pytest\n\n@pytest.mark.long\ndef test_it(): pass\n"
    )
    said = in_pytest(tmp_path, "--quick", "-n1")
    reasons = {
        line.partition("--without: ")[2] for line in said.splitlines() if "--without: " in line
    }
    assert reasons == {"loads torch", "loads jax", "starts an interpreter"}
    assert "--quick: long" in said and "1 passed, 5 skipped" in said


def test_what_is_not_left_out_runs(tmp_path):
    assert "2 passed, 3 skipped" in in_pytest(tmp_path, "--without", "torch,jax")


def test_only_what_can_be_told_is_left_out():
    with pytest.raises(ArgumentTypeError, match="'numpy' is none of torch, jax, interpreters"):
        left_out("numpy")


def test_the_table_of_the_longest_files_names_files():
    assert len(PLACES) == len(LONGEST)
    assert [path for path in PLACES if not path.is_file()] == []
