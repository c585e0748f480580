"""The examples run, agree with themselves, and fail where they should."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.documents.forking import TIMEOUT_S, script

EXAMPLES = Path(__file__).parents[2] / "examples"
DIFFERENCE = "largest relative difference"


def printed(name: str, *options: str, **environment: str) -> str:
    """The output of an example, which must succeed; all that import torch are forks of a process that has."""
    from tests.torch_bridge.helpers import (
        apart,
    )  # imports torch, which the rest of this file does not

    variables = {"COLUMNS": "400", **environment}  # no line of a table is broken
    status, text, errors = apart(script, str(EXAMPLES / f"{name}.py"), [*options], variables)
    assert status == 0, text + errors
    return text


@contextmanager
def imported(name: str) -> Iterator[Any]:
    """A script of the examples as a module, and what stands beside it to be imported."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def test_the_demo_runs_as_for_a_user() -> None:
    """As a user runs it, in an interpreter of its own."""
    command = [sys.executable, str(EXAMPLES / "demo.py")]
    environment = {**os.environ, "COLUMNS": "400"}
    options: Any = {"capture_output": True, "text": True, "timeout": TIMEOUT_S, "env": environment}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "received 96 B (1.00x the bound of 96 B)" in done.stdout and DIFFERENCE in done.stdout


RUNS = {
    "train_parity": ("--steps", "2", "--any-accuracy"),
    "jax_layer_in_torch": ("--steps", "2", "--any-accuracy"),
    "mixed_parallel": ("--steps", "2"),
    "long_context": ("--quick",),
}


@pytest.mark.parametrize("name", RUNS)
def test_all_runtimes_agree(name: str) -> None:
    text = printed(name, *RUNS[name])
    assert DIFFERENCE in text
    assert name != "long_context" or ("1.75" in text and "1.00" in text)


def test_a_network_on_cut_photographs_is_that_of_one_device(tmp_path: Path) -> None:
    picture = tmp_path / "seams.png"
    options = ("--steps", "2", "--picture", str(picture))
    assert DIFFERENCE in printed("domain_parallel", *options, DOMAIN_COLUMNS="16")
    assert picture.stat().st_size > 10_000


def test_a_block_written_as_expressions_is_that_of_one_device() -> None:
    text = printed("llama_block", "--steps", "2")
    assert DIFFERENCE in text
    rows = (
        line.strip().split() for line in text.splitlines() if ", torch" in line or ", JAX" in line
    )
    alone, *sharded = (row[-2:] for row in rows)
    assert alone == ["0", "0"] and ["0", "0"] not in sharded
    assert sharded[:2] == sharded[2:]  # both frameworks send the same


def test_whole_matrices_for_one_device_each() -> None:
    text = printed("muon")
    assert "elements per device [10240, 10240, 11264, 11264], largest difference 0.0" in text


def test_stages_on_meshes_of_different_shape_train_as_one_device() -> None:
    lines = printed("pipeline").splitlines()
    assert "1F1B, stage 0: F0 F1 F2 B0 F3 B1 B2 B3" in lines
    assert any(line.startswith("zero bubble, stage 1: F0 I0 ") and " W3" in line for line in lines)
    results = [line for line in lines if line.endswith("as on one device: True")]
    assert len(results) == 4 and len(lines) == 8


def test_a_graph_network_on_a_sphere_is_that_of_one_device(tmp_path: Path) -> None:
    picture = tmp_path / "parts.svg"
    text = printed("graph_sphere", "--refinements", "2", "--parts", "4", "--picture", str(picture))
    rows = {line[:16].strip(): line.split() for line in text.splitlines()}
    assert rows["4"] == ["4", "15.2", "5.4", "3.5", "3.5", "3.6"]
    assert rows["torch, 4 ranks"][-1] == rows["JAX, 4 devices"][-1] == "3.5" and DIFFERENCE in text
    assert picture.read_text().count("<path") == 2 * 9


