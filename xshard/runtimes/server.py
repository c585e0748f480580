"""`python -m xshard.runtimes.server MODULE`: calls functions of a module for another process.

Reads pickled (name, arguments) from its standard input until nobody asks, and writes what the calls
return, or the XshardError that they raised. Knows no framework: the module does.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from importlib import import_module

from xshard.errors import XshardError
from xshard.runtimes.processes import FunctionError


def main(module: str) -> None:
    """Import the module, then answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what functions print is no answer
    sys.path[:] = pickle.load(sys.stdin.buffer)
    framework = import_module(module)
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = getattr(framework, name)(*arguments)
        except XshardError as error:
            answer = error
        except BaseException as error:
            answer = FunctionError(f"{type(error).__name__} in {module}", hint=traceback.format_exc().strip())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
