"""`pytest --without torch,jax,interpreters`: skip each test that loads a framework or starts a process.

A test is skipped at the moment when it does so: there is no list of tests to keep. `pytest --quick` is the
inner loop: it leaves these out too, draws fewer random examples, and skips what is marked `long`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Generator, Sequence

import pytest
from hypothesis import settings

FRAMEWORKS = ("torch", "jax")
INTERPRETERS = "interpreters"
QUICK_EXAMPLES = 20


def left_out(text: str) -> tuple[str, ...]:
    """The parts of the option."""
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
    parser.addoption(
        "--quick",
        action="store_true",
        help="--without torch,jax,interpreters, with few random examples and without tests marked long",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "long: an exhaustive search or a long random one, left out by --quick"
    )
    if config.option.quick:
        config.option.without = (*FRAMEWORKS, INTERPRETERS)
        settings.register_profile("quick", settings.default, max_examples=QUICK_EXAMPLES)
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.quick:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="--quick: long"))


def pytest_collection(session: pytest.Session) -> None:
    """Called in the processes that run tests; not in the one that hands them out to others."""
    if names := session.config.option.without:
        guard = _Guard(names)
        session.config.pluginmanager.register(guard)
        sys.meta_path.insert(0, guard)
        sys.addaudithook(guard.audit)


class _Guard:
    """Ends the test that asks for something that is left out."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.reason = ""

    def find_spec(self, name: str, *_: object) -> None:
        """A finder of modules before all others."""
        if name in self.names and name in FRAMEWORKS:
            self.skip(f"loads {name}")

    def audit(self, event: str, details: Sequence[object]) -> None:
        """All Python processes that the tests start are of this interpreter, maybe behind a prefix."""
        if (
            event == "subprocess.Popen"
            and INTERPRETERS in self.names
            and sys.executable in details[1]
        ):
            self.skip("starts an interpreter")

    def skip(self, reason: str) -> None:
        self.reason = f"--without: {reason}"
        raise pytest.skip.Exception(self.reason, allow_module_level=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """A test is skipped even if what it calls has caught the exception, as doctest does."""
        self.reason = ""
        try:
            return (yield)
        except Exception:
            if self.reason:
                pytest.skip(self.reason)
            raise
