"""The planner: `plan` finds the cheapest steps of a move or a contraction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

from xshard.arguments import lengths_of, limit_of, whole_numbers
from xshard.caches import layout_cache
from xshard.contractions.expression import Contraction, contraction, is_contraction
from xshard.contractions.plan import ContractionPlan
from xshard.contractions.ring import NEVER, Overlapping
from xshard.contractions.shapes import (
    Shapes,
    checked_lengths,
    on_sub_axes,
    shapes_of,
    written_shardings,
)
from xshard.contractions.solve import ContractionRequest, find_contraction
from xshard.cost.machine import load_profile, with_addends, without_devices
from xshard.cost.model import FREE, Addends, ProfileLike
from xshard.dtypes import name_of, precision
from xshard.errors import DtypeError, MeshError, ShapeError, api_boundary
from xshard.layout import Mesh
from xshard.layout.layout import check_axes
from xshard.layout.mesh import check_mesh
from xshard.notation.maps import Maps
from xshard.notation.parser import mark_errors, with_map_digests
from xshard.plans.expression import LayoutPair, as_expression, sides
from xshard.plans.plan import Plan, find_plan
from xshard.plans.table import device_ranges
from xshard.search.request import BOTH, FORWARD, Objective, Request, device_numbers
from xshard.signatures import Bytes

Shape = tuple[int, ...]


class End(NamedTuple):
    """Where one end of a move is: its mesh, and the number of every device; None: 0, 1, 2, ..."""

    mesh: Mesh
    devices: Sequence[int] | None = None


class MoveOptions(NamedTuple):
    """What a plan of a move depends on, beside its layouts, ends and shape."""

    dtype: object
    profile: ProfileLike
    memory_limit: int | None
    objective: str


@overload
def plan(
    expression: LayoutPair,
    mesh: Mesh | None = None,
    shape: Sequence[int] | None = None,
    dtype: object = "float32",
    *,
    src_mesh: Mesh | None = None,
    dst_mesh: Mesh | None = None,
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    relabel: bool = False,
    profile: ProfileLike = "h100",
    memory_limit: Bytes = None,
    objective: Objective | None = None,
    addends: Addends = FREE,
    maps: Maps | None = None,
) -> Plan: ...
@overload
def plan(
    expression: str,
    mesh: Mesh,
    shape: Sequence[Sequence[int]] | None = None,
    dtype: object = "float32",
    *,
    sizes: Mapping[str, int] | None = None,
    profile: ProfileLike = "h100",
    memory_limit: Bytes = None,
    flops_limit: int | None = None,
    objective: Objective | None = None,
    overlap: Overlapping = NEVER,
    addends: Addends = FREE,
    maps: Maps | None = None,
) -> ContractionPlan: ...
@api_boundary
def plan(  # noqa: PLR0913  public, for moves, for two meshes, and for contractions
    expression: Any,
    mesh: Mesh | None = None,
    shape: Any = None,
    dtype: object = "float32",
    *,
    sizes: Mapping[str, int] | None = None,
    src_mesh: Mesh | None = None,
    dst_mesh: Mesh | None = None,
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    relabel: bool = False,
    profile: ProfileLike = "h100",
    memory_limit: Bytes = None,
    flops_limit: int | None = None,
    objective: Objective | None = None,
    overlap: Overlapping = NEVER,
    addends: Addends = FREE,
    maps: Maps | None = None,
) -> Plan | ContractionPlan:
    """Find the cheapest plan of a move, or of a contraction of several sharded arrays.

        plan("b s/cp c -> b s c/cp", Mesh(cp=4), (2, 16, 8))     # an all-to-all
        plan("b d, d f/tp -> b f/tp", Mesh(tp=4), sizes={"b": 8, "d": 16, "f": 64})

    A contraction sums the dims that the result lacks; its plan chooses where it is computed. It has several
    operands, or one with `sizes` or a list of its shape: with a plain shape it is a move, which sums
    nothing. In a contraction `...` is any number of whole dims, `(h d)/tp` one composed dim, `i i` a
    diagonal.

    Args:
        expression: `"layout -> layout"`, a pair of layouts, or `"layout, layout -> layout"`.
        mesh: The mesh, unless `src_mesh` and `dst_mesh` are given.
        shape: The global shape. For a contraction, a list with the shape of every operand, unless `sizes`
            has the lengths of all dims.
        dtype: A name, or a dtype of numpy, torch or JAX.
        sizes: For a contraction, lengths of dims by name: of every dim, or beside `shape` of parts of
            composed ones.
        src_mesh: The mesh of the left layout, instead of `mesh`. Over the same devices in the same order
            the plan is on the coarsest mesh that refines both; if there is none, or over other devices,
            one of its steps is a `Transfer`.
        dst_mesh: The mesh of the right layout, instead of `mesh`.
        src_devices: The number of every device of `src_mesh`, in its order; by default 0, 1, 2, ..., so
            that two meshes share devices.
        dst_devices: The same for `dst_mesh`.
        relabel: The same devices may change places in the destination's mesh, so that less moves; the
            plan's `dst_devices` has the new order.
        profile: The machine: a shipped name, such as `a100` or, with nodes of 4, `a100:4`; a file; or
            "auto" (`xshard.use_profile`).
        memory_limit: Bytes that no device may exceed, as a number or as "2GiB".
        flops_limit: Floating point operations that no device may exceed for a contraction.
        objective: "forward", the default of a move, plans the move; its gradient is planned when it is
            needed. "forward+backward", the default of a contraction, plans both now: `cost` is their sum,
            which decides everything that they share, and both obey the limit of a move.
        overlap: Whether a gather may run while its parts are contracted, and a reduce-scatter while its
            addends are: "never", "auto" (if that is predicted to save a tenth of the seconds) or "always"
            (if possible).
        addends: The order of sums over devices. "ranks": rows travel to who adds them, in the order of
            ranks, so that every path has equal bits; "free": collectives add as they like.
        maps: The `Owners` and `Needs` that the expression names.

    Returns:
        A `Plan` of a move, or a `ContractionPlan`.

    Raises:
        MeshError: A mesh is missing, or there are too many; or devices do not fit.
        NotationError: The text is wrong, marked with a caret.
        ShapeError: The shape does not fit the layouts.
        DtypeError: There is no such dtype.
        PlanError: No plan fits the limits.
        LinearityError: The gradient of a max or min is asked for.

    Examples:
        >>> p = plan("b s/cp c -> b s c/cp", Mesh(cp=4), (2, 16, 8))
        >>> [str(step) for step in p.steps], p.bytes_received == p.bytes_lower_bound
        (['all_to_all s/cp -> c/cp'], True)
        >>> layer = plan("b d, d f/tp -> b f/tp", Mesh(tp=4), sizes={"b": 8, "d": 16, "f": 64})
        >>> layer.local, layer.bytes_received, [str(step) for step in layer.moves[0].backward.steps]
        ('b d | copy(tp), d f/tp -> b f/tp', 0, ['all_reduce sum(tp)'])
        >>> str(plan("n/dp -> n/tp", src_mesh=Mesh(dp=4), dst_mesh=Mesh(tp=2), shape=(8,)).transfer)
        'transfer, 3 messages'
    """
    expression = as_expression(with_map_digests(expression, maps))
    profile = with_addends(without_devices(profile), addends)
    if getattr(dtype, "__hash__", None) is None:
        name_of(dtype)  # raises: caches, which come first below, would raise TypeError
    for any_mesh in (mesh, src_mesh, dst_mesh):
        if any_mesh is not None:
            check_mesh(any_mesh)
    # Options of moves between two meshes, or over devices by number.
    has_two_ends = (
        relabel
        or src_mesh is not None
        or dst_mesh is not None
        or src_devices is not None
        or dst_devices is not None
    )

    if is_contraction(expression, named=sizes is not None or _is_by_operand(shape)):
        if mesh is None or has_two_ends:
            raise MeshError(
                "a contraction is on one mesh", hint="plan(expression, mesh, sizes=...)"
            )
        limit = limit_of(memory_limit)
        call, shapes = shapes_of(contraction(expression), *checked_lengths(sizes, shape))
        # A contraction is a layer as a rule: its gradient decides where it is computed, too.
        passes = objective if objective else BOTH
        return plan_contraction(
            call, mesh, shapes, dtype, profile, limit, flops_limit, passes, overlap
        )

    if sizes is not None or flops_limit is not None:
        sides(expression)  # errors in the text come first
        raise ShapeError(
            "sizes and flops_limit are for contractions", hint="shape= is the shape of the array"
        )
    limit = limit_of(memory_limit)
    passes = objective if objective else FORWARD
    if mesh is None or has_two_ends:
        src_mesh, dst_mesh = _two_meshes(mesh, src_mesh, dst_mesh)
        src = End(src_mesh, src_devices)
        dst = End(dst_mesh, dst_devices)
        options = MoveOptions(dtype, profile, limit, passes)
        return _plan_between(expression, src, dst, _lengths(shape), options, relabel=relabel)
    lengths = _lengths(shape)
    # The usual case: a cache by value, that a repeated call hits.
    types = tuple(map(type, lengths))
    return _plan_on_mesh(expression, mesh, lengths, types, dtype, profile, limit, passes)


def _is_by_operand(shape: Any) -> bool:
    """Return whether a shape is a list of shapes, one for each operand."""
    lengths = whole_numbers(shape)
    return lengths is not None and any(isinstance(length, list | tuple) for length in lengths)


@layout_cache(maxsize=4096)
def plan_contraction(  # noqa: PLR0913, PLR0917  a cached function: its arguments are the key
    call: Contraction,
    mesh: Mesh,
    shapes: Shapes,
    dtype: object,
    profile: ProfileLike,
    memory_limit: int | None = None,
    flops_limit: int | None = None,
    objective: str | None = None,
    overlap: str = NEVER,
) -> ContractionPlan:
    """Find the cheapest plan of a contraction, from arguments that `plan` or a bridge has prepared.

    call: the parsed text, with `...` replaced by named dims. shapes: for every operand, a length
    for each name: `b d, d f -> b f` -> ((8, 4), (4, 2)). memory_limit: in bytes, or None.
    objective: as in `plan`; None means "forward+backward" if the dtype has gradients, as floats do,
    else "forward". The rest, and what it raises, is as in `plan`. Results are cached.
    """
    dtype_name = name_of(dtype)
    if not objective:
        objective = BOTH if precision(dtype_name) else FORWARD
    for layout in (*call.operands, call.result):
        check_axes(layout, mesh, call.text)
    call, mesh = on_sub_axes(call, mesh, shapes)
    request = ContractionRequest(
        contraction=call,
        mesh=mesh,
        shapes=shapes,
        dtype=dtype_name,
        profile=load_profile(profile),
        memory_limit=memory_limit,
        flops_limit=flops_limit,
        objective=objective,
        overlap=overlap,
    )
    # Both raise for shapes that do not fit the layouts. `find_contraction` would raise as well, but
    # without the user's text.
    with mark_errors(call.text):
        written_shardings(call, mesh, shapes)
        _ = request.shardings
    try:
        return find_contraction(request)
    except DtypeError:  # numbers that are not added up
        with mark_errors(call.text):
            raise


@layout_cache(maxsize=4096)
def _plan_on_mesh(
    expression: LayoutPair,
    mesh: Mesh,
    shape: Shape,
    _types: tuple[type, ...],
    dtype: object,
    profile: ProfileLike,
    memory_limit: int | None,
    objective: str,
) -> Plan:
    """Find the plan of a redistribution on one mesh, cached by the values of all arguments.

    _types: the types of the lengths in `shape`. They are only a part of the cache's key: 4 and 4.0
    are equal keys, and a shape with 4.0 has to raise instead of finding the plan for 4.
    """
    end = End(mesh)
    options = MoveOptions(dtype, profile, memory_limit, objective)
    return _plan_between(expression, end, end, shape, options, relabel=False)


def _plan_between(
    move: LayoutPair,
    src_end: End,
    dst_end: End,
    shape: Shape,
    options: MoveOptions,
    *,
    relabel: bool,
) -> Plan:
    """Find the plan of a redistribution from one mesh to another, or on one mesh that is both.

    move: "layout -> layout", or a pair of layouts. src_end, dst_end: the mesh on each side, with the
    numbers of its devices. shape: the global one. options: the arguments of `plan` that are passed on
    as they are. relabel: whether the devices may change places in the destination's mesh.
    """
    src_layout, dst_layout, text = sides(move)
    check_axes(src_layout, src_end.mesh, text)
    if src_end.mesh == dst_end.mesh:
        check_axes(dst_layout, dst_end.mesh, text)
    else:
        # In `n/dp -> n/dp` dp may be an axis of the source's mesh only. -1: the caret of the error
        # then marks the last dp in the text, which is the one on the right.
        check_axes(dst_layout, dst_end.mesh, text, "the destination's mesh", -1)
    # Without numbers both meshes are over devices 0, 1, 2, ..., and so share them.
    src_devices = device_numbers("source", src_end.mesh, src_end.devices)
    dst_devices = device_numbers("destination", dst_end.mesh, dst_end.devices)
    if relabel and sorted(src_devices) != sorted(dst_devices):
        raise MeshError(
            "relabel=True is for two meshes over the same devices",
            hint=f"the source has {device_ranges(src_devices)}, the destination {device_ranges(dst_devices)}",
        )
    request = Request(
        src=src_layout,
        dst=dst_layout,
        src_mesh=src_end.mesh,
        dst_mesh=dst_end.mesh,
        src_devices=src_devices,
        dst_devices=dst_devices,
        shape=shape,
        dtype=name_of(options.dtype),
        profile=load_profile(options.profile),
        memory_limit=options.memory_limit,
        relabel=relabel,
    )
    # These properties make the shardings, and raise for a shape that does not fit its layout. Read
    # here, they raise where the user's text is known, and the error marks the place in it.
    with mark_errors(text):
        _ = request.source
        _ = request.target
        if request.src_mesh == request.dst_mesh:
            _ = request.on_sub_axes
    try:
        return find_plan(request, options.objective)
    except (ShapeError, DtypeError):  # more pieces of rows than can be compared; no such sums
        with mark_errors(text):
            raise


def _two_meshes(
    mesh: Mesh | None, src_mesh: Mesh | None, dst_mesh: Mesh | None
) -> tuple[Mesh, Mesh]:
    """Return (src_mesh, dst_mesh) for a redistribution between two meshes, if both are given.

    Raises MeshError if one is missing, or if `mesh`, which is for both sides, is given as well.
    """
    if mesh is not None:
        if src_mesh is None and dst_mesh is None:  # another option, as relabel=True, asks for both
            raise MeshError(
                "src_devices, dst_devices and relabel are for two meshes",
                hint="pass src_mesh= and dst_mesh=, which may be equal, instead of the mesh",
            )
        raise MeshError(
            "a mesh beside src_mesh or dst_mesh", hint="pass either mesh, or src_mesh and dst_mesh"
        )
    if src_mesh is None or dst_mesh is None:
        meshes_by_name = {"src_mesh": src_mesh, "dst_mesh": dst_mesh}
        missing = [name for name, end_mesh in meshes_by_name.items() if end_mesh is None]
        raise MeshError(
            f"no {' and no '.join(missing)}", hint="pass a mesh, or src_mesh= and dst_mesh="
        )
    return src_mesh, dst_mesh


def _lengths(shape: Sequence[int] | None) -> Shape:
    """Return the shape of an array as a tuple. Raises ShapeError if it is missing, or no shape."""
    if shape is None:
        raise ShapeError(
            "no shape", hint="shape= is the global shape of the array, as in shape=(8, 4)"
        )
    return lengths_of(shape)
