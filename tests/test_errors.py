"""The form of messages: the caret stands under the same characters wherever the message is printed."""

import functools
import inspect
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

import xshard as xs
from xshard.errors import NotationError, XshardError, api_boundary, end_at_user


def printed(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


def marked(lines: list[str]) -> str:
    at = next(i for i, line in enumerate(lines) if line.endswith("^"))
    return lines[at - 1][lines[at].index("^") : len(lines[at])]


@pytest.mark.parametrize(
    "printing",
    [
        printed,
        lambda error: [f"[rank0]: {line}" for line in printed(error)],
        lambda error: printed(ExceptionGroup("two", [error, ValueError()])),
        lambda error: f"NotationError: {error}".splitlines(),
    ],
    ids=["traceback", "rank", "group", "short"],
)
def test_the_caret_stands_under_what_is_wrong(printing):
    with pytest.raises(xs.errors.NotationError) as caught:
        xs.plan("b s/cq c -> b s c", xs.Mesh(cp=4), (2, 8, 4))
    assert marked(printing(caught.value.with_traceback(None))) == "cq"


def test_a_text_over_several_lines_is_shown_on_one():
    with pytest.raises(xs.errors.NotationError) as caught:
        xs.Layout.parse("b\n\ts/zagzig(cp)")
    assert str(caught.value).splitlines()[1:3] == ["    'b  s/zagzig(cp)'", "          ^^^^^^"]


MESH = xs.Mesh(cp=4)
WRONG = {
    "plan": lambda: xs.plan("b s/cq -> b s", MESH, (2, 8)),
    "Layout": lambda: xs.Layout("b s/"),
    "Layout.parse": lambda: xs.Layout.parse("b s/"),
    "Layout.positions": lambda: xs.Layout("n").positions(MESH, (3,), "d", 0),
    "Mesh": lambda: xs.Mesh(cp=0),
    "Mesh.parse": lambda: xs.Mesh.parse("cp"),
    "Sharding": lambda: xs.Sharding("b/cq", MESH, (4,)),
    "Owners": lambda: xs.Owners([-1]),
    "Owners.of_rows": lambda: xs.Owners.of_rows([[0, 0]]),
    "Owners.moved": lambda: xs.Owners([0, 1]).moved([5], 0),
    "Needs": lambda: xs.Needs([[1, 1]]),
    "Needs.of_edges": lambda: xs.Needs.of_edges(xs.Owners([0]), [1], [0]),
    "load_profile": lambda: xs.load_profile("nope"),
    "Link": lambda: xs.Link(-1, 1),
    "reference.scatter": lambda: xs.reference.scatter(np.ones(3), xs.Layout("n/cq"), MESH),
}


def frames(call):
    """The functions in the traceback of a call's error, outermost first."""
    with pytest.raises(XshardError) as caught:
        call()
    return [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.delenv("XSHARD_TRACEBACK")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_traceback_ends_at_the_users_own_line(call):
    assert frames(call) == ["frames", "<lambda>"]


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_the_whole_traceback_is_shown_on_request(call):
    assert len(frames(call)) > 2


@pytest.mark.usefixtures("short")
def test_functions_of_users_keep_their_frames():
    """A library calls a user's function: all down to its line stays."""

    def of_user():
        xs.Layout("b s/")

    def calls_back(function):
        return function()

    api = api_boundary(calls_back)
    assert frames(lambda: api(of_user)) == ["frames", "<lambda>", "called", "calls_back", "of_user"]


@pytest.mark.usefixtures("short")
def test_hot_functions_cut_by_themselves():
    source = """
def hot(inner):
    try:
        inner()
    except XshardError as error:
        end_at_user(error)
        raise
"""
    names = {"__name__": "xshard.hot", "XshardError": XshardError, "end_at_user": end_at_user}
    exec(source, names)
    wrong = functools.partial(xs.Layout.parse, "b s/")
    assert frames(lambda: names["hot"](wrong)) == ["frames", "<lambda>"]


@pytest.mark.usefixtures("short")
@api_boundary
def fails():
    raise NotationError("broken", hint="mend it") from OSError("disk")


def test_a_cause_stays():
    with pytest.raises(NotationError, match="broken\n  mend it") as caught:
        fails()
    assert isinstance(caught.value.__cause__, OSError)


def test_an_error_survives_pickling():
    with pytest.raises(NotationError) as caught:
        fails()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), type(copy)) == (str(caught.value), NotationError)


def test_public_names_keep_their_signatures():
    assert list(inspect.signature(xs.plan).parameters)[:2] == ["expression", "mesh"]
    assert list(inspect.signature(xs.Layout).parameters) == ["dims", "tags"]


def test_public_functions_survive_pickling():
    assert pickle.loads(pickle.dumps(xs.plan)) is xs.plan


def test_public_functions_keep_their_names():
    assert (xs.plan.__name__, xs.plan.__module__) == ("plan", "xshard.planner")


def test_a_program_that_fails_prints_its_own_line_last(tmp_path: Path):
    script = tmp_path / "program.py"
    script.write_text("import xshard as xs\nxs.plan('b s/cq -> b s', xs.Mesh(cp=4), (2, 8))\n")
    root = str(Path(xs.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, script], env={"PYTHONPATH": root}, capture_output=True, text=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert done.returncode == 1
    assert lines == [f'  File "{script}", line 2, in <module>']
    assert "xshard.errors.NotationError: unknown mesh axis 'cq' in" in done.stderr


DEPRECATED = """
from xshard.errors import warn_deprecated
def verb():
    warn_deprecated("xs.old(x)", "xs.new(x)", since="0.3")
"""
USER = """
import library
for _ in range(2):
    library.verb()
library.verb()
"""


def test_what_goes_away_warns_once_for_each_line_of_the_user(tmp_path: Path):
    """Also where a module of this package lies between the user and the warning."""
    (tmp_path / "library.py").write_text("from xshard.verbs import verb\n")
    code = "import sys, types\nsys.modules['xshard.verbs'] = module = types.ModuleType('xshard.verbs')\n"
    code += f"exec({DEPRECATED!r}, vars(module))\n\n"
    script = tmp_path / "program.py"
    script.write_text(code + USER)
    paths = f"{Path(xs.__file__).parents[1]}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, script], env={"PYTHONPATH": paths}, capture_output=True, text=True
    )
    warning = "FutureWarning: xs.old(x) is deprecated since xshard 0.3, and goes away in 0.5: write xs.new(x)"
    assert done.stderr.splitlines() == [
        f"{script}:8: {warning}", "  library.verb()", f"{script}:9: {warning}", "  library.verb()",
    ]  # fmt: skip


def test_nothing_is_deprecated_for_more_than_two_minor_versions():
    root = Path(xs.__file__).parents[1]
    now = int(xs.__version__.split(".")[1])
    for package in ("xshard", "torch_bridge", "jax_bridge"):
        for path in (root / package).rglob("*.py"):
            calls = re.findall(
                r"warn_deprecated\(.*?since=\"(\d+)\.(\d+)\"", path.read_text(), re.DOTALL
            )
            assert all(int(minor) + 2 > now for _, minor in calls if path.name != "errors.py"), path
