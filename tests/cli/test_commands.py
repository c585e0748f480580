"""The command line: its output, its refusals, and the exit status that a script can rely on.

Long because all commands share their helpers and their table of refusals.
"""

import json
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
from xshard.testing.plans import in_numpy

MESH = xs.Mesh(dp=2, cp=4)
ULYSSES = ("b s/cp c -> b s c/cp", "--mesh", "dp=2,cp=4", "--shape", "2,64,32")
COLUMNS = ("b s/tp d, d f/tp -> b s f/tp", "--mesh", "tp=4", "--sizes", "b=8,s=64,d=32,f=128")
COLUMNS_PLAN = {
    "mesh": xs.Mesh(tp=4),
    "sizes": {"b": 8, "s": 64, "d": 32, "f": 128},
    "profile": "bandwidth",
}
SERVE = ("o/dp i -> o/tp i", "--src-mesh", "dp=4", "--dst-mesh", "tp=2", "--shape", "64,32")


@pytest.fixture(autouse=True)
def _plain_console(monkeypatch):
    """No colours and room for every table, whatever terminal the tests run in."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def xshard(*arguments: str, code: int = 0):
    """What a call prints and returns, which ends with this exit status."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


def words(text: str) -> str:
    """Text with every run of white space as one blank, as tables are padded."""
    return " ".join(text.split())


# --- plan


def test_plan_prints_each_pass():
    told = xshard("plan", *ULYSSES, "--dtype", "bfloat16").stdout
    plan = xs.plan(ULYSSES[0], MESH, (2, 64, 32), "bfloat16")
    for part in (plan, plan.backward):
        assert all(words(" ".join(row)) in words(told) for row in rows(part))
        lines = str(part).splitlines()
        assert lines[0] in told and lines[-1] in told


@pytest.mark.parametrize(
    ("arguments", "backwards"),
    [
        (("n d | max(tp) -> n/tp d", "--mesh", "tp=4", "--shape", "8,8"), 3),
        (("n/a d | max(b) -> n d | max(b)", "--mesh", "a=2,b=2", "--shape", "8,8"), 0),
        (("o | max(dp) -> o/tp", *SERVE[1:5], "--shape", "64"), 0),
    ],
    ids=["gradient of a max", "a max that stays one", "between meshes"],
)
def test_plan_of_a_max_prints_the_plans_of_its_gradient(arguments, backwards):
    told = xshard("plan", *arguments).stdout
    assert told.count("backward, " if backwards else "backward") == backwards


@pytest.mark.parametrize(("arguments", "options"), [
    ((*ULYSSES, "--profile", "bandwidth"), {"mesh": MESH, "shape": (2, 64, 32), "profile": "bandwidth"}),
    ((*ULYSSES, "--objective", "forward+backward"),
        {"mesh": MESH, "shape": (2, 64, 32), "objective": "forward+backward"}),
    ((*COLUMNS, "--profile", "bandwidth", "--objective", "forward"), COLUMNS_PLAN | {"objective": "forward"}),
])  # fmt: skip
def test_plan_json_parses_back(arguments, options):
    plan = xs.plan(arguments[0], **options)
    assert type(plan).from_json(xshard("plan", *arguments, "--json").stdout) == plan


def test_plan_keeps_the_memory_limit():
    arguments = ("plan", "n/a -> n", "--mesh", "a=4", "--shape", "1024", "--memory-limit")
    assert "no plan stays within 4.00 KiB per device" in xshard(*arguments, "4KiB", code=2).stderr
    xshard(*arguments, "1MiB")


@pytest.mark.parametrize(
    ("options", "devices"),
    [((), ()), (("--src-devices", "2-5", "--dst-devices", "4,3"), ((2, 3, 4, 5), (4, 3)))],
)
def test_plan_between_two_meshes(options, devices, tmp_path):
    meshes = {"src_mesh": xs.Mesh(dp=4), "dst_mesh": xs.Mesh(tp=2)}
    places = dict(zip(("src_devices", "dst_devices"), devices, strict=False))
    plan = xs.plan(SERVE[0], **meshes, **places, shape=(64, 32))
    assert xs.Plan.from_json(xshard("plan", *SERVE, *options, "--json").stdout) == plan
    told = xshard("plan", *SERVE, *options).stdout
    assert all(str(part).splitlines()[0] in told for part in (plan, plan.backward))
    xshard("plan", *SERVE, *options, "--html", str(tmp_path / "page.html"))
    assert "transfer" in (tmp_path / "page.html").read_text()


