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
FREELY: Mapping[str, Any] = {"accesses": 0.0}
Arguments = Mapping[str, Any]
Work = tuple[str, Mapping[str, Any]]  # a class, and numbers of its own
Places = Sequence[int | None]


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
    tensors, dims = tensors_of(args.values()), _letters(out.ndim)
    first = tensors[0] if tensors else out
    if name in MATRICES:
        bias = tensors.pop(0) if "add" in name else None
        return Call(tensors, MATRICES[name], "contraction", added=bias)
    if name in VIEWS:
        text, lengths, whole = view(first.shape, out.shape)
        return Call([first], text, "linear", whole, lengths, FREELY)
    if name in ("t", "transpose", "permute"):
        order = [*args.get("dims", range(first.ndim))]
        if name != "permute":
            i, j = args.get("dim0", 0), args.get("dim1", -1)
            order[i], order[j] = order[j], order[i]
        return Call([first], _text([dims, [dims[d] for d in order]]), "linear", how=FREELY)
    if name == "embedding":
        return Call([args["indices"], args["weight"]], _text([dims[:-1], ["v", dims[-1]], dims]), "lookup")
    if name == "index":
        return _indexed(args, out)
    if name == "convolution":
        return _convolution(args, out)
    if name == "nll_loss_forward":
        rows = _letters(args["target"].ndim)
        return Call(tensors[:2], _text([[rows[0], "v", *rows[1:]][: first.ndim], rows, []]), "loss")
    if name == "native_layer_norm":
        last = dims[-len(args["normalized_shape"]) :]
        return Call(tensors, _text([dims, *[last] * (len(tensors) - 1), dims]), "pointwise", last)
    if name.endswith("_like") or (name.startswith("new_") and first.shape == out.shape):
        return _aligned([first], out, ("pointwise", {**FREELY, "saved": 0.0}))
    if not tensors or name.startswith("new_"):
        return Call((), _text([dims]), "source", () if name in UNIFORM else dims)
    if name == "stack":
        d = args["dim"] % out.ndim
        each = [*dims[:d], *dims[d + 1 :]]
        return Call(tensors, _text([*[each] * len(tensors), dims]), "linear", [dims[d]])
    is_number = name in ("add", "sub") and len(tensors) == 1
    work = "linear" if name in LINEAR and not is_number else "pointwise", FREELY if name in FREE else {}
    if "dim" in args:
        return _along(tensors, out, args["dim"], work, sums=name == "sum")
    if is_pointwise or name in ALIGNED:
        return _aligned(tensors, out, work, dims[-2:] if name in ("tril", "triu") else ())
    arrays = [_letters(x.ndim, f"u{k}_") for k, x in enumerate((*tensors, out))]
    return Call(tensors, _text(arrays), "opaque")


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Call, Tensor]:
    """Scaled dot product attention, and its result; few heads of keys and values serve several of queries."""
    out, depths = query.new_empty(*query.shape[:-1], value.shape[-1]), (query.shape[-1], value.shape[-1])
    batch, depth = [f"b{i}" for i in range(query.ndim - 2)], "d" if depths[0] == depths[1] else "e"
    lengths, few, many = dict[str, int](), batch, batch
    if query.shape[:-2] != key.shape[:-2]:
        few, many = [*batch[:-1], "g"], [*batch[:-1], "(g r)"]
        lengths = {"g": key.shape[-3], "r": query.shape[-3] // key.shape[-3]}
    operands, arrays = [query, key, value], [[*many, "s", "d"], [*few, "t", "d"], [*few, "t", depth]]
    if attn_mask is not None:
        operands.append(attn_mask)
        scores = [*zip([*many, "s", "t"], (*out.shape[:-1], key.shape[-2]), strict=True)][-attn_mask.ndim :]
        same = [n == size for n, (_, size) in zip(attn_mask.shape, scores, strict=True)]
        arrays.append([d if same[i] else f"u{i}" for i, (d, _) in enumerate(scores)])
    whole = {"d", "t", depth, *("s" if is_causal else "")}
    flops = (1.0 if is_causal else 2.0) * sum(depths) / math.prod({*depths})
    text = _text([*arrays, [*many, "s", depth]])
    return Call(operands, text, "attention", whole, lengths, {"flops": flops}), out


def bias_call(out: Tensor, call: Call) -> Call:
    """A bias is added to the last dims of a result, or to the channels of a convolution."""
    assert call.added is not None
    if not call.how:
        return _aligned([out, call.added], out, ("linear", FREELY))
    dims = _letters(out.ndim)
    return Call([out, call.added], _text([dims, [dims[1]], dims]), "linear", how=FREELY)


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


def _aligned(tensors: Sequence[Tensor], out: Tensor, work: Work, whole: Collection[str] = ()) -> Call:
    """The last dims are the result's; a dim of another length is broadcast, or whole."""
    return _placed(tensors, out, [range(out.ndim - x.ndim, out.ndim) for x in tensors], work, whole)


def _along(tensors: Sequence[Tensor], out: Tensor, dim: Any, work: Work, sums: bool) -> Call:
    """Dims that an argument names are whole, or sums; all others are the result's, in their order."""
    ndim, left = tensors[0].ndim, iter(range(out.ndim))
    dims = range(ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    named = {d % max(ndim, 1) for d in dims}
    places = [next(left) if out.ndim == ndim or d not in named else None for d in range(ndim)]
    each = [places if x.ndim == ndim else [None] * x.ndim for x in tensors]
    call = _placed(tensors, out, each, work, {f"r{places[d]}" for d in named})
    return call._replace(whole=() if sums else {*call.whole, *re.findall(r"\bu\w+", call.text)})


def _placed(
    tensors: Sequence[Tensor], out: Tensor, places: Sequence[Places], work: Work, whole: Collection[str]
) -> Call:
    """Dims at places of the result, or None; dims of other lengths are broadcast, or whole."""
    arrays, odd = list[list[str]](), {*whole}
    for k, x in enumerate(tensors):
        arrays.append([])
        for d, (n, j) in enumerate(zip(x.shape, places[k], strict=True)):
            is_same = j is not None and n == out.shape[j]
            arrays[k].append(f"r{j}" if is_same else f"u{k}_{d}")
            odd |= {f"r{j}", f"u{k}_{d}"} if j is not None and 1 < n != out.shape[j] else set()
    arrays.append(_letters(out.ndim))
    return Call(tensors, _text(arrays), work[0], odd & {d for dims in arrays for d in dims}, None, work[1])


def _indexed(args: Arguments, out: Tensor) -> Call:
    """Rows of an array by arrays of numbers: the dims that these stand for are whole."""
    x, by = args["self"], {d: index for d, index in enumerate(args["indices"]) if index is not None}
    first, n, dims = min(by), max(index.ndim for index in by.values()), _letters(out.ndim)
    lead = first if max(by) - first < len(by) else 0
    rows, rest = dims[lead : lead + n], iter([*dims[:lead], *dims[lead + n :]])
    arrays = [[f"u{d}" if d in by else next(rest) for d in range(x.ndim)]]
    for d, index in by.items():
        pairs = zip(rows[n - index.ndim :], index.shape, strict=True)
        arrays.append([r if m == out.shape[int(r[1:])] else f"v{d}{r}" for r, m in pairs])
    return Call([x, *by.values()], _text([*arrays, dims]), "linear", [f"u{d}" for d in by])


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
