"""`python -m xshard.runtimes.server`: pickled `sys.path` and (name, arguments) in, results or errors out."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
from importlib import import_module
from typing import Any

from xshard.errors import XshardError
from xshard.runtimes.processes import FunctionError


def main() -> None:
    """Answer question after question, until standard input ends."""
    # Frameworks are a million objects that stay: fewer looks at them.
    gc.set_threshold(500_000, 50, 100)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what functions print is no answer
    while True:
        try:
            sys.path[:] = pickle.load(sys.stdin.buffer)  # before what may have to be imported
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answers.write(_answer(*question))
        answers.flush()


def _answer(function: str, arguments: tuple[Any, ...]) -> bytes:
    """Call a function -> the pickled result, or the error in its place."""
    try:
        module, _, name = function.rpartition(".")
        return pickle.dumps(getattr(import_module(module), name)(*arguments))
    except BaseException as error:
        # The class of a bridge's error would be imported with its framework where it is read.
        if isinstance(error, XshardError) and type(error).__module__.startswith("xshard."):
            return pickle.dumps(error)
        hint = traceback.format_exc().strip()
        return pickle.dumps(FunctionError(f"{type(error).__name__} in {function}", hint=hint))


if __name__ == "__main__":
    main()
