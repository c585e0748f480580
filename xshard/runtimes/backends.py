"""torch and JAX: the packages they need, and the processes that run their functions, with which settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from xshard.errors import MeshError, XshardError
from xshard.runtimes.processes import Process, running

HOST_DEVICES = "XSHARD_HOST_DEVICES"  # environment: the most devices that a mesh of the kit has

_IMPORT_S = 300.0  # the longest time in which an import makes no progress

# Programs of the kit run once or twice: there the compiler takes more time than it saves.
QUICK_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class NoRuntimeError(XshardError):
    """A runtime that does not exist, is not installed, or cannot take the mesh."""


@dataclass(frozen=True)
class Backend:
    """A framework that runs plans, by functions of its bridge's room `testing`.

    Attributes:
        package: The framework's package; also the name of the extra that brings it.
        devices: What it calls devices, in words.
        rounds: Whether exchanges run in rounds; see `Profile`.
        environment: The number of devices -> the variables that a process needs.
        modes: The ways to run a program.
        world: The variable in which a launcher says how many ranks there are; "" if it has no launcher.
    """

    package: str
    devices: str
    rounds: bool
    environment: Callable[[int], dict[str, str]]
    modes: tuple[str, ...]
    world: str = ""

    def check_installed(self, way_out: str = "") -> None:
        """Raise NoRuntimeError if the package is not installed; nothing is imported."""
        if find_spec(self.package) is None:
            hint = f"pip install 'xshard[{self.package}]'{way_out}"
            raise NoRuntimeError(f"{self.package} is not installed", hint=hint)

    @property
    def is_launched(self) -> bool:
        """True if this process is one of several ranks that a launcher has started."""
        return int(os.environ.get(self.world, "1")) > 1

    def function(self, name: str) -> str:
        """Return the full name of a function of the bridge's kit: "worker.answers"."""
        return f"{self.package}_bridge.testing.{name}"

    def ask(self, n_devices: int, name: str, *arguments: Any, timeout_s: float) -> Any:
        """Call one of xshard's test functions by name, in the process that has the devices.

        Args:
            n_devices: The number of devices.
            name: The function, as in `function`.
            *arguments: Its arguments.
            timeout_s: See `Process.ask`.

        Returns:
            What the function returns, in the process with these devices; in this process if it is one
            of the ranks that a launcher has started.
        """
        function = self.function(name)
        if self.is_launched:
            return resolve_name(function)(*arguments, timeout_s)
        return self.process(n_devices).ask(function, *arguments, timeout_s=timeout_s, quiet=True)

    def process(self, n_devices: int) -> Process:
        """Return the process with these devices, with the compiler settings that users have."""
        self.check_installed()
        return running(self.package, self.environment(n_devices))


def _jax_environment(n_devices: int) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(n_devices)}


def _torch_environment(n_devices: int) -> dict[str, str]:
    """Return no variables: ranks are forked from the process, however many are asked for."""
    return {}


BACKENDS = {
    "torch": Backend(
        "torch",
        devices="gloo processes",
        rounds=False,
        environment=_torch_environment,
        modes=("",),
        world="WORLD_SIZE",
    ),
    "jax": Backend(
        "jax",
        devices="host devices of one process",
        rounds=True,
        environment=_jax_environment,
        modes=("vma", "novma", "pmap"),
    ),
}


def backend_named(name: str) -> Backend:
    """Return an installed backend.

    Raises:
        NoRuntimeError: It does not exist, or is not installed.
    """
    if name not in BACKENDS:
        raise NoRuntimeError(f"no backend {name!r}", hint=f"backends are: {', '.join(BACKENDS)}")
    BACKENDS[name].check_installed()
    return BACKENDS[name]


def kit_process(name: str, preload: Sequence[str] = ()) -> Process:
    """Return the process in which tests run torch or JAX, started if it is not running.

    The process of torch forks a gloo rank for each device. That of JAX has as many CPU devices. The
    caller's own process needs neither framework.

    Args:
        name: "torch" or "jax".
        preload: Modules that ranks of torch have imported when they begin.

    Raises:
        NoRuntimeError: The package is not installed.
        FunctionError: A module cannot be imported.
    """
    backend = BACKENDS[name]
    n_devices = host_devices()
    if name == "torch":
        process = backend.process(n_devices)
        if preload:
            process.ask(backend.function("worker.preload"), tuple(preload), timeout_s=_IMPORT_S)
        return process
    backend.check_installed()
    settings = {
        # Two programs at once need a thread for each of their devices: with fewer they wait for
        # each other for ever, and XLA makes as many as there are cores.
        "PJRT_NPROC": str(max(64, 2 * n_devices)),
        "XLA_FLAGS": f"{QUICK_XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip(),
    }
    return running(name, backend.environment(n_devices) | settings)


def host_devices() -> int:
    """Return the most devices that a mesh of the kit has: 16, or the number in the environment."""
    text = os.environ.get(HOST_DEVICES, "16")
    if not text.isdecimal() or int(text) < 1:
        raise MeshError(f"{HOST_DEVICES}={text!r} in the environment: a number of devices is due")
    return int(text)


def check_size(n_devices: int) -> None:
    """Raise MeshError for more devices than there are."""
    if not 1 <= n_devices <= host_devices():
        hint = f"a smaller mesh, or {HOST_DEVICES}={n_devices} in the environment before the first test"
        raise MeshError(f"{n_devices} devices, this host has 1 to {host_devices()}", hint=hint)
