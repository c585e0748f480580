"""Functions of other systems as expressions, and plans of transformers as rules, for both bridges."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from xshard.errors import ShapeError, XshardError
from xshard.layout import Mesh
from xshard.notation.parser import text_spans
from xshard.ops import Axes, dims, sharded, tag

DIRECTIONS = ("split_to_full", "full_to_split")


# ---- functions of other systems


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
    """Translate NvSubquadratic's `all_to_all_single_fn` into the text of a redistribution.

    "split_to_full" makes the sequence whole, and shards channels instead: `c l/axis -> c/axis l`.
    "full_to_split" is the way back.

    Args:
        direction: "split_to_full" makes the sequence whole, "full_to_split" the channels.
        shape: The shape of the block.
        n: The number of devices along the axis.
        axis: The mesh axis.
        zigzag: Whether the sequence is sharded in zigzag order.
        channel_dim: The dim of the channels.
        sequence_dim: The dim of the sequence.
        even: Whether blocks must be equally large.

    Raises:
        ShapeError: The block has another number of dims, or lengths that are not divisible.
        XshardError: There is no such direction.

    Examples:
        >>> all_to_all_single("split_to_full", (2, 4, 6), 2, "cp", zigzag=True)
        'd0 d1 d2/zigzag(cp) -> d0 d1/cp d2'
    """
    if not 3 <= len(shape) <= 5:
        hint = "[B, C, L], [B, C, H, W] or [B, C, T, H, W]; all_to_all takes any"
        raise ShapeError(f"{len(shape)} dims, not 3, 4 or 5", hint=hint)
    if direction not in DIRECTIONS:
        known_options = " or ".join(map(repr, DIRECTIONS))
        raise XshardError(f"unknown direction {direction!r}", hint=f"it is {known_options}")
    sequence_sharded = dims(shape, {sequence_dim: sharded(axis, "zigzag" if zigzag else "block")})
    channels_sharded = dims(shape, {channel_dim: sharded(axis)})
    sequence_length = shape[sequence_dim]
    if direction == "split_to_full":
        text = f"{sequence_sharded} -> {channels_sharded}"
        sequence_length *= n  # `shape` is of a block, which has one n-th of the sequence
    else:
        text = f"{channels_sharded} -> {sequence_sharded}"
    if even:
        hint = "pass shape= (the global shape): blocks may then differ in size"
        n_chunks = 2 * n if zigzag else n  # zigzag gives each device two chunks
        # Dims may be counted from the end; errors mark them by their number from the front.
        _check_divides(
            "sequence length", sequence_length, n_chunks, text, sequence_dim % len(shape), hint
        )
        if direction == "split_to_full":
            _check_divides(
                "number of channels", shape[channel_dim], n, text, channel_dim % len(shape), hint
            )
    return text


def _check_divides(noun: str, length: int, n_parts: int, text: str, dim: int, hint: str) -> None:
    """Raise ShapeError, with the dim marked, unless a length is divisible into parts."""
    if length % n_parts == 0:
        return
    span_of_name = dict(reversed(text_spans(text).dims))  # reversed: the one on the left side stays
    reason = f"the {noun} {length} is not divisible by {n_parts}"
    raise ShapeError(reason, text=text, span=span_of_name[f"d{dim}"], hint=hint)


def zigzag_split(shape: Sequence[int], dim: int, axis: Axes) -> str:
    """Write NvSubquadratic's `zigzag_split_across_group_ranks`: devices keep two chunks of a copied array."""
    return f"{_copies(shape, axis)} -> {_zigzag(shape, dim, axis)}"


def zigzag_gather(shape: Sequence[int], dim: int, axis: Axes) -> str:
    """Write NvSubquadratic's `zigzag_gather_from_group_ranks`: all devices get the array in natural order."""
    return f"{_zigzag(shape, dim, axis)} -> {_copies(shape, axis)}"


def _zigzag(shape: Sequence[int], dim: int, axis: Axes) -> str:
    """Write the layout of a block that is sharded in zigzag order."""
    return dims(shape, {dim: sharded(axis, "zigzag")})


