"""The cost of a step: elements -> bytes -> seconds, under an alpha-beta model of the machine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from xshard.arguments import shown, whole_number
from xshard.dtypes import itemsize, name_of
from xshard.errors import DtypeError, PlanError, ProfileError, api_boundary
from xshard.formatting import format_bytes
from xshard.layout import Mesh, Sharding
from xshard.steps import Step, Traffic
from xshard.steps.base import FREE
from xshard.steps.traffic import Hop, LinkSpan, LinkSpans

DIRECT = ("all_to_all", "permute", "exchange")  # kinds with messages from any device to any other
TOPOLOGIES = ("switch", "ring", "port")
LOCAL = (*FREE, "slice", "embed", "mask", "scale")  # kinds of steps that send nothing


@api_boundary
@dataclass(frozen=True)
class Link:
    """The link between the devices along one axis: seconds per message, bytes per second and device.

    topology: on a "switch" all devices are equally near; on a "ring" (an axis of a
    torus, both ways) what is not passed on to a neighbour takes a quarter of it on average; a "port" is
    shared by the devices of a node, and where only some of them receive, they have it to themselves.
    """

    latency_s: float
    bytes_per_s: float
    topology: str = "switch"

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ProfileError(
                f"no topology {self.topology!r}", hint=f"there are: {', '.join(TOPOLOGIES)}"
            )
        if not 0 <= _number(self.latency_s) < math.inf or not _number(self.bytes_per_s) > 0:
            reason = f"no such link: {shown(self.latency_s)} s, {shown(self.bytes_per_s)} bytes/s"
            raise ProfileError(reason, hint="a latency is >= 0 and a bandwidth > 0")

    def carried(self, hop: Hop) -> int:
        """Elements that the busiest link of a hop, or share of a port, carries to a device."""
        return hop.received - hop.slack * (self.topology == "port")

    def seconds(self, hop: Hop, itemsize: int, way: float = 1.0) -> float:
        """Predicted time of a hop over such links. way: number of links that a message takes."""
        return hop.messages * self.latency_s + way * self.carried(hop) * itemsize / self.bytes_per_s


@api_boundary
@dataclass(frozen=True)
class Profile:
    """The machine a plan is priced for.

    default: the link between devices of one node. across: the link between nodes of `node_devices`
    consecutive devices, for axes that reach over a node. axes: links of axes by name, which win.
    inside: for axes named there, how many consecutive positions share a node, if not all do.
    launch_s: seconds to start a collective, by the kind of step ("other" for kinds not named).
    ring_s: seconds of each round of a collective that runs as a ring, by kind, beside its messages: n - 1
    rounds among n devices, twice as many for an all-reduce.
    copy_bytes_per_s: local packing speed.
    flops_per_s: floating point operations per second of one device in matrix products, by dtype; other
    dtypes have the rate of float32.
    disk: the link over which the devices of a node read files, shared by them; None if unknown.
    rounds: an exchange runs as one permutation per message, each with its own launch; elements that stay on
    their device are then not packed.
    """

    name: str
    source: str
    default: Link
    across: Link | None = None
    node_devices: int | None = None
    axes: tuple[tuple[str, Link], ...] = ()
    launch_s: tuple[tuple[str, float], ...] = ()
    copy_bytes_per_s: float = math.inf
    inside: tuple[tuple[str, int], ...] = ()
    rounds: bool = False
    flops_per_s: tuple[tuple[str, float], ...] = ()
    disk: Link | None = None
    ring_s: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for field, fits in (
            ("name", isinstance(self.name, str)),
            ("source", isinstance(self.source, str)),
            (
                "node_devices",
                self.node_devices is None or (whole_number(self.node_devices) or 0) > 0,
            ),
            ("inside", all((whole_number(n) or 0) > 0 for _, n in self.inside)),
            ("launch_s", all(0 <= _number(s) < math.inf for _, s in self.launch_s)),
            ("ring_s", all(0 <= _number(s) < math.inf for _, s in self.ring_s)),
            ("copy_bytes_per_s", _number(self.copy_bytes_per_s) > 0),
            ("rounds", isinstance(self.rounds, bool)),
        ):
            if not fits:
                hint = (
                    "names are text, seconds >= 0, bandwidths > 0, and a node has 1 device or more"
                )
                raise ProfileError(
                    f"a profile with {field} {shown(getattr(self, field))}", hint=hint
                )
        for dtype, rate in self.flops_per_s:
            if not 0 < _number(rate) < math.inf or not _is_dtype(dtype):
                hint = 'a rate is > 0, by the name of a dtype, as in {"bfloat16": 9.9e14}'
                what = f"no such rate: {shown(rate)} operations per second in {dtype!r}"
                raise ProfileError(what, hint=hint)

    def __hash__(self) -> int:
        return hash(self.name)  # a part of the key of every cached call

    def along(self, axes: Sequence[str], mesh: Mesh) -> Profile:
        """The profile for some axes of a mesh as a mesh of their own, with device numbers of its own."""
        if set(axes) == set(mesh.axes):
            return self
        links = tuple((axis, self.link(axis, mesh)) for axis in axes)
        reached = tuple((axis, self._inside(axis, mesh)) for axis in axes)
        partly = tuple((axis, n) for axis, n in reached if 1 < n < mesh.size(axis))
        return replace(self, axes=links, inside=partly)

    def link(self, axis: str, mesh: Mesh) -> Link:
        """The link of all devices of a mesh along an axis: the one across nodes if they are in several."""
        whole = mesh.origin(axis)
        named = dict(self.axes).get(whole)
        partly = whole in dict(self.inside)
        if named is not None and not (partly and self._inside(axis, mesh) == mesh.size(axis)):
            return named
        if self.across is None or self.node_devices is None:
            return self.default
        return self.default if self._inside(axis, mesh) == mesh.size(axis) else self.across

    def _inside(self, axis: str, mesh: Mesh) -> int:
        """Consecutive positions along an axis that are in one node, wherever they begin; 1 if none are."""
        position = mesh.position(axis)
        whole = mesh.origin(axis)
        nodes = self.node_devices
        n = mesh.sizes[position]
        after = mesh.sizes[position + 1 :]
        if whole in dict(self.inside):
            nodes = dict(self.inside)[whole]
            after = mesh.sizes_of([a for a in mesh.axes[position + 1 :] if mesh.origin(a) == whole])
        elif (
            self.across is None
            or nodes is None
            or whole in dict(self.axes)
            or mesh.n_devices <= nodes
        ):
            return n
        stride = math.prod(after)
        if nodes % stride:
            return 1
        return (
            n if nodes % (stride * n) == 0 else nodes // stride if n % (nodes // stride) == 0 else 1
        )

    def splits_groups(self, mesh: Mesh) -> bool:
        """Whether nodes end in the middle of groups of devices, so that axes do not show which are near."""
        nodes = self.node_devices
        if self.across is None or nodes is None or self.axes or mesh.n_devices <= nodes:
            return False
        return math.prod(self._inside(axis, mesh) for axis in mesh.axes) != nodes

    def launch(self, kind: str) -> float:
        """Seconds to start a step of a kind."""
        return self._launches.get(kind, self._launches.get("other", 0.0))

    @cached_property
    def _launches(self) -> dict[str, float]:
        return dict(self.launch_s)

    @cached_property
    def rings(self) -> dict[str, float]:
        """`ring_s` by kind."""
        return dict(self.ring_s)

    def launches(self, kind: str, traffic: Traffic) -> int:
        """How many collectives a step of a kind starts."""
        if kind in LOCAL:
            return 0
        return (
            max(1, sum(hop.messages for hop in traffic.hops))
            if self.rounds and kind == "exchange"
            else 1
        )

    def copied(self, traffic: Traffic) -> int:
        """Elements that a step copies locally."""
        return traffic.copied - traffic.kept if self.rounds else traffic.copied

    def flops(self, dtype: str) -> float:
        """Floating point operations per second in matrix products of a dtype; infinite if none is known."""
        known = dict(self.flops_per_s)
        return known.get(dtype, known.get("float32", math.inf))

    def work(self, flops: int, touched: int, dtype: str) -> float:
        """Seconds of operations, or of the elements read and written meanwhile, if these take longer."""
        return max(
            flops / self.flops(dtype), touched * itemsize(dtype) / (2 * self.copy_bytes_per_s)
        )

    def fabric(self, mesh: Mesh) -> Fabric:
        """The links of a mesh."""
        return _fabric(self, mesh)

    def link_spans(self, mesh: Mesh) -> LinkSpans:
        """The spans of each kind of link along the axes of a mesh, the slowest first."""
        return self.fabric(mesh).spans

    def to_json(self) -> str:
        """The profile as text; in a file, `load_profile` reads it back."""
        data = asdict(self)
        for pairs in ("launch_s", "ring_s", "axes", "inside", "flops_per_s"):
            data[pairs] = dict(data[pairs])
        if math.isinf(self.copy_bytes_per_s):
            data["copy_bytes_per_s"] = None
        return json.dumps(data, indent=2) + "\n"


ProfileLike = str | Path | Profile  # the name of one, its file, or itself


@dataclass(frozen=True)
class Fabric:
    """A profile on one mesh: its links, one per level, slowest first, and their spans along the axes."""

    profile: Profile
    mesh: Mesh
    links: tuple[Link, ...]
    spans: LinkSpans

    def seconds(self, kind: str, traffic: Traffic, itemsize: int) -> float:
        """Predicted time of a step of a kind on the busiest device."""
        total = self.profile.copied(traffic) * itemsize / self.profile.copy_bytes_per_s
        if kind not in LOCAL:
            total += self.profile.launch(kind) * self.profile.launches(kind, traffic)
            total += self.profile.rings.get(kind, 0.0) * traffic.rounds
        for hop in traffic.hops:
            link = self.link(hop)
            way = 1.0
            if link.topology == "ring" and kind in DIRECT:
                way = max(1.0, self.mesh.size(hop.axis) / 4)
            total += link.seconds(hop, itemsize, way)
        return total

    def link(self, hop: Hop) -> Link:
        """The link of a hop: the one of its level, or the only one for node-local senders without nodes."""
        return self.links[min(hop.level, len(self.links) - 1)]

    def between_nodes(self, traffic: Traffic) -> int:
        """Elements that the busiest device receives from other nodes."""
        return sum(hop.received for hop in traffic.hops if self.link(hop) == self.profile.across)

    def has_phases(self, axes: Sequence[str]) -> bool:
        """Whether a gather over axes is faster as a collective per kind of link than as one ring of all."""
        spans = [span for span in self.spans if span.axis in axes and span.size > 1]
        n = math.prod(span.size for span in spans)
        ring = 0.0
        phases = 0.0
        gathered = 1
        inside = n
        for span in spans:
            seconds = 1 / self.links[span.level].bytes_per_s
            inside = inside // span.size
            ring = max(ring, (n - 1) * seconds / inside)
            phases += (span.size - 1) * gathered * seconds
            gathered *= span.size
        return len({span.level for span in spans}) > 1 and phases < ring


@lru_cache(maxsize=256)
def _fabric(profile: Profile, mesh: Mesh) -> Fabric:
    pieces: list[tuple[Link, str, int, int]] = []
    for axis, n in zip(mesh.axes, mesh.sizes, strict=True):
        link = profile.link(axis, mesh)
        inside = profile._inside(axis, mesh)
        if inside in (1, n):
            pieces.append((link, axis, n, 1))
        else:
            pieces += [(link, axis, n // inside, inside), (profile.default, axis, inside, 1)]
    # Between devices of a node is the link of a node, even where no axis runs inside nodes only.
    near = [profile.default] if profile.splits_groups(mesh) else []
    links = sorted(
        {*near, *(link for link, *_ in pieces)}, key=lambda x: (x.bytes_per_s, -x.latency_s)
    )
    origins = {axis: "" if mesh.origin(axis) == axis else mesh.origin(axis) for axis in mesh.axes}
    spans = [
        LinkSpan(axis, n, links.index(link), step, origins[axis]) for link, axis, n, step in pieces
    ]
    return Fabric(profile, mesh, tuple(links), tuple(sorted(spans, key=lambda span: span.level)))


@dataclass(frozen=True)
class Price:
    """The price of a step: seconds, bytes received by the busiest device, most bytes it holds at once."""

    seconds: float
    received_bytes: int
    peak_bytes: int


def price(step: Step, before: Sharding, after: Sharding, itemsize: int, profile: Profile) -> Price:
    """Price of a step between two shardings. Peak: input, output, and a packing buffer for collectives."""
    fabric = profile.fabric(before.mesh)
    traffic = step.traffic(before, fabric.spans)
    buffer = traffic.copied if traffic.hops else 0
    result = 0 if step.kind in FREE else after.max_local_size
    held = before.max_local_size + result + buffer
    return Price(
        fabric.seconds(step.kind, traffic, itemsize), traffic.received * itemsize, held * itemsize
    )


def too_large(limit: int | None, least: int, of: str = "of those weighed") -> PlanError:
    """The error if no plan stays within so many bytes. least: the bytes of the plan that holds least."""
    hint = f"the least {of} is {format_bytes(least)} ({least} bytes)"
    return PlanError(f"no plan stays within {format_bytes(limit or 0)} per device", hint=hint)


@lru_cache(maxsize=64)
def _is_dtype(name: str) -> bool:
    try:
        return name_of(name) == name
    except DtypeError:
        return False


def _number(value: Any) -> float:
    """A number >= 0; -1 for what is none, or is too large for a float."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number and value >= 0 else -1.0
    except OverflowError:
        return -1.0
