"""The documents' code runs, and what they show is what it prints.

The python blocks of a document run in order, as one script. A block that begins with the command that runs
it runs alone: `# torchrun --nproc-per-node N FILE` on N forked gloo ranks,
`# JAX_NUM_CPU_DEVICES=N python FILE` in a process in which JAX has N host devices. Processes start once and
run many blocks. A block without a language that follows code is what it prints. README's blocks for
several devices run from the wheel, in tests/test_package.
"""

import ast
import doctest
import functools
import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

import xshard as xs
from tests.documents.forking import all_printed, printed
from xshard.cli.app import app
from xshard.runtimes.processes import Process

ROOT = Path(__file__).parents[2]
SKILLS = sorted((ROOT / "xshard/skills").glob("**/*.md"))
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *SKILLS]
DOCUMENTS = [str(path.relative_to(ROOT)) for path in PATHS]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = (
    "layout after",
    "likely cause: ",
    ", h100, ",
)  # in blocks of plans, of errors, of suggestions
SPECIAL = re.compile(
    r"# (torchrun|JAX_NUM_CPU_DEVICES)(?: --nproc-per-node |=)(\d+) (?:python )?FILE\n"
)
TIMES = re.compile(r"\d+(\.\d+)? m?s\b")  # no two runs take the same
OPTIONAL = ("accelerate", "lightning")  # in no extra: blocks with them run where they are installed
TIMEOUT_S = 600.0  # without progress, where a block takes seconds: this ends what hangs


class Block(NamedTuple):
    """The code of a fenced block, with the line of the document where it begins."""

    document: str
    line: int
    language: str
    code: str

    @property
    def special(self):
        """('torchrun' or 'JAX_NUM_CPU_DEVICES', N) where the block asks for it."""
        asked = SPECIAL.match(self.code)
        return asked and (asked[1], int(asked[2]))

    @property
    def optional(self):
        """What it imports of OPTIONAL."""
        return [name for name in OPTIONAL if re.search(rf"(from|import) {name}", self.code)]


def blocks(document):
    text = (ROOT / document).read_text()
    return [
        Block(document, text[: found.start(2)].count("\n"), *found.groups())
        for found in FENCED.finditer(text)
    ]


def in_one_launch(some):
    """Blocks of a folder that ask for as many ranks, or of a document that ask for as many devices."""
    found = {}
    for block in some:
        runtime, n = block.special
        place = Path(block.document).parent if runtime == "torchrun" else block.document
        found.setdefault(f"{place}:{n}{':optional' * bool(block.optional)}", []).append(block)
    return found


def printed_by(block):
    """The blocks that follow this one at once: what it prints."""
    lines = (ROOT / block.document).read_text().splitlines()
    following = blocks(block.document)
    for each in following[following.index(block) + 1 :]:
        between = lines[block.line + block.code.count("\n") + 1 : each.line - 1]
        if each.language or any(between):
            return
        yield each
        block = each


def assert_shown(shown, text):
    for block in shown:
        what = f"{block.document}:{block.line} shows something else than\n{text}"
        assert block.code.strip() in text, what


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


@functools.cache
def process(n_devices):
    """A process for all blocks that ask for so many devices, which JAX makes once."""
    return Process(
        {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(n_devices), "PJRT_NPROC": "64"}
    )


def printed_there(n_devices, path):
    return process(n_devices).ask("tests.documents.forking.printed", path, timeout_s=TIMEOUT_S)


# tests/torch_bridge/models runs the pages of models, all on the same ranks.
WITH_PYTHON = [
    name for name in DOCUMENTS if python_blocks(name) and not name.startswith("docs/models/")
]
ON_DEVICES = [
    block for document in WITH_PYTHON for block in python_blocks(document) if block.special
]
LAUNCHES = in_one_launch(block for block in ON_DEVICES if block.document != "README.md")