def test_plan_of_a_contraction_prints_its_moves():
    told = words(xshard("plan", *COLUMNS, "--profile", "bandwidth", "--explain").stdout)
    plan = xs.plan(COLUMNS[0], **COLUMNS_PLAN)
    assert all(words(line) in told for line in str(plan).splitlines())


def test_plan_of_a_contraction_explains_both_passes():
    told = words(xshard("plan", *COLUMNS, "--profile", "bandwidth", "--explain").stdout)
    plan = xs.plan(COLUMNS[0], **COLUMNS_PLAN)
    assert words(plan.explain()) in told


def test_plan_of_both_passes_tells_their_sum():
    plan = ("plan", *ULYSSES, "--objective")
    assert "with the backward's" in xshard(*plan, "forward+backward").stdout
    assert "objective is 'backward', not Objective" in xshard(*plan, "backward", code=2).stderr


@pytest.mark.parametrize(
    ("expression", "options", "message"),
    [
        (
            COLUMNS[0],
            ("--shape", "8,64"),
            "a contraction takes --sizes, as in b=8,s=64 in 'b s/tp d, d",
        ),
        ("n/tp -> n", ("--sizes", "n=8"), "--shape is due, as in 2,64,32 in 'n/tp -> n'"),
        ("n/tp -> n", ("--sizes", "n=8", "--shape", "8"), "--sizes beside --shape in 'n/tp -> n'"),
        ("n/tp, n -> n", ("--sizes", "n=8", "--shape", "8"), "--shape beside --sizes in 'n/tp, n"),
        ("n/tp, n -> n", ("--sizes", "n=8,n=9"), "dim 'n' twice in\n    'n=8,n=9'\n         ^^^"),
        (
            "n/tp, n -> n",
            ("--sizes", "n=x"),
            "length >= 0 in\n    'n=x'\n     ^^^\n  as in b=8,s=64",
        ),
        ("n/tp, n -> n", ("--sizes", "m=8"), "sizes has no length for dim 'n'"),
    ],
)
def test_lengths_that_do_not_fit(expression, options, message):
    assert message in xshard("plan", expression, "--mesh", "tp=2", *options, code=2).stderr


# --- show


@pytest.mark.parametrize(("layout", "mesh", "lengths", "parts"), [
    ("b s/zigzag(cp) c | sum(tp)", "cp=2,tp=2", ("--shape", "2,8,4"), (
        "s 8 / c 4 0-3 0-1 sum d0-1 2-3 sum d2-3 4-5 sum d2-3 6-7 sum d0-1",
        " 0 0 0 2x4x4 0-1, 6-7 ", " 3 1 1 2x4x4 2-5",
        "along tp every device holds an addend: the array is their sum")),
    ("n/a d/b", "a=2,b=2", ("--shape", "4,6"), ("n 4 / d 6 0-2 3-5 0-1 d0 d1 2-3 d2 d3",)),
    ("h/sp:halo(1,1)", "sp=2", ("--shape", "8"),
        ("h 8 0-3 4-7 d0 d1", "h held", "0 0 6 0-3 1 fill, 0-4")),
    ("a/x b/y c/z", "x=2,y=2,z=2", ("--shape", "4,4,4", "--dims", "b, c"), ("b 4 / c 4", "not drawn: a")),
    ("()", "a=2", ("--shape", ""), ()),  # the least arrays
    ("n/a", "a=2", ("--shape", "0"), ()),
    ("n", "", ("--shape", "3"), ()),
])  # fmt: skip
def test_show_draws(layout, mesh, lengths, parts):
    told = words(xshard("show", layout, "--mesh", mesh, *lengths).stdout)
    assert told and all(part in told for part in parts)


def test_show_draws_all_arrays_of_a_contraction():
    told = xshard(
        "show", "n d/tp, d/tp f -> n/tp f", "--mesh", "tp=2", "--sizes", "n=4,d=6,f=3"
    ).stdout
    titles = [line for line in told.splitlines() if " on tp=2" in line]
    assert titles == [
        "n d/tp   [4, 6] on tp=2",
        "d/tp f   [6, 3] on tp=2",
        "n/tp f   [4, 3] on tp=2",
    ]
    assert words(told).count("0 0 ") == 3
    xshard("show", "n/tp", "--mesh", "tp=2", "--sizes", "n=4", code=2)


