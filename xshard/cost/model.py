"""The cost of a step: elements -> bytes -> seconds, under an alpha-beta model of the machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, get_args

from xshard.dtypes import itemsize, name_of
from xshard.errors import DtypeError, PlanError, ProfileError, api_boundary
from xshard.formatting import format_bytes
from xshard.layout import Mesh, Sharding
from xshard.signatures import as_whole_number, short_repr
from xshard.steps import Step, Traffic
from xshard.steps.base import VIEW_KINDS
from xshard.steps.traffic import Hop, LinkSpan, LinkSpans

DIRECT = ("all_to_all", "permute", "exchange")  # kinds with messages from any device to any other
TOPOLOGIES = ("switch", "ring", "port")
FREE: Final = "free"  # collectives add in any order
RANKS: Final = "ranks"  # rows travel to who adds them, in the order of ranks
Addends = Literal["free", "ranks"]
LOCAL = (*VIEW_KINDS, "slice", "embed", "mask", "scale")  # kinds of steps that send nothing


@api_boundary
@dataclass(frozen=True)
class Link:
    """The link between the devices along one axis: seconds per message, bytes per second and device.

    Attributes:
        latency_s: Seconds for each message.
        bytes_per_s: Bytes per second that a device receives.
        topology: On a "switch" all devices are equally near. On a "ring", an axis of a torus, both ways,
            what is not passed on to a neighbour takes a quarter of it on average. A "port" is shared by
            the devices of a node, and where only some of them receive, they have it to themselves.

    Examples:
        >>> Link(latency_s=2e-6, bytes_per_s=50e9).topology
        'switch'
    """

    latency_s: float
    bytes_per_s: float
    topology: str = "switch"

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            hint = f"there are: {', '.join(TOPOLOGIES)}"
            raise ProfileError(f"no topology {self.topology!r}", hint=hint)
        if not _is_time(self.latency_s) or not _is_rate(self.bytes_per_s):
            reason = f"no such link: {short_repr(self.latency_s)} s, {short_repr(self.bytes_per_s)} bytes/s"
            raise ProfileError(reason, hint="a latency is >= 0 and a bandwidth > 0")

    def carried_elements(self, hop: Hop) -> int:
        """Return the elements that the busiest link of a hop, or share of a port, carries to a device."""
        # `mean_shortfall`: what devices that receive less leave of the port to others.
        if self.topology == "port":
            return hop.received - hop.mean_shortfall
        return hop.received

    def seconds(self, hop: Hop, itemsize: int, n_links: float = 1.0) -> float:
        """Predict the time of a hop over such links.

        Args:
            hop: The messages and elements that the busiest device receives over links of one level.
            itemsize: Bytes of an element.
            n_links: The number of links that a message takes.
        """
        transfer = n_links * self.carried_elements(hop) * itemsize / self.bytes_per_s
        return hop.messages * self.latency_s + transfer


PEAK_EFFICIENCY = 0.72  # the share of a vendor's peak rate that layers reach


@api_boundary
@dataclass(frozen=True)
class Profile:
    """The machine that a plan is priced for.

    Attributes:
        name: Its name, as `load_profile` knows it.
        source: Where its numbers are from.
        default: The link between devices of one node.
        across: The link between nodes of `node_devices` consecutive devices, for axes that reach over a
            node.
        node_devices: The number of devices of a node, or None.
        axes: Links of axes by name, which win over the others.
        launch_s: Seconds to start a collective, by the kind of step; "other" for kinds not named.
        copy_bytes_per_s: The speed of local packing.
        inside: For axes named there, how many consecutive positions share a node, if not all do.
        rounds: An exchange runs as one permutation per message, each with its own launch; elements that
            stay on their device are then not packed.
        flops_per_s: Floating point operations per second of one device in matrix products, by dtype;
            other dtypes have the rate of float32.
        disk: The link over which the devices of a node read files, shared by them; None if unknown.
        ring_s: Seconds of each round of a collective that runs as a ring, by kind, beside its messages:
            n - 1 rounds among n devices, twice as many for an all-reduce.
        addends: "free" where collectives reduce, in an order of their own. "ranks" where none does:
            addends travel to who needs their sum, and are added in the order of ranks.
        call_s: Seconds of the host for an operation of a model, as it calls it and notes it for the gradient,
            where devices wait for that; 0 where they have a queue, or run compiled steps. Where it is not 0
            no compiler fuses operations, either: each accesses memory for itself.
        compiled_overlap: The share of the seconds of moves that XLA's scheduler runs beside computing; 0
            where nobody has measured it.
        eager_overlap: The same share for moves that a program of torch starts ahead: 1 where links
            carry them alone, less where the processor that computes sends and receives.
        layer_efficiency: The share of `flops_per_s` that products in a model's layers reach: 0.72 of a
            vendor's peaks, 1 of rates that were measured.
        step_slowdown: Seconds of a move between two layers, over those of the same move in a loop, 1 or
            more: devices that share cores and caches reach a move at different times, and find it cold.

    Examples:
        >>> from xshard import Mesh, plan
        >>> slow = Profile("two boxes", "made up", Link(latency_s=0.0, bytes_per_s=1e6))
        >>> plan("n/a -> n", Mesh(a=2), (500_000,), profile=slow).cost  # 1 MB received, in seconds
        1.0
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
    addends: str = FREE
    call_s: float = 0.0
    compiled_overlap: float = 0.0
    eager_overlap: float = 1.0
    layer_efficiency: float = PEAK_EFFICIENCY
    step_slowdown: float = 1.0

    def __post_init__(self) -> None:
        field_is_right: Mapping[str, bool] = {
            "node_devices": self.node_devices is None or _is_count(self.node_devices),
            "inside": all(_is_count(devices) for _, devices in self.inside),
            "launch_s": all(_is_time(seconds) for _, seconds in self.launch_s),
            "ring_s": all(_is_time(seconds) for _, seconds in self.ring_s),
            "copy_bytes_per_s": _is_rate(self.copy_bytes_per_s),
            "addends": self.addends in get_args(Addends),
            "call_s": _is_time(self.call_s),
            "compiled_overlap": _is_share(self.compiled_overlap),
            "eager_overlap": _is_share(self.eager_overlap),
            "layer_efficiency": _is_share(self.layer_efficiency) and self.layer_efficiency > 0,
            "step_slowdown": _is_rate(self.step_slowdown) and 1 <= self.step_slowdown < math.inf,
        }
        for field, is_right in field_is_right.items():
            if not is_right:
                reason = f"a profile with {field} {short_repr(getattr(self, field))}"
                hint = (
                    "seconds are >= 0, bandwidths > 0, shares from 0 to 1, a slowdown 1 or more, and a "
                    "node has 1 device or more"
                )
                raise ProfileError(reason, hint=hint)
        for dtype, rate in self.flops_per_s:
            if not _is_rate(rate) or math.isinf(rate) or not _is_dtype(dtype):
                reason = f"no such rate: {short_repr(rate)} operations per second in {dtype!r}"
                hint = 'a rate is > 0, by the name of a dtype, as in {"bfloat16": 9.9e14}'
                raise ProfileError(reason, hint=hint)

    @property
    def adds_in_order(self) -> bool:
        """Whether sums are added in the order of ranks."""
        return self.addends == RANKS

    @property
    def calls_each_operation(self) -> bool:
        """Whether a host calls each operation of a step, so that no compiler fuses them."""
        return self.call_s > 0

    def __hash__(self) -> int:  # cheap: a part of the key of every cached call
        return hash(self.name)

    def for_axes(self, axes: Sequence[str], mesh: Mesh) -> Profile:
        """Return the profile for a mesh of only some axes of this mesh.

        On nodes of 4, axis a of Mesh(a=2, b=4) reaches over two nodes. Of Mesh(a=2) alone nobody
        would see that: devices 0 and 1 would be in one node. So the result names the
        link of every axis.
        """
        if set(axes) == set(mesh.axes):
            return self
        links = []
        inside = []
        for axis in axes:
            links.append((axis, self.link(axis, mesh)))
            in_node = self._positions_in_node(axis, mesh)
            # Partly inside nodes: `link` is then the one across nodes, and `inside` says how far
            # the faster one reaches.
            if 1 < in_node < mesh.size(axis):
                inside.append((axis, in_node))
        return replace(self, axes=tuple(links), inside=tuple(inside))

    def link(self, axis: str, mesh: Mesh) -> Link:
        """Return the slowest link between devices along a mesh axis.

        That is the link across nodes if the devices along the axis are in several, else the one in
        a node. A link that the profile names for the axis wins over both.
        """
        origin = mesh.origin(axis)  # the axis that this one is a part of, or itself
        is_in_node = self._positions_in_node(axis, mesh) == mesh.size(axis)
        named = dict(self.axes).get(origin)
        if named is not None:
            # The named link of an axis that is partly inside nodes is the one across them. A
            # sub-axis that does not leave a node has the link of a node.
            is_partly_inside = origin in dict(self.inside)
            return self.default if is_partly_inside and is_in_node else named
        if self.across is None or self.node_devices is None or is_in_node:
            return self.default
        return self.across

    def _positions_in_node(self, axis: str, mesh: Mesh) -> int:
        """Return how many consecutive positions along a mesh axis are always in one node.

        Nodes of 4, and Mesh(a=2, b=8): 4 along b, since positions 0-3 and 4-7 share a node, and 1
        along a, whose two positions are 8 devices apart. If nodes end at different positions for
        different groups of devices, it is 1 as well.
        """
        size = mesh.size(axis)
        origin = mesh.origin(axis)  # the axis that this one is a part of, or itself
        inner_axes = mesh.axes[mesh.position(axis) + 1 :]
        node_positions = dict(self.inside).get(origin)
        if node_positions is not None:
            # The profile says it of the original axis. One step along a sub-axis of that passes
            # over all of its sub-axes that are further in.
            inner_axes = tuple(
                inner_axis for inner_axis in inner_axes if mesh.origin(inner_axis) == origin
            )
        else:
            node_positions = self.node_devices
            is_one_link = self.across is None or origin in dict(self.axes)
            if is_one_link or node_positions is None or mesh.n_devices <= node_positions:
                return size  # no nodes, or one link for the whole axis: as if in one node
        return _positions_together(node_positions, math.prod(mesh.sizes_of(inner_axes)), size)

    def splits_groups(self, mesh: Mesh) -> bool:
        """Return whether nodes end within groups of devices, so that axes do not show which are near."""
        nodes = self.node_devices
        if self.across is None or nodes is None or self.axes or mesh.n_devices <= nodes:
            return False
        # If axes fill nodes, devices of a node differ along the positions inside, and along no others.
        return math.prod(self._positions_in_node(axis, mesh) for axis in mesh.axes) != nodes

    def launch(self, step_kind: str) -> float:
        """Return the seconds to start a step of a kind, such as "all_gather"."""
        return self._launches.get(step_kind, self._launches.get("other", 0.0))

    @cached_property
    def _launches(self) -> dict[str, float]:
        return dict(self.launch_s)

    @cached_property
    def rings(self) -> dict[str, float]:
        """`ring_s` by kind."""
        return dict(self.ring_s)

    def count_collectives(self, step_kind: str, traffic: Traffic) -> int:
        """Return how many collectives a step of a kind starts."""
        if step_kind in LOCAL:
            return 0
        if self.rounds and step_kind == "exchange":  # one permutation for each message
            return max(1, sum(hop.messages for hop in traffic.hops))
        return 1

    def copied_elements(self, traffic: Traffic) -> int:
        """Return the elements that a step copies locally."""
        if self.rounds:
            return traffic.copied - traffic.saved_copies
        return traffic.copied

    def flops(self, dtype: str) -> float:
        """Return the floating point operations per second in matrix products; infinite if unknown."""
        rates = dict(self.flops_per_s)
        return rates.get(dtype, rates.get("float32", math.inf))

    def work(self, flops: int, touched_elements: int, dtype: str) -> float:
        """Predict the seconds of a local contraction: of its operations, or of its memory traffic.

        The longer of both counts (a roofline). 1e12 operations at 1e15 a second: 1 ms.

        Args:
            flops: Floating point operations.
            touched_elements: The elements that it reads and writes.
            dtype: The name of the dtype of its operands.
        """
        # Hot: called for each placement that is weighed. `copy_bytes_per_s` counts a copied byte
        # once, though it is read and written: so memory itself is twice as fast.
        memory_seconds = touched_elements * itemsize(dtype) / (2 * self.copy_bytes_per_s)
        return max(flops / self.flops(dtype), memory_seconds)

    def fabric(self, mesh: Mesh) -> Fabric:
        """Return the links of a mesh."""
        return _fabric(self, mesh)

    def link_spans(self, mesh: Mesh) -> LinkSpans:
        """Return the spans of each kind of link along the axes of a mesh, the slowest first."""
        return self.fabric(mesh).spans

    def to_json(self) -> str:
        """Return the profile as text; in a file, `load_profile` reads it back."""
        data = asdict(self)
        for field_name in ("launch_s", "ring_s", "axes", "inside", "flops_per_s"):
            data[field_name] = dict(data[field_name])
        if math.isinf(self.copy_bytes_per_s):
            data["copy_bytes_per_s"] = None  # JSON has no number for infinity
        return json.dumps(data, indent=2) + "\n"


