"""The class of each operation of torch, with the dims of its operands and its result in letters.

An operation is described by its name and by shapes alone: `mm` is "a b, b c -> a c", a contraction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from xshard.notation.parser import ARROW
from xshard.step.op import COPY, REPLICAS, SUM, Op
from xshard.step.views import view


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names("view _unsafe_view _reshape_alias unsqueeze squeeze alias detach clone _to_copy lift_fresh")
FREE = _names("slice select split split_with_sizes unbind expand")
LINEAR = FREE | _names("add sub neg sum cat constant_pad_nd flip roll")
RANDOM = _names("native_dropout bernoulli uniform normal")
ALIGNED = RANDOM | _names("expand repeat constant_pad_nd copy tril triu fill zero")
UNIFORM = _names("full zeros ones empty scalar_tensor")
MATRICES = {
    "mm": "a b, b c -> a c",
    "bmm": "e a b, e b c -> e a c",
    "mv": "a b, b -> a",
    "dot": "a, a -> ",
    "addmm": "a b, b c -> a c",
    "baddbmm": "e a b, e b c -> e a c",
}
Arguments = Mapping[str, Any]


class Call(NamedTuple):
    """An operation in letters, as for `Trace.add`. added: a tensor that is added to the result."""

    operands: Sequence[Tensor]
    text: str
    kind: str
    whole: Collection[str] = ()
    lengths: Mapping[str, int] | None = None
    how: Mapping[str, Any] = {}
    added: Tensor | None = None


def call_of(name: str, args: Arguments, out: Tensor, is_pointwise: bool) -> Call:
    """The call that gives one result of an operation; `opaque` if no class fits. args: by name."""
    tensors = tensors_of(args.values())
    first = tensors[0] if tensors else out
    if name in MATRICES:
        bias = tensors.pop(0) if "add" in name else None
        return Call(tensors, MATRICES[name], "contraction", added=bias)
    if name in VIEWS:
        text, lengths, whole = view(first.shape, out.shape)
        return Call([first], text, "linear", whole, lengths, {"accesses": 0.0})
    if name in ("t", "transpose", "permute"):
        order = list(range(first.ndim))
        if name == "permute":
            order = [d % first.ndim for d in args["dims"]]
        else:
            i, j = args.get("dim0", 0), args.get("dim1", first.ndim - 1)
            order[i], order[j] = order[j], order[i]
        arrays = [_letters(first.ndim), [f"r{d}" for d in order]]
        return Call([first], _text(arrays), "linear", how={"accesses": 0.0})
    if name == "embedding":
        dims = _letters(out.ndim)
        return Call([args["indices"], args["weight"]], _text([dims[:-1], ["v", dims[-1]], dims]), "lookup")
    if name == "index":
        return _indexed(args, out)
    if name == "convolution":
        return _convolution(args, out)
    if name == "nll_loss_forward":
        rows = _letters(args["target"].ndim)
        return Call(tensors[:2], _text([[rows[0], "v", *rows[1:]][: first.ndim], rows, []]), "loss")
    if name == "native_layer_norm":
        n = len(args["normalized_shape"])
        dims = _letters(out.ndim)
        return Call(tensors, _text([dims, *[dims[-n:]] * (len(tensors) - 1), dims]), "pointwise", dims[-n:])
    if name.endswith("_like") or (name.startswith("new_") and first.shape == out.shape):
        return _aligned([first], out, "pointwise", {"accesses": 0.0, "saved": 0.0})
    if not tensors or name.startswith("new_"):
        dims = _letters(out.ndim)
        return Call((), _text([dims]), "source", () if name in UNIFORM else dims)
    number = name in ("add", "sub") and len(tensors) == 1
    kind, how = (
        "linear" if name in LINEAR and not number else "pointwise",
        {"accesses": 0.0} if name in FREE else {},
    )
    if name == "stack":
        d = args["dim"] % out.ndim
        dims = _letters(out.ndim)
        each = [*dims[:d], *dims[d + 1 :]]
        return Call(tensors, _text([*[each] * len(tensors), dims]), "linear", [dims[d]])
    if "dim" in args:
        return _along(tensors, out, args["dim"], kind, how, sums=name == "sum")
    if is_pointwise or name in ALIGNED:
        triangle = _letters(out.ndim)[-2:] if name in ("tril", "triu") else ()
        return _aligned(tensors, out, kind, how, triangle)
    arrays = [_letters(x.ndim, f"u{k}_") for k, x in enumerate((*tensors, out))]
    return Call(tensors, _text(arrays), "opaque")


def attention_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, out: Tensor
) -> Call:
    """Scaled dot product attention; few heads of keys and values serve several of queries."""
    batch, depth = [f"b{i}" for i in range(q.ndim - 2)], "d" if q.shape[-1] == v.shape[-1] else "e"
    known, few, many = dict[str, int](), batch, batch
    if q.shape[:-2] != k.shape[:-2]:
        few, many = [*batch[:-1], "g"], [*batch[:-1], "(g r)"]
        known = {"g": k.shape[-3], "r": q.shape[-3] // k.shape[-3]}
    arrays = [[*many, "s", "d"], [*few, "t", "d"], [*few, "t", depth]]
    if mask is not None:
        own = [*many, "s", "t"][-mask.ndim :]
        sizes = (*out.shape[:-1], k.shape[-2])[-mask.ndim :]
        arrays.append(
            [
                d if n == size else f"u{i}"
                for i, (d, n, size) in enumerate(zip(own, mask.shape, sizes, strict=True))
            ]
        )
    operands = [x for x in (q, k, v, mask) if x is not None]
    whole = {"d", "t", depth, *("s" if is_causal else "")}
    flops = (2.0 if is_causal else 4.0) / (
        1 if depth == "d" else 2 * q.shape[-1] * v.shape[-1] / (q.shape[-1] + v.shape[-1])
    )
    return Call(operands, _text([*arrays, [*many, "s", depth]]), "attention", whole, known, {"flops": flops})


def bias_call(out: Tensor, call: Call) -> Call:
    """A bias is added to the last dims of a result, or to the channels of a convolution."""
    assert call.added is not None
    if call.how:  # a convolution
        dims = _letters(out.ndim)
        return Call([out, call.added], _text([dims, [dims[1]], dims]), "linear", how={"accesses": 0.0})
    return _aligned([out, call.added], out, "linear", {"accesses": 0.0})


def linked(call: Call, arrays: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """The text and the rules of an operation beside arrays that it reads lengths from, as operands.

    An axis shards the same in both; beside that, it does anything in the arrays.
    """
    operands, _, result = call.text.partition(ARROW)
    sides = [each.strip() for each in (operands, *map(" ".join, arrays)) if each.strip()]
    text, n = f"{', '.join(sides)} {ARROW} {result}", len(call.operands)
    draft = Op("draft", call.text, ("x",) * n, call.kind, tuple(call.whole))
    new = Op("draft", text, ("x",) * (n + len(arrays)), "opaque")
    rules = []
    for rule in draft.axis_rules:
        letters = {dims[way] for dims, way in zip(draft.dims, rule, strict=True) if way >= 0}
        ways = []
        for dims in arrays:
            same = [d for d, name in enumerate(dims) if name in letters]
            free = [d for d, name in enumerate(dims) if name[0] == "w"]
            ways.append(same or [REPLICAS, SUM, COPY, *free])
        rules += [new.text_of((*rule[:-1], *each, rule[-1])) for each in product(*ways)]
    return text, [rule for rule in rules if "x" in re.findall(r"\bx\b", rule)]


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors among some values, lists of them included."""
    lists = (value if isinstance(value, list | tuple) else [value] for value in values)
    return [x for each in lists for x in each if isinstance(x, Tensor)]