def test_show_breaks_a_wide_grid_into_bands(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    told = xshard("show", "s/cyclic(cp)", "--mesh", "cp=4", "--shape", "32").stdout
    grid = [line for line in told.splitlines() if re.match(r" +(s 32 |d\d)", line)]
    assert len(grid) >= 4 and max(map(len, grid)) <= 60
    assert [int(d) for d in re.findall(r"d(\d)", " ".join(grid))] == [0, 1, 2, 3] * 8


def test_show_colours_by_owner(monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    told = xshard("show", "s/zigzag(cp)", "--mesh", "cp=2", "--shape", "8").stdout
    first, second, third, fourth = re.findall(r"\x1b\[30;(\d+)m *d\d", told)
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
    told = xshard(*arguments, code=2)
    assert told.stdout == "" and "Traceback" not in told.stderr
    lines = told.stderr.splitlines()
    caret = next(i for i, line in enumerate(lines) if set(line) == {" ", "^"})
    span = slice(lines[caret].index("^"), len(lines[caret]))
    assert lines[caret - 1][span] == marked
    assert len(lines[caret - 1]) <= int(columns)


def test_wrong_usage_exits_with_2():
    xshard("selfcheck", code=2)
    xshard("selfcheck", "n/a -> n", code=2)
    xshard("selfcheck", "--all", "--mesh", "a=2", code=2)
    xshard("plan", "n/a -> n", code=2)
    xshard("plan", "n/a -> n", "--shape", "8", code=2)
    xshard("plan", *SERVE, "--mesh", "a=2", code=2)
    xshard("plan", *SERVE, "--explain", code=2)
    xshard("no-such-command", code=2)


@pytest.mark.parametrize("command", ["plan", "show", "selfcheck"])
def test_help_has_an_example_that_runs(command):
    told = xshard(command, "--help").stdout
    example = re.search(rf"Example: xshard {command} \"(.+?)\" (.+)", told)
    numpy_only = ("--runtime", "numpy") if command == "selfcheck" else ()
    xshard(command, example[1], *example[2].split(), *numpy_only)


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
    code = "import sys, xshard, xshard.testing.plans, xshard.pictures.grid\n"
    code += "assert not {'typer', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- selfcheck


MOVE = ("n/dp d -> n d | copy(dp)", "--mesh", "dp=2", "--shape", "4,3")
PRODUCT = ("s/cp d, d f/cp | mean(x) -> f/cp s", "--mesh", "cp=2,x=2", "--sizes", "s=4,d=3,f=2")


def selfcheck_one(*options: str, code: int = 0):
    return xshard("selfcheck", *MOVE, *options, code=code)


def answer_with(monkeypatch, change):
    """Let every worker answer as the reference does, changed by `change`; returns the calls."""
    calls = []

    class Answers:
        def ask(self, function, questions, **_):
            calls.append((function, questions[0].mode, len(questions)))
            return [change(in_numpy(question)) for question in questions]

    monkeypatch.setattr(backends, "running", lambda package, environment: Answers())
    monkeypatch.setattr(backends, "find_spec", lambda _: object())
    return calls


def one_off(arrays, number=0):
    """The blocks of arrays, with the last element of the last device changed in one of them."""
    name = list(arrays)[number]
    last = arrays[name][-1].copy()
    last.flat[-1] += 1
    return arrays | {name: (*arrays[name][:-1], last)}


@pytest.mark.parametrize(
    ("dtype", "n_bytes"), [("float32", 24), ("float64", 48), ("int32", 24), ("bfloat16", 12)]
)
def test_selfcheck_on_numpy_alone(dtype, n_bytes):
    told = selfcheck_one("--runtime", "numpy", "--dtype", dtype).stdout
    assert "numpy 0 0 - -" in words(told)
    assert f"planned: {n_bytes} B forward, {n_bytes} B backward" in told
    assert "1 expression on numpy: all equal" in told


def test_selfcheck_shows_what_every_worker_measured(monkeypatch):
    calls = answer_with(monkeypatch, lambda o: replace(o, forward_bytes=24, backward_bytes=48))
    monkeypatch.setenv("COLUMNS", "80")
    shown = selfcheck_one().stdout
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    told = words(shown)
    assert calls == [
        ("torch_bridge.testing.worker.answers", "", 1),
        *(("jax_bridge.testing.worker.answers", mode, 1) for mode in ("vma", "novma", "pmap")),
    ]
    assert all(f"{runtime.name} 0 0 24 B 48 B" in told for runtime in plans.RUNTIMES[1:])


def each(arrays, change):
    return {name: tuple(map(change, blocks)) for name, blocks in arrays.items()}


@pytest.mark.parametrize(
    ("given", "change", "row"),
    [
        (MOVE, lambda o: replace(o, outputs=one_off(o.outputs)), "torch 1 0 "),
        (MOVE, lambda o: replace(o, gradients=one_off(o.gradients)), "torch 0 1 "),
        (MOVE, lambda o: replace(o, outputs={"output": o.outputs["output"][:1]}), "torch inf 0 "),
        (
            MOVE,
            lambda o: replace(o, outputs=each(o.outputs, lambda b: b.astype("f8"))),
            "torch inf 0 ",
        ),
        (
            MOVE,
            lambda o: replace(o, gradients=each(o.gradients, lambda b: b * np.nan)),
            "torch 0 inf ",
        ),
        (PRODUCT, lambda o: replace(o, gradients=one_off(o.gradients)), "torch 0 1 "),
        (PRODUCT, lambda o: replace(o, gradients=one_off(o.gradients, 1)), "torch 0 1 "),
    ],
)
def test_selfcheck_exits_with_1_where_a_runtime_is_wrong(monkeypatch, given, change, row):
    answer_with(monkeypatch, change)
    told = xshard("selfcheck", *given, "--runtime", "numpy,torch", code=1).stdout
    assert "numpy 0 0 " in words(told) and row in words(told)
    assert "DIFFERENT" in told and "1 different, 0 failed, of 2 runs" in told


@pytest.mark.parametrize("where", ["outputs", "gradients"])
def test_selfcheck_exits_with_1_where_the_reference_itself_is_wrong(monkeypatch, where):
    wrong = lambda q: replace(o := in_numpy(q), **{where: one_off(getattr(o, where))})  # noqa: E731
    monkeypatch.setattr(plans, "in_numpy", wrong)
    selfcheck_one("--runtime", "numpy", code=1)


def test_selfcheck_exits_with_1_where_a_runtime_fails(monkeypatch):
    broken = replace(backends.BACKENDS["torch"], package="numpy")
    monkeypatch.setattr(plans, "RUNTIMES", (plans.RUNTIMES[0], plans.Runtime("torch", broken)))
    result = selfcheck_one(code=1)
    assert "numpy 0 0" in words(result.stdout) and re.search(
        r"torch( -)+ failed", words(result.stdout)
    )
    assert (
        "FunctionError: torch: ModuleNotFoundError in numpy_bridge.testing.worker.answers"
        in result.stderr
    )
    assert "No module named 'numpy_bridge'" in result.stderr


def test_selfcheck_does_not_skip_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "jax" else object())
    told = selfcheck_one(code=2).stderr
    assert "jax is not installed" in told and "leave jax-vma out with --runtime" in told


def test_selfcheck_refuses_what_cannot_run():
    for arguments, message in (
        ((*MOVE, "--runtime", "tpu"), "no runtime 'tpu'"),
        ((*PRODUCT, "--runtime", "jax-pmap"), "jax-pmap cannot run on Mesh(cp=2, x=2)"),
        (
            ("n/a, n -> n", "--mesh", "a=2", "--sizes", "n=2", "--dtype", "int32"),
            "no gradients of a contraction in int32",
        ),
    ):
        assert message in xshard("selfcheck", *arguments, code=2).stderr


def test_what_cannot_be_written_served_or_held_is_said(tmp_path):
    for command, message in (
        (("explore", "--port", "99999", "--no-browser"), "port 99999: "),
        (("plan", *MOVE, "--html", ""), ".: Is a directory"),
        (("plan", *MOVE, "--html", str(tmp_path / "no" / "x.html")), "x.html: No such file"),
        (
            ("selfcheck", "a/x -> a", "--mesh", "x=2", "--shape", "1000000000000"),
            "have 10.91 TiB together",
        ),
        (
            ("show", "a/x", "--mesh", "x=100000", "--shape", "200000"),
            "100000 devices, a drawing has up to",
        ),
    ):
        assert message in xshard(*command, code=2).stderr
    page = tmp_path / "x.html"
    assert (
        '"steps"' in xshard("plan", *MOVE, "--json", "--html", str(page)).stdout
        and page.stat().st_size
    )


def test_selfcheck_all_asks_each_worker_once(monkeypatch):
    calls = answer_with(monkeypatch, lambda o: o)
    told = xshard("selfcheck", "--all").stdout
    one_axis = sum(len(xs.Mesh.parse(e.mesh).axes) == 1 for e in EXAMPLES)
    assert [n for _, _, n in calls] == [len(EXAMPLES)] * 3 + [one_axis]
    assert all(f"{example.expression}   float32" in told for example in EXAMPLES)
    assert f"jax-pmap ({one_axis} of them): all equal" in told


def test_the_examples_differ():
    assert len({e.expression for e in EXAMPLES}) == len(EXAMPLES) >= 13


def test_every_example_is_canonical():
    for example in EXAMPLES:
        texts = re.split(r", (?![^(]*\))| -> ", example.expression)
        *given, result = (str(xs.Layout.parse(text)) for text in texts)
        assert f"{', '.join(given)} -> {result}" == example.expression
        assert xs.Mesh.parse(example.mesh).n_devices <= 4


@pytest.mark.parametrize(
    ("expression", "lengths"),
    [
        ("b s/zigzag(cp) c -> b s c/cp", ("--shape", "2,8,4")),
        ("s/cp d, d f/cp -> f/cp s", ("--sizes", "s=4,d=3,f=2")),
    ],
)
def test_selfcheck_end_to_end(expression, lengths):
    """Every runtime in its own process, for real."""
    told = words(xshard("selfcheck", expression, "--mesh", "cp=2", *lengths).stdout)
    assert all(f"{runtime.name} 0 0 " in told for runtime in plans.RUNTIMES)


# --- suggest


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
# What is searched is tested elsewhere: one axis and few examples are searched in a second.
SUGGEST = ("--mesh", "dp=2", "--batch", "2", "--sequence", "8", "--memory", "80GiB")


def config_in(folder, **changes):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps({**LLAMA, **sizes, **changes}))
    return str(folder)


