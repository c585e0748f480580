"""`pytest --without torch,jax,interpreters`: what a test may not load or start; one that does is skipped.

Decides by what a test does, at the moment when it does it, so there is no list of tests to keep. Knows no test.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence

import pytest

FRAMEWORKS = ("torch", "jax")
INTERPRETERS = "interpreters"


def left_out(text: str) -> tuple[str, ...]:
    """What the option names."""
    names = tuple(text.split(","))
    if unknown := set(names) - {*FRAMEWORKS, INTERPRETERS}:
        raise ArgumentTypeError(f"{min(unknown)!r} is none of torch, jax, interpreters")
    return names


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without",
        type=left_out,
        default=(),
        metavar="torch,jax,interpreters",
        help="skip each test that loads one of these frameworks, or starts a Python process",
    )


def pytest_collection(session: pytest.Session) -> None:
    """Called in the processes that run tests; not in the one that hands them out to others."""
    names = session.config.option.without
    sys.meta_path.insert(0, _NoFramework(names))
    if INTERPRETERS in names:
        sys.addaudithook(_no_interpreter)


class _NoFramework:
    """Stands before all finders of modules, and ends the test that asks for a framework."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: object) -> None:
        if name in self.names:
            _skip(f"loads {name}")


def _no_interpreter(event: str, details: Sequence[object]) -> None:
    """An audit hook. All processes that the tests start are of this interpreter."""
    if event == "subprocess.Popen" and details[0] == sys.executable:
        _skip("starts an interpreter")


def _skip(reason: str) -> None:
    raise pytest.skip.Exception(f"--without: {reason}", allow_module_level=True)
