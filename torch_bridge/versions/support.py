"""The releases of torch that the bridge supports, and the error for all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

OLDEST = (2, 11)
NEWEST_TESTED = (2, 13)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


SUPPORTED = f"torch_bridge needs torch {_text(OLDEST)} or later, this is {torch.__version__}"

# Numbers, not text: builds of vendors, such as 2.11.0a0+nv, count as the release that they precede.
if tuple(int(number) for number in torch.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"{SUPPORTED}: earlier ones lack names that it is made with")


@contextmanager
def private_names() -> Iterator[None]:
    """Raise ImportError with the supported releases if torch lacks a name that is bound inside."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        tested = f"it is tested up to {_text(NEWEST_TESTED)}"
        raise ImportError(f"{SUPPORTED}, and {tested}: {error}") from error
