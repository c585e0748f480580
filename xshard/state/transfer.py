"""`plan_transfer`: a tree of arrays on one mesh becomes another tree on another mesh, planned as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

from xshard import arguments, trees
from xshard.cost.machine import load_profile
from xshard.cost.model import Profile, ProfileLike
from xshard.dtypes import itemsize
from xshard.errors import NotationError, located
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.plans.expression import sides_or_one
from xshard.plans.plan import find_plan
from xshard.plans.transfer_senders import balanced
from xshard.rules import Rules, RulesLike
from xshard.search.request import Request, device_numbers
from xshard.signatures import Bytes
from xshard.state.names import SAME, Names
from xshard.state.parts import ArrayPart, PartMapping, Shape, TargetArray
from xshard.state.progress import Progress
from xshard.state.tree_plan import ArrayPlan, PartMove, SourceArray, TreePlan, part_of
from xshard.steps.base import REDUCERS

BUCKET = "256MiB"  # large enough for full bandwidth, small beside a model
Dtypes = Mapping[str, str]  # by name
TransferRules = RulesLike | tuple[RulesLike | None, RulesLike]  # with arrows, or of both meshes


class TransferKeywords(TypedDict, total=False):
    """The keywords of `transfer` in both bridges on which the type of its result does not depend."""

    bucket_bytes: Bytes
    donate: bool
    progress: Progress
    profile: ProfileLike


class MeshPair(NamedTuple):
    """Both ends of a transfer: the meshes, and the number of every device of each, in its order."""

    src_mesh: Mesh
    dst_mesh: Mesh
    src_devices: tuple[int, ...]
    dst_devices: tuple[int, ...]


class Layouts(NamedTuple):
    """The layouts of all source arrays and of all target arrays by name, and the target arrays."""

    src: dict[str, Layout]
    dst: dict[str, Layout]
    targets: dict[str, TargetArray]


def plan_transfer(  # noqa: PLR0913  all but two are keywords
    shapes: Mapping[str, Sequence[int]],
    rules: TransferRules,
    *,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    names: Names | None = None,
    dtypes: Dtypes | None = None,
    profile: ProfileLike = "h100",
    bucket_bytes: Bytes = BUCKET,
) -> TreePlan:
    """Plan the transfer of a tree to another mesh; its messages travel together, bucket by bucket.

        plan_transfer({"w": (8, 6)}, {"w": "o/dp i -> o i/tp"}, src_mesh=Mesh(dp=4), dst_mesh=Mesh(tp=2))

    Args:
        shapes: Global shapes by name.
        rules: Patterns over names -> `"source layout -> target layout"`, or one layout for both. With
            `names`, a pair of rules: layouts by source names, and layouts by target names.
        src_mesh: The mesh of the sources.
        dst_mesh: The mesh of the targets.
        src_devices: As in `xshard.plan`.
        dst_devices: As in `xshard.plan`.
        names: How source arrays become target arrays.
        dtypes: Dtypes by name. Values that `names` casts travel in the smaller dtype. Default: float32.
        profile: As in `xshard.plan`.
        bucket_bytes: About the most that a device sends and receives at once; None: no limit.

    Returns:
        The plan: print it, or ask it for bytes and messages.

    Raises:
        XshardError: As `Names.resolve`, `Rules.match` and `xshard.plan` do, with the name of the array.

    Examples:
        >>> shapes = {"a.weight": (8, 6), "a.bias": (8,)}
        >>> rules = {"*.weight": "o/dp i -> o i/tp", "*.bias": "o/dp -> o"}
        >>> meshes = dict(src_mesh=Mesh(dp=4), dst_mesh=Mesh(tp=2), dst_devices=(2, 3))
        >>> plan = plan_transfer(shapes, rules, **meshes)
        >>> plan.bytes_received == plan.bytes_lower_bound, plan.messages, len(plan.buckets)
        (True, 6, 1)
    """
    global_shapes = {name: arguments.lengths_of(shape) for name, shape in shapes.items()}
    src_dtypes = dtypes or dict.fromkeys(shapes, "float32")
    meshes = MeshPair(
        src_mesh,
        dst_mesh,
        tuple(device_numbers("source", src_mesh, src_devices)),
        tuple(device_numbers("destination", dst_mesh, dst_devices)),
    )
    layouts = _find_layouts(rules, names, global_shapes, src_dtypes, meshes)
    machine = load_profile(profile)
    sources = {}
    for name, shape in global_shapes.items():
        with located(trees.place_of(name)):
            sharding = Sharding(layouts.src[name], src_mesh, shape)
            sources[name] = SourceArray(sharding, src_dtypes[name])
    arrays = []
    for name, target in layouts.targets.items():
        with located(trees.place_of(name)):
            sharding = Sharding(layouts.dst[name], dst_mesh, target.shape)
            moves = [
                _plan_move(mapping, sources, sharding, target.dtype, meshes, machine)
                for mapping in target.pieces
            ]
        arrays.append(ArrayPlan(name, sharding, target.dtype, tuple(moves)))
    limit_bytes = arguments.limit_of(bucket_bytes, "bucket_bytes")
    buckets = _divide_into_buckets(_with_balanced_senders(arrays), limit_bytes)
    return TreePlan(*meshes, sources, buckets, machine)


def _divide_into_buckets(
    arrays: Sequence[ArrayPlan], limit_bytes: int | None
) -> tuple[tuple[ArrayPlan, ...], ...]:
    """Divide arrays into buckets of which a device sends, or receives, about this many bytes at most."""
    bytes_sent = [array.bytes_by_device(sent=True) for array in arrays]
    groups = trees.group_by_bytes(bytes_sent, limit_bytes)
    return tuple(tuple(arrays[i] for i in group) for group in groups)


def _find_layouts(
    rules: Any,
    names: Names | None,
    shapes: Mapping[str, Shape],
    dtypes: Dtypes,
    meshes: MeshPair,
) -> Layouts:
    """Find each array's layout at the source and at the destination of a move between two programs.

    Rules are ({"w": "o/dp i"}, {"kernel": "i o/tp"}) for two programs with names of their own, or
    {"w": "o/dp i -> o i/tp"} for arrays that keep their names.

    Args:
        rules: A pair of dicts from patterns of names to layouts, for the source's and the target's
            names. Or one dict to "layout -> layout", for arrays that keep their names.
        names: Maps source arrays to target arrays. None: they keep their names.
        shapes: The shapes of the source arrays by name.
        dtypes: Their dtypes by name.
        meshes: The meshes of both sides.
    """
    if isinstance(rules, list | tuple) and len(rules) == 2:
        src_rules, dst_rules = rules
        targets = (names or SAME).resolve(shapes, dtypes)
        src = _match_layouts(src_rules, shapes)
        return Layouts(src, _match_layouts(dst_rules, targets), targets)
    if names is not None:
        hint = 'rules=({"**": layouts by source names}, {"**": layouts by target names})'
        raise NotationError(
            "with names=, the two sides of an arrow are about different arrays", hint=hint
        )
    return _layouts_of_arrows(Rules(rules), shapes, dtypes, meshes)


def _layouts_of_arrows(
    rules: Rules, shapes: Mapping[str, Shape], dtypes: Dtypes, meshes: MeshPair
) -> Layouts:
    """Find the layouts of arrays that keep their names, by rules with an arrow.

    {"**": "o i/tp -> i o"} -> for a source w [4, 2] the layouts "o i/tp" and "i o", and a target w
    [2, 4] that is the source with its dims exchanged.
    """
    layouts = Layouts({}, {}, {})  # filled below, by name
    for name, rule in rules.match(list(shapes)).items():
        shape = shapes[name]
        with located(trees.place_of(name)):
            src, dst, text = sides_or_one(rule)
            check_axes(src, meshes.src_mesh, text)
            check_axes(dst, meshes.dst_mesh, text)
            src = src.resolved(len(shape))
            dst = dst.resolved(len(shape))
        layouts.src[name] = src
        layouts.dst[name] = dst
        order = tuple(map(src.names.index, dst.names))  # the source's dim of each target dim
        target_shape = tuple(shape[i] for i in order)
        whole_array = ArrayPart.whole(name, len(shape))
        mapping = PartMapping(whole_array, whole_array, order)
        layouts.targets[name] = TargetArray(target_shape, dtypes[name], (mapping,))
    return layouts


def _match_layouts(rules: Any, names: Iterable[str]) -> dict[str, Layout]:
    """Find the layout of each name by rules."""
    return {name: Layout.parse(layout) for name, layout in Rules(rules).match(list(names)).items()}


def _plan_move(
    mapping: PartMapping,
    sources: Mapping[str, SourceArray],
    target: Sharding,
    dtype: str,
    meshes: MeshPair,
    profile: Profile,
) -> PartMove:
    """Plan how a part of a source array travels to its place in a target array on another mesh.

    For example, q [4, 2] becomes rows 0-3 of a fused qkv [12, 2]. It is cast before it travels if
    the target's dtype is the smaller one, else afterwards.

    Args:
        mapping: Which part of which source becomes which part of the target.
        sources: The source arrays by name.
        target: The sharding of the target.
        dtype: The target's dtype.
        meshes: The meshes of both sides, and the numbers of their devices.
        profile: The machine, by whose speeds plans are compared.
    """
    source, src_dtype = sources[mapping.src.name]
    # The shardings of both parts, as arrays of their own. Without the arrays' names, so that equal
    # parts of other arrays are found in the cache.
    src = part_of(source, mapping.src._replace(name=""))
    dst = part_of(target, mapping.dst._replace(name=""))
    src_names = src.sharding.layout.names
    _check_same_dims(mapping, source, target, src_names, dst.sharding.layout.names)
    # Addends cannot be cast before they are added: the sum would round another way.
    has_addends = bool(source.layout.tagged(*REDUCERS))
    casts_first = itemsize(dtype) < itemsize(src_dtype) and not has_addends
    request = Request(
        src=src.sharding.layout,
        # A plan needs the same names on both sides: those of the source, in the target's order.
        dst=dst.sharding.layout.with_names([src_names[i] for i in mapping.order]),
        src_mesh=source.mesh,
        dst_mesh=target.mesh,
        src_devices=meshes.src_devices,
        dst_devices=meshes.dst_devices,
        shape=src.sharding.shape,
        dtype=dtype if casts_first else src_dtype,
        profile=profile,
    )
    return PartMove(mapping.src.name, src, dst, find_plan(request, by_transfer=True))


def _check_same_dims(
    mapping: PartMapping,
    source: Sharding,
    target: Sharding,
    src_names: Sequence[str],
    dst_names: Sequence[str],
) -> None:
    """Raise NotationError if source and target layouts use one dim's name for different dims.

    "o/tp i" to "i o/tp" looks like a transposition, but only `names=` transposes arrays: without
    it, the first dim stays the first, so "o" would become "i". Names that are in one layout alone
    are right: each of the two programs may have names of its own.
    """
    for i, name in enumerate(dst_names):
        src_name = src_names[mapping.order[i]]  # the dim that becomes dim i of the target
        # Names with "_" are ours, of dims that the user left unnamed ("...").
        if name in src_names and src_name != name and not name.startswith("_"):
            dim_text = f"dim {src_name!r} of {mapping.src.name}"
            hint = f"'{source.layout}' has another dim {name!r}: write the target's dims in the target's "
            hint += "order, or use other names; names= says which dims are transposed"
            raise NotationError(f"dim {name!r} of '{target.layout}' is {dim_text}", hint=hint)


def _with_balanced_senders(arrays: Sequence[ArrayPlan]) -> list[ArrayPlan]:
    """Return the same arrays, with senders that share the work of all of them."""
    moves = [move for array in arrays for move in array.moves]
    itemsizes = [move.plan.itemsize for move in moves]
    senders_of_moves = iter(balanced([move.transfer for move in moves], itemsizes))
    balanced_arrays = []
    for array in arrays:
        balanced_moves = [_with_senders(move, next(senders_of_moves)) for move in array.moves]
        balanced_arrays.append(replace(array, moves=tuple(balanced_moves)))
    return balanced_arrays


def _with_senders(move: PartMove, senders: tuple[int, ...]) -> PartMove:
    """Return the move with other senders in its transfer."""
    transfer = replace(move.transfer, senders=senders)
    steps = tuple(transfer if step is move.transfer else step for step in move.plan.steps)
    return move._replace(plan=replace(move.plan, steps=steps))
