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

EXAMPLES = Path(__file__).parents[2] / "examples"


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
    command = [sys.executable, str(EXAMPLES / "train_parity.py"), "--steps", "5", "--any-accuracy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest relative difference" in done.stdout


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
    command = [
        sys.executable,
        str(EXAMPLES / "domain_parallel.py"),
        "--steps",
        "2",
        "--picture",
        str(picture),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest relative difference" in done.stdout
    assert picture.stat().st_size > 10_000


def test_a_port_is_shown_to_be_the_same_and_bugs_in_it_are_named() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "port_check.py"), "--bugs", "bias", "gelu", "norm"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "COLUMNS": "400"},  # no line of the table is broken
    )
    assert done.returncode == 0, done.stdout + done.stderr
    same, bias, gelu, norm = done.stdout.split("With a bug in")
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
    command = [sys.executable, str(EXAMPLES / "mixed_parallel.py"), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest relative difference" in done.stdout


@pytest.mark.parametrize(("loss", "gradient"), [(1.001, 1.0), (1.0, 0.5)])
def test_another_loss_or_gradient_fails(loss: float, gradient: float) -> None:
    code = (
        "import sys, torch; from rich.console import Console; from mixed_parallel import judge;"
        "run = lambda loss, g: ([2.0, loss], {'p': torch.full((2,), g)});"
        f"sys.exit(judge(run(1.0, 1.0), run({loss}, {gradient}), Console()) + 10)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 11 and "They differ by more than" in done.stdout, done.stderr


def test_a_model_with_its_context_on_four_devices_is_that_of_one() -> None:
    command = [sys.executable, str(EXAMPLES / "long_context.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest relative difference" in done.stdout
    assert "1.75" in done.stdout and "1.00" in done.stdout


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
    command = [sys.executable, str(EXAMPLES / "jax_layer_in_torch.py"), "--steps", "2", "--any-accuracy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest relative difference" in done.stdout
