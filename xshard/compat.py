"""Functions of other systems as expressions, and plans of transformers as rules, for both bridges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from xshard.errors import ShapeError, XshardError
from xshard.notation.parser import text_spans
from xshard.ops import Axes, dims, sharded, tag

DIRECTIONS = ("split_to_full", "full_to_split")


@lru_cache(maxsize=1024)
def all_to_all_single(
    direction: str,
    shape: tuple[int, ...],
    n: int,
    axis: Axes,
    *,
    zigzag: bool,
    channel_dim: int = 1,
    sequence_dim: int = 2,
    even: bool = True,
) -> str:
    """NvSubquadratic's `all_to_all_single_fn`: "split_to_full" is `c l/axis -> c/axis l`.

    even: blocks must be equally large. Raises ShapeError for other lengths and numbers of dims, XshardError.

    >>> all_to_all_single("split_to_full", (2, 4, 6), 2, "cp", zigzag=True)
    'd0 d1 d2/zigzag(cp) -> d0 d1/cp d2'
    """
    if not 3 <= len(shape) <= 5:
        what = f"{len(shape)} dims, not 3, 4 or 5"
        raise ShapeError(
            what, hint="[B, C, L], [B, C, H, W] or [B, C, T, H, W]; all_to_all takes any"
        )
    if direction not in DIRECTIONS:
        known = " or ".join(map(repr, DIRECTIONS))
        raise XshardError(f"unknown direction {direction!r}", hint=f"it is {known}")
    split = dims(shape, {sequence_dim: sharded(axis, "zigzag" if zigzag else "block")})
    full = dims(shape, {channel_dim: sharded(axis)})
    gathers = direction == DIRECTIONS[0]
    text = " -> ".join((split, full) if gathers else (full, split))
    if even:
        hint = "pass shape= (the global shape): blocks may then differ in size"
        length = shape[sequence_dim] * (n if gathers else 1)
        chunks = n * (2 if zigzag else 1)
        _check_divides("sequence length", length, chunks, text, sequence_dim % len(shape), hint)
        if gathers:
            dim = channel_dim % len(shape)
            _check_divides("number of channels", shape[dim], n, text, dim, hint)
    return text


def _check_divides(what: str, length: int, parts: int, text: str, dim: int, hint: str) -> None:
    if length % parts:
        span = dict(reversed(text_spans(text).dims))[f"d{dim}"]  # the first is on the left side
        raise ShapeError(
            f"the {what} {length} is not divisible by {parts}", text=text, span=span, hint=hint
        )


def zigzag_split(shape: Sequence[int], dim: int, axis: Axes) -> str:
    """NvSubquadratic's `zigzag_split_across_group_ranks`: each device keeps two chunks of a copied array."""
    return f"{dims(shape)}{tag('copy', axis)} -> {dims(shape, {dim: sharded(axis, 'zigzag')})}"


def zigzag_gather(shape: Sequence[int], dim: int, axis: Axes) -> str:
    """NvSubquadratic's `zigzag_gather_from_group_ranks`: every device gets the array in its natural order."""
    return f"{dims(shape, {dim: sharded(axis, 'zigzag')})} -> {dims(shape)}{tag('copy', axis)}"


def shard_whole(shape: Sequence[int], dim: int, n: int, axis: Axes, *, uneven: bool) -> str:
    """Credit's `shard_tensor`: `n` devices keep a part each. Raises ShapeError unless even or `uneven`."""
    text = f"{dims(shape)}{tag('copy', axis)} -> {dims(shape, {dim: sharded(axis)})}"
    if not uneven:
        hint = "pass uneven=True: parts may then differ in size, and the way back needs shape="
        _check_divides("length", shape[dim], n, text, dim % len(shape), hint)
    return text


@lru_cache(maxsize=1024)
def spmd_transition(src: str, dst: str, shape: tuple[int, ...], n: int, axis: Axes) -> str | None:
    """spmd_types' `redistribute`; None if nothing changes: V and a cut are the same.

    With "V", device i has element i of a new leading dim, which is in the expression.
    Raises XshardError for unknown types, ShapeError for dims that do not fit.

    >>> spmd_transition("V", "I", (4, 2), 2, "tp")
    'd0/tp d1 d2 -> d0 d1 d2'
    """
    cuts = [spmd_cut(kind) for kind in (src, dst)]
    if src == dst or ("V" in (src, dst) and None not in cuts):
        return None
    if dst == "V" and shape[:1] != (n,):
        hint = "V takes the leading dim apart; S(0) cuts it"
        raise ShapeError(
            f"a block of shape {shape} lacks an element for each of {n} devices", hint=hint
        )
    stacked = (1, *shape) if src == "V" else shape
    tags = {"R": tag("copy", axis), "P": tag("sum", axis)}
    sides = (
        dims(stacked, {} if cut is None else {cut: sharded(axis)}) + tags.get(kind, "")
        for kind, cut in zip((src, dst), cuts, strict=True)
    )
    return " -> ".join(sides)


def spmd_cut(kind: str) -> int | None:
    """The dim that a type of spmd_types cuts: 0 for V, None for R, I and P. Raises XshardError."""
    if kind in ("R", "I", "P"):
        return None
    match = re.fullmatch(r"V|S\((-?\d+)\)", kind)
    if match is None:
        raise XshardError(f"unknown type {kind!r}", hint="R, I, V, P, or a cut as S(0)")
    return int(match[1] or 0)


