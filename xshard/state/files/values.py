"""Values of objects as JSON: numbers and texts in dicts, lists, tuples and the like, without a loss.

JSON has no tuples, and no keys but texts. A container that JSON lacks is {"": [its kind, its items]}, a
deque of limited length {"": ["deque", its items, the limit]}. So is an array, {"": ["array"]}: it is stored
beside the value, under its own name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from xshard.errors import XshardError
from xshard.signatures import short_repr
from xshard.state.files.header import FileError
from xshard.trees import joined, place_of

_KIND = ""  # the key of a container that JSON lacks; no other dict is written with it
_ARRAY = "array"
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "deque": deque}


def number_of(x: Any) -> Any:
    """Return a number of numpy as Python's, which JSON holds; anything else as it is."""
    return x.item() if isinstance(x, np.generic) else x


def to_json(x: Any, name: str, array_type: type | tuple[()], arrays: dict[str, Any]) -> Any:
    """Return a value as JSON, from which `from_json` makes an equal one; add its arrays to `arrays`.

    {"seen": (1, 2), "w": x} called "loader" -> {"seen": {"": ["tuple", [1, 2]]}, "w": {"": ["array"]}},
    and x under "loader.w". array_type: the class of arrays.

    Raises:
        XshardError: It has an object of another class, or two arrays of one name.
    """
    x = number_of(x)
    if isinstance(x, array_type):
        if name in arrays:
            raise XshardError(f"two leaves are called {name!r}", hint="a key without dots")
        arrays[name] = x
        return {_KIND: [_ARRAY]}
    class_name = type(x).__name__
    if x is None or isinstance(x, int | float | str):
        return x
    if type(x) in _MAPPINGS.values():
        items = []
        for key, item in x.items():
            key_json = to_json(key, name, (), {})
            items.append([key_json, to_json(item, joined(name, str(key)), array_type, arrays)])
        is_plain = class_name == "dict" and all(isinstance(key, str) and key for key in x)
        return dict(items) if is_plain else {_KIND: [class_name, items]}
    if type(x) in _SEQUENCES.values():
        items = [to_json(y, joined(name, str(i)), array_type, arrays) for i, y in enumerate(x)]
        if isinstance(x, deque) and x.maxlen is not None:
            return {_KIND: [class_name, items, x.maxlen]}
        return items if class_name == "list" else {_KIND: [class_name, items]}
    hint = "tensors, numbers and texts are saved, in dicts, lists, tuples and Counters: "
    hint += "make it one of these (torch.from_numpy of an array), or leave it out"
    raise XshardError(f"{place_of(name)} is {short_repr(x)}", hint=hint)


def from_json(x: Any, name: str, arrays: Mapping[str, Any]) -> Any:
    """Return the value of which `to_json` made this JSON, with arrays by their names; None for others.

    Raises:
        FileError: It is not what `to_json` makes.
    """
    if isinstance(x, list):
        return [from_json(item, joined(name, str(i)), arrays) for i, item in enumerate(x)]
    if not isinstance(x, dict):
        return x
    if _KIND not in x:
        return {key: from_json(item, joined(name, str(key)), arrays) for key, item in x.items()}
    with suppress(TypeError, ValueError):  # of content that `to_json` does not make
        match x[_KIND]:
            case ["array"]:
                return arrays.get(name)
            case ["deque", [*items], int(maxlen)]:
                return deque(from_json(items, name, arrays), maxlen)
            case [str(kind), [*items]] if kind in _SEQUENCES:
                return _SEQUENCES[kind](from_json(items, name, arrays))
            case [str(kind), [*pairs]] if kind in _MAPPINGS:
                mapping = _MAPPINGS[kind]()
                for key_json, item in pairs:
                    key = from_json(key_json, name, {})
                    mapping[key] = from_json(item, joined(name, str(key)), arrays)
                return mapping
    raise FileError(f"{name} is stored as {short_repr(x)}, which says no value")
