"""Training runs in processes of their own: the side that follows them, and the side that trains and reports.

JAX fixes its number of devices when it starts and torch forks its ranks, so neither runs in the process that
draws the progress bar. A run prints one line of JSON per step, and one at the end.
"""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EXAMPLES = Path(__file__).parent.parent
Report = Mapping[str, float]  # of a step, or of the whole run


@dataclass(frozen=True)
class Result:
    """The loss of every step, the accuracy if the run reports one (else NaN), the seconds it took."""

    losses: tuple[float, ...]
    accuracy: float
    seconds: float


def options(doc: str | None, steps: int | None = None) -> ArgumentParser:
    """A parser that shows the first line of a script's docstring. steps: the default of `--steps`."""
    parser = ArgumentParser(description=(doc or "").partition("\n")[0])
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps)
    return parser


def follow(arguments: list[str], on_step: Callable[[float], None]) -> Result:
    """Start `python -m arguments`, pass on every loss as it comes, return the result.

    Exits with status 1 if the run fails; by then its own message is on stderr.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", *arguments]
    losses = []
    accuracy = float("nan")
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
        print(subprocess.CalledProcessError(process.returncode, command), file=sys.stderr)
        sys.exit(1)
    return Result(tuple(losses), accuracy, time.perf_counter() - start)


def follow_all(runs: Mapping[str, list[str]], steps: int) -> dict[str, Result]:
    """Every run, one after the other, under a progress bar. `steps` is added as its last argument."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}")) as progress:
        tasks = {
            name: progress.add_task(name, total=steps, start=False, loss=float("nan"))
            for name in runs
        }
        results = {}
        for name, arguments in runs.items():
            progress.start_task(tasks[name])
            results[name] = follow(
                [*arguments, str(steps)],
                lambda loss, task=tasks[name]: progress.update(task, advance=1, loss=loss),
            )
            progress.stop_task(tasks[name])
    return results


def report(**values: float) -> None:
    """One line from a run to the process that follows it."""
    print(json.dumps(values), flush=True)


def run_in_jax(train: Callable[[int], Iterable[Report]], n_devices: int) -> None:
    """Train on devices of this process for as many steps as the command line says, and report."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n_devices)
    for values in train(int(sys.argv[1])):
        report(**values)


def run_in_torch(
    single: Callable[..., Iterator[Report]],
    sharded: Callable[..., Iterator[Report]],
    n_devices: int,
) -> None:
    """Train as `{single,sharded} ... STEPS` on the command line says, and report.

    `single` runs in this process, `sharded` on every process of a world; the words between go to both.
    """
    from torch_bridge.testing import run_ranks

    kind, *words, steps = sys.argv[1:]
    if kind == "single":
        for values in single(*words, int(steps)):
            report(**values)
    else:
        run_ranks(n_devices, report_first, sharded, *words, int(steps))


def report_first(sharded: Callable[..., Iterator[Report]], *arguments: object) -> None:
    """Train on a process of a world; the first one reports, for losses are the same on all."""
    import torch.distributed as dist

    for values in sharded(*arguments):
        if dist.get_rank() == 0:
            report(**values)
