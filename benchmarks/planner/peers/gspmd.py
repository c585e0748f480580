"""XLA's SPMD partitioner: moves compiled by `jax.jit` with in- and out-shardings.

Compiles for many CPU devices and reads the HLO text. HLO knows no layouts, so these plans are priced by their
traffic: a collective by the formulas of our steps, and every other operation that writes elements as a local
copy of them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from benchmarks.cases import Case
from benchmarks.planner.peers.base import NODE_DEVICES, NotConvertibleError
from xshard import dtypes
from xshard.steps import Traffic
from xshard.steps.all_gather import gather_traffic
from xshard.steps.all_to_all import all_to_all_traffic
from xshard.steps.permute import permute_traffic
from xshard.steps.traffic import LinkSpans, slowest_first

MAX_DEVICES = 256
# Operations that write no elements.
FREE = (
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "partition-id",
    "replica-id",
)
# XLA's CPU backend would widen bf16: values are carried as integers of their width.
CARRIERS = {1: "uint8", 2: "uint16", 4: "uint32"}
KINDS = {"all-gather": "all_gather", "all-to-all": "all_to_all", "collective-permute": "permute"}


@dataclass(frozen=True)
class Collective:
    """One collective of an HLO module: the elements that a device holds after it, and its group.

    devices, nodes: sizes of the largest group; nodes have NODE_DEVICES consecutive devices.
    """

    kind: str
    elements: int
    devices: int
    nodes: int

    @property
    def mesh(self) -> xs.Mesh:
        """The largest group."""
        return xs.Mesh(across=self.nodes, inside=self.devices // self.nodes)

    def traffic(self, spans: LinkSpans = ()) -> Traffic:
        """The elements that a device sends and receives, over the links of the group's mesh."""
        group = tuple(
            span for span in slowest_first(self.mesh, self.mesh.axes, spans) if span.size > 1
        )
        if self.kind == "all_gather":
            return gather_traffic(self.elements // self.devices, group, in_place=True)
        if self.kind == "all_to_all":  # packed and unpacked by operations of their own
            return all_to_all_traffic(self.elements, group)._replace(copied=0)
        return permute_traffic(self.elements, group)


@dataclass(frozen=True)
class HloPlan:
    """What XLA compiles for a case. copied: elements that local operations write."""

    collectives: tuple[Collective, ...]
    copied: int
    plan_s: float

    def seconds(self, case: Case, profile: xs.Profile) -> float:
        """Predicted time by our model."""
        links = (("across", profile.across or profile.default), ("inside", profile.default))
        named = replace(profile, axes=links)
        itemsize = dtypes.itemsize(case.dtype)
        return self.copied * itemsize / profile.copy_bytes_per_s + sum(
            named.fabric(c.mesh).seconds(c.kind, c.traffic(named.link_spans(c.mesh)), itemsize)
            for c in self.collectives
        )

    def received_bytes(self, case: Case) -> int:
        return sum(c.traffic().received for c in self.collectives) * dtypes.itemsize(case.dtype)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HloPlan:
        return cls(
            tuple(Collective(**c) for c in data["collectives"]), data["copied"], data["plan_s"]
        )


def find_plan(case: Case) -> HloPlan | None:
    """XLA's plan; None for partial sums and uneven cuts, which `jit` refuses. Raises NotConvertibleError."""
    if case.is_partial or not case.is_even:
        return None
    text, plan_s = _compiled(case)
    if re.search(r"\bwhile\(", text):
        raise NotConvertibleError("XLA loops over collectives")
    entry = text[text.index("\nENTRY") :]
    operations = list(re.finditer(r"= (?P<shape>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<rest>.*)", entry))
    sent = [
        _collective(m["op"], m["shape"], m["rest"]) for m in operations if _communicates(m["op"])
    ]
    local = [m for m in operations if m["op"] not in FREE and not _communicates(m["op"])]
    copied = sum(_elements(m["shape"]) for m in local)
    return HloPlan(tuple(c for c in sent if c.devices > 1), copied, plan_s)


def _compiled(case: Case) -> tuple[str, float]:
    """The optimised HLO of a move, and the seconds that compiling it took."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices < MAX_DEVICES:
        jax.config.update("jax_num_cpu_devices", MAX_DEVICES)
    devices = np.array(jax.devices()[: case.mesh.n_devices]).reshape(case.mesh.sizes)
    mesh = Mesh(devices, case.mesh.axes)
    src, dst = (
        NamedSharding(mesh, PartitionSpec(*(dim.axes or None for dim in end.dims)))
        for end in (case.src, case.dst)
    )
    array = jax.ShapeDtypeStruct(case.shape, CARRIERS[dtypes.itemsize(case.dtype)])
    start = time.perf_counter()
    compiled = jax.jit(lambda x: x, in_shardings=src, out_shardings=dst).lower(array).compile()
    return compiled.as_text(), time.perf_counter() - start


def _communicates(op: str) -> bool:
    return op.startswith(("all-", "collective-", "reduce-scatter", "ragged-"))


def _collective(op: str, shape: str, rest: str) -> Collective:
    if op not in KINDS:
        raise NotConvertibleError(f"{op} is not expected in a move")
    elements = _elements(shape)
    if op == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
        moves = np.array([int(n) for n in re.findall(r"\d+", pairs[1] if pairs else "")]).reshape(
            -1, 2
        )
        moves = moves[moves[:, 0] != moves[:, 1]]
        far = len(moves) and (moves[:, 0] // NODE_DEVICES != moves[:, 1] // NODE_DEVICES).any()
        return Collective("permute", elements, 2 if len(moves) else 1, 2 if far else 1)
    groups = _groups(rest)
    nodes = max(len(set(group // NODE_DEVICES)) for group in groups)
    n = groups.shape[1]
    # A group that nodes do not divide evenly counts as all across.
    return Collective(KINDS[op], elements, n, nodes if n % nodes == 0 else n)


def _elements(shape: str) -> int:
    """Elements of an HLO shape, or of all members of a tuple: `(u16[4,2]{1,0}, u16[4,2]{1,0})`."""
    sizes = re.findall(r"\w+\[([\d,]*)\]", shape)
    return sum(math.prod(int(n) for n in size.split(",") if n) for size in sizes)


def _groups(text: str) -> NDArray[np.int64]:
    """The replica groups of a collective, one row each, from any of HLO's three notations."""
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        rows = re.findall(r"\{([\d,\s]+)\}", listed[1])
        return np.array([[int(n) for n in row.split(",")] for row in rows])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?)(?:,\s|\s|$)", text):
        return _iota(iota[2]).reshape(_numbers(iota[1]))
    if named := re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\) | )\{(.*?)\}", text
    ):
        return _named_groups(*named.groups())
    raise NotConvertibleError(f"replica groups in {text[:200]}")


