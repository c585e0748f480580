"""The peers' figures for every case, as recorded, or measured again if the peer is installed.

"plain" is the plainest planner: it tried every placement of the local contraction, and planned the moves
before and after it for the fewest bytes, with at most XLA's operations, or an even share if that is more. It
contracts three operands at once. torch-einshard was counted forward only: its gradients are each device's
own, for the caller to add.
"""

import json
from collections.abc import Sequence
from importlib import metadata

from benchmarks import record
from benchmarks.cases import DATA
from benchmarks.claim import Row
from benchmarks.einsum.cases import Case

FILE = DATA / "einsum_peers.json"
MAX_DEVICES = 64


def figures(forward: Row, backward: Row) -> Row:
    """A peer's figures in each pass -> its row; bytes by objective, the rest by pass."""
    received = forward.pop("received_bytes"), backward.pop("received_bytes")
    row = {"received_bytes": {"forward": received[0], "forward+backward": sum(received)}}
    return row | {key: {"forward": forward[key], "backward": backward[key]} for key in forward}


def recorded() -> Row:
    """`{"versions": {peer: text}, peer: {case: row}}`."""
    return json.loads(FILE.read_text())


def live(cases: Sequence[Case]) -> Row:
    """The same, with the peers that are installed here measured again."""
    # These import JAX, which reads its environment first, and torch.
    from benchmarks.einsum import dtensor, xla
    from benchmarks.jax_devices import configure

    configure(MAX_DEVICES)
    known = recorded()
    for name, package, measured in (
        ("xla", "jax", xla.measured),
        ("dtensor", "torch", dtensor.measured),
    ):
        known["versions"][name] = f"{package} {metadata.version(package)}"
        known[name] |= {case.name: measured(case) for case in record.shown(cases, name)}
    return known


def save(known: Row) -> None:
    """Record the figures; a line per case."""
    parts = [f'"versions": {json.dumps(known["versions"])}']
    for peer in (key for key in known if key != "versions"):
        rows = [f"{json.dumps(case)}: {json.dumps(row)}" for case, row in known[peer].items()]
        parts.append(f"{json.dumps(peer)}: {{\n" + ",\n".join(rows) + "\n}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def of(case: Case, known: Row) -> Row:
    """The row of every peer for a case."""
    return {peer: rows[case.name] for peer, rows in known.items() if peer != "versions"}