def sampler_gather(shape: Sequence[int], axis: Axes) -> str:
    """Ksuit's `all_gather_nograd_clipped`: a `DistributedSampler`'s samples in their own order."""
    return f"{dims(shape, {0: sharded(axis, 'cyclic')})} -> {dims(shape)}"


def equal_parts(shape: Sequence[int], n: int) -> tuple[int, ...]:
    """A block's shape with a dim of devices, and `n` equal parts: `(1, n, rows, ...)`. Raises ShapeError."""
    if not shape or shape[0] % n:
        rows = f"{shape[0]} rows" if shape else "a scalar"
        hint = "all_to_all and redistribute take parts of any size (shape=)"
        raise ShapeError(f"{rows} cannot be split into {n} equal parts", hint=hint)
    return (1, n, shape[0] // n, *shape[1:])


class Style(NamedTuple):
    """A style of transformers. dim: its parameters' sharded one, of fused `parts`; its module's rules."""

    dim: int | None = None
    inputs: Any = None
    outputs: str | None = None
    parts: int = 1


def styles_of_transformers(axis: str) -> dict[str, Style]:
    copied = f"... -> ... | copy({axis})"
    summed = f"... | sum({axis}) -> ..."
    part = f"... o/{axis} -> ... o"
    row = f"... i/{axis}"
    split = f"... i -> ... i/{axis}"
    kept = f"... | copy({axis})"
    return {
        "colwise": Style(-2, copied),
        **dict.fromkeys(("colwise_gather_output", "colwise_rep"), Style(-2, copied, part)),
        "rowwise": Style(-1, row, summed),
        **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), Style(-1, split, summed)),
        "packed_colwise": Style(-2, copied, parts=2),
        "packed_rowwise": Style(-1, row, summed, parts=2),
        "embedding_rowwise": Style(-2, None, summed),
        "embedding_colwise": Style(-1, None, part),
        "sequence_parallel": Style(None, f"b s/{axis} ..."),
        "replicated_with_grad_allreduce": Style(None, kept),
        "all_reduce": Style(None, None, summed),
        "moe_tp_experts": Style(None, (copied, None, copied), summed),
        "moe_identity_expert": Style(None, f"{kept} -> ... | sum({axis})"),
        **dict.fromkeys(("mla_kv_a_proj", "local_params"), Style(None, kept)),
        "replicate": Style(),
    }


def plan_of_transformers(model: Any, axis: str) -> dict[str, dict[Any, Any]]:
    """The plan that a model of transformers declares -> the arguments of `parallelize`: see `Rules`."""
    plan = getattr(model, "tp_plan", None) or {}
    styles = styles_of_transformers(axis)
    if not plan:
        hint = "write rules for it: docs/models has some of many families"
        raise XshardError(f"a {type(model).__name__} declares no tensor parallel plan", hint=hint)
    if other := [name for name, kind in plan.items() if kind not in styles]:
        what = f"{plan[other[0]]!r} of '{other[0]}'"
        known = ", ".join(styles)
        raise XshardError(
            f"unknown style {what} in the model's plan", hint=f"the styles are: {known}"
        )
    texts: dict[str, dict[str, str]] = {}  # by the name with stars for numbers, and by name
    for name, x in model.named_parameters(remove_duplicate=False):
        path = _starred(name)
        where, _, own = path.rpartition(".")
        style = styles[plan.get(path) or plan.get(where) or "replicate"]
        if style.dim is not None:
            texts.setdefault(path, {})[name] = _parameter(style, tuple(x.shape), own, axis)
    rules: dict[str, dict[Any, Any]] = {"parameters": {}, "inputs": {"": "..."}, "outputs": {}}
    for path, each in texts.items():
        rules["parameters"] |= {path: min(each.values())} if len({*each.values()}) == 1 else each
    rules["parameters"]["**"] = "..."
    # Modules with a parameter of their own, or a part of an output, that each device uses for its heads.
    whole = [path for path, kind in plan.items() if kind == "local_params"]
    whole += [path.rpartition(".")[0] for path, kind in plan.items() if kind == "mla_kv_a_proj"]
    for path in dict.fromkeys(_starred(name) for name, _ in model.named_modules() if name):
        style = styles[plan.get(path, "replicate")]
        copied = styles["colwise"].inputs
        inputs = copied if path in whole else style.inputs
        if inputs == copied and any(path.startswith(f"{around}.") for around in whole):
            inputs = styles["mla_kv_a_proj"].inputs
        for kind, rule in (("inputs", inputs), ("outputs", style.outputs)):
            rules[kind] |= {} if rule is None else {path: rule}
    return rules


def _starred(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _parameter(style: Style, shape: tuple[int, ...], name: str, axis: str) -> str:
    """How a parameter is stored and used: biases of partial products are added once."""
    if style.dim == -1 and name == "bias":
        return f"{dims(shape)} -> {dims(shape)}{tag('sum', axis)}"
    d = max(len(shape) + (style.dim or 0), 0)
    length = f",{shape[d] // style.parts}" * style.parts
    return dims(shape, {d: sharded(axis) if style.parts == 1 else f"block({axis}{length})"})