def test_bugs_in_a_port_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has the kit's."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "argv", ["port_check", "--bugs", "bias", "gelu", "norm"])
    with imported("port_check") as module:
        assert module.main() == 0
    same, bias, gelu, norm = capsys.readouterr().out.split("With a bug in")
    assert "The same on dp=1,tp=4; dp=2,tp=2: output, 9 gradients, 8 updated weights" in same
    assert "weights['down_bias'] is counted 4 times" in bias
    assert "an approximation (a GELU by tanh" in gelu
    assert "jax dp=1,tp=1" in gelu and "tp=4" not in gelu  # how it is cut is right
    assert "a sum over (dp,tp) is missing" in norm


def test_suggested_rules_train_as_predicted() -> None:
    lines = printed("suggest_and_train", "--steps", "2").splitlines()
    rows = {line[:24].strip(): line.split()[-1] for line in lines[-8:] if line.strip()}
    assert rows["optimizer state"] == "1.00"
    assert (
        0.9 < float(rows["parameters, activations"]) < 1.1
        and "All gradients are those of one device" in lines[-1]
    )


def test_a_server_outlives_its_trainer() -> None:
    lines = printed("train_and_serve", "--versions", "3", "--kill").splitlines()
    at = next(
        i for i, line in enumerate(lines) if line.startswith("version 2 did not arrive whole")
    )
    assert lines[at].endswith("version 1 stays") and lines[at - 1].startswith("version 1: ")
    assert any("the last of these answers, by version 1, is later" in line for line in lines[at:])
    assert lines[-1].startswith("version 3: ") and lines[-1].endswith("moved a version")


# Few processes, and in JAX few programs to compile: each is another mesh than dp=2,tp=2.
ELSEWHERE = {"torch": ("--elsewhere", "dp=1,tp=2"), "jax": ("--elsewhere", "dp=1,tp=1", "--jax")}


@pytest.mark.parametrize("framework", ELSEWHERE)
def test_a_killed_run_goes_on_with_its_own_bits_and_elsewhere_as_on_one_device(
    framework: str,
) -> None:
    text = printed("kill_and_resume", *ELSEWHERE[framework], "--steps", "8", "--save-every", "2")
    assert "Resumed, the same mesh has its own bits, and another the losses of one device" in text
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert rows["undisturbed"][1:4] == ["1", "to", "8"]
    assert int(rows["resumed"][1]) > 2
    assert rows["resumed elsewhere"][0] == ELSEWHERE[framework][1]


def test_a_run_in_bfloat16_is_near_that_in_float32(tmp_path: Path) -> None:
    losses = []
    for options in ((), ("--bfloat16",)):
        text = printed("run", str(tmp_path / f"{len(losses)}"), "--steps", "1", *options)
        losses.append([json.loads(line)["loss"] for line in text.splitlines()])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.01)


def test_the_demo_fails_where_a_gradient_or_a_loss_is_wrong() -> None:
    with imported("demo") as demo:
        quiet = demo.Console(quiet=True)
        assert demo.compare_gradients(quiet, {"xshard: n/dp -> n": 1.0, "another system": 4.0})
        assert not demo.compare_gradients(quiet, {"xshard: n/dp -> n": 4.0})
        assert demo.compare_losses(quiet, {"a": [1.0] * demo.STEPS, "b": [1.000001] * demo.STEPS})
        assert not demo.compare_losses(quiet, {"a": [1.0] * demo.STEPS, "b": [1.0001] * demo.STEPS})


def result(*losses: float, accuracy: float = math.nan) -> object:
    """A run's result, as the scripts read it; they have been imported."""
    return sys.modules["support.runs"].Result(losses, accuracy, 1.0)


def parity(module: ModuleType, last: float, accuracy: float) -> int:
    """Three runs that agree, but for the last loss of the last."""
    runs = zip(module.RUNS, (0.5, 0.5, last), strict=True)
    return module.judge({name: result(2.5, 1.25, loss, accuracy=accuracy) for name, loss in runs})


def domain(module: ModuleType, last: float, pixel: float) -> int:
    whole = np.zeros((1, 3, 4, 4))
    images = {"whole": whole, "sharded": whole + pixel, "alone": whole + 1}
    return module.judge({"a": result(1.5, 0.5), "b": result(1.5, last)}, images)


def mixed(module: ModuleType, loss: float, gradient: float) -> int:
    one, four = (
        ([2.0, x], {"p": module.torch.full((2,), g)}) for x, g in ((1.0, 1.0), (loss, gradient))
    )
    return module.judge(one, four, Console())


