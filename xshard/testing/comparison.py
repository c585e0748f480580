"""All arrays of all runs against the truth, and the two runtimes against each other.

Decides what is compared with what, and in which order it is told. One comparison is in `mismatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xshard import reference
from xshard.mesh import Mesh
from xshard.sharding import Sharding
from xshard.steps.base import Block
from xshard.testing.case import plain
from xshard.testing.mismatch import Mismatch, Subject, compare
from xshard.testing.problem import Problem, wanted_gradient
from xshard.testing.runs import RUNTIMES, Run, Truth
from xshard.testing.task import Devices


def mismatches(
    given: Problem, truth: Truth, runs: Sequence[Run], tol: float | None
) -> tuple[list[Mismatch], int]:
    """All that differs, outputs before gradients before parameters, and how many comparisons were made."""
    arguments = dict(zip(given.names, given.values, strict=True))
    largest = {
        "output": _largest(truth.outputs.values()),
        "gradient": _largest(truth.gradients.values()),
        "parameter": _largest(truth.updated.values()),
    }
    found: list[Mismatch] = []
    compared = 0
    by_mesh: dict[Mesh, dict[str, list[_Array]]] = {}
    for run in runs:
        arrays = list(_arrays(given, truth, run))
        right = []
        for array in arrays:
            subject = Subject(array.kind, array.name, run.runtime, run.mesh, truth.source)
            compared += 1
            wrong = compare(
                subject, array.got, array.want, array.sharding, tol, largest[array.kind], arguments
            )
            if wrong is None:
                right.append(array)
            else:
                found.append(wrong)
        by_mesh.setdefault(run.mesh, {})[run.runtime] = right
    for mesh, both in by_mesh.items():  # what both have right may still differ from each other
        if len(both) == len(RUNTIMES):
            jax_arrays = {(array.kind, array.name): array for array in both["jax"]}
            for array in both["torch"]:
                other = jax_arrays.get((array.kind, array.name))
                if other is None:
                    continue
                compared += 1
                subject = Subject(array.kind, array.name, "torch", mesh, "JAX")
                wrong = compare(
                    subject, array.got, other.got, array.sharding, tol, largest[array.kind], arguments
                )
                found += [] if wrong is None else [wrong]
    order = list(largest)
    return sorted(found, key=lambda m: order.index(m.subject.kind)), compared


class _Array(NamedTuple):
    kind: str
    name: str
    got: Devices
    want: Devices
    sharding: Sharding


def _arrays(given: Problem, truth: Truth, run: Run) -> Iterator[_Array]:
    """Every array of a run, with the blocks that it should have."""
    mesh, answer = run.mesh, run.answer
    for name, got in answer.outputs.items():
        whole = truth.outputs[name]
        sharding = Sharding(truth.layouts[name], mesh, whole.shape)
        yield _Array("output", name, got, tuple(reference.scatter(whole, sharding.layout, mesh)), sharding)
    for i, got in (answer.gradients or {}).items():
        sharding = Sharding(given.layouts[i], mesh, given.values[i].shape)
        want = wanted_gradient(truth.gradients[i], sharding)
        yield _Array("gradient", given.names[i], got, want, sharding.with_layout(sharding.layout.dual))
    for i, got in answer.updated.items():
        sharding = Sharding(given.layouts[i], mesh, given.values[i].shape)
        want = tuple(reference.scatter(truth.updated[i], sharding.layout, mesh))
        yield _Array("parameter", given.names[i], got, want, sharding)


def _largest(arrays: Iterable[Block]) -> float:
    return max(
        (float(np.abs(x).max(initial=0, where=np.isfinite(x))) for x in map(plain, arrays)), default=0.0
    )
