"""The examples run, agree with themselves, and fail where they should."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def parity() -> Iterator[ModuleType]:
    """examples/train_parity.py as a module: neither torch nor JAX is loaded by it."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_parity

        yield train_parity
    finally:
        sys.path.remove(str(EXAMPLES))


def results(parity: ModuleType, *losses: float, accuracy: float = 0.95) -> dict[str, object]:
    """Three runs that agree, but for the last loss of each as given."""
    return {
        name: parity.Result((2.5, 1.25, last), accuracy, seconds=1.0)
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


@pytest.fixture(scope="module")
def domain() -> Iterator[ModuleType]:
    """examples/domain_parallel.py as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import domain_parallel

        yield domain_parallel
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize(
    ("last", "pixel", "message"), [(0.50001, 0.0, "losses differ"), (0.5, 0.1, "Pixels differ")]
)
def test_a_seam_or_another_loss_fails(
    domain: ModuleType, capsys: pytest.CaptureFixture[str], last: float, pixel: float, message: str
) -> None:
    found = {name: domain.Result((1.5, loss), math.nan, 1.0) for name, loss in (("a", 0.5), ("b", last))}
    whole = np.zeros((1, 3, 4, 4))
    images = {"whole": whole, "sharded": whole + pixel, "alone": whole + 1}
    assert domain.judge(found, images) == 1
    assert message in capsys.readouterr().out


def test_a_jax_layer_in_torch_has_the_losses_of_torch() -> None:
    command = [sys.executable, str(EXAMPLES / "jax_layer_in_torch.py"), "--steps", "2", "--any-accuracy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest relative difference" in done.stdout
