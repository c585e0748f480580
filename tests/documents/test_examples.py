"""The examples run, agree with themselves, and fail where they should."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

from tests.documents.forking import TIMEOUT_S, script

EXAMPLES = Path(__file__).parents[2] / "examples"


def as_a_user(name: str, *options: str) -> str:
    """The output of an example, in an interpreter of its own; it must succeed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "COLUMNS": "400"},  # no line of a table is broken
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed(name: str, *options: str, **environment: str) -> str:
    """The same, with everything that imports torch forked from a process that has imported it."""
    from tests.torch_bridge.helpers import apart  # imports torch, which the rest of this file does not

    variables = {"COLUMNS": "400", **environment}
    status, text, errors = apart(script, str(EXAMPLES / f"{name}.py"), [*options], variables)
    assert status == 0, text + errors
    return text


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """A script of the examples as a module, and what stands beside it to be imported."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def parity() -> Iterator[ModuleType]:
    """examples/train_parity.py as a module: neither torch nor JAX is loaded by it."""
    with imported("train_parity") as module:
        yield module


def result(*values: object, **named: object) -> object:
    """A run's result, as the scripts read it; they have been imported."""
    return sys.modules["support.runs"].Result(*values, **named)


def results(parity: ModuleType, *losses: float, accuracy: float = 0.95) -> dict[str, object]:
    """Three runs that agree, but for the last loss of each as given."""
    return {
        name: result((2.5, 1.25, last), accuracy, seconds=1.0)
        for name, last in zip(parity.RUNS, losses, strict=True)
    }


def test_a_short_training_agrees_on_all_runtimes() -> None:
    assert "largest relative difference" in as_a_user("train_parity", "--steps", "5", "--any-accuracy")


def test_the_demo_shows_equal_losses_and_both_gradients() -> None:
    text = as_a_user("demo")
    assert "received 96 B (1.00x the bound of 96 B)" in text and "largest relative difference" in text


def test_the_demo_fails_where_a_gradient_or_a_loss_is_wrong() -> None:
    with imported("demo") as demo:
        quiet = demo.Console(quiet=True)
        assert demo.compare_gradients(quiet, {"xshard: n/dp -> n": 1.0, "another system": 4.0})
        assert not demo.compare_gradients(quiet, {"xshard: n/dp -> n": 4.0})
        assert demo.compare_losses(quiet, {"a": [1.0] * demo.STEPS, "b": [1.000001] * demo.STEPS})
        assert not demo.compare_losses(quiet, {"a": [1.0] * demo.STEPS, "b": [1.0001] * demo.STEPS})


def test_equal_curves_pass(parity: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.judge(results(parity, 0.5, 0.5, 0.500001)) == 0
    assert "2.0e-06" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [0.5001, 0.4999, math.nan])
def test_a_loss_that_differs_fails(
    parity: ModuleType, capsys: pytest.CaptureFixture[str], wrong: float
) -> None:
    assert parity.judge(results(parity, 0.5, 0.5, wrong)) == 1
    assert "The losses differ by" in capsys.readouterr().out


@pytest.mark.parametrize("accuracy", [0.9, 0.1, math.nan])
def test_a_model_that_has_not_learned_fails(
    parity: ModuleType, capsys: pytest.CaptureFixture[str], accuracy: float
) -> None:
    assert parity.judge(results(parity, 0.5, 0.5, 0.5, accuracy=accuracy)) == 1
    assert capsys.readouterr().out.count("it must exceed 90%") == 3


def test_a_network_on_cut_photographs_is_that_of_one_device(tmp_path: Path) -> None:
    picture = tmp_path / "seams.png"
    options = ("--steps", "2", "--picture", str(picture))
    text = printed("domain_parallel", *options, DOMAIN_COLUMNS="64")
    assert "largest relative difference" in text
    assert picture.stat().st_size > 10_000


def test_a_port_is_shown_to_be_the_same_and_bugs_in_it_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has the kit's."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "argv", ["port_check", "--bugs", "bias", "gelu", "norm"])
    with imported("port_check") as module:
        assert module.main() == 0
    text = capsys.readouterr().out
    same, bias, gelu, norm = text.split("With a bug in")
    assert "The same on dp=1,tp=4; dp=2,tp=2: output, 9 gradients, 8 updated weights" in same
    assert "weights['down_bias'] is counted 4 times" in bias
    assert "an approximation (a GELU by tanh" in gelu
    assert "jax dp=1,tp=1" in gelu and "tp=4" not in gelu  # how it is cut is right
    assert "a sum over (dp,tp) is missing" in norm


@pytest.fixture(scope="module")
def domain() -> Iterator[ModuleType]:
    """examples/domain_parallel.py as a module."""
    with imported("domain_parallel") as module:
        yield module


@pytest.mark.parametrize(
    ("last", "pixel", "message"), [(0.50001, 0.0, "losses differ"), (0.5, 0.1, "Pixels differ")]
)
def test_a_seam_or_another_loss_fails(
    domain: ModuleType, capsys: pytest.CaptureFixture[str], last: float, pixel: float, message: str
) -> None:
    found = {name: result((1.5, loss), math.nan, 1.0) for name, loss in (("a", 0.5), ("b", last))}
    whole = np.zeros((1, 3, 4, 4))
    images = {"whole": whole, "sharded": whole + pixel, "alone": whole + 1}
    assert domain.judge(found, images) == 1
    assert message in capsys.readouterr().out


