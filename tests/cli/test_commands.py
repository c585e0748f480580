"""The command line: its output, its refusals, and the exit status that a script can rely on.

Long because all commands share their helpers and their table of refusals.
"""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import xshard as xs
from xshard.cli.app import app
from xshard.cli.options import parse_shape
from xshard.cli.selfcheck import EXAMPLES
from xshard.plans.table import rows
from xshard.runtimes import backends
from xshard.testing import plans
from xshard.testing.plans import answer_in_numpy

ULYSSES = ("b s/cp c -> b s c/cp", "--mesh", "dp=2,cp=4", "--shape", "2,64,32")


@pytest.fixture(autouse=True)
def _plain_console(monkeypatch):
    """No colours and room for every table, whatever terminal the tests run in."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def xshard(*arguments: str):
    return CliRunner().invoke(app, arguments)


def words(text: str) -> str:
    """Text with every run of white space as one blank, as tables are padded."""
    return " ".join(text.split())


# --- plan


def test_plan_prints_the_plan_and_its_backward():
    told = xshard("plan", *ULYSSES, "--dtype", "bfloat16")
    assert told.exit_code == 0
    plan = xs.plan(ULYSSES[0], xs.Mesh(dp=2, cp=4), (2, 64, 32), "bfloat16")
    for part in (plan, plan.backward):
        for row in rows(part):
            assert words(" ".join(row)) in words(told.stdout)
        assert str(part).splitlines()[0] in told.stdout
        assert str(part).splitlines()[-1] in told.stdout


def test_plan_of_a_max_prints_the_three_plans_of_its_gradient():
    told = xshard("plan", "n d | max(tp) -> n/tp d", "--mesh", "tp=4", "--shape", "8,8").stdout
    assert told.count("backward, ") == 3


def test_plan_of_a_max_that_stays_one_has_no_backward():
    told = xshard("plan", "n/a d | max(b) -> n d | max(b)", "--mesh", "a=2,b=2", "--shape", "8,8")
    assert told.exit_code == 0
    assert "backward" not in told.stdout


def test_plan_json_parses_back():
    told = xshard("plan", *ULYSSES, "--json", "--profile", "bandwidth")
    plan = xs.plan(ULYSSES[0], xs.Mesh(dp=2, cp=4), (2, 64, 32), profile="bandwidth")
    assert xs.Plan.from_json(told.stdout) == plan


def test_plan_keeps_the_memory_limit():
    told = xshard("plan", "n/a -> n", "--mesh", "a=4", "--shape", "1024", "--memory-limit", "4KiB")
    assert told.exit_code == 2
    assert "no plan stays within 4.00 KiB per device" in told.stderr
    assert (
        xshard("plan", "n/a -> n", "--mesh", "a=4", "--shape", "1024", "--memory-limit", "1MiB").exit_code
        == 0
    )


SERVE = ("o/dp i -> o/tp i", "--src-mesh", "dp=4", "--dst-mesh", "tp=2", "--shape", "64,32")


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ((), {}),
        (
            ("--src-devices", "2-5", "--dst-devices", "4,3"),
            {"src_devices": (2, 3, 4, 5), "dst_devices": (4, 3)},
        ),
    ],
)
def test_plan_between_two_meshes(options, devices, tmp_path):
    meshes = {"src_mesh": xs.Mesh(dp=4), "dst_mesh": xs.Mesh(tp=2)}
    plan = xs.plan(SERVE[0], **meshes, **devices, shape=(64, 32))
    assert xs.Plan.from_json(xshard("plan", *SERVE, *options, "--json").stdout) == plan
    told = xshard("plan", *SERVE, *options).stdout
    for part in (plan, plan.backward):
        assert str(part).splitlines()[0] in told
    xshard("plan", *SERVE, *options, "--html", str(tmp_path / "page.html"))
    assert "transfer" in (tmp_path / "page.html").read_text()
    largest = xshard("plan", "o | max(dp) -> o/tp", *SERVE[1:5], "--shape", "64")
    assert largest.exit_code == 0 and "backward" not in largest.stdout


COLUMNS = ("b s/tp d, d f/tp -> b s f/tp", "--mesh", "tp=4", "--sizes", "b=8,s=64,d=32,f=128")


def test_plan_of_a_contraction_prints_its_moves_and_both_passes():
    told = xshard("plan", *COLUMNS, "--profile", "bandwidth", "--explain")
    sizes = {"b": 8, "s": 64, "d": 32, "f": 128}
    plan = xs.plan(COLUMNS[0], xs.Mesh(tp=4), sizes=sizes, profile="bandwidth")
    assert told.exit_code == 0
    for line in str(plan).splitlines():
        assert words(line) in words(told.stdout)
    assert words(plan.explain()) in words(told.stdout)
    told = xshard("plan", *COLUMNS, "--profile", "bandwidth", "--objective", "forward", "--json")
    forward = xs.plan(COLUMNS[0], xs.Mesh(tp=4), sizes=sizes, profile="bandwidth", objective="forward")
    assert xs.ContractionPlan.from_json(told.stdout) == forward


@pytest.mark.parametrize(
    ("expression", "options", "message"),
    [
        (COLUMNS[0], ("--shape", "8,64"), "a contraction takes --sizes, as in b=8,s=64 in 'b s/tp d, d"),
        ("n/tp -> n", ("--sizes", "n=8"), "--shape is due, as in 2,64,32 in 'n/tp -> n'"),
        ("n/tp, n -> n", ("--sizes", "n=8", "--shape", "8"), "a contraction takes --sizes"),
        ("n/tp, n -> n", ("--sizes", "n=8,n=9"), "dim 'n' twice in\n    'n=8,n=9'\n         ^^^"),
        (
            "n/tp, n -> n",
            ("--sizes", "n=x"),
            "a dim has a length >= 0 in\n    'n=x'\n     ^^^\n  as in b=8,s=64",
        ),
        ("n/tp, n -> n", ("--sizes", "m=8"), "sizes has no length for dim 'n'"),
    ],
)
def test_lengths_that_do_not_fit(expression, options, message):
    told = xshard("plan", expression, "--mesh", "tp=2", *options)
    assert told.exit_code == 2
    assert message in told.stderr


def test_plan_of_both_passes_tells_their_sum():
    told = xshard("plan", *ULYSSES, "--objective", "forward+backward", "--json")
    plan = xs.plan(ULYSSES[0], xs.Mesh(dp=2, cp=4), (2, 64, 32), objective="forward+backward")
    assert xs.Plan.from_json(told.stdout) == plan
    assert "with the backward's" in xshard("plan", *ULYSSES, "--objective", "forward+backward").stdout
    wrong = xshard("plan", *ULYSSES, "--objective", "backward")
    assert wrong.exit_code == 2
    assert "no objective 'backward'" in wrong.stderr


# --- show


def test_show_draws_the_blocks_of_a_zigzag():
    told = xshard("show", "b s/zigzag(cp) c | sum(tp)", "--mesh", "cp=2,tp=2", "--shape", "2,8,4")
    assert told.exit_code == 0
    assert "s 8 0-1 2-3 4-5 6-7 d0-1 d2-3 d2-3 d0-1" in words(told.stdout)
    assert "along tp every device holds an addend: the array is their sum" in told.stdout
    legend = [words(line) for line in told.stdout.splitlines()]
    assert "0 0 0 2x4x4 0-1, 6-7" in legend
    assert "3 1 1 2x4x4 2-5" in legend


def test_show_draws_a_grid_of_two_dims():
    lines = xshard("show", "n/a d/b", "--mesh", "a=2,b=2", "--shape", "4,6").stdout.splitlines()
    assert [words(line) for line in lines[2:5]] == ["n 4 / d 6 0-2 3-5", "0-1 d0 d1", "2-3 d2 d3"]


def test_show_draws_all_arrays_of_a_contraction():
    told = xshard("show", "n d/tp, d/tp f -> n/tp f", "--mesh", "tp=2", "--sizes", "n=4,d=6,f=3")
    assert told.exit_code == 0
    titles = [line for line in told.stdout.splitlines() if " on tp=2" in line]
    assert titles == ["n d/tp   [4, 6] on tp=2", "d/tp f   [6, 3] on tp=2", "n/tp f   [4, 3] on tp=2"]
    assert words(told.stdout).count("0 0 ") == 3
    assert xshard("show", "n/tp", "--mesh", "tp=2", "--sizes", "n=4").exit_code == 2


def test_show_marks_overlaps():
    told = words(xshard("show", "h/sp:halo(1,1)", "--mesh", "sp=2", "--shape", "8").stdout)
    assert "h 8 0-2 3 4 5-7 d0 d0 +d1 d1 +d0 d1" in told
    assert "0 0 6 0-3 1 fill, 0-4" in told


def test_show_draws_the_dims_it_is_asked_for():
    told = xshard("show", "a/x b/y c/z", "--mesh", "x=2,y=2,z=2", "--shape", "4,4,4", "--dims", "b, c").stdout
    assert "b 4 / c 4" in told
    assert "not drawn: a" in told


def test_show_breaks_a_wide_grid_into_bands(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    told = xshard("show", "s/cyclic(cp)", "--mesh", "cp=4", "--shape", "32").stdout
    grid = [line for line in told.splitlines() if re.match(r" +(s 32 |d\d)", line)]
    assert len(grid) >= 4
    assert max(map(len, grid)) <= 60
    assert [int(d) for d in re.findall(r"d(\d)", " ".join(grid))] == [0, 1, 2, 3] * 8


@pytest.mark.parametrize(
    ("layout", "mesh", "shape"), [("()", "a=2", ""), ("n/a", "a=2", "0"), ("n", "", "3")]
)
def test_show_draws_the_least_arrays(layout, mesh, shape):
    assert xshard("show", layout, "--mesh", mesh, "--shape", shape).exit_code == 0


def test_show_colours_by_owner(monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    told = xshard("show", "s/zigzag(cp)", "--mesh", "cp=2", "--shape", "8").stdout
    first, second, third, fourth = re.findall(r"48;5;(\d+)m *d\d", told)
    assert first == fourth != second == third


# --- errors


@pytest.mark.parametrize(
    ("arguments", "marked"),
    [
        (("plan", "b s/cq c -> b s c", "--mesh", "cp=4", "--shape", "2,8,4"), "cq"),
        (("plan", "b s/cp c -> b s d/cp", "--mesh", "cp=4", "--shape", "2,8,4"), "d"),
        (("selfcheck", "b s/cp c -> b q c/cp", "--mesh", "cp=4", "--shape", "2,8,4"), "q"),
        (("show", "b  s/spiral(cp)", "--mesh", "cp=4", "--shape", "2,8"), "spiral"),
        (("show", "b  s/cq", "--mesh", "cp=4", "--shape", "2,8"), "cq"),
        (("show", "b s/cp", "--mesh", "cp=4,dp=two", "--shape", "2,8"), "dp=two"),
        (("show", "b s/cp", "--mesh", "cp=4", "--shape", "2,x8"), "x8"),
        (("plan", "o/dp -> o/tq", *SERVE[1:5], "--shape", "8"), "tq"),
        (("plan", "o/dp -> o/tp", *SERVE[1:5], "--shape", "8", "--dst-devices", "4,7-5"), "7-5"),
    ],
)
@pytest.mark.parametrize("columns", ["160", "60"])
def test_the_caret_stands_under_what_is_wrong(arguments, marked, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    told = xshard(*arguments)
    assert told.exit_code == 2
    assert told.stdout == ""
    lines = told.stderr.splitlines()
    caret = next(i for i, line in enumerate(lines) if set(line) == {" ", "^"})
    span = slice(lines[caret].index("^"), len(lines[caret]))
    assert lines[caret - 1][span] == marked
    assert len(lines[caret - 1]) <= int(columns)
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("selfcheck",),
        ("selfcheck", "n/a -> n"),
        ("selfcheck", "--all", "--mesh", "a=2"),
        ("plan", "n/a -> n"),
        ("plan", "n/a -> n", "--shape", "8"),
        ("plan", *SERVE, "--mesh", "a=2"),
        ("plan", *SERVE, "--explain"),
        ("no-such-command",),
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    assert xshard(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["plan", "show", "selfcheck"])
def test_help_has_one_sentence_and_an_example_that_runs(command):
    told = xshard(command, "--help").stdout
    example = re.search(rf"Example: xshard {command} \"(.+?)\" (.+)", told)
    numpy_only = ("--runtime", "numpy") if command == "selfcheck" else ()
    assert xshard(command, example[1], *example[2].split(), *numpy_only).exit_code == 0


def test_shapes_are_read():
    assert [parse_shape(text) for text in ("", "3", " 2, 64 ,0")] == [(), (3,), (2, 64, 0)]
    for text in ("3,", "-1", "2x3"):
        with pytest.raises(xs.errors.ShapeError):
            parse_shape(text)


@pytest.mark.parametrize("package", ["rich", "typer"])
def test_without_the_extra_the_script_says_what_to_install(package):
    """Run as `python -m xshard`."""
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_module('xshard', None, '__main__')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == f"xshard: the command line needs {package}: pip install 'xshard[cli]'\n"


def test_the_library_needs_neither_typer_nor_rich():
    code = """
