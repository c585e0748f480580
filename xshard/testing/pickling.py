"""Functions of users as bytes, which another process can load."""

from __future__ import annotations

import inspect
import io
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from xshard.errors import XshardError
from xshard.runtimes.processes import FunctionError

OURS = ("xshard", "torch_bridge", "jax_bridge")


def packed(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Pickle a function and its arguments to bytes, for a call in another process.

    Closures can be sent, too. The code of the user's own file is sent by value, so that the other
    process does not import that file, which may import torch where the process runs JAX.

    Raises:
        FunctionError: It closes over something that cannot be sent.
        XshardError: cloudpickle is not installed.
    """
    if find_spec("cloudpickle") is None:
        raise XshardError("cloudpickle is not installed", hint="pip install 'xshard[testing]'")
    cloudpickle = import_module("cloudpickle")
    with _sending_module_of(function, cloudpickle):
        try:
            file = io.BytesIO()
            _pickler_class(cloudpickle)(file).dump((function, arguments))
        except Exception as error:  # pickling runs code of any object, which may raise anything
            name = getattr(function, "__name__", function)
            raise FunctionError(
                f"{name} cannot be sent to another process: {error}",
                hint="it may close over arrays, modules and functions, "
                "not over locks, files or process groups",
            ) from None
    return file.getvalue()


@contextmanager
def _sending_module_of(function: Callable[..., Any], cloudpickle: Any) -> Iterator[None]:
    """Send what is defined in the function's module by value, unless the module is installed."""
    module = inspect.getmodule(inspect.unwrap(function)) if callable(function) else None
    # cloudpickle sends `__main__` by value of itself.
    if module is None or module.__name__ == "__main__" or is_installed(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _pickler_class(cloudpickle: Any) -> Any:
    """Make cloudpickle's pickler send modules of a class of their own by name: `torch.ops` is one."""

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # its class is known at run time only
        def reducer_override(self, x: Any) -> Any:
            if isinstance(x, ModuleType) and type(x) is not ModuleType:
                return import_module, (x.__name__,)
            return super().reducer_override(x)

    return Pickler


@cache
def is_installed(module: str) -> bool:
    """Tell whether every process can import a module: it is installed, or part of these packages."""
    root = module.partition(".")[0]
    if root in OURS:
        return True
    file = getattr(sys.modules.get(root), "__file__", None)
    if file is None:  # built in, or a namespace
        return True
    places = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")]
    return any(Path(file).is_relative_to(place) for place in places)
