"""All processes of a JAX program at one piece of work: each learns what the others found, or why not.

Decides how errors of one become errors of all, so that none waits for it. Knows no arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from xshard.state.files import FileError


def together(work: Callable[[], Any]) -> list[Any]:
    """Do this in every process -> what it returns in each of them, as JSON has it.

    An error in one is raised there, and FileError in the others.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        error = raised
    found = _gathered([value, None if error is None else str(error)])
    if error is not None:
        raise error
    for process, (_, why) in enumerate(found):
        if why is not None:
            raise FileError(f"process {process} failed: {why}")
    return [value for value, _ in found]


def _gathered(value: Any) -> list[Any]:
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(len(text)))
    padded = multihost_utils.process_allgather(np.pad(text, (0, int(lengths.max()) - len(text))))
    return [json.loads(row[:n].tobytes()) for row, n in zip(padded, lengths, strict=True)]