import sys, xshard, xshard.testing.plans, xshard.pictures.grid
print({'typer', 'rich'} & set(sys.modules))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


# --- selfcheck


def selfcheck_one(*options: str):
    return xshard("selfcheck", "n/dp d -> n d | copy(dp)", "--mesh", "dp=2", "--shape", "4,3", *options)


def answer_with(monkeypatch, change):
    """Let every worker answer as the reference does, changed by `change`; returns the calls."""
    calls = []

    class Answers:
        def ask(self, function, questions, **_):
            calls.append((function, questions[0].mode, len(questions)))
            return [change(answer_in_numpy(question)) for question in questions]

    monkeypatch.setattr(backends, "running", lambda package, environment: Answers())
    monkeypatch.setattr(backends, "find_spec", lambda _: object())
    return calls


def one_off(blocks):
    """The blocks of one array, with one element of the last device changed."""
    [(name, blocks)] = blocks.items()
    last = blocks[-1].copy()
    last.flat[-1] += 1
    return {name: (*blocks[:-1], last)}


def each(arrays, change):
    return {name: tuple(map(change, blocks)) for name, blocks in arrays.items()}


def test_selfcheck_on_numpy_alone():
    result = selfcheck_one("--runtime", "numpy")
    assert result.exit_code == 0
    assert "numpy 0 0 -/24 B -/24 B" in words(result.stdout)
    assert "1 expression on numpy: all equal" in result.stdout


