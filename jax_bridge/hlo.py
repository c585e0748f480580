"""What a compiled program moves, read from its optimised HLO.

Decides how much each collective brings to a device, counted as a ring moves it and in whole
elements. Knows nothing of plans: it is what their numbers are checked against.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

# Elements that a device of a group of n receives, from those of the result.
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
_GROUPS = re.compile(r"replica_groups=(?:\{\{(?P<first>[\d,]*)\}|\[\d+,(?P<size>\d+)\]<=)")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>(?:\{\d+,\d+\},?)*)\}")


def received_bytes(text: str, n_devices: int) -> int:
    """Bytes that the busiest device receives; text: of `compiled.as_text()`.

    Raises ValueError for a collective written in a way that is not known here.

    >>> received_bytes("%x = f32[8]{0} all-gather(%y), replica_groups={{0,1},{2,3}}, dimensions={0}", 4)
    16
    """
    by_device = [0] * n_devices
    for line in text.splitlines():
        found = _COLLECTIVE.search(line)
        if found is None:
            continue
        if found["half"]:  # its result is not what it receives; XLA:CPU has none
            raise ValueError(f"cannot count half a collective: {line.strip()}")
        elements, itemsize = _size(found["result"])
        if pairs := _PAIRS.search(line):
            for src, dst in re.findall(r"(\d+),(\d+)", pairs["pairs"]):
                by_device[int(dst)] += elements * itemsize * (src != dst)
        elif groups := _GROUPS.search(line):
            n = int(groups["size"] or len(groups["first"].split(",")))
            received = _RECEIVED[found["op"]](elements, n) * itemsize
            by_device = [total + received for total in by_device]
        else:
            raise ValueError(f"cannot read this collective: {line.strip()}")
    return max(by_device)


def _size(shapes: str) -> tuple[int, int]:
    """Elements of one or several arrays of one dtype, and the bytes of each."""
    arrays = list(_ARRAY.finditer(shapes))
    itemsizes = {int(array["bits"] or 8) // 8 for array in arrays}
    if len(itemsizes) != 1:
        raise ValueError(f"cannot read the result '{shapes}' of a collective")
    elements = sum(math.prod(map(int, filter(None, a["shape"].split(",")))) for a in arrays)
    return elements, itemsizes.pop()
