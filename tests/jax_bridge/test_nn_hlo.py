"""Layers on cut arrays beside XLA's own partitioning of them: values, gradients, collectives and bytes."""

import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xshard as xs
from jax_bridge import nn
from jax_bridge.testing.stacked import received_bytes
from tests.jax_bridge.domains import difference
from tests.jax_bridge.helpers import device_mesh, in_jax
from tests.nn.cases import PAD_MODES

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
N = 4  # devices


class Case(NamedTuple):
    """A one-dimensional convolution of `length` rows: k, stride, dilation, dilation of inputs, padding."""

    length: int
    k: int
    s: int = 1
    d: int = 1
    base: int = 1
    p: tuple[int, int] = (1, 1)
    boundary: str = "zero"


# The configurations in which XLA was found to be right (and where other libraries are not).
CASES = {
    "same": Case(32, 3),
    "strided": Case(32, 3, s=2),
    "even kernel": Case(32, 4, s=2),
    "valid, uneven output": Case(32, 3, p=(0, 0)),
    "transposed": Case(32, 4, base=2, p=(2, 2)),
    "strided and dilated": Case(32, 3, s=2, d=2, p=(2, 2)),
    "much wider than a shard": Case(8, 17, p=(8, 8)),
    "periodic": Case(32, 3, boundary="periodic"),
    "reflect": Case(32, 3, boundary="reflect"),
}


def programs(case: Case):
    """(ours, XLA's): jitted functions of a kernel, the whole array and a cotangent of the output."""
    cut = P(None, None, "sp")
    everywhere = P()
    devices = device_mesh(xs.Mesh(sp=N))
    arguments = (case.s,), [case.p], (case.base,), (case.d,)

    def local(kernel, x):
        x = nn.Sharded(x, "n c h/sp")
        return nn.conv_general_dilated(x, kernel, *arguments, boundary={"h": case.boundary}).block

    def theirs(kernel, x):
        if case.boundary == "zero":
            return lax.conv_general_dilated(x, kernel, *arguments)
        x = jnp.pad(x, [(0, 0), (0, 0), case.p], mode=PAD_MODES[case.boundary])
        return lax.conv_general_dilated(x, kernel, (case.s,), "VALID", None, (case.d,))

    ours = jax.shard_map(local, mesh=devices, in_specs=(everywhere, cut), out_specs=cut)
    placed = tuple(NamedSharding(devices, spec) for spec in (everywhere, cut))
    return tuple(jax.jit(f, in_shardings=placed) for f in (ours, theirs)), placed


def with_gradients(f, placed):
    """Output and both gradients of half its square, so that XLA can leave nothing out."""

    def both(kernel, x):
        y, pull = jax.vjp(f, kernel, x)
        return y, pull(y)

    return jax.jit(both, in_shardings=placed)


def compiled(f, *arguments) -> str:
    return f.lower(*arguments).compile().as_text()


def moved(text: str) -> Counter[str]:
    return Counter(COLLECTIVE.findall(text))


def arguments_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(3, 2, case.k)), draw.normal(size=(2, 2, case.length))


@pytest.mark.parametrize("name", CASES)
@in_jax
def test_layers_move_no_more_than_the_partitioner(name) -> None:
    case = CASES[name]
    with jax.enable_x64(True):
        both_programs, placed = programs(case)
        given = arguments_of(case)
        texts = []
        results = []
        for f in both_programs:
            both = with_gradients(f, placed)
            texts.append(compiled(both, *given))
            results.append(jax.tree.leaves(both(*given)))
        n = results[1][0].shape[2]
        y = np.asarray(results[0][0])
        if y.shape != results[1][0].shape:  # uneven blocks leave a shard_map padded
            rows = -(-n // N)
            assert y.shape[2] == N * rows and not y[..., n:].any()
            results[0][0] = y[..., :n]
        assert difference(*results) <= 1e-12
    ours, theirs = map(moved, texts)
    assert not {"all-gather", "all-to-all"} & set(ours)
    if "all-gather" not in theirs:
        assert ours.total() <= theirs.total(), (ours, theirs)
        assert received_bytes(texts[0], N) <= received_bytes(texts[1], N)


@in_jax
def test_a_periodic_halo_is_two_permutes_per_pass() -> None:
    """One each way, and back; what the devices' kernels got is summed once."""
    case = CASES["periodic"]
    (ours, theirs), placed = programs(case)
    given = [a.astype(np.float32) for a in arguments_of(case)]
    assert moved(compiled(ours, *given)) == {"collective-permute": 2}
    gradients = moved(compiled(with_gradients(ours, placed), *given))
    assert gradients == {"collective-permute": 4, "all-reduce": 1}
    assert moved(compiled(theirs, *given))["collective-permute"] > 2
    assert moved(compiled(with_gradients(theirs, placed), *given))["collective-permute"] > 4


@in_jax
def test_uneven_outputs_stay_cut() -> None:
    """Thirty rows over four devices: XLA gathers them, and its result is whole on every device."""
    case = CASES["valid, uneven output"]
    (ours, theirs), _ = programs(case)
    given = [a.astype(np.float32) for a in arguments_of(case)]
    assert moved(compiled(ours, *given)) == {"collective-permute": 1}
    assert theirs.lower(*given).compile().output_shardings.is_fully_replicated
    assert not ours.lower(*given).compile().output_shardings.is_fully_replicated
