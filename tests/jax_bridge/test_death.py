"""A process of `jax.distributed` is killed: the other has an error at once, and does not hang."""

import os
import signal
import socket
import subprocess
import sys

HEARTBEAT_S = 20  # beyond what a busy machine takes from a process

PROCESS = """
import os, signal, sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax_bridge as xj

port, process, heartbeat_s = map(int, sys.argv[1:])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=heartbeat_s)
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
x = jax.make_array_from_callback((2,), sharding, lambda at: np.arange(2.0)[at])


@jax.jit
@jax.shard_map(mesh=sharding.mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
def gathered(block):
    return xj.redistribute(block, "n/x -> n")


print(gathered(x).addressable_shards[0].data.tolist(), flush=True)
if process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(2):  # what the other had sent before may still arrive
        jax.block_until_ready(gathered(x))
except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError where the call itself waits
    print("Gloo" in str(error), flush=True)
"""


def test_the_other_has_an_error_in_time() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "PJRT_NPROC": "16",
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    options = {
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    command = [sys.executable, "-c", PROCESS, str(port)]
    processes = [
        subprocess.Popen([*command, str(i), str(HEARTBEAT_S)], **options) for i in range(2)
    ]
    try:
        (said, log), (said_before, _) = (process.communicate(timeout=600) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert answers(said_before) == ["[0.0, 1.0]"]
    assert answers(said) == ["[0.0, 1.0]", "True"], log
    # It waits for the other at its end, and the runtime ends it after the heartbeat's timeout.
    assert [process.returncode for process in processes] == [-signal.SIGABRT, -signal.SIGKILL], log
    assert "heartbeat timeout" in log


def answers(said: str) -> list[str]:
    return [line for line in said.splitlines() if not line.startswith("[Gloo]")]
