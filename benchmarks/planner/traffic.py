"""Elements that devices and nodes receive in a step, counted from its messages and not from its price.

Collectives are taken to be
hierarchical, as the steps' traffic functions document them: elements that several members of a group need
in one node enter it once, and elements that they send leave it reduced. The boxes of an exchange, the pieces
of an all-to-all and permuted blocks differ from receiver to receiver: each is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from xshard.steps import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Step
from xshard.steps.base import axes_of
from xshard.steps.exchange.messages import messages_to
from xshard.steps.permute import senders

Elements = NDArray[np.float64]


@dataclass(frozen=True)
class Flow:
    """Elements received in a step: by every device, and by every node from other nodes."""

    devices: Elements
    nodes: Elements


def plan_flow(plan: xs.Plan, node_devices: int) -> Flow:
    """A plan's steps together, on nodes of `node_devices` consecutive devices."""
    return _flow([(stage.step, stage.before) for stage in plan.stages], plan.mesh, node_devices)


def step_flow(step: Step, before: xs.Sharding, node_devices: int) -> Flow:
    """One step from a sharding in normal form."""
    return _flow([(step, before)], before.mesh, node_devices)


def _flow(steps: Sequence[tuple[Step, xs.Sharding]], mesh: xs.Mesh, node_devices: int) -> Flow:
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


def _reduce_scattered(step: ReduceScatter, before: xs.Sharding, node_devices: int, flow: Flow) -> None:
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
            piece, node = sizes[d] / len(group), d // node_devices
            flow.devices[d] += (len(group) - 1) * piece
            flow.nodes[node] += (len(group) - members[node]) * piece


def _permuted(step: Permute, before: xs.Sharding, node_devices: int, flow: Flow) -> None:
    sizes = _sizes(before)
    for device, sender in enumerate(senders(before, step.after(before))):
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