ProfileLike = str | Path | Profile  # the name of one, its file, or itself


@dataclass(frozen=True)
class Fabric:
    """A profile on one mesh: how its devices are linked.

    Attributes:
        profile: The machine.
        mesh: The mesh on it.
        links: The links that occur, one for each level, the slowest first.
        spans: Which stretch of each axis has which link, in the order of levels.
    """

    profile: Profile
    mesh: Mesh
    links: tuple[Link, ...]
    spans: LinkSpans

    @cached_property
    def least_launch_s(self) -> float:
        """The fewest seconds to start a step that communicates."""
        launches = [seconds for kind, seconds in self.profile.launch_s if kind not in LOCAL]
        return min(launches, default=0.0)

    @cached_property
    def least_latency_s(self) -> float:
        """The fewest seconds of a message."""
        return min((link.latency_s for link in self.links), default=0.0)

    @cached_property
    def least_step_s(self) -> float:
        """The fewest seconds of a step that communicates: a launch and a message."""
        return self.least_launch_s + self.least_latency_s

    @cached_property
    def fastest_bytes_per_s(self) -> float:
        """The bytes per second of the fastest link."""
        return max((link.bytes_per_s for link in self.links), default=1.0)

    def seconds(self, step_kind: str, traffic: Traffic, itemsize: int) -> float:
        """Predict the seconds that a step, such as an all-gather, takes on the busiest device.

        They are the sum of local copies, of starting the collective, and of messages over each
        level of links.

        step_kind: as "all_gather". traffic: the elements that it copies and sends.
        itemsize: bytes of an element.
        """
        profile = self.profile  # hot: called for each step that a search weighs
        seconds = profile.copied_elements(traffic) * itemsize / profile.copy_bytes_per_s
        if step_kind not in LOCAL:
            seconds += profile.launch(step_kind) * profile.count_collectives(step_kind, traffic)
            seconds += profile.rings.get(step_kind, 0.0) * traffic.ring_rounds
        for hop in traffic.hops:  # a hop: all messages over one level of links
            link = self.link(hop)
            n_links = 1.0
            # On a ring, a message between any two devices passes over several links: on average a
            # quarter of the ring, as it takes the shorter way round.
            if link.topology == "ring" and step_kind in DIRECT:
                n_links = max(1.0, self.mesh.size(hop.axis) / 4)
            seconds += link.seconds(hop, itemsize, n_links)
        return seconds

    def link(self, hop: Hop) -> Link:
        """Return the link of a hop: the one of its level.

        Without nodes there is one link, also for senders that are numbered as if they were in a node.
        """
        return self.links[min(hop.level, len(self.links) - 1)]

    def between_nodes(self, traffic: Traffic) -> int:
        """Return the elements that the busiest device receives from other nodes."""
        return sum(hop.received for hop in traffic.hops if self.link(hop) == self.profile.across)

    def has_phases(self, axes: Sequence[str]) -> bool:
        """Return whether an all-gather is faster in phases: across nodes first, then inside them.

        The other way is one ring through all devices, in which each link carries all but one block.
        For 2 nodes of 4 devices, phases send 1 block between nodes and then 3 * 2 inside. Both are
        compared in seconds for each byte of a block, without latencies.

        axes: the mesh axes of the gather.
        """
        # A span is a stretch of an axis with one kind of link.
        spans = [span for span in self.spans if span.axis in axes and span.size > 1]
        if len({span.level for span in spans}) < 2:  # links of one kind only: there are no phases
            return False
        n_devices = math.prod(span.size for span in spans)
        ring_seconds = 0.0
        phase_seconds = 0.0
        n_gathered = 1  # blocks that a device has after the phases so far
        for span in spans:  # the slowest link first
            byte_seconds = 1 / self.links[span.level].bytes_per_s
            phase_seconds += (span.size - 1) * n_gathered * byte_seconds
            # The next phase, over faster links, passes on all blocks that this one brought.
            n_gathered *= span.size
            # What leaves a group of devices at one position along the spans so far, all devices of
            # the group share. The ring is as fast as its slowest link.
            group_devices = n_devices // n_gathered
            ring_seconds = max(ring_seconds, (n_devices - 1) * byte_seconds / group_devices)
        return phase_seconds < ring_seconds


