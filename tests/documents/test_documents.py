"""The documents' code runs, and what they show is what it prints.

The python blocks of a document run in order, as one script. A block that begins with
`# torchrun: N` runs alone, on N forked gloo ranks; one that begins with `# devices: N`, in a
process in which JAX has N host devices.
"""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import xshard

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if "```python" in path.read_text()
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = ("layout after", "likely cause: ")  # in blocks of plans, and of errors
SPECIAL = re.compile(r"# (torchrun|devices): (\d+)\n")

ON_RANKS = """
import runpy, sys
from torch_bridge.launch import run_ranks

def block():
    runpy.run_path(sys.argv[1])

run_ranks(int(sys.argv[2]), block)
"""


class Block(NamedTuple):
    """The code of a fenced block, with the line of the document where it begins."""

    document: str
    line: int
    language: str
    code: str

    @property
    def special(self):
        """('torchrun' or 'devices', N) where the block asks for it."""
        asked = SPECIAL.match(self.code)
        return asked and (asked[1], int(asked[2]))


def blocks(document):
    text = (ROOT / document).read_text()
    return [
        Block(document, text[: found.start(2)].count("\n"), *found.groups())
        for found in FENCED.finditer(text)
    ]


def python_blocks(document):
    return [block for block in blocks(document) if block.language == "python"]


def script_of(some, folder):
    """The blocks as one file, each at its own lines, so that a traceback points into the document."""
    lines = []
    for block in some:
        lines += [""] * (block.line - len(lines)) + block.code.splitlines()
    path = folder / Path(block.document).name
    path.write_text("\n".join(lines))
    return str(path)


def run(*arguments, **environment):
    """What a python process prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_code_runs_and_prints_what_is_shown(document, tmp_path):
    plain = [block for block in python_blocks(document) if block.special is None]
    printed = run(script_of(plain, tmp_path)) if plain else ""
    for block in blocks(document):
        if any(words in block.code for words in SHOWN):
            assert block.code.strip() in printed, (
                f"{document}:{block.line} shows something else than\n{printed}"
            )


@pytest.mark.parametrize(
    "block",
    [block for document in DOCUMENTS for block in python_blocks(document) if block.special],
    ids=lambda block: f"{block.document}:{block.line}",
)
def test_the_code_runs_on_several_devices(block, tmp_path):
    (runtime, n), path = block.special, script_of([block], tmp_path)
    if runtime == "torchrun":
        run("-c", ON_RANKS, path, str(n))
    else:
        run(path, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(n))


def test_the_readme_shows_both_frameworks():
    assert {block.special for block in python_blocks("README.md")} == {None, ("torchrun", 4), ("devices", 4)}


def doctests():
    for found in pkgutil.walk_packages(xshard.__path__, "xshard."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            tests = doctest.DocTestFinder(exclude_empty=True).find(module)
            yield from (test for test in tests if test.examples)


@pytest.mark.parametrize("example", [*doctests()], ids=lambda example: example.name)
def test_examples_in_docstrings(example):
    said = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(said)


def test_the_plan_and_ownership_have_examples():
    assert {"xshard.planner.plan", "xshard.layout.partition.cut"} <= {example.name for example in doctests()}
