"""Elements that devices and nodes receive in a step, counted from its messages and not from its price.

Collectives are taken to be hierarchical, as the steps' traffic functions document them: elements that several
members of a group need in one node enter it once, and elements that they send leave it reduced. Boxes of an
exchange, pieces of an all-to-all and permuted blocks differ from receiver to receiver: each is counted.

At the end are lower bounds for any plan, beside the one that every plan has (`Plan.bytes_lower_bound`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from benchmarks.cases import Case
from xshard.cost import bounds
from xshard.steps import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Step
from xshard.steps.base import axes_of
from xshard.steps.exchange.messages import messages_to
from xshard.steps.permute import sender_of_each_device

Elements = NDArray[np.float64]


@dataclass(frozen=True)
class Flow:
    """Elements received in a step: by every device, and by every node from other nodes."""

    devices: Elements
    nodes: Elements


def plan_flow(plan: xs.Plan, node_devices: int) -> Flow:
    """A plan's steps together, on nodes of `node_devices` consecutive devices."""
    return flow_of([(stage.step, stage.before) for stage in plan.stages], plan.mesh, node_devices)


def flow_of(steps: Sequence[tuple[Step, xs.Sharding]], mesh: xs.Mesh, node_devices: int) -> Flow:
    """Steps together, each with the sharding before it, in normal form."""
    flow = Flow(np.zeros(mesh.n_devices), np.zeros(-(-mesh.n_devices // node_devices)))
    for step, before in steps:
        if count := _COUNTS.get(type(step)):
            count(step, before, node_devices, flow)
    return flow


def _sizes(sharding: xs.Sharding) -> list[int]:
    return [math.prod(sharding.local_shape(d)) for d in range(sharding.mesh.n_devices)]


def _gathered(step: AllGather, before: xs.Sharding, node_devices: int, flow: Flow) -> None:
    """Every member's block goes to every other member, and into every other node once."""
    sizes = _sizes(before)
    for group in before.mesh.groups(axes_of(step.shards)):
        whole = sum(sizes[d] for d in group)
        at_home: Counter[int] = Counter()
        for d in group:
            flow.devices[d] += whole - sizes[d]
            at_home[d // node_devices] += sizes[d]
        for node, home in at_home.items():
            flow.nodes[node] += whole - home


def _reduce_scattered(
    step: ReduceScatter, before: xs.Sharding, node_devices: int, flow: Flow
) -> None:
    """Every member gets its part from every other member, and from every other node once."""
    sizes = _sizes(step.after(before))
    for group in before.mesh.groups(axes_of(step.shards)):
        n_nodes = len({d // node_devices for d in group})
        for d in group:
            flow.devices[d] += (len(group) - 1) * sizes[d]
            flow.nodes[d // node_devices] += (n_nodes - 1) * sizes[d]


def _all_reduced(step: AllReduce, before: xs.Sharding, node_devices: int, flow: Flow) -> None:
    """A reduce-scatter into equal parts and an all-gather of them."""
    sizes = _sizes(before)
    for group in before.mesh.groups(step.axes):
        part = sizes[group[0]] / len(group)
        members = Counter(d // node_devices for d in group)
        for d in group:
            flow.devices[d] += 2 * (len(group) - 1) * part
        for node, home in members.items():
            flow.nodes[node] += part * (home * (len(members) - 1) + len(group) - home)


def _moved(step: AllToAll, before: xs.Sharding, node_devices: int, flow: Flow) -> None:
    """Every member gets an equal piece from every other member."""
    sizes = _sizes(step.after(before))
    for group in before.mesh.groups(axes_of(step.src_shards)):
        members = Counter(d // node_devices for d in group)
        for d in group:
            piece = sizes[d] / len(group)
            node = d // node_devices
            flow.devices[d] += (len(group) - 1) * piece
            flow.nodes[node] += (len(group) - members[node]) * piece


def _permuted(step: Permute, before: xs.Sharding, node_devices: int, flow: Flow) -> None:
    sizes = _sizes(before)
    for device, sender in enumerate(sender_of_each_device(before, step.after(before))):
        _send(flow, sender, device, sizes[sender], node_devices)


def _exchanged(step: Exchange, before: xs.Sharding, node_devices: int, flow: Flow) -> None:
    after = step.after(before)
    for device in range(before.mesh.n_devices):
        for message in messages_to(before, after, device, step.node_devices):
            _send(flow, message.src, device, message.size, node_devices)


def _send(flow: Flow, src: int, dst: int, elements: int, node_devices: int) -> None:
    if src != dst:
        flow.devices[dst] += elements
    if src // node_devices != dst // node_devices:
        flow.nodes[dst // node_devices] += elements


_COUNTS: dict[type[Step], Callable[..., None]] = {
    AllGather: _gathered,
    ReduceScatter: _reduce_scattered,
    AllReduce: _all_reduced,
    AllToAll: _moved,
    Permute: _permuted,
    Exchange: _exchanged,
}


def total_elements(case: Case) -> int:
    """Elements that all devices together must receive."""
    return bounds.total_elements(*(each.with_layout(each.normal_layout) for each in case.shardings))


def node_elements(src: xs.Sharding, dst: xs.Sharding, node_devices: int) -> NDArray[np.int64]:
    """Elements that must enter every node, because its devices need them and do not have them.

    For contiguous cuts without partial sums. The array is cut into cells wherever a block begins or ends: the
    elements of a cell move together.
    """
    marks = [_marks(d, (src, dst)) for d in range(len(src.shape))]
    needed = []
    n = src.mesh.n_devices
    for first in range(0, n, node_devices):
        devices = range(first, min(first + node_devices, n))
        have, want = (_covered(marks, sharding, devices) for sharding in (src, dst))
        elements = (want & ~have).astype(np.int64)
        for along in reversed(marks):
            elements = elements @ np.diff(along)
        needed.append(int(elements))
    return np.array(needed)


def _marks(dim: int, shardings: Sequence[xs.Sharding]) -> NDArray[np.int64]:
    runs = itertools.chain.from_iterable(
        held for s in shardings for held in s.held_by_position(dim)
    )
    return np.unique([mark for run in runs for mark in (run.start, run.start + run.length)])


def _covered(
    marks: Sequence[NDArray[np.int64]], sharding: xs.Sharding, devices: Iterable[int]
) -> NDArray[np.bool_]:
    """The cells that the devices hold together."""
    covered = np.zeros([len(along) - 1 for along in marks], bool)
    for device in devices:
        held = [sharding.held(d, device) for d in range(len(marks))]
        if all(held):
            box = (
                slice(*np.searchsorted(along, (runs[0].start, runs[0].start + runs[0].length)))
                for along, runs in zip(marks, held, strict=True)
            )
            covered[tuple(box)] = True
    return covered