@pytest.mark.parametrize("dtype", ["float64", "int32", "bfloat16"])
def test_selfcheck_knows_dtypes(dtype):
    assert selfcheck_one("--runtime", "numpy", "--dtype", dtype).exit_code == 0


def test_selfcheck_asks_every_worker_and_shows_what_it_measured(monkeypatch):
    calls = answer_with(monkeypatch, lambda o: replace(o, forward_bytes=24, backward_bytes=48))
    result = selfcheck_one()
    assert result.exit_code == 0
    assert calls == [
        ("torch_bridge.testing.worker.answers", "", 1),
        *(("jax_bridge.testing.worker.answers", mode, 1) for mode in ("vma", "novma", "pmap")),
    ]
    for runtime in plans.RUNTIMES[1:]:
        assert f"{runtime.name} 0 0 24 B/24 B 48 B/24 B" in words(result.stdout)


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (lambda o: replace(o, outputs=one_off(o.outputs)), "torch 1 0 "),
        (lambda o: replace(o, gradients=one_off(o.gradients)), "torch 0 1 "),
        (lambda o: replace(o, outputs={"output": o.outputs["output"][:1]}), "torch inf 0 "),
        (lambda o: replace(o, outputs=each(o.outputs, lambda b: b.astype("float64"))), "torch inf 0 "),
        (lambda o: replace(o, gradients=each(o.gradients, lambda b: b * np.nan)), "torch 0 inf "),
    ],
)
def test_selfcheck_exits_with_1_where_a_runtime_is_wrong(monkeypatch, change, row):
    answer_with(monkeypatch, change)
    result = selfcheck_one("--runtime", "numpy,torch")
    assert result.exit_code == 1
    assert row in words(result.stdout)
    assert "DIFFERENT" in result.stdout
    assert "1 different, 0 failed, of 2 runs" in result.stdout


