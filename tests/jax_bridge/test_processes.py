"""The case table on several processes: devices of each in every mesh, gloo between them."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import CASES
from xshard.runtimes.tasks import Outcome, make_task, run_reference
from xshard.runtimes.verdict import difference

TIMEOUT_S = 400
TASKS = {case.name: make_task(case.plan(), seed) for seed, case in enumerate(CASES)}


def names_for(processes: int) -> list[str]:
    """The cases with a device of every process in their mesh."""
    return [name for name, task in TASKS.items() if task.plan.mesh.n_devices % processes == 0]


def run_processes(folder: Path, processes: int, names: list[str]) -> list[list[Outcome]]:
    """The outcomes of every process. They end together: one that fails takes the others with it."""
    (folder / "tasks").write_bytes(pickle.dumps([TASKS[name] for name in names]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started, said = [], []
    for i in range(processes):
        said.append((folder / f"said{i}").open("w"))
        command = [
            sys.executable,
            "-m",
            "jax_bridge.testing.worker",
            str(folder / "tasks"),
            str(folder / f"out{i}"),
        ]
        command += ["--processes", str(processes), "--process", str(i), "--coordinator", address]
        environment = {**os.environ, "PJRT_NPROC": "16"}
        started.append(subprocess.Popen(command, stdout=said[-1], stderr=said[-1], env=environment))
    try:
        ended = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process, file in zip(started, said, strict=True):
            process.kill()
            process.wait()
            file.close()
    assert ended == [0] * processes, (folder / "said0").read_text()[-4000:]
    return [pickle.loads((folder / f"out{i}").read_bytes()) for i in range(processes)]


def together(parts):
    """Blocks of several processes, each with None for those of others."""
    blocks = [[block for block in blocks if block is not None] for blocks in zip(*parts, strict=True)]
    assert all(len(held) == 1 for held in blocks)  # every device is one process's own
    return [held[0] for held in blocks]


@pytest.mark.parametrize("processes", [2, 4])
def test_values_and_gradients_of_every_case(processes, tmp_path) -> None:
    """On 2 x 4 and 4 x 2 devices. Their numbers are not contiguous: those of a process begin at a multiple
    of 2048, and a mesh takes the processes in turn."""
    names = names_for(processes)
    assert len(names) > 90
    wrong = []
    for name, parts in zip(names, zip(*run_processes(tmp_path, processes, names), strict=True), strict=True):
        expected = run_reference(TASKS[name])
        forward = difference(together([part.outputs for part in parts]), expected.outputs)
        backward = difference(together([part.gradients for part in parts]), expected.gradients)
        if forward or backward:
            wrong.append((name, forward, backward))
    assert not wrong
