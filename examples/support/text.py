"""English text: the help that Python ships, in numbers."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray


@cache
def text() -> tuple[NDArray[np.int64], int]:
    """The help texts that Python ships, as numbers of characters, and how many there are."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    known = sorted(set(whole))
    number = {character: i for i, character in enumerate(known)}
    return np.array([number[character] for character in whole]), len(known)