@pytest.mark.parametrize("where", ["outputs", "gradients"])
def test_selfcheck_exits_with_1_where_the_reference_itself_is_wrong(monkeypatch, where):
    right = answer_in_numpy
    monkeypatch.setattr(
        plans, "answer_in_numpy", lambda q: replace(o := right(q), **{where: one_off(getattr(o, where))})
    )
    assert selfcheck_one("--runtime", "numpy").exit_code == 1


def test_selfcheck_exits_with_1_where_a_runtime_fails(monkeypatch):
    broken = replace(backends.BACKENDS["torch"], package="numpy")
    monkeypatch.setattr(plans, "RUNTIMES", (plans.RUNTIMES[0], plans.Runtime("torch", broken)))
    result = selfcheck_one()
    assert result.exit_code == 1
    assert "numpy 0 0" in words(result.stdout)
    assert re.search(r"torch( -)+ failed", words(result.stdout))
    assert "FunctionError: torch: ModuleNotFoundError in numpy_bridge.testing.worker.answers" in result.stderr
    assert "No module named 'numpy_bridge'" in result.stderr


def test_selfcheck_does_not_skip_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "jax" else object())
    result = selfcheck_one()
    assert result.exit_code == 2
    assert "jax is not installed" in result.stderr
    assert "leave jax-vma out with --runtime" in result.stderr


