"""What the JAX tests share: a process with host devices in which they run, and blocks to feed them.

JAX makes its devices once per process, so pytest's own process never asks for any. A test under
`@in_jax` runs in a process of its own kind, started once for each process of pytest.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

import pytest


def in_jax(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run in the process with devices; it fails with the traceback from there."""

    @functools.wraps(test)
    def there(**arguments: object) -> None:
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        _write(server.stdin, (test.__module__, test.__name__, arguments))
        failure = pickle.load(server.stdout)
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    there.here = test  # type: ignore[attr-defined]
    return there


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Two programs at once need a thread for each of their devices: with fewer they wait for
        # each other for ever, and XLA makes as many as there are cores.
        env={**os.environ, "PJRT_NPROC": "64"},
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tests print is no answer
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 18)  # the largest case of tests/data/halo.json
    while True:
        try:
            module, name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            getattr(importlib.import_module(module), name).here(**arguments)
            failure = None
        except BaseException:
            failure = traceback.format_exc()
        _write(answers, failure)


def _write(stream: BinaryIO, value: object) -> None:
    pickle.dump(value, stream)
    stream.flush()


if __name__ == "__main__":
    _serve()