@pytest.mark.parametrize("document", WITH_PYTHON)
def test_the_code_prints_what_is_shown(document, tmp_path):
    plain = [block for block in python_blocks(document) if block.special is None]
    # The kit has processes of its own, which pytest's process shares with the examples in docstrings.
    uses_the_kit = any("xshard.testing" in block.code for block in plain)
    run = printed if uses_the_kit else functools.partial(printed_there, 4)
    text = run(script_of(plain, tmp_path)) if plain else ""
    asked = [block for block in blocks(document) if any(words in block.code for words in SHOWN)]
    assert_shown([*asked, *(shown for block in plain for shown in printed_by(block))], text)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_code_runs_on_several_devices(launch, tmp_path):
    some = LAUNCHES[launch]
    if missing := {
        name for block in some for name in block.optional if not importlib.util.find_spec(name)
    }:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    (runtime, n), paths = some[0].special, []
    for number, block in enumerate(some):
        (folder := tmp_path / str(number)).mkdir()
        paths.append(script_of([block], folder))
    if runtime == "torchrun":
        from tests.torch_bridge.helpers import (
            on_ranks,
        )  # imports torch, which the rest of this file does not

        texts = on_ranks(n, all_printed, paths)[0]
    else:
        texts = [
            printed_there(max(n, 4), path) for path in paths
        ]  # a mesh of two takes the first two
    for block, text in zip(some, texts, strict=True):
        shown = [each._replace(code=TIMES.sub("TIME", each.code)) for each in printed_by(block)]
        assert_shown(shown, TIMES.sub("TIME", text))


def test_the_readme_shows_both_frameworks():
    assert {block.special for block in python_blocks("README.md")} == {
        None, ("torchrun", 4), ("JAX_NUM_CPU_DEVICES", 4)
    }  # fmt: skip


def command_lines():
    """Calls of the command line in any block: `xshard VERB ...`, without what follows a `#`."""
    for document in DOCUMENTS:
        for block in blocks(document):
            for line in block.code.splitlines():
                if re.match(r"xshard \w+ ", line):
                    yield pytest.param(line, id=f"{document}: {line[:30]}")


@pytest.mark.parametrize("line", [*command_lines()])
def test_command_lines_are_understood(line):
    verb, *arguments = shlex.split(line, comments=True)[1:]
    typer.main.get_command(app).commands[verb].make_context(
        verb, arguments
    )  # raises where it is wrong


class Example(NamedTuple):
    """A docstring that shows `>>>`: its module, its qualified name, its line in the file, its text."""

    module: str
    name: str
    line: int
    text: str


def examples():
    """All of xshard, found by their syntax: nothing is imported, and no kind of property hides one."""
    for path in sorted((ROOT / "xshard").rglob("*.py")):
        if ">>> " in (source := path.read_text()):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
                ".__init__"
            )
            yield from (
                Example(module, *found) for found in docstrings(ast.parse(source), module, 0)
            )


def docstrings(node, name, line):
    text = ast.get_docstring(node, clean=False)
    if text and ">>> " in text:
        yield name, line, text
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield from docstrings(child, f"{name}.{child.name}", child.lineno)


@pytest.mark.parametrize("example", [*examples()], ids=lambda example: example.name)
def test_examples_in_docstrings(example):
    module = importlib.import_module(example.module)
    test = doctest.DocTestParser().get_doctest(
        example.text, dict(vars(module)), example.name, module.__file__, example.line
    )
    said = []
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(said)


def test_the_main_verbs_have_examples():
    names = {example.name for example in examples()}
    assert {"xshard.planner.plan", "xshard.layout.layout.Layout.positions"} <= names


def test_the_schemes_that_have_names_are_planned_as_the_page_says():
    lengths = {
        "b": 8,
        "s": 2048,
        "d": 1024,
        "f": 4096,
        "t": 2048,
        "e": 8,
        "c": 1024,
        "h": 16,
        "k": 64,
    }
    row = re.compile(r"^\| [^|`]+ \| `(.+? -> .+?)` \| `(.+? -> .+?)` \| (.+?) \|$", re.MULTILINE)
    rows = row.findall((ROOT / "docs/einsum.md").read_text())
    assert len(rows) == 8
    for expression, local, moves in rows:
        names = set(re.findall(r"(?<![/\w])[a-z]\b", expression))
        sizes = {name: lengths[name] for name in names}
        plan = xs.plan(expression, xs.Mesh(tp=8), sizes=sizes, dtype="bfloat16")
        steps = [
            step.kind
            for move in (*plan.moves, plan.result)
            for step in move.steps
            if step.kind != "retag"
        ]
        assert (plan.local, ", ".join(steps) or "none") == (local.replace("\\|", "|"), moves), (
            expression
        )