def test_ddp_fsdp_and_dtensor_in_one_script_train_as_one_process() -> None:
    assert "largest relative difference" in printed("mixed_parallel", "--steps", "3")


@pytest.fixture(scope="module")
def mixed() -> Iterator[ModuleType]:
    """examples/mixed_parallel.py as a module."""
    with imported("mixed_parallel") as module:
        yield module


@pytest.mark.parametrize(("loss", "gradient"), [(1.001, 1.0), (1.0, 0.5)])
def test_another_loss_or_gradient_fails(
    mixed: ModuleType, capsys: pytest.CaptureFixture[str], loss: float, gradient: float
) -> None:
    full, given = mixed.torch.full, ((1.0, 1.0), (loss, gradient))
    one, four = (([2.0, last], {"p": full((2,), g)}) for last, g in given)
    assert mixed.judge(one, four, Console()) == 1
    assert "They differ by more than" in capsys.readouterr().out


def test_a_model_with_its_context_on_four_devices_is_that_of_one() -> None:
    text = printed("long_context", "--quick")
    assert "largest relative difference" in text
    assert "1.75" in text and "1.00" in text


@pytest.fixture(scope="module")
def long_context() -> Iterator[ModuleType]:
    """examples/long_context.py as a module."""
    with imported("long_context") as module:
        yield module


def test_a_zigzag_shares_causal_work_out_evenly(long_context: ModuleType) -> None:
    contiguous, zigzag = (long_context.work(cut) for cut in ("s/cp", "s/zigzag(cp)"))
    assert contiguous.sum() == zigzag.sum() == 512 * 513 // 2
    assert len(set(zigzag.tolist())) == 1
    assert round(contiguous.max() / contiguous.mean(), 2) == 1.75


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ((4.0, 3.0), None),
        ((4.0, 3.001), "losses differ"),
        ((4.0, math.nan), "losses differ"),
        ((2.5, 3.0), "went"),
    ],
)
def test_another_loss_or_none_learned_fails(
    long_context: ModuleType,
    capsys: pytest.CaptureFixture[str],
    losses: tuple[float, float],
    message: str | None,
) -> None:
    first = (losses[0], 3.0)
    runs = (first, first, losses)
    found = {name: result(run, math.nan, 1.0) for name, run in zip(long_context.RUNS, runs, strict=True)}
    assert long_context.judge(found) == (message is not None)
    assert (message or "largest relative difference") in capsys.readouterr().out


def test_a_jax_layer_in_torch_has_the_losses_of_torch() -> None:
    assert "largest relative difference" in printed("jax_layer_in_torch", "--steps", "2", "--any-accuracy")


def test_a_block_written_as_expressions_is_that_of_one_device() -> None:
    text = printed("llama_block", "--steps", "2")
    assert "largest relative difference" in text
    rows = (line.strip().split() for line in text.splitlines() if ", torch" in line or ", JAX" in line)
    alone, *sharded = (row[-2:] for row in rows)
    assert alone == ["0", "0"] and ["0", "0"] not in sharded
    assert sharded[:2] == sharded[2:]  # both frameworks send the same


@pytest.fixture(scope="module")
def llama() -> Iterator[ModuleType]:
    """examples/llama_block.py as a module."""
    with imported("llama_block") as module:
        yield module


@pytest.mark.parametrize(
    ("losses", "gradient", "message"),
    [
        ((2.0, 1.0), 1.0, None),
        ((2.0, 1.001), 1.0, "They differ by"),
        ((2.0, math.nan), 1.0, "They differ by"),
        ((2.0, 1.0), 0.5, "They differ by"),
        ((1.0, 1.0), 1.0, "went from"),
    ],
)
def test_a_block_that_differs_or_has_not_learned_fails(
    llama: ModuleType,
    capsys: pytest.CaptureFixture[str],
    losses: tuple[float, float],
    gradient: float,
    message: str | None,
) -> None:
    one, four = (
        llama.Run([losses[0], last], {"w": np.full(2, g)}) for last, g in ((1.0, 1.0), (losses[1], gradient))
    )
    assert llama.judge(one, {"four": four}, Console()) == (message is not None)
    assert (message or "largest relative difference") in capsys.readouterr().out


def test_a_server_answers_while_weights_are_renewed_and_goes_on_without_its_trainer() -> None:
    lines = printed("train_and_serve", "--versions", "3", "--kill").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("version 2 did not arrive whole"))
    assert lines[at].endswith("version 1 stays") and lines[at - 1].startswith("version 1: ")
    assert any("the last of these answers, by version 1, is later" in line for line in lines[at:])
    assert lines[-1].startswith("version 3: ") and lines[-1].endswith("moved a version")


@pytest.fixture(scope="module")
def serving() -> Iterator[ModuleType]:
    """examples/train_and_serve.py as a module."""
    with imported("train_and_serve") as module:
        yield module


@pytest.mark.parametrize(
    ("version", "apart", "message"),
    [(2, 0.0, None), (1, 0.0, "ended with version 1 of 2"), (2, 1e-6, "not that of its version")],
)
def test_an_answer_of_no_version_fails(
    serving: ModuleType, capsys: pytest.CaptureFixture[str], version: int, apart: float, message: str | None
) -> None:
    said = {"version": version, "answers": 5, "apart": apart, "bytes": 2048}
    assert serving.judge([said], 2, Console()) == (message is not None)
    assert (message or "2.00 KiB moved") in capsys.readouterr().out
