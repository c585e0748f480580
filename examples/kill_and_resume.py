"""A run is killed at a random step, and goes on: on the same mesh with its own bits, elsewhere as one device.

    python examples/kill_and_resume.py            # run.py, in torch: four processes, killed by SIGKILL
    python examples/kill_and_resume.py --jax      # run_jax.py: a process with four devices
    python examples/kill_and_resume.py --seed 7   # killed at the same step again

Five runs: on one device and on four, undisturbed; on four, killed; and from what that one has left, on the
same mesh and on another. The exit status is 1 if a loss is not that of one device, or if anything that the
same mesh has saved at the end (weights, moments, average, places) has other bits than undisturbed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from support.losses import verdict
from support.runs import EXAMPLES, options

from xshard import Mesh
from xshard.state.files import open_checkpoint

TOLERANCE = 1e-6  # of a loss in float32, relative
SAME = "dp=2,tp=2"
ALONE = "dp=1,tp=1"
EXIT_S = 60.0  # until the processes of a run that has ended are gone


@dataclass(frozen=True)
class Story:
    """What all runs have in common."""

    program: str  # a module of this folder
    steps: int
    save_every: int
    killed_after: int  # a step
    killed_within: float  # the next step: a fraction of the time that one takes
    elsewhere: str  # the other mesh


@dataclass
class Run:
    """The losses that a run has reported, by step."""

    mesh: str
    folder: Path
    losses: dict[int, float] = field(default_factory=dict)

    def start(self, story: Story) -> list[subprocess.Popen[str]]:
        """Start the processes of the program, as torchrun or a scheduler would."""
        command = [sys.executable, "-m", story.program, str(self.folder), "--mesh", self.mesh]
        command += ["--steps", str(story.steps), "--save-every", str(story.save_every)]
        if story.program == "run_jax":
            command += ["--programs", str(self.folder.with_name("programs"))]
        return [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES, env={**os.environ, **own}
            )
            for own in environments(story.program, Mesh.parse(self.mesh).n_devices)
        ]

    def follow(self, story: Story, *, kill: bool = False) -> None:
        """Run the program to its end, or until it is killed."""
        processes = self.start(story)
        reported_s = time.monotonic()
        try:
            for line in processes[0].stdout or ():
                if not line.startswith("{"):
                    continue
                values = json.loads(line)
                self.losses[values["step"]] = values["loss"]
                step_s = time.monotonic() - reported_s
                reported_s += step_s
                if kill and values["step"] == story.killed_after:
                    time.sleep(story.killed_within * step_s)
                    break
            if not kill:
                check_ended(processes)
        finally:
            for process in processes:
                process.kill()  # SIGKILL: nothing is cleaned up
            for process in processes:
                process.wait()


def environments(program: str, n_devices: int) -> list[dict[str, str]]:
    """What a scheduler sets for each process: in torch one for each device, in JAX one for all."""
    if program == "run_jax":
        return [{"PJRT_NPROC": "64"}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        {**common, "RANK": str(rank), "WORLD_SIZE": str(n_devices)} for rank in range(n_devices)
    ]


def check_ended(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for processes that have nothing more to do. Exits with status 1 if one has failed."""
    for process in processes:
        if process.wait(EXIT_S):
            print(f"a process ended with status {process.returncode}", file=sys.stderr)
            sys.exit(1)


def tell(story: Story, folder: Path) -> dict[str, Run]:
    """Make all runs, one after the other."""
    runs = {
        "one device": Run(ALONE, folder / "alone"),
        "undisturbed": Run(SAME, folder / "undisturbed"),
        "killed": Run(SAME, folder / "killed"),
    }
    for name, run in runs.items():
        run.follow(story, kill=name == "killed")
    for name, mesh in (("resumed", SAME), ("resumed elsewhere", story.elsewhere)):
        left = folder / name.replace(" ", "_")
        shutil.copytree(folder / "killed", left)
        runs[name] = Run(mesh, left)
        runs[name].follow(story)
    return runs


def differences(runs: Mapping[str, Run]) -> dict[str, float]:
    """The largest relative difference between a loss of each run and that of one device."""
    alone = runs["one device"].losses
    return {
        name: max(abs(loss / alone[step] - 1) for step, loss in run.losses.items())
        for name, run in runs.items()
    }