def _named_groups(axes: str, devices: str | None, grouped: str) -> NDArray[np.int64]:
    """`'x'=2,'y'=4`, `[2,4]T(1,0)`, `'y':(2)2` -> the groups along the second half of axis y."""
    sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", axes)}
    shape: dict[tuple[str, int], int] = {}
    along = [
        (axis, int(outer or 1), int(size or sizes[axis]))
        for axis, outer, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", grouped)
    ]
    for (
        axis,
        n,
    ) in sizes.items():  # every axis has three parts: before, in and after the part that groups
        outer, size = next(((o, s) for a, o, s in along if a == axis), (n, 1))
        shape |= {(axis, 0): outer, (axis, 1): size, (axis, 2): n // (outer * size)}
    order = list(shape)
    parts = [order.index((axis, 1)) for axis, _, _ in along]
    ids = _iota(devices) if devices else np.arange(math.prod(sizes.values()))
    moved = np.moveaxis(ids.reshape(list(shape.values())), parts, range(-len(parts), 0))
    return moved.reshape(-1, math.prod(size for _, _, size in along))


def _iota(text: str) -> NDArray[np.int64]:
    """`[4,2]T(1,0)`: the numbers from 0 up, in this shape, transposed."""
    shape, _, order = text.partition("T")
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return numbers.transpose(_numbers(order)) if order else numbers


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