@pytest.fixture(scope="module")
def suggested(tmp_path_factory):
    """The path of a configuration, and what Python suggests for it."""
    import torch
    import transformers

    import torch_bridge as xt

    path = config_in(tmp_path_factory.mktemp("suggest"))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.AutoConfig.from_pretrained(path, use_cache=False)
        )
        batch = {"input_ids": torch.empty(2, 8, dtype=torch.int64)}
    fixed = {"input_ids": "b/dp s"}
    plan = xt.suggest(model.bfloat16(), batch, xs.Mesh(dp=2), memory="80GiB", fixed=fixed)
    return path, plan


def test_suggest_prints_what_python_says(suggested):
    path, plan = suggested
    told = xshard(
        "suggest", path, *SUGGEST, "--fixed", "input_ids=b/dp s", "--why", "lm_head.weight"
    ).stdout
    assert told == f"{plan}\n{plan.why('lm_head.weight')}\n"


def test_suggest_writes_the_same_plan_to_files(suggested, tmp_path):
    path, plan = suggested
    page = tmp_path / "page.html"
    how = ("--fixed", "input_ids=b/dp s", "--json", "--html", str(page))
    rules = json.loads(xshard("suggest", path, *SUGGEST, *how).stdout)
    assert rules["parameters"] == dict(plan.parameters.items()) and "b/dp" in rules["inputs"][""]
    bar = r">([\w ]+)</td><td[^>]*>[^<]*</td><td[^>]*><div style=\"width:([\d.]+)%"
    bars = re.findall(bar, page.read_text())
    of_each = [
        value / max(kind.values()) for kind in (plan.parts, plan.memory) for value in kind.values()
    ]
    assert [name for name, _ in bars] == [*plan.parts, *plan.memory]
    assert [float(width) for _, width in bars] == pytest.approx(
        [100 * share for share in of_each], abs=0.06
    )