def arrays_of(run: Run) -> dict[str, NDArray[Any]]:
    """All arrays that a run has saved at its end."""
    with open_checkpoint(run.folder / f"step_{max(run.losses)}") as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint}


def bits_of(run: Run) -> dict[str, bytes]:
    """All that a run has saved at its end, numbers and texts too."""
    with open_checkpoint(run.folder / f"step_{max(run.losses)}") as checkpoint:
        constants = {name: repr(value).encode() for name, value in checkpoint.constants.items()}
    arrays = {name: array.tobytes() for name, array in arrays_of(run).items()}
    return {**constants, **arrays}


def final_differences(one: Run, other: Run) -> list[str]:
    """The names of what two runs have saved at their ends with other bits."""
    first = bits_of(one)
    second = bits_of(other)
    names = sorted({*first, *second})
    return [name for name in names if first.get(name) != second.get(name)]


def average_difference(one: Run, other: Run) -> float:
    """How far the averages of weights are apart, relative to the largest of each array."""
    found = arrays_of(other)
    apart = []
    for name, expected in arrays_of(one).items():
        if "average" in name and expected.ndim > 0:
            difference = np.abs(expected - found[name]).max() / np.abs(expected).max()
            apart.append(float(difference))
    return max(apart)


def complaints(story: Story, runs: Mapping[str, Run]) -> Iterator[str]:
    """Say what is wrong with the runs."""
    for name, difference in differences(runs).items():
        if not difference <= TOLERANCE:
            yield f"{name}: a loss differs from one device's by {difference:.1e} relative"
    for name in ("resumed", "resumed elsewhere"):
        losses = runs[name].losses
        if min(losses) == 1 or max(losses) != story.steps:
            yield f"{name}: it went from step {min(losses)} to {max(losses)}"
    undisturbed = runs["undisturbed"]
    for name in ("killed", "resumed"):
        for step, loss in runs[name].losses.items():
            if loss != undisturbed.losses[step]:
                yield f"{name}: the loss of step {step} has other bits than undisturbed"
    if names := final_differences(undisturbed, runs["resumed"]):
        yield f"resumed: at the end {', '.join(names)} have other bits than undisturbed"


def table(runs: Mapping[str, Run]) -> Table:
    """The steps of each run, its last loss, and how far its losses are from those of one device."""
    shown = Table(box=SIMPLE, pad_edge=False)
    for name in ("run", "mesh", "steps", "last loss", "largest relative difference"):
        shown.add_column(name)
    for name, difference in differences(runs).items():
        run = runs[name]
        first = min(run.losses)
        last = max(run.losses)
        shown.add_row(
            name, run.mesh, f"{first} to {last}", f"{run.losses[last]:.6f}", f"{difference:.1e}"
        )
    return shown


def judge(story: Story, runs: Mapping[str, Run], console: Console) -> int:
    """Print the runs and what is wrong with them; the exit status."""
    console.print(table(runs))
    apart = average_difference(runs["one device"], runs["resumed elsewhere"])
    console.print(f"averages of one device and resumed elsewhere: {apart:.1e} apart")
    good = "Resumed, the same mesh has its own bits, and another the losses of one device."
    return verdict(console, [*complaints(story, runs)], good)


def main() -> int:
    parser = options(__doc__, steps=20)
    parser.add_argument("--jax", action="store_true", help="run_jax.py in the place of run.py")
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--elsewhere", default="dp=4,tp=1", help="the other mesh")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2)))
    chosen = parser.parse_args()
    earliest = 2 * chosen.save_every + 1  # then one save is complete, since the next has begun
    if chosen.steps - 1 <= earliest:
        parser.error(f"--steps has to be {earliest + 2} at least, to be killed between two saves")
    draw = random.Random(chosen.seed)
    story = Story(
        program="run_jax" if chosen.jax else "run",
        steps=chosen.steps,
        save_every=chosen.save_every,
        killed_after=draw.randrange(earliest, chosen.steps - 1),
        killed_within=draw.random(),
        elsewhere=chosen.elsewhere,
    )
    console = Console()
    console.print(f"Seed {chosen.seed}: killed in step {story.killed_after + 1}.")
    with tempfile.TemporaryDirectory() as folder:
        return judge(story, tell(story, Path(folder)), console)


if __name__ == "__main__":
    sys.exit(main())