def _positions_together(node_size: int, stride: int, size: int) -> int:
    """Count the consecutive positions along an axis that are always in one node.

    The axis has `size` positions, each `stride` devices from the next. Nodes of 8, a stride of 2:
    4 of 8 positions are together, all of 4, and 1 of 6, where nodes end at other positions for
    other groups along the axis.
    """
    n_together, remainder = divmod(node_size, stride)
    if remainder:  # a step along the axis may lead into another node
        return 1
    if n_together % size == 0:
        return size
    return 1 if size % n_together else n_together


@lru_cache(maxsize=256)
def _fabric(profile: Profile, mesh: Mesh) -> Fabric:
    """Find which links a mesh has, and which span of each mesh axis runs over which link.

    Nodes of 4, and an axis of 8: a span of 2 positions, each 4 from the next, over the link between
    nodes, and a span of 4, each 1 from the next, over the link in a node. Links are sorted, the
    slowest first; the index of a link is its level.
    """
    link_of: dict[LinkSpan, Link] = {}  # of spans without a level
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        link = profile.link(axis, mesh)
        in_node = profile._positions_in_node(axis, mesh)
        origin = mesh.origin(axis)
        if origin == axis:
            origin = ""  # it is a part of no other axis
        if in_node in (1, size):  # one kind of link: no two positions share a node, or all do
            link_of[LinkSpan(axis, size, origin=origin)] = link
        else:  # between nodes, and inside them
            link_of[LinkSpan(axis, size // in_node, stride=in_node, origin=origin)] = link
            link_of[LinkSpan(axis, in_node, origin=origin)] = profile.default
    links = [*link_of.values()]
    if profile.splits_groups(mesh):
        # Nodes end in the middle of an axis, so that no span is inside nodes. Yet some devices
        # share a node, and messages between them take its link.
        links.append(profile.default)
    links = sorted(dict.fromkeys(links), key=_slowest_first)  # each once, in one order
    spans = [span._replace(level=links.index(link)) for span, link in link_of.items()]
    spans.sort(key=attrgetter("level"))
    return Fabric(profile, mesh, tuple(links), tuple(spans))


def _slowest_first(link: Link) -> tuple[float, float]:
    return link.bytes_per_s, -link.latency_s


@dataclass(frozen=True)
class Price:
    """The price of a step: seconds, bytes received by the busiest device, most bytes it holds at once."""

    seconds: float
    received_bytes: int
    peak_bytes: int


def price(step: Step, source: Sharding, target: Sharding, itemsize: int, profile: Profile) -> Price:
    """Predict the seconds, received bytes and peak memory of one step, such as an all-gather.

    source, target: the array's sharding before and after the step. itemsize: bytes of an element.
    The peak counts the input, the output, and a buffer for what is packed into messages.
    """
    fabric = profile.fabric(source.mesh)
    traffic = step.traffic(source, fabric.spans)
    held_elements = source.max_local_size
    if step.kind not in VIEW_KINDS:  # else the result is the input, or a view of it
        held_elements += target.max_local_size
    if traffic.hops:  # messages are sent, from and into buffers
        held_elements += traffic.copied
    seconds = fabric.seconds(step.kind, traffic, itemsize)
    return Price(seconds, traffic.received * itemsize, held_elements * itemsize)


def too_large(
    limit: int | None, min_bytes: int, candidates_text: str = "of those weighed"
) -> PlanError:
    """Return the error if no plan stays within so many bytes.

    min_bytes: of the plan that holds least. candidates_text: the plans that were weighed, in words.
    """
    limit_bytes = limit if limit is not None else 0
    hint = f"the least {candidates_text} is {format_bytes(min_bytes)} ({min_bytes} bytes)"
    return PlanError(f"no plan stays within {format_bytes(limit_bytes)} per device", hint=hint)


@lru_cache(maxsize=64)
def _is_dtype(name: str) -> bool:
    """Return whether text is the name of a dtype."""
    try:
        return name_of(name) == name
    except DtypeError:
        return False


def _is_share(value: Any) -> bool:
    return _is_time(value) and value <= 1


def _is_time(value: Any) -> bool:
    """Return whether a value is a number of seconds: finite, and not negative."""
    return 0 <= _number(value) < math.inf


def _is_rate(value: Any) -> bool:
    """Return whether a value is a number for each second: positive, or infinite."""
    return _number(value) > 0


def _is_count(value: Any) -> bool:
    """Return whether a value is a number of devices: whole, 1 or more."""
    count = as_whole_number(value)
    return count is not None and count > 0


def _number(value: Any) -> float:
    """Return a number >= 0 as a float; -1 for any other value, or a number too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return -1.0
    try:
        return float(value) if value >= 0 else -1.0
    except OverflowError:
        return -1.0