def _copies(shape: Sequence[int], axis: Axes) -> str:
    """Write the layout of a whole block that each device uses separately."""
    return dims(shape) + tag("copy", axis)


def shard_whole(shape: Sequence[int], dim: int, n: int, axis: Axes, *, uneven: bool) -> str:
    """Write Credit's `shard_tensor`: each of `n` devices keeps a part.

    Raises:
        ShapeError: The length is not divisible, and `uneven` is False.
    """
    text = f"{_copies(shape, axis)} -> {dims(shape, {dim: sharded(axis)})}"
    if not uneven:
        hint = "pass uneven=True: parts may then differ in size, and the way back needs shape="
        _check_divides("length", shape[dim], n, text, dim % len(shape), hint)
    return text


@lru_cache(maxsize=1024)
def spmd_transition(src: str, dst: str, shape: tuple[int, ...], n: int, axis: Axes) -> str | None:
    """Translate a `redistribute` of spmd_types into the text of a redistribution of this package.

    Their types are "R" (replicated, gradients are addends), "I" (invariant: replicated, gradients
    too), "P" (partial sums), "S(0)" (dim 0 is sharded) and "V" (varying: each device has a block of
    its own). A block of type V is written as one element of a new leading dim that is sharded over
    the devices: [4, 2] on each of 2 devices as [2, 4, 2], with d0 sharded.

    Args:
        src: The type before: "R", "I", "P", "V", or a cut as "S(0)".
        dst: The type after.
        shape: The shape of the block.
        n: The number of devices along the axis.
        axis: The mesh axis.

    Returns:
        The text. None if blocks stay as they are: the types are equal, or one is "V" and the other
        "S(...)".

    Raises:
        XshardError: There is no such type.
        ShapeError: "V" takes a leading dim apart that the block lacks.

    Examples:
        >>> spmd_transition("V", "I", (4, 2), 2, "tp")
        'd0/tp d1 d2 -> d0 d1 d2'
    """
    src_dim = spmd_cut(src)  # the dim that is sharded, 0 for V; None for R, I and P
    dst_dim = spmd_cut(dst)
    are_both_sharded = src_dim is not None and dst_dim is not None
    if src == dst or ("V" in (src, dst) and are_both_sharded):
        return None
    if dst == "V" and shape[:1] != (n,):
        reason = f"a block of shape {shape} lacks an element for each of {n} devices"
        raise ShapeError(reason, hint="V takes the leading dim apart; S(0) cuts it")
    if src == "V":
        shape = (1, *shape)  # a block of the array with the new leading dim
    return f"{_spmd_side(src, src_dim, shape, axis)} -> {_spmd_side(dst, dst_dim, shape, axis)}"


def _spmd_side(spmd_type: str, sharded_dim: int | None, shape: Sequence[int], axis: Axes) -> str:
    """Write one side of a redistribution: the layout of a block under a type of spmd_types."""
    if sharded_dim is not None:
        return dims(shape, {sharded_dim: sharded(axis)})
    tags = {"R": tag("copy", axis), "P": tag("sum", axis), "I": ""}
    return dims(shape) + tags[spmd_type]


def spmd_cut(spmd_type: str) -> int | None:
    """Return the dim that is sharded under a type of spmd_types: "S(1)" -> 1; None for R, I and P.

    0 for "V", under which devices hold the elements of a leading dim.

    Raises:
        XshardError: There is no such type.
    """
    if spmd_type in ("R", "I", "P"):
        return None
    if spmd_type == "V":
        return 0
    match = re.fullmatch(r"S\((-?\d+)\)", spmd_type)
    if match is None:
        raise XshardError(f"unknown type {spmd_type!r}", hint="R, I, V, P, or a cut as S(0)")
    return int(match[1])


def sampler_gather(shape: Sequence[int], axis: Axes) -> str:
    """Write Ksuit's `all_gather_nograd_clipped`: a `DistributedSampler`'s samples in their own order."""
    return f"{dims(shape, {0: sharded(axis, 'cyclic')})} -> {dims(shape)}"


