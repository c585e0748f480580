"""Random sums over devices whose addends have one order, and what every path has to give, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from ml_dtypes import bfloat16

import xshard as xs
from xshard import reference
from xshard.steps import Exchange

N_DEVICES = 6
MESHES = (
    xs.Mesh(a=6),
    xs.Mesh(a=2, b=3),
    xs.Mesh(b=3, a=2),
    xs.Mesh(a=6, b=1),
)
DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(bfloat16),
}
# The dtype in which addends are added; the sum is rounded once.
ADDED_IN = {"float16": np.float32, "bfloat16": np.float32}


@dataclass(frozen=True)
class Reduction:
    """Addends of one array along some axes, and two layouts between which they are added."""

    seed: int
    mesh: xs.Mesh
    summed: tuple[str, ...]
    src: str  # without its tag
    middle: str  # by which a path may go: the sum, cut over the summed axes
    dst: str
    kind: str
    dtype: str
    shape: tuple[int, int]

    @property
    def expression(self) -> str:
        return self.text_of(self.dst)

    def text_of(self, dst: str, summed: tuple[str, ...] = ()) -> str:
        axes = ",".join(summed if summed else self.summed)
        return f"{self.src} | {self.kind}({axes}) -> {dst}"

    @cached_property
    def addends(self) -> np.ndarray:
        """[addends, *shape]: sizes so different that another order has other bits."""
        rng = np.random.default_rng(self.seed)
        size = (self.mesh.size(*self.summed), *self.shape)
        values = rng.normal(size=size) * 10.0 ** rng.integers(-3, 3, size)
        values[:, :1] = -0.0
        return values.astype(DTYPES[self.dtype])

    @cached_property
    def blocks(self) -> list[np.ndarray]:
        """The block of every device: its part of its addend."""
        found = []
        numbers = self.mesh.indices(sorted(self.summed, key=self.mesh.position))
        parts = [reference.scatter(addend, self.src, self.mesh) for addend in self.addends]
        for device, number in enumerate(numbers.tolist()):
            found.append(parts[number][device])
        return found

    @cached_property
    def total(self) -> np.ndarray:
        """The sum in the order of ranks; of a mean, of shares."""
        dtype = DTYPES[self.dtype]
        wide = np.dtype(ADDED_IN.get(self.dtype, dtype))
        addends = list(self.addends)
        if self.kind == "mean":
            addends = [(addend.astype(wide) / len(addends)).astype(dtype) for addend in addends]
        if self.kind == "max":
            return np.maximum.reduce(addends)
        total = addends[0].astype(wide)
        for addend in addends[1:]:
            total = total + addend.astype(wide)
        return total.astype(dtype)

    @cached_property
    def wanted(self) -> list[np.ndarray]:
        """The block of every device at the end."""
        total = self.total.T if self.dst == "d n" else self.total
        return reference.scatter(total, self.dst, self.mesh)

    def plan(self, expression: str = "", **options: str) -> xs.Plan:
        text = expression if expression else self.expression
        return xs.plan(text, self.mesh, self.shape, self.dtype, addends="ranks", **options)

    @property
    def direct(self) -> xs.Plan:
        """The plan in which every device gets the addends of its own block, in one step."""
        plan = self.plan()
        scales = [step for step in plan.steps if step.kind == "scale"]
        transposes = [step for step in plan.steps if step.kind == "transpose"]
        exchange = Exchange(plan._normal_ends[1].layout)
        return replace(plan, steps=(*scales, exchange, *transposes), split=())

    @property
    def gathered(self) -> tuple[xs.Plan, xs.Plan]:
        """A reduce-scatter, and what makes the result of its parts."""
        return self.plan(self.text_of(self.middle)), self.plan(f"{self.middle} -> {self.dst}")

    @property
    def other_order(self) -> xs.Plan:
        """The same sum, with its axes named in another order."""
        return self.plan(self.text_of(self.dst, self.summed[::-1]))

    @property
    def adjoint(self) -> xs.Plan:
        """The move whose gradient is this sum: that of copies."""
        plan = self.plan()
        text = f"{plan.dst.dual} -> {plan.src.dual}"
        return xs.plan(text, self.mesh, plan.target.shape, self.dtype, addends="ranks")


def random_reductions(n: int, seed: int = 0) -> Iterator[Reduction]:
    """Draw reductions on meshes of six devices."""
    rng = random.Random(seed)
    for number in range(n):
        mesh = rng.choice(MESHES)
        axes = list(mesh.axes)
        summed = tuple(rng.sample(axes, rng.randint(1, len(axes))))
        kept = [axis for axis in axes if axis not in summed]
        shape = rng.choice(((12, 6), (6, 12), (7, 5), (24, 6), (5, 18)))
        cut = "/" + "/".join(kept) if kept else ""
        scattered = "/".join(rng.sample(summed, len(summed)))
        stays = rng.random() < 0.5
        src = rng.choice((f"n{cut} d", f"n d{cut}", "n d"))
        dim = src if stays else "n d"
        dst = rng.choice((dim, f"n/{scattered} d", f"n d/{scattered}", "d n"))
        yield Reduction(
            seed=1000 * seed + number,
            mesh=mesh,
            summed=summed,
            src=src,
            middle=rng.choice((f"n/({','.join(summed)}) d", f"n d/({','.join(summed)})")),
            dst=dst,
            kind=rng.choice(("sum", "sum", "mean", "max")),
            dtype=rng.choice(tuple(DTYPES)),
            shape=shape,
        )


def bits(block: np.ndarray) -> bytes:
    """The bits of a block: of short floats, of the equal float64."""
    return np.ascontiguousarray(block, np.float64).tobytes()
