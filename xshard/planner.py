"""The planner: `plan` finds the cheapest steps of a move or a contraction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, overload

from xshard.arguments import lengths_of, limit_of, shown, whole_numbers
from xshard.caches import layout_cache
from xshard.contractions.expression import Contraction, contraction, is_contraction
from xshard.contractions.plan import ContractionPlan
from xshard.contractions.ring import NEVER, OVERLAPS
from xshard.contractions.shapes import Shapes, shapes_of, whole_lengths, written
from xshard.contractions.solve import ContractionRequest, find_contraction
from xshard.cost.machine import load_profile, without_devices
from xshard.cost.model import ProfileLike
from xshard.dtypes import name_of, precision
from xshard.errors import MeshError, PlanError, ShapeError, api_boundary
from xshard.layout import Mesh
from xshard.layout.layout import check_axes
from xshard.layout.mesh import check_mesh
from xshard.notation.maps import Maps
from xshard.notation.parser import mark_errors, with_maps
from xshard.plans.expression import LayoutPair, as_expression, sides
from xshard.plans.plan import Plan, find_plan
from xshard.plans.table import device_ranges
from xshard.search.request import BOTH, FORWARD, OBJECTIVES, Request, device_numbers

Shape = tuple[int, ...]


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
    memory_limit: int | str | None = None,
    objective: str | None = None,
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
    memory_limit: int | str | None = None,
    flops_limit: int | None = None,
    objective: str | None = None,
    overlap: str = NEVER,
    maps: Maps | None = None,
) -> ContractionPlan: ...
@api_boundary
def plan(
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
    memory_limit: int | str | None = None,
    flops_limit: int | None = None,
    objective: str | None = None,
    overlap: str = NEVER,
    maps: Maps | None = None,
) -> Plan | ContractionPlan:
    """The cheapest plan of a move, `"layout -> layout"`, or of a contraction, `"layout, layout -> layout"`.

    A contraction sums the dims that the result lacks; its plan chooses where it is computed. It has several
    operands, or one with `sizes` or a list of its shape: with a plain shape it is a move, which sums nothing.
    There `...` is any number of whole dims, `(h d)/tp` one composed dim, `i i` a diagonal.

    shape: the global shape; for a contraction, a list with the shape of every operand, unless `sizes` has the
    length of every dim by name. dtype: a name or a dtype of numpy, torch or JAX.
    profile: the machine: a shipped name, such as `a100` or, with nodes of 4, `a100:4`, a file, or "auto"
    (`xshard.use_profile`). memory_limit: bytes that no device may exceed, as a number or as "2GiB".
    objective: "forward" (default of a move) plans the move; its gradient is planned when it is needed.
    "forward+backward" (default of a contraction) plans both now: `cost` is their sum, which decides
    everything that they share, and both obey the limit of a move.

    src_mesh, dst_mesh: the meshes of the left and the right layout, instead of `mesh`.
    src_devices, dst_devices: the number of every device, in the order of its mesh; by default 0, 1, 2, ...,
    so that two meshes share devices. relabel: the same devices may change places in the destination's mesh,
    so that less moves; the plan's `dst_devices` has the new order.
    Over the same devices in the same order the plan is on the coarsest mesh that refines both; if there is
    none, or over other devices, one of its steps is a `Transfer`.

    flops_limit: floating point operations that no device may exceed for a contraction.
    overlap: whether a gather may run while its parts are contracted, and a reduce-scatter while its addends
    are: "never", "auto" (if that is predicted to save a tenth of the seconds) or "always" (if possible).
    maps: the `Owners` and `Needs` that the expression names.

    Raises MeshError, NotationError, ShapeError, DtypeError; PlanError if no plan fits the limit;
    LinearityError for the gradient of a max or min.

    >>> p = plan("b s/cp c -> b s c/cp", Mesh(cp=4), (2, 16, 8))
    >>> [str(step) for step in p.steps], p.bytes_received == p.bytes_lower_bound
    (['all_to_all s/cp -> c/cp'], True)
    >>> layer = plan("b d, d f/tp -> b f/tp", Mesh(tp=4), sizes={"b": 8, "d": 16, "f": 64})
    >>> layer.local, layer.bytes_received, [str(step) for step in layer.moves[0].backward.steps]
    ('b d | copy(tp), d f/tp -> b f/tp', 0, ['all_reduce sum(tp)'])
    >>> str(plan("n/dp -> n/tp", src_mesh=Mesh(dp=4), dst_mesh=Mesh(tp=2), shape=(8,)).transfer)
    'transfer, 3 messages'
    """
    expression = as_expression(with_maps(expression, maps))
    profile = without_devices(profile)
    if getattr(dtype, "__hash__", None) is None:  # which no cache takes
        name_of(dtype)
    for each in (mesh, src_mesh, dst_mesh):
        if each is not None:
            check_mesh(each)
    two = src_mesh, dst_mesh, src_devices, dst_devices
    named = sizes is not None or any(
        isinstance(n, list | tuple) for n in whole_numbers(shape) or ()
    )
    if is_contraction(expression, named=named):
        if mesh is None or relabel or two != (None,) * 4:
            raise MeshError(
                "a contraction is on one mesh", hint="plan(expression, mesh, sizes=...)"
            )
        operations: Any = flops_limit
        if operations is not None and not isinstance(operations, Real):
            hint = "a number of floating point operations"
            raise PlanError(f"flops_limit is {shown(operations)}", hint=hint)
        limits: tuple[Any, ...] = limit_of(memory_limit), operations
        call, shapes = shapes_of(contraction(expression), *whole_lengths(sizes, shape))
        return plan_contraction(
            call, mesh, shapes, dtype, profile, *limits, objective or BOTH, overlap
        )
    if sizes is not None or flops_limit is not None:
        sides(expression)  # errors in the text come first
        hint = "shape= is the shape of the array"
        raise ShapeError("sizes and flops_limit are for contractions", hint=hint)
    options = dtype, profile, limit_of(memory_limit), objective or FORWARD
    if mesh is None or relabel or two != (None,) * 4:
        meshes = _two_meshes(mesh, src_mesh, dst_mesh)
        devices = src_devices, dst_devices
        return _plan_between(expression, meshes, _lengths(shape), devices, relabel, *options)
    lengths = _lengths(shape)
    return _plan(expression, mesh, lengths, tuple(map(type, lengths)), *options)


@layout_cache(maxsize=4096)
def plan_contraction(
    call: Contraction,
    mesh: Mesh,
    shapes: Shapes,
    dtype: object,
    profile: ProfileLike,
    memory_limit: int | None,
    flops_limit: int | None,
    objective: str | None,
    overlap: str,
) -> ContractionPlan:
    """`plan` of a contraction without `...`, with a length per name; without an objective, by its dtype."""
    name = name_of(dtype)
    objective = objective or (BOTH if precision(name) else FORWARD)
    if overlap not in OVERLAPS:
        raise PlanError(f"no overlap {overlap!r}", hint=f"there are: {', '.join(OVERLAPS)}")
    if objective not in OBJECTIVES:
        raise PlanError(f"no objective {objective!r}", hint=f"there are: {', '.join(OBJECTIVES)}")
    for layout in (*call.operands, call.result):
        check_axes(layout, mesh, call.text)
    machine = name, load_profile(profile)
    request = ContractionRequest(
        call, mesh, shapes, *machine, memory_limit, flops_limit, objective, overlap
    )
    with mark_errors(call.text):
        _ = request.shardings, written(call, mesh, shapes)  # errors come before the cache of plans
    return find_contraction(request)


@layout_cache(maxsize=4096)  # with the types of lengths, which tell 4 from 4.0
def _plan(
    expression: LayoutPair, mesh: Mesh, shape: Shape, _: tuple[type, ...], *options: Any
) -> Plan:
    return _plan_between(expression, (mesh, mesh), shape, (None, None), False, *options)


def _plan_between(
    move: LayoutPair,
    meshes: tuple[Mesh, Mesh],
    shape: Shape,
    devices: Any,
    relabel: bool,
    *options: Any,
) -> Plan:
    """options: dtype, profile, memory limit and objective."""
    dtype, profile, memory_limit, objective = options
    src, dst, text = sides(move)
    check_axes(src, meshes[0], text)
    if meshes[0] == meshes[1]:
        check_axes(dst, meshes[1], text)
    else:  # the axis may be right on the left: the error marks it where it comes last
        check_axes(dst, meshes[1], text, "the destination's mesh", -1)
    src_numbers = device_numbers("source", meshes[0], devices[0])
    dst_numbers = device_numbers("destination", meshes[1], devices[1])
    if relabel and sorted(src_numbers) != sorted(dst_numbers):
        hint = f"the source has {device_ranges(src_numbers)}, the destination {device_ranges(dst_numbers)}"
        raise MeshError("relabel=True is for two meshes over the same devices", hint=hint)
    endpoints = src, dst, *meshes, src_numbers, dst_numbers
    name = name_of(dtype)
    machine = load_profile(profile)
    request = Request(*endpoints, shape, name, machine, memory_limit=memory_limit, relabel=relabel)
    with mark_errors(text):
        _ = (
            request.source,
            request.target,
        )  # a wrong shape is found before the cache of plans is asked
    try:
        return find_plan(request, objective)
    except ShapeError as error:  # more pieces of rows than can be compared
        with mark_errors(text):
            raise error from None


def _two_meshes(
    mesh: Mesh | None, src_mesh: Mesh | None, dst_mesh: Mesh | None
) -> tuple[Mesh, Mesh]:
    if mesh is not None and src_mesh is None and dst_mesh is None:
        hint = "pass src_mesh= and dst_mesh=, which may be equal, instead of the mesh"
        raise MeshError("src_devices, dst_devices and relabel are for two meshes", hint=hint)
    if mesh is not None:
        hint = "pass either mesh, or src_mesh and dst_mesh"
        raise MeshError("a mesh beside src_mesh or dst_mesh", hint=hint)
    if src_mesh is None or dst_mesh is None:
        missing = [n for n, m in (("src_mesh", src_mesh), ("dst_mesh", dst_mesh)) if m is None]
        raise MeshError(
            f"no {' and no '.join(missing)}", hint="pass a mesh, or src_mesh= and dst_mesh="
        )
    return src_mesh, dst_mesh


def _lengths(shape: Sequence[int] | None) -> Shape:
    if shape is None:
        raise ShapeError(
            "no shape", hint="shape= is the global shape of the array, as in shape=(8, 4)"
        )
    return lengths_of(shape)
