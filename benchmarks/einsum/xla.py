"""XLA's partitioner on an einsum between shardings, and on its gradients: compiled, not run.

One program is for the result, and one for all gradients from operands and cotangent, each gradient under the
sharding of its operand. Traffic is read off the optimised HLO. XLA:CPU makes an
all-reduce and slices where XLA makes a reduce-scatter elsewhere: half of these bytes count.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

import xshard as xs
from benchmarks.claim import Row
from benchmarks.einsum.cases import Case
from benchmarks.einsum.peers import figures
from jax_bridge.specs import to_partition_spec
from jax_bridge.testing.stacked import collectives

_RESULT = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\w+\[[\d,]*\])")


def measured(case: Case) -> Row:
    """Received bytes of the busiest device, collectives and operations of both programs."""
    einsum = program(case)

    def gradients(cotangent: Any, *operands: Any) -> Any:
        return jax.vjp(einsum, *operands)[1](cotangent)

    operands = list(case.contraction.operands)
    result = case.contraction.result
    forward = _figures(case, einsum, operands, result)
    backward = _figures(case, gradients, [result, *operands], tuple(operands))
    return figures(forward, backward)


def program(case: Case) -> Callable[..., Any]:
    """JAX's own einsum."""
    return lambda *operands: jnp.einsum(case.equation, *operands)


def sharding(case: Case, layout: xs.Layout) -> NamedSharding:
    """A layout on host devices."""
    devices = np.array(jax.devices()[: case.mesh.n_devices]).reshape(case.mesh.sizes)
    return NamedSharding(JaxMesh(devices, case.mesh.axes), to_partition_spec(layout))


def _figures(case: Case, run: Callable[..., Any], operands: list[xs.Layout], results: Any) -> Row:
    arrays = [jax.ShapeDtypeStruct(case.shape(layout), case.dtype) for layout in operands]
    before, after = (
        jax.tree.map(partial(sharding, case), layouts) for layouts in (tuple(operands), results)
    )
    compiled = jax.jit(run, in_shardings=before, out_shardings=after).lower(*arrays).compile()
    text = compiled.as_text()
    counts = Counter[str]()
    if " while(" in text:
        raise ValueError(f"{case.name}: collectives in a loop would be counted once")
    received = np.zeros(case.mesh.n_devices)
    as_compiled = received.copy()
    for line in text.splitlines():
        for collective in collectives(line, case.mesh.n_devices):
            scattered = collective.op == "all-reduce" and is_sliced(text, line)
            counts["reduce-scatter" if scattered else collective.op] += 1
            as_compiled += collective.received
            received += np.array(collective.received) / (2 if scattered else 1)
    return {
        "received_bytes": int(received.max()),
        "as_compiled_bytes": int(as_compiled.max()),
        "counts": dict(sorted(counts.items())),
        "flops": compiled.cost_analysis()["flops"],
    }


def is_sliced(text: str, line: str) -> bool:
    """Whether all operations that read the result of a line take, in sum, a part of it."""
    result = _RESULT.match(line)
    if result is None:  # several arrays, reduced together
        return False
    reads = re.compile(rf"[(, ]%?{re.escape(result['name'])}[,)]")
    users = [other for other in text.splitlines() if reads.search(other.partition(" = ")[2])]
    if not users or not all(" fusion(" in user or " dynamic-slice(" in user for user in users):
        return False
    shapes = [match["shape"] for user in users if (match := _RESULT.match(user))]
    return len(shapes) == len(users) and sum(map(_elements, shapes)) < _elements(result["shape"])


def _elements(shape: str) -> int:
    """`"f32[8,16]"` -> 128."""
    return math.prod(map(int, re.findall(r"\d+", shape.partition("[")[2])))
