"""Every peer's plan for a case: asked live if the peer is installed, else as recorded.

Whole plans are recorded (by a live run with `--save-peers`); for cases without one, there are the bytes of
the baselines that came with the cases.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

import xshard as xs
from benchmarks.cases import DATA, Case
from benchmarks.planner.peers import dtensor, gspmd, shardy
from benchmarks.planner.peers.base import NotConvertibleError, PeerPlan
from benchmarks.planner.peers.gspmd import HloPlan
from xshard import dtypes

PLANS = "reshard_peers.json"
BASELINES = {"public": "reshard_baselines.json", "scaled": "reshard_large_baselines.json"}


@dataclass(frozen=True)
class Peer:
    """A planner: its name in the baselines, how to ask it, and its package."""

    title: str
    baseline: str
    find_plan: Callable[[Case], PeerPlan | HloPlan | None]
    package: str

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        try:
            return f"{self.package} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return None


PEERS = {
    "shardy": Peer("Shardy", "shardy", shardy.find_plan, "jaxlib"),
    "dtensor_greedy": Peer("DTensor greedy", "dt_greedy", dtensor.greedy, "torch"),
    "dtensor_dijkstra": Peer("DTensor Dijkstra", "dt_mincost", dtensor.dijkstra, "torch"),
    "gspmd": Peer("GSPMD", "gspmd", gspmd.find_plan, "jax"),
}


@dataclass(frozen=True)
class Answer:
    """A peer's answer to a case: a plan, or at least its bytes, or why there is neither.

    source: "live", "recorded plan", "recorded bytes" or "none".
    """

    source: str
    plan: PeerPlan | HloPlan | None = None
    bytes_of_baseline: float | None = None
    reason: str = ""

    def received_bytes(self, case: Case) -> float | None:
        return self.bytes_of_baseline if self.plan is None else self.plan.received_bytes(case)


def answers(which: str, cases: Iterable[Case], *, live: bool) -> dict[str, dict[str, Answer]]:
    """By case and peer."""
    return {
        case.name: {name: _answer(which, case, name, live=live) for name in PEERS} for case in cases
    }


def versions(*, live: bool) -> dict[str, str]:
    """The versions that made the peers' plans, by peer."""
    installed = {name: peer.version for name, peer in PEERS.items() if live and peer.version}
    return {**_data(PLANS)["versions"], **installed}


def save(found: Mapping[str, Mapping[str, Mapping[str, Answer]]]) -> None:
    """Record the live plans of a run, by set, case and peer."""
    sets = {
        which: {
            case: {name: a.plan.to_dict() for name, a in by_peer.items() if a.plan is not None}
            for case, by_peer in by_case.items()
        }
        for which, by_case in found.items()
    }
    (DATA / PLANS).write_text(
        json.dumps({"versions": versions(live=True), **sets}, separators=(",", ":")) + "\n"
    )


def _answer(which: str, case: Case, name: str, *, live: bool) -> Answer:
    try:
        answer = (
            _live(case, name) if live and PEERS[name].version else _recorded_plan(which, case, name)
        )
        if answer.plan is not None:
            answer.plan.seconds(
                case, xs.load_profile("bandwidth")
            )  # its steps must lead to the destination
            return answer
        reason = answer.reason
    except (NotConvertibleError, xs.XshardError) as error:
        reason = f"{type(error).__name__}: {error}"
    entry = _data(BASELINES[which]).get(case.name, {}).get(PEERS[name].baseline, {})
    if entry.get("vol_elems") is None:
        return Answer("none", reason=reason)
    return Answer(
        "recorded bytes",
        bytes_of_baseline=entry["vol_elems"] * dtypes.itemsize(case.dtype),
        reason=reason,
    )


def _live(case: Case, name: str) -> Answer:
    with contextlib.redirect_stdout(sys.stderr):
        return Answer("live", PEERS[name].find_plan(case))


def _recorded_plan(which: str, case: Case, name: str) -> Answer:
    data = _data(PLANS).get(which, {}).get(case.name, {}).get(name)
    if data is None:
        return Answer("none")
    kind = HloPlan if name == "gspmd" else PeerPlan
    return Answer("recorded plan", kind.from_dict(data))


@lru_cache(maxsize=3)
def _data(file: str) -> dict[str, Any]:
    return json.loads((DATA / file).read_text())