def test_suggest_takes_images_too(tmp_path):
    images = {"image_size": 16, "patch_size": 4, "num_labels": 8}
    path = config_in(
        tmp_path, model_type="vit", architectures=["ViTForImageClassification"], **images
    )
    assert '"vit.embeddings' in xshard("suggest", path, *SUGGEST, "--json").stdout


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"architectures": None},
            (),
            'names no model of transformers\n  as in "model_type": "llama"',
        ),
        ({"model_type": "lama"}, (), "names no model of transformers"),
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            (),
            "any batch",
        ),
        (
            {},
            ("--fixed", "input_ids"),
            "--fixed 'input_ids' lacks a layout\n  as in --fixed 'input_ids=b/dp s'",
        ),
        ({}, ("--why", "lm_heat.weight"), "did you mean 'lm_head.weight'"),
        ({}, ("--memory", "1KiB"), "the step does not fit '1KiB' per device"),
        ({}, ("--dtype", "float33"), "float33"),
    ],
)
def test_suggest_refuses(changes, options, message, tmp_path):
    assert (
        message
        in xshard("suggest", config_in(tmp_path, **changes), *SUGGEST, *options, code=2).stderr
    )


def test_suggest_without_a_config_says_how_to_get_one(tmp_path):
    told = xshard("suggest", str(tmp_path / "config.json"), *SUGGEST, code=2).stderr
    assert "there is no '" in told and "`hf download NAME config.json` fetches a config" in told
