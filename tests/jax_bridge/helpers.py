"""Shared by the JAX tests: a process with host devices, where they run.

JAX makes its devices once per process, so pytest's own process never asks for any. A test under
`@in_jax` runs in the process that `xshard.testing` keeps for JAX, one for each process of pytest.
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable

import pytest

from xshard.runtimes.backends import jax_process
from xshard.testing import FunctionError
from xshard.testing.pickling import packed

TIMEOUT_S = 600.0
CALL = "jax_bridge.testing.equivalence.call_packed"

gc.set_threshold(50_000, 20, 20)  # tracing makes many objects, and little garbage that is in cycles


def in_jax(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run in the process with devices; it fails with the traceback from there."""

    @functools.wraps(test)
    def there(**arguments: object) -> None:
        sent = packed(_run_here, test.__module__, test.__name__, arguments)
        try:
            jax_process().ask(CALL, sent, timeout_s=TIMEOUT_S)
        except FunctionError as error:
            pytest.fail(str(error), pytrace=False)

    there.here = test  # type: ignore[attr-defined]
    return there


def _run_here(module: str, name: str, arguments: dict[str, object]) -> None:
    getattr(importlib.import_module(module), name).here(**arguments)