def test_selfcheck_refuses_runtimes_that_do_not_exist_or_cannot_take_the_mesh():
    assert "no runtime 'tpu'" in selfcheck_one("--runtime", "tpu").stderr
    two_axes = ("n/a/b -> n", "--mesh", "a=2,b=2", "--shape", "8")
    result = xshard("selfcheck", *two_axes, "--runtime", "jax-pmap")
    assert result.exit_code == 2
    assert "jax-pmap cannot run on Mesh(a=2, b=2)" in result.stderr


def test_selfcheck_all_asks_each_worker_once(monkeypatch):
    calls = answer_with(monkeypatch, lambda o: o)
    result = xshard("selfcheck", "--all")
    assert result.exit_code == 0
    one_axis = sum(len(e.mesh.axes) == 1 for e in EXAMPLES)
    assert [n for _, _, n in calls] == [len(EXAMPLES)] * 3 + [one_axis]
    for example in EXAMPLES:
        assert f"{example.expression}   float32" in result.stdout
    assert f"jax-pmap ({one_axis} of them): all equal" in result.stdout


def test_the_examples_differ_and_each_is_canonical():
    assert len({e.expression for e in EXAMPLES}) == len(EXAMPLES) >= 13
    for example in EXAMPLES:
        *given, result = (
            xs.Layout.parse(text) for text in re.split(r", (?![^(]*\))| -> ", example.expression)
        )
        assert f"{', '.join(map(str, given))} -> {result}" == example.expression
        assert example.mesh.n_devices <= 4


@pytest.mark.parametrize(
    ("expression", "lengths"),
    [
        ("b s/zigzag(cp) c -> b s c/cp", ("--shape", "2,8,4")),
        ("s/cp d, d f/cp -> f/cp s", ("--sizes", "s=4,d=3,f=2")),
    ],
)
def test_selfcheck_end_to_end(expression, lengths):
    """Every runtime in its own process, for real."""
    result = xshard("selfcheck", expression, "--mesh", "cp=2", *lengths)
    assert result.exit_code == 0, result.output
    for runtime in plans.RUNTIMES:
        assert f"{runtime.name} 0 0 " in words(result.stdout)


@pytest.mark.parametrize("which", [0, -1])
def test_selfcheck_compares_the_gradient_of_every_operand(monkeypatch, which):
    def change(outcome):
        number = list(outcome.gradients)[which]
        first, *others = outcome.gradients[number]
        return replace(outcome, gradients=outcome.gradients | {number: (first + 1, *others)})

    answer_with(monkeypatch, change)
    contraction = ("s/cp d, d f/cp | mean(x) -> f/cp s", "--mesh", "cp=2,x=2", "--sizes", "s=4,d=3,f=2")
    result = xshard("selfcheck", *contraction, "--runtime", "numpy,torch")
    assert result.exit_code == 1
    assert "numpy 0 0 " in words(result.stdout) and "torch 0 1 " in words(result.stdout)
    refused = xshard("selfcheck", "n/a, n -> n", "--mesh", "a=2", "--sizes", "n=2", "--dtype", "int32")
    assert refused.exit_code == 2 and "no gradients of a contraction in int32" in refused.stderr