def context(module: ModuleType, first: float, last: float) -> int:
    runs = zip(module.RUNS, ((first, 3.0), (first, 3.0), (first, last)), strict=True)
    return module.judge({name: result(*losses) for name, losses in runs})


def llama(module: ModuleType, first: float, last: float, gradient: float) -> int:
    one, four = (
        module.Run([first, x], {"w": np.full(2, g)}) for x, g in ((1.0, 1.0), (last, gradient))
    )
    return module.judge(one, {"four": four}, Console())


def sphere(module: ModuleType, apart: float) -> int:
    one, four = (module.Run(np.ones(2), {"w": np.full(2, x)}, 0) for x in (1.0, 1.0 + apart))
    return module.judge(one, {"four": four}, Console())


def serving(module: ModuleType, version: int, apart: float) -> int:
    said = {"version": version, "answers": 5, "apart": apart, "bytes": 2048}
    return module.judge([said], 2, Console())


def suggested(module: ModuleType, last: float) -> int:
    run = module.Measured([2.0, last], 0.5, {"gradients": 2048})
    return module.judge(0.25, {"gradients": 1024}, run, Console())


# A script, what of its runs to judge, the exit status, and what is said how often.
JUDGED = (
    ("train_parity", parity, (0.500001, 0.95), 0, "2.0e-06", 3),
    *(
        ("train_parity", parity, (x, 0.95), 1, "The losses differ by", 1)
        for x in (0.5001, 0.4999, math.nan)
    ),
    *(("train_parity", parity, (0.5, x), 1, "it must exceed 90%", 3) for x in (0.9, 0.1, math.nan)),
    ("domain_parallel", domain, (0.50001, 0.0), 1, "losses differ", 1),
    ("domain_parallel", domain, (0.5, 0.1), 1, "Pixels differ", 1),
    *(
        ("mixed_parallel", mixed, x, 1, "They differ by more than", 1)
        for x in ((1.001, 1.0), (1.0, 0.5))
    ),
    ("long_context", context, (4.0, 3.0), 0, DIFFERENCE, 1),
    *(("long_context", context, (4.0, x), 1, "losses differ", 1) for x in (3.001, math.nan)),
    ("long_context", context, (2.5, 3.0), 1, "went", 3),
    ("llama_block", llama, (2.0, 1.0, 1.0), 0, DIFFERENCE, 1),
    *(("llama_block", llama, (2.0, x, 1.0), 1, "They differ by", 1) for x in (1.001, math.nan)),
    ("llama_block", llama, (2.0, 1.0, 0.5), 1, "They differ by", 1),
    ("llama_block", llama, (1.0, 1.0, 1.0), 1, "went from", 1),
    ("suggest_and_train", suggested, (1.0,), 0, "to 1.000.", 1),
    *(("suggest_and_train", suggested, (x,), 1, "The loss went from", 1) for x in (2.0, math.nan)),
    ("graph_sphere", sphere, (1e-13,), 0, DIFFERENCE, 1),
    *(("graph_sphere", sphere, (x,), 1, "They differ by", 1) for x in (1e-11, math.nan)),
    ("train_and_serve", serving, (2, 0.0), 0, "2.00 KiB moved", 1),
    ("train_and_serve", serving, (1, 0.0), 1, "ended with version 1 of 2", 1),
    ("train_and_serve", serving, (2, 1e-6), 1, "not that of its version", 1),
)


@pytest.mark.parametrize(("name", "judge", "runs", "status", "said", "times"), JUDGED)
def test_runs_that_differ_or_have_not_learned_fail(
    name: str,
    judge: Any,
    runs: Any,
    status: int,
    said: str,
    times: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with imported(name) as module:
        assert judge(module, *runs) == status
    assert capsys.readouterr().out.count(said) == times


def test_a_zigzag_shares_causal_work_out_evenly() -> None:
    with imported("long_context") as module:
        contiguous, zigzag = (module.work(cut) for cut in ("s/cp", "s/zigzag(cp)"))
    assert contiguous.sum() == zigzag.sum() == 512 * 513 // 2
    assert len(set(zigzag.tolist())) == 1
    assert round(contiguous.max() / contiguous.mean(), 2) == 1.75