def equal_parts(shape: Sequence[int], n: int) -> tuple[int, ...]:
    """Return a block's shape with a dim of devices, and `n` equal parts: [rows, ...] -> [1, n, rows/n, ...].

    Raises:
        ShapeError: The rows are not divisible.
    """
    if not shape or shape[0] % n:
        rows = f"{shape[0]} rows" if shape else "a scalar"
        hint = "all_to_all and redistribute take parts of any size (shape=)"
        raise ShapeError(f"{rows} cannot be split into {n} equal parts", hint=hint)
    return (1, n, shape[0] // n, *shape[1:])


# ---- plans of transformers

# Layers of an attention that are cut by heads, and how many heads a head of keys stays with there;
# None: itself and all heads of queries that read it.
_LAYERS_OF_HEADS = {
    "q_proj": None,
    "k_proj": 1,
    "v_proj": 1,
    "o_proj": None,
    "query_key_value": 3,
    "dense": None,
}


GROUPS = "num_key_value_groups"  # the attribute of an attention


class Heads(NamedTuple):
    """How a layer of an attention is cut by heads.

    Attributes:
        rows: The rows that stay together.
        cut: The text of how they are dealt out, such as "balanced(tp)".
    """

    rows: int
    cut: str


class Style(NamedTuple):
    """What a style of a plan of transformers means: the rules for a module.

    Attributes:
        dim: The dim of the module's parameters that is sharded; None if none is.
        inputs: The rule for its inputs; None for none.
        outputs: The rule for its outputs; None for none.
        parts: How many fused parts the dim has, each of which is sharded alone.
        layout: The layout of the parameters, where `dim` does not say it.
        heads: How the dim is cut by heads; None for one that is not.
    """

    dim: int | None = None
    inputs: Any = None
    outputs: str | None = None
    parts: int = 1
    layout: str | None = None
    heads: Heads | None = None


def styles_of_transformers(axis: Axes) -> dict[str, Style]:
    """Translate the tensor-parallel styles of Hugging Face transformers into rules of this package.

    "colwise" on axis tp: the weight's output features (dim -2) are sharded, and inputs are used as
    copies: `... -> ... | copy(tp)`. "rowwise": its input features (dim -1) are sharded, and outputs
    are all-reduced: `... | sum(tp) -> ...`.

    Returns:
        By the name of a style: the dim of the weight that is sharded, the rule for inputs, and the
        rule for outputs; None for no rule.
    """
    cut = sharded(axis)
    copies = tag("copy", axis)
    copied = f"... -> ...{copies}"
    still_copied = Style(inputs=f"...{copies}")  # by an outer module
    summed = f"...{tag('sum', axis)} -> ..."
    gathered = f"... o/{cut} -> ... o"
    sharded_input = f"... i/{cut}"
    # The weight's dim has the name of the output's, whose length it says: blocks may be 50 and 49 of 99.
    column_gathered = Style(inputs=copied, outputs=gathered, layout=f"o/{cut} ...")
    row_split = Style(dim=-1, inputs=f"... i -> {sharded_input}", outputs=summed)
    return {
        "colwise": Style(dim=-2, inputs=copied),
        "colwise_gather_output": column_gathered,
        "colwise_rep": column_gathered,
        "rowwise": Style(dim=-1, inputs=sharded_input, outputs=summed),
        "rowwise_split_input": row_split,
        "rowwise_rep": row_split,
        "packed_colwise": Style(dim=-2, inputs=copied, parts=2),
        "packed_rowwise": Style(dim=-1, inputs=sharded_input, outputs=summed, parts=2),
        "embedding_rowwise": Style(dim=-2, outputs=summed),
        "embedding_colwise": Style(outputs=gathered, layout=f"... o/{cut}"),
        "sequence_parallel": Style(inputs=f"b s/{cut} ..."),
        "replicated_with_grad_allreduce": still_copied,
        "all_reduce": Style(outputs=summed),
        "moe_tp_experts": Style(inputs=(copied, None, copied), outputs=summed),
        "moe_identity_expert": Style(inputs=f"...{copies} -> ...{tag('sum', axis)}"),
        "mla_kv_a_proj": still_copied,
        "local_params": still_copied,
        "replicate": Style(),
    }


def plan_of_transformers(
    model: Any, axis: Axes, mesh: Mesh | None = None
) -> dict[str, dict[Any, Any]]:
    """Turn the tensor-parallel plan of a Hugging Face model into the arguments of `parallelize`.

    `model.tp_plan` {"layers.*.mlp.up_proj": "colwise"} on axis "tp" shards the output features of
    that weight over tp, {"layers.*.mlp.up_proj.weight": "d0/tp d1"}, and uses its inputs as copies.

    Args:
        model: A model with a `tp_plan`: names of modules and parameters with their styles.
        axis: The mesh axis over which it is sharded, or two: of heads of keys, and of processes that
            share one.
        mesh: The mesh, if processes along a single axis may share heads of keys.

    Returns:
        The rules for "parameters", "inputs" and "outputs", and if heads are shared for "counts": see
        `Rules`.

    Raises:
        XshardError: The model declares no plan, or a style that is not known.
    """
    plan = getattr(model, "tp_plan", None) or {}
    ep_only = getattr(model, "ep_plan", {}).keys() - plan.keys()
    if ep_only:
        warnings.warn(
            f"only the ep_plan of the model shards '{min(ep_only)}', and it is not read: write "
            "parameters '**.experts.*': 'e/ep ...', inputs '**.experts': 't/ep c -> t/to(ep) c', and "
            "shard the batch over ep",
            stacklevel=3,
        )
    if not plan:
        hint = "write rules for it: docs/models has some of many families"
        raise XshardError(f"a {type(model).__name__} declares no tensor parallel plan", hint=hint)
    plan = _with_tied_embeddings(plan, model)
    styles = styles_of_transformers(axis)
    for name, style_name in plan.items():
        if style_name not in styles:
            reason = f"unknown style {style_name!r} of '{name}' in the model's plan"
            raise XshardError(reason, hint=f"the styles are: {', '.join(styles)}")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    heads, counts = _heads_of_layers(model, plan, parameters, axis, mesh)
    inputs, outputs = _activation_rules(model, plan, styles)
    rules: dict[str, dict[Any, Any]] = {
        "parameters": _parameter_rules(parameters.items(), plan, styles, axis, heads),
        "inputs": inputs,
        "outputs": outputs,
    }
    if counts:
        rules["counts"] = counts
    return rules


def _activation_rules(
    model: Any, plan: Mapping[str, str], styles: Mapping[str, Style]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rules of the inputs and of the outputs of a model's modules, by their styles."""
    inputs = {"": "..."}
    outputs = {}
    local_modules = _modules_with_local_parts(plan)  # whose weights each device uses for its heads
    for name, _ in model.named_modules():
        pattern = _starred(name)  # one for all layers, as in the model's plan
        style = styles[plan.get(pattern, "replicate")]
        input_rule = _input_rule(pattern, style, styles, local_modules)
        if input_rule is not None:
            inputs[pattern] = input_rule
        if style.outputs is not None:
            outputs[pattern] = style.outputs
    return inputs, outputs


def _with_tied_embeddings(plan: dict[str, str], model: Any) -> dict[str, str]:
    """Add embeddings to a plan that shards the rows of their weight elsewhere, as in the head.

    A plan may declare the head, and not an embedding that is tied to it, as `embed_in` of GPT-NeoX.
    """
    sharded = set()
    for name, weight in model.named_parameters(remove_duplicate=False):
        if plan.get(_starred(name.removesuffix(".weight")), "").startswith("colwise"):
            sharded.add(id(weight))
    tied = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "num_embeddings") and id(module.weight) in sharded:
            tied[_starred(name)] = "embedding_rowwise"
    return tied | plan


def _heads_of_layers(
    model: Any,
    plan: Mapping[str, str],
    parameters: Mapping[str, Any],
    axis: Axes,
    mesh: Mesh | None,
) -> tuple[dict[str, Heads], dict[str, str]]:
    """Find how the layers of each attention are cut by heads, and how many queries then read a head of keys.

    A process has whole heads of keys, each with the queries that read it. Where processes share a
    head of keys, each has some of its queries: it counts fewer of them than the model does.

    Returns:
        By the name of a layer, how it is cut; by the name of a number of the model, the rule for it.
    """
    heads_of_layers = {}
    counts = {}
    for name, attention in model.named_modules():
        head_rows = getattr(attention, "head_dim", getattr(attention, "head_size", None))
        # In other attentions, as with compressed keys, the layers have heads of other lengths.
        has_keys = hasattr(attention, "k_proj") or hasattr(attention, "query_key_value")
        if head_rows is None or not has_keys:
            continue
        queries_of_keys = getattr(attention, GROUPS, 1)  # heads of queries that read one of keys
        shared = None
        keys = parameters.get(f"{name}.k_proj.weight")
        are_cut = plan.get(_starred(f"{name}.k_proj")) == "colwise" and hasattr(attention, GROUPS)
        if are_cut and keys is not None:
            n_keys = keys.shape[0] // head_rows
            shared = _shared_heads(axis, mesh, n_keys, queries_of_keys)
        if shared is not None:
            # Of this layer alone: others may have as many heads as there are processes.
            counts[f"{name}.{GROUPS}"] = shared.queries
        for layer, heads in _heads_by_layer(head_rows, queries_of_keys, axis, shared).items():
            heads_of_layers[f"{name}.{layer}"] = heads
    return heads_of_layers, counts


def _heads_by_layer(
    head_rows: int, queries_of_keys: int, axis: Axes, shared: SharedHeads | None
) -> dict[str, Heads]:
    """Say for each layer of an attention which rows stay together, and how these groups are sharded.

    With heads of 16 rows and 4 queries for each head of keys: 64 rows of q_proj stay together, which
    are the queries of one head of keys, and 16 rows of k_proj. Where processes share a head of keys,
    they divide its queries: 16 rows of q_proj then.

    Args:
        head_rows: Rows of a head.
        queries_of_keys: Heads of queries that read one head of keys.
        axis: The mesh axis that shards heads.
        shared: How processes share heads of keys; None if each has whole ones.
    """
    query_heads_together = queries_of_keys if shared is None else 1
    by_layer = {}
    for layer, n_heads_together in _LAYERS_OF_HEADS.items():
        if n_heads_together is None:  # a layer of queries
            n_heads_together = query_heads_together
        cut = sharded(axis, "balanced")
        if shared is not None and layer in ("k_proj", "v_proj"):
            cut = shared.cut
        by_layer[layer] = Heads(head_rows * n_heads_together, cut)
    return by_layer


class SharedHeads(NamedTuple):
    """How processes share heads of keys: the cut of these, and the rule for how many queries read one."""

    cut: str
    queries: str


def _shared_heads(axis: Axes, mesh: Mesh | None, n_keys: int, n_queries: int) -> SharedHeads | None:
    """Decide how processes share the heads of keys of an attention; None if each has whole ones.

    2 heads of keys, each read by 4 of queries, on tp=4: two processes share a head of keys, and each
    has 2 of its queries.

    Args:
        axis: The axis, or one with a process for each head of keys and one along which they share it.
        mesh: The mesh; None if processes of a single axis share no heads.
        n_keys: The heads of keys.
        n_queries: The heads of queries that read one of them.
    """
    if not isinstance(axis, str):
        return SharedHeads(f"sizes({axis[0]}{',1' * n_keys})", f"g/{axis[-1]}")
    if mesh is None:
        return None
    n_processes = mesh.size(axis)
    n_sharing = n_processes // n_keys
    are_equal = n_sharing > 1 and n_processes % n_keys == n_queries % n_sharing == 0
    # Else a head of keys stays whole with its queries: some processes have fewer, or none.
    if not are_equal:
        return None
    # A process has n_queries / n_sharing of each head of keys: a unit of so many, of which there are
    # n_sharing, is shared by n_keys processes.
    return SharedHeads(f"spread({axis})", f"(g {n_queries // n_sharing})/spread({axis})")


def _parameter_rules(
    parameters: Iterable[tuple[str, Any]],
    plan: Mapping[str, str],
    styles: Mapping[str, Style],
    axis: Axes,
    heads: Mapping[str, Heads],
) -> dict[Any, Any]:
    """Return the sharding rule of each parameter that a plan of transformers shards.

    One rule is for all layers: {"layers.*.weight": "d0/tp d1", "**": "..."}. Before it are those of layers
    where it is another; "**", which comes last, leaves all other parameters whole.

    parameters: (name, array) of each. plan: the name of a style by the name of a module or
    parameter, with "*" for numbers. styles: what the names of styles mean. heads: how layers are
    cut by heads, by their names.
    """
    rules: dict[str, str] = {}
    exceptions = {}
    for name, x in parameters:
        pattern = _starred(name)
        module_pattern, _, own_name = pattern.rpartition(".")
        # A style is declared for the parameter itself, or for its module.
        style_name = plan.get(pattern, plan.get(module_pattern, "replicate"))
        style = styles[style_name]
        if style_name in ("colwise", "rowwise"):  # others bring the rows of all heads together
            style = style._replace(heads=heads.get(name.rpartition(".")[0]))
        rule = _parameter_rule(style, tuple(x.shape), own_name, axis)
        if rule is not None and rules.setdefault(pattern, rule) != rule:
            exceptions[name] = rule
    return {**exceptions, **rules, "**": "..."}


def _parameter_rule(style: Style, shape: tuple[int, ...], name: str, axis: Axes) -> str | None:
    """Return the layout of one parameter under a style, as text: a weight (8, 4) -> `d0/tp d1`.

    None if the style leaves it whole.

    name: the last part of the parameter's name, as "weight" or "bias".
    """
    if style.dim is None:
        return style.layout
    if style.dim == -1 and name == "bias":
        # A row-parallel layer's outputs are partial sums. If each device added the bias, the
        # reduction would add it n times: so it is used as a sum, with the value on one device and
        # zeros elsewhere.
        return f"{dims(shape)} -> {dims(shape)}{tag('sum', axis)}"
    # Column parallel is dim -2 of a weight, and the only dim of its bias.
    dim = max(len(shape) + style.dim, 0)
    if style.heads is not None:
        names = [f"d{dim_index}" for dim_index in range(len(shape))]
        names[dim] = f"({names[dim]} {style.heads.rows})/{style.heads.cut}"
        return " ".join(names)
    if style.parts == 1:
        return dims(shape, {dim: sharded(axis)})
    # Fused weights, as gate and up in one: each of `parts` equal lengths is sharded by itself.
    part_lengths = f",{shape[dim] // style.parts}" * style.parts
    axes = sharded(axis).strip("()")
    return dims(shape, {dim: f"block({axes}{part_lengths})"})


def _modules_with_local_parts(plan: Mapping[str, str]) -> list[str]:
    """List the modules with a parameter, or a part of an output, that each device uses for its heads."""
    paths = []
    for path, style_name in plan.items():
        if style_name == "local_params":
            paths.append(path)
        elif style_name == "mla_kv_a_proj":
            paths.append(path.rpartition(".")[0])
    return paths


def _input_rule(
    pattern: str, style: Style, styles: Mapping[str, Style], local_modules: Collection[str]
) -> Any:
    """Return the redistribution of a module's inputs; None to leave them as they are.

    pattern: the module's name, with "*" for numbers. local_modules: modules whose parameters each
    device uses for its own heads.
    """
    copied = styles["colwise"].inputs
    inputs = copied if pattern in local_modules else style.inputs
    is_inside = any(pattern.startswith(f"{module}.") for module in local_modules)
    if inputs == copied and is_inside:
        # The outer module has made copies of its inputs already.
        return styles["local_params"].inputs
    return inputs


def _starred(name: str) -> str:
    """Return a name with stars for numbers: `layers.0.weight` -> `layers.*.weight`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
