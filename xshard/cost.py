"""What a step costs: elements -> bytes -> seconds, under an alpha-beta model of the machine.

Decides the model; the constants are data (`profiles/*.json`, each with its source). A step
pays a launch, one latency per message and its received bytes at the speed of the slowest
axis it crosses, and memory bandwidth for what it packs locally.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from xshard.errors import XshardError
from xshard.mesh import Mesh
from xshard.sharding import Sharding
from xshard.steps import Step, Traffic
from xshard.steps.base import Levels

DIRECT = ("all_to_all", "permute", "exchange")  # kinds whose messages go from any device to any other
TOPOLOGIES = ("switch", "ring")
LOCAL = ("slice", "embed", "mask", "retag", "scale")  # kinds of steps that send nothing


class ProfileError(XshardError):
    """A profile that does not exist or makes no sense."""


@dataclass(frozen=True)
class Link:
    """What connects the devices along one axis: seconds per message, bytes per second and device.

    topology: on a "switch" every device reaches every other alike; on a "ring" (an axis of a
    torus, both ways) what is not passed on to a neighbour travels a quarter of it on average.
    """

    latency_s: float
    bytes_per_s: float
    topology: str = "switch"

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ProfileError(f"no topology {self.topology!r}", hint=f"there are: {', '.join(TOPOLOGIES)}")
        if not 0 <= self.latency_s < math.inf or not self.bytes_per_s > 0:
            raise ProfileError(
                f"no such link: {self.latency_s} s, {self.bytes_per_s} bytes/s",
                hint="a latency is >= 0 and a bandwidth > 0",
            )


@dataclass(frozen=True)
class Profile:
    """The machine a plan is priced for.

    default: the link between devices of one node. across: the link between nodes of `node_devices`
    consecutive devices, for axes that reach over a node. axes: links of axes by name, which win.
    launch_s: seconds to start a collective, by the kind of step ("other" for those not named).
    copy_bytes_per_s: local packing speed.
    """

    name: str
    source: str
    default: Link
    across: Link | None = None
    node_devices: int | None = None
    axes: tuple[tuple[str, Link], ...] = ()
    launch_s: tuple[tuple[str, float], ...] = ()
    copy_bytes_per_s: float = math.inf

    def link(self, axis: str, mesh: Mesh) -> Link:
        """What connects the devices of a mesh along an axis."""
        named = dict(self.axes).get(axis)
        if named is not None or self.across is None or self.node_devices is None:
            return named or self.default
        reach = math.prod(mesh.sizes[mesh.position(axis) :])
        # Groups along the axis stay in a node where whole runs of `reach` devices fill it, or all fit.
        fits = self.node_devices % reach == 0 or mesh.n_devices <= self.node_devices
        return self.default if fits or mesh.size(axis) == 1 else self.across

    def launch(self, kind: str) -> float:
        known = dict(self.launch_s)
        return known.get(kind, known.get("other", 0.0))

    def seconds(self, kind: str, traffic: Traffic, itemsize: int, mesh: Mesh) -> float:
        """Predicted time of a step of a kind on the busiest device."""
        total = traffic.copied * itemsize / self.copy_bytes_per_s
        if kind not in LOCAL:
            total += self.launch(kind)
        for hop in traffic.hops:
            link = self.link(hop.axis, mesh)
            way = max(1.0, mesh.size(hop.axis) / 4) if link.topology == "ring" and kind in DIRECT else 1.0
            total += hop.messages * link.latency_s + way * hop.received * itemsize / link.bytes_per_s
        return total

    def levels(self, mesh: Mesh) -> Levels:
        """The mesh's axes grouped by link, the slowest link first."""
        links = {axis: self.link(axis, mesh) for axis in mesh.axes}
        slow_first = sorted(set(links.values()), key=lambda x: (x.bytes_per_s, -x.latency_s))
        return tuple(tuple(a for a in mesh.axes if links[a] == link) for link in slow_first)

    def to_json(self) -> str:
        """The profile as text; in a file, `load_profile` reads it back."""
        data = {
            "name": self.name,
            "source": self.source,
            "launch_s": dict(self.launch_s),
            "copy_bytes_per_s": None if math.isinf(self.copy_bytes_per_s) else self.copy_bytes_per_s,
            "default": asdict(self.default),
            "node_devices": self.node_devices,
            "across": None if self.across is None else asdict(self.across),
            "axes": {axis: asdict(link) for axis, link in self.axes},
        }
        return json.dumps(data, indent=2) + "\n"


@dataclass(frozen=True)
class Price:
    """What one step costs: seconds, bytes received by the busiest device, most bytes it holds at once."""

    seconds: float
    received_bytes: int
    peak_bytes: int


def price(step: Step, before: Sharding, after: Sharding, itemsize: int, profile: Profile) -> Price:
    """Price of a step between two shardings. Peak: input, output, and a packing buffer for collectives."""
    traffic = step.traffic(before, profile.levels(before.mesh))
    buffer = traffic.copied if traffic.hops else 0
    made = 0 if step.kind == "retag" else after.max_local_size  # a block renamed is the same block
    held = before.max_local_size + made + buffer
    seconds = profile.seconds(step.kind, traffic, itemsize, before.mesh)
    return Price(seconds, traffic.received * itemsize, held * itemsize)


def load_profile(profile: str | Path | Profile) -> Profile:
    """A shipped name, a file or a Profile -> Profile. Raises ProfileError."""
    return profile if isinstance(profile, Profile) else _load(str(profile))


@lru_cache(maxsize=64)
def _load(name: str) -> Profile:
    shipped = resources.files("xshard") / "profiles"
    known = sorted(p.name[: -len(".json")] for p in shipped.iterdir() if p.name.endswith(".json"))
    if name in known:
        text = (shipped / f"{name}.json").read_text()
    elif Path(name).is_file():
        text = Path(name).read_text()
    else:
        raise ProfileError(f"no profile {name!r}", hint=f"shipped are: {', '.join(known)}; or give a file")
    try:
        data: dict[str, Any] = json.loads(text)
        return Profile(
            name=data["name"],
            source=data["source"],
            default=Link(**data["default"]),
            across=Link(**data["across"]) if data.get("across") else None,
            node_devices=data.get("node_devices"),
            axes=tuple(sorted((axis, Link(**link)) for axis, link in data["axes"].items())),
            launch_s=tuple(sorted(data["launch_s"].items())),
            copy_bytes_per_s=data["copy_bytes_per_s"] or math.inf,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"profile {name!r} is malformed: {error}") from None