def _letters(n: int, prefix: str = "r") -> list[str]:
    return [f"{prefix}{i}" for i in range(n)]


def _text(arrays: Sequence[Sequence[str]]) -> str:
    *sides, result = (" ".join(dims) for dims in arrays)
    return f"{', '.join(side or '()' for side in sides)} -> {result}"


def _aligned(
    tensors: Sequence[Tensor], out: Tensor, kind: str, how: Mapping[str, Any], whole: Collection[str] = ()
) -> Call:
    """The last dims are the result's; a dim of another length is broadcast, or whole."""
    arrays, odd = [_letters(out.ndim)], {*whole}
    for k, x in enumerate(tensors):
        places = range(out.ndim - x.ndim, out.ndim)
        arrays.insert(
            k, [f"r{j}" if n == out.shape[j] else f"u{k}_{j}" for j, n in zip(places, x.shape, strict=True)]
        )
        for j, n in zip(places, x.shape, strict=True):
            odd |= {f"r{j}", f"u{k}_{j}"} if 1 < n != out.shape[j] else set()
    return Call(tensors, _text(arrays), kind, odd & {d for dims in arrays for d in dims}, None, how)


def _along(
    tensors: Sequence[Tensor], out: Tensor, dim: Any, kind: str, how: Mapping[str, Any], sums: bool
) -> Call:
    """Dims that an argument names are whole, or sums; all others are the result's, in their order."""
    x = tensors[0]
    dims = range(x.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    named = {d % max(x.ndim, 1) for d in dims}
    left = [d for d in range(x.ndim) if out.ndim == x.ndim or d not in named]
    place, arrays, whole = {d: j for j, d in enumerate(left)}, list[list[str]](), set[str]()
    for k, y in enumerate(tensors):
        same = [y.ndim == x.ndim and d in place and n == out.shape[place[d]] for d, n in enumerate(y.shape)]
        arrays.append([f"r{place[d]}" if is_same else f"u{k}_{d}" for d, is_same in enumerate(same)])
        whole |= {name for d, name in enumerate(arrays[-1]) if name[0] == "u" or d in named}
    whole = set() if sums else whole | {f"r{place[d]}" for d in named & {*left}}
    return Call(tensors, _text([*arrays, _letters(out.ndim)]), kind, whole, None, how)


def _indexed(args: Arguments, out: Tensor) -> Call:
    """Rows of an array by arrays of numbers: the dims that these stand for are whole."""
    x, indices = args["self"], [*args["indices"], *[None] * (args["self"].ndim - len(args["indices"]))]
    by = [d for d, index in enumerate(indices) if index is not None]
    n = max(indices[d].ndim for d in by)
    lead = by[0] if by == list(range(by[0], by[-1] + 1)) else 0
    dims, rows = iter([*_letters(lead), *_letters(out.ndim)[lead + n :]]), _letters(out.ndim)[lead : lead + n]
    own = [f"u{d}" if d in by else next(dims) for d in range(x.ndim)]
    each = [
        [
            r if m == out.shape[int(r[1:])] else f"v{d}{r}"
            for r, m in zip(rows[n - i.ndim :], i.shape, strict=True)
        ]
        for d, i in ((d, indices[d]) for d in by)
    ]
    return Call(
        [x, *(indices[d] for d in by)],
        _text([own, *each, _letters(out.ndim)]),
        "linear",
        [f"u{d}" for d in by],
    )


def _convolution(args: Arguments, out: Tensor) -> Call:
    """Windows are whole; channels are, too, if they are in groups."""
    x, weight, n, grouped = args["input"], args["weight"], out.ndim - 2, args["groups"] > 1
    windows = [_letters(n, letter) for letter in "lkm"]
    arrays = [["b", "c", *windows[0]], ["o", "i" if grouped else "c", *windows[1]], ["b", "o", *windows[2]]]
    whole = {name for each in windows for name in each} | ({"c", "o", "i"} if grouped else set())
    again = math.prod(x.shape[2:]) * (x.shape[1] if grouped else 1)
    return Call(
        [x, weight], _text(arrays), "contraction", whole, None, {"flops": 2.0 / again}, args.get("bias")
    )
