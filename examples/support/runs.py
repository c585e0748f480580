"""A training run in a process of its own, and its reports while it runs.

JAX fixes its number of devices when it starts and torch forks its ranks, so neither runs in
the process that draws the progress bar. A run prints one line of JSON per step, and one at
the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EXAMPLES = Path(__file__).parent.parent


@dataclass(frozen=True)
class Result:
    """The loss of every step, the accuracy if the run reports one (else NaN), the seconds it took."""

    losses: tuple[float, ...]
    accuracy: float
    seconds: float


def report(**values: float) -> None:
    """One line from a run to the process that follows it."""
    print(json.dumps(values), flush=True)


def follow(arguments: list[str], on_step: Callable[[float], None]) -> Result:
    """Start `python -m arguments`, pass on every loss as it comes, return the result.

    Raises CalledProcessError if the run fails; by then its own message is on stderr.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", *arguments]
    losses, accuracy = [], float("nan")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES) as process:
        for line in process.stdout or ():
            if not line.startswith("{"):  # JAX's gloo prints its connections on stdout
                continue
            values = json.loads(line)
            if "loss" in values:
                losses.append(values["loss"])
                on_step(values["loss"])
            else:
                accuracy = values["accuracy"]
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Result(tuple(losses), accuracy, time.perf_counter() - start)


def follow_all(runs: Mapping[str, list[str]], steps: int) -> dict[str, Result]:
    """Every run, one after the other, under a progress bar. `steps` is added as its last argument."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}")) as progress:
        tasks = {name: progress.add_task(name, total=steps, start=False, loss=float("nan")) for name in runs}
        results = {}
        for name, arguments in runs.items():
            progress.start_task(tasks[name])
            results[name] = follow(
                [*arguments, str(steps)],
                lambda loss, task=tasks[name]: progress.update(task, advance=1, loss=loss),
            )
            progress.stop_task(tasks[name])
    return results
