"""English text: the help that Python ships, in numbers, and windows of it."""

from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

Characters = NDArray[np.int64]


@cache
def text() -> tuple[Characters, int]:
    """The help texts that Python ships, as numbers of characters, and how many there are."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    known = sorted(set(whole))
    number = {character: i for i, character in enumerate(known)}
    return np.array([number[character] for character in whole]), len(known)


def windows(steps: int, batch: int, length: int) -> Iterator[tuple[Characters, Characters]]:
    """(characters, the next of each), [batch, length], the same for every run."""
    rng, (characters, _) = np.random.default_rng(1), text()
    for _ in range(steps):
        starts = rng.integers(0, len(characters) - length, batch)
        window = characters[starts[:, None] + np.arange(length + 1)]
        yield window[:, :-1], window[:, 1:]
