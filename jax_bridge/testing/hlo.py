"""The traffic of a compiled program, read from its optimised HLO.

A device receives as in a ring, in whole elements; a plan's numbers are checked against it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

# (elements of the result, group size n) -> elements that a device receives.
_RECEIVED: dict[str, Callable[[int, int], int]] = {
    "all-gather": lambda result, n: result * (n - 1) // n,
    "all-reduce": lambda result, n: -(-2 * result * (n - 1) // n),
    "all-to-all": lambda result, n: result * (n - 1) // n,
    "reduce-scatter": lambda result, n: result * (n - 1),
}
_COLLECTIVE = re.compile(
    rf"= (?P<result>.+?) (?P<op>{'|'.join(_RECEIVED)}|collective-permute)(?P<half>-start)?\("
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")
# Three spellings: all groups, their shape, or axes (whole or parts, `'x':(2)4`) of a mesh that HLO made.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]*)\}|\[\d+,(?P<size>\d+)\]<="
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\(\S*\))? ?\{(?P<axes>[^}]*)\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>(?:\{\d+,\d+\},?)*)\}")


class HloCollective(NamedTuple):
    """One collective of a program: HLO's name, and the bytes that every device receives."""

    op: str
    received: tuple[int, ...]


def received_bytes(text: str, n_devices: int) -> int:
    """Bytes that the busiest device receives; text: as from `compiled.as_text()`.

    Raises ValueError for a collective written in a way that is not known here.

    >>> received_bytes("%x = f32[8]{0} all-gather(%y), replica_groups={{0,1},{2,3}}, dimensions={0}", 4)
    16
    """
    received = [collective.received for collective in collectives(text, n_devices)]
    return max(map(sum, zip(*received, strict=True)), default=0)


def collectives(text: str, n_devices: int) -> Iterator[HloCollective]:
    """Every collective that brings something to a device. Raises as `received_bytes` does."""
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        if match["half"]:  # its result is not what it receives; XLA:CPU has none
            raise ValueError(f"cannot count half a collective: {line.strip()}")
        elements, itemsize = _size(match["result"])
        received = [0] * n_devices
        if pairs := _PAIRS.search(line):
            for src, dst in re.findall(r"(\d+),(\d+)", pairs["pairs"]):
                received[int(dst)] += elements * itemsize * (src != dst)
        elif groups := _GROUPS.search(line):
            received = [_RECEIVED[match["op"]](elements, _group_size(groups)) * itemsize] * n_devices
        else:
            raise ValueError(f"cannot read this collective: {line.strip()}")
        if any(received):
            yield HloCollective(match["op"], tuple(received))


def _group_size(groups: re.Match[str]) -> int:
    if groups["mesh"] is None:
        return int(groups["size"] or len(groups["first"].split(",")))
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups["mesh"]))
    along = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups["axes"])
    return math.prod(int(part or sizes[axis]) for axis, part in along)


def _size(shapes: str) -> tuple[int, int]:
    """Elements of one or several arrays of one dtype, and the bytes of each."""
    arrays = list(_ARRAY.finditer(shapes))
    itemsizes = {int(array["bits"] or 8) // 8 for array in arrays}
    if len(itemsizes) != 1:
        raise ValueError(f"cannot read the result '{shapes}' of a collective")
    elements = sum(math.prod(map(int, filter(None, a["shape"].split(",")))) for a in arrays)
    return elements, itemsizes.pop()
