"""The cases: einsums with a layout for every operand and for the result, which every peer can express.

Shards are even, and there are no sums.
"""

import json
import math
import string
from dataclasses import dataclass, replace
from functools import cached_property

import xshard as xs
from benchmarks.cases import DATA
from xshard.contractions.expression import Contraction, contraction


@dataclass(frozen=True)
class Case:
    """An expression on a mesh; `sizes` are pairs of dim and length."""

    name: str
    expression: str
    mesh: xs.Mesh
    sizes: tuple[tuple[str, int], ...]
    dtype: str

    @cached_property
    def contraction(self) -> Contraction:
        return contraction(self.expression)

    @cached_property
    def equation(self) -> str:
        """The expression as `numpy.einsum` reads it."""
        letters = dict(zip(dict(self.sizes), string.ascii_letters, strict=False))
        left = [
            "".join(letters[name] for name in layout.names) for layout in self.contraction.operands
        ]
        return (
            f"{','.join(left)}->{''.join(letters[name] for name in self.contraction.result.names)}"
        )

    def shape(self, layout: xs.Layout) -> tuple[int, ...]:
        """The global shape of an operand or of the result."""
        return tuple(dict(self.sizes)[name] for name in layout.names)

    @property
    def share(self) -> float:
        """Operations of one device, if all operands are contracted at once and no work is repeated."""
        return 2 * math.prod(length for _, length in self.sizes) / self.mesh.n_devices

    @property
    def least_flops(self) -> float:
        """Of two operands the share: XLA counts no additions where nothing is summed. Of more, unknown: 0."""
        return self.share if len(self.contraction.operands) <= 2 else 0.0

    def plan(
        self, objective: str, flops_limit: int | None, profile: str | xs.Profile = "bandwidth"
    ) -> xs.ContractionPlan:
        """Our plan."""
        options = {"profile": profile, "flops_limit": flops_limit, "objective": objective}
        return xs.plan(
            self.expression, self.mesh, sizes=dict(self.sizes), dtype=self.dtype, **options
        )


def load() -> tuple[Case, ...]:
    """All cases."""
    entries = json.loads((DATA / "einsum.json").read_text())
    return tuple(
        Case(e["name"], e["expression"], xs.Mesh(e["mesh"]), tuple(e["sizes"].items()), e["dtype"])
        for e in entries
    )


def scaled(case: Case, most_flops: float) -> Case:
    """The case with `most_flops` at most: its longest dims are halved while all devices can shard them."""
    sizes = dict(case.sizes)
    n = case.mesh.n_devices
    while 2 * math.prod(sizes.values()) > most_flops:
        longest = max(
            (name for name in sizes if sizes[name] % (2 * n) == 0), key=lambda name: sizes[name]
        )
        sizes[longest] //= 2
    return replace(case, sizes=tuple(sizes.items()))
