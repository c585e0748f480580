"""`python -m tests.fuzz torch --moves 1000 --seed 7`: random cases on a runtime, mutated texts, or steps."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz import owner_steps
from tests.fuzz.run import RUNTIMES, Report, fuzz
from tests.fuzz.texts import failures, readers
from xshard.runtimes.backends import QUICK_XLA_FLAGS

TEXTS = "texts"
STEPS = "owner-steps"
MODELS = "models"


def run_chains(runtime: str, moves: int, seed: int) -> int:
    """Print what fails as it is found -> the number of failures."""
    told = 0
    report = Report()
    for report in fuzz(runtime, seed, moves):
        for name, why in list(report.failures.items())[told:]:
            print(f"\n{name}: {why}", flush=True)
        told = len(report.failures)
        if sys.stderr.isatty() or report.chains % 500 < 20:
            print(f"seed {seed}: {report}", file=sys.stderr, flush=True)
    print(f"{runtime}, seed {seed}: {report}")
    return told


def run_texts(n: int, seed: int) -> int:
    """As many texts of every reader -> the number of failures."""
    found = readers()
    total = 0
    for name, reader in found.items():
        wrong = list(failures(name, reader, seed, n // len(found)))
        total += len(wrong)
        print(
            *wrong,
            f"{name}, seed {seed}: {n // len(found)} texts, {len(wrong)} failures",
            sep="\n",
            flush=True,
        )
    return total


def run_steps(n: int, seed: int) -> int:
    """Take steps of `owner_steps`, which raise AssertionError -> no failures."""
    with TemporaryDirectory() as folder:
        print(f"{STEPS}, seed {seed}:", dict(owner_steps.run(n, seed, Path(folder))))
    return 0


def run_models(n: int, seed: int) -> int:
    """Draw cases of `models`, which raise an error -> no failures."""
    from tests.fuzz import models  # imports torch

    print(f"{MODELS}, seed {seed}:", dict(models.run(n, seed)))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", QUICK_XLA_FLAGS)  # a program runs twice
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=(*RUNTIMES, TEXTS, STEPS, MODELS))
    parser.add_argument(
        "--moves",
        type=int,
        default=1000,
        help="at least so many moves, contractions, trees, texts, steps or models",
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    others = {TEXTS: run_texts, STEPS: run_steps, MODELS: run_models}
    count = others.get(given.what, partial(run_chains, given.what))(given.moves, given.seed)
    sys.exit(bool(count))
