"""Functions of users as bytes, which another process can load."""

from __future__ import annotations

import inspect
import io
import sys
import sysconfig
from collections.abc import Callable
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
    """A function, closures too, and its arguments, pickled. Raises FunctionError. The user's own file is sent
    by value: the process need not import it, with the other framework.
    """
    if find_spec("cloudpickle") is None:
        raise XshardError("cloudpickle is not installed", hint="pip install 'xshard[testing]'")
    cloudpickle = import_module("cloudpickle")
    module = inspect.getmodule(inspect.unwrap(function)) if callable(function) else None
    by_value = (
        module is not None and module.__name__ != "__main__" and not is_installed(module.__name__)
    )
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = io.BytesIO()
        _pickler(cloudpickle)(file).dump((function, arguments))
    except Exception as error:
        why = (
            f"{getattr(function, '__name__', function)} cannot be sent to another process: {error}"
        )
        hint = "it may close over arrays, modules and functions, not over locks, files or process groups"
        raise FunctionError(why, hint=hint) from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _pickler(cloudpickle: Any) -> Any:
    """cloudpickle's, which also sends modules of a class of their own by name, as `torch.ops` is one."""

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, x: Any) -> Any:
            if isinstance(x, ModuleType) and type(x) is not ModuleType:
                return import_module, (x.__name__,)
            return super().reducer_override(x)

    return Pickler


@cache
def is_installed(module: str) -> bool:
    """Whether a module is imported wherever it is needed, as this package and the installed ones are."""
    root = module.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None)
    places = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")]
    return root in OURS or file is None or any(Path(file).is_relative_to(place) for place in places)
