"""spmd_types' own `redistribute` beside ours, for every pair of types; layouts as types and back."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import xshard as xs
from tests.torch_bridge.helpers import RECENT, error_of, on_ranks
from torch_bridge.compat import spmd_types as ours
from xshard import compat

pytest.importorskip(
    "spmd_types", reason="spmd_types, beside which this is tested, is not installed"
)

WHOLE = ("R", "I", "P")  # types of which every rank has all elements


def _block(src: str, dst: str) -> Tensor:
    """Integers, which differ between ranks unless the type says otherwise."""
    n = dist.get_world_size()
    shape = (n, 4, 6) if dst == "V" and src in WHOLE else (4, 6)  # what becomes V is taken apart
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    return x if src in ("R", "I") else x + 100 * dist.get_rank()


def _transitions() -> None:
    import spmd_types as theirs
    from spmd_types import I, P, R, S, V, checker

    types = {repr(type_): type_ for type_ in (R, I, V, P, S(0), S(-1))}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    for src, dst in itertools.permutations(types, 2):
        x = _block(src, dst)
        found = []
        for function, ends in (
            (theirs.redistribute, (types[src], types[dst])),
            (ours.redistribute, (types[src], types[dst])),
            (ours.redistribute, (src, dst)),
        ):
            leaf = x.clone().requires_grad_()
            y = function(leaf, group, src=ends[0], dst=ends[1])
            w = torch.arange(y.numel()).reshape(y.shape) + (
                0 if dst in ("I", "P") else 7.0 * dist.get_rank()
            )
            (gradient,) = torch.autograd.grad(y, leaf, w)
            found.append((y, gradient))
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), (src, dst)
    x = _block("P", "R")
    for options in (
        {"op_dtype": torch.bfloat16},
        {"op_dtype": torch.float64, "out_dtype": torch.float32},
    ):
        a, b = (
            f(x, group, src=P, dst=R, **options) for f in (theirs.redistribute, ours.redistribute)
        )
        assert a.dtype == b.dtype and torch.equal(a, b)
    with theirs.set_current_mesh(mesh), checker.typecheck(local=False):
        theirs.assert_type(x, ours.to_types("n d/tp", mesh))
        assert (
            str(ours.from_types(theirs.get_local_type(x), 2, theirs.get_partition_spec(x)))
            == "d0 d1/tp"
        )
        typed = theirs.no_typecheck(out_types={"tp": R})(
            lambda x: ours.redistribute(x, "tp", src="S(1)", dst="R")
        )
        assert torch.equal(typed(x), theirs.redistribute(x, "tp", src=S(1), dst=R))
    uneven = torch.arange(5.0).chunk(2)[dist.get_rank()]
    assert ours.redistribute(uneven, None, src="S(0)", dst="R", shape=(5,)).tolist() == list(
        range(5)
    )


def _quiet(function: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs calls what torch renames
        function()


@pytest.mark.skipif(not RECENT, reason="theirs exchanges lists, which gloo does since torch 2.13")
def test_every_transition_is_theirs() -> None:
    on_ranks(2, functools.partial(_quiet, _transitions))


def _several_axes() -> None:
    """Beside their own moves, an axis at a time; and what these refuse: a dim that two axes shard."""
    import spmd_types as theirs
    from spmd_types import S, TensorSharding

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    own = theirs.redistribute
    whole = torch.arange(64.0).reshape(8, 8)
    pairs = itertools.permutations(itertools.product(("R", "I", "P", "S(0)", "S(1)"), repeat=2), 2)
    for src, dst in list(pairs)[::17]:
        first = int(src[0] == dst[1] or dst[0] not in "RIP")  # what ends a shard goes first
        between = (dst[0], src[1]) if first == 0 else (src[0], dst[1])
        if any(a == b and "S" in a for a, b in (src, between, dst)):
            continue  # two axes shard a dim: below
        types = {
            text: S(int(text[2])) if "(" in text else getattr(theirs, text) for text in {*src, *dst}
        }
        at = mesh.get_coordinate()
        x = torch.arange(16.0).reshape(4, 4) + sum(
            100 * at[i] for i in range(2) if src[i] not in "RI"
        )
        results = []
        for planned in (False, True):
            y = leaf = x.clone().requires_grad_()
            if planned:
                with ours.planned():
                    ends = ({"dp": types[end[0]], "tp": types[end[1]]} for end in (src, dst))
                    y = theirs.redistribute(y, mesh, src=next(ends), dst=next(ends))
            else:
                for i in (first, 1 - first):
                    if src[i] != dst[i]:
                        y = theirs.redistribute(
                            y, mesh.get_group(i), src=types[src[i]], dst=types[dst[i]]
                        )
            w = torch.arange(y.numel()).reshape(y.shape) + sum(
                7.0 * at[i] for i in range(2) if dst[i] not in "IP"
            )
            gradient = torch.autograd.grad(y, leaf, w)[0]
            for i in range(2):  # addends are compared by their sum
                for tensor in (*([y.detach()] * (dst[i] == "P")), *([gradient] * (src[i] == "R"))):
                    dist.all_reduce(tensor, group=mesh.get_group(i))
            results.append((y, gradient))
        assert all(map(torch.equal, *results)), (src, dst)
    blocks = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).requires_grad_()
    ends = TensorSharding(("dp", "tp")), TensorSharding("tp", "dp")
    with pytest.raises(NotImplementedError):
        theirs.spmd_redistribute(blocks, *ends)
    with ours.planned():
        y = theirs.spmd_redistribute(blocks, *ends)
    assert theirs.redistribute is own
    assert list(y.placements) == [Shard(1), Shard(0)] and torch.equal(y.full_tensor(), whole)
    (y.to_local() * (rank + 1)).sum().backward()
    assert blocks.grad.to_local().tolist() == [[1.0 + rank // 2] * 4 + [3.0 + rank // 2] * 4] * 2


@pytest.mark.skipif(not RECENT, reason="theirs exchanges lists, which gloo does since torch 2.13")
def test_moves_over_several_axes_are_planned_inside_the_context() -> None:
    on_ranks(4, functools.partial(_quiet, _several_axes))


MESH = xs.Mesh(dp=2, cp=2, tp=2)


@pytest.mark.parametrize(
    "layout", ["d0 d1", "d0/dp/tp d1", "d0/tp/dp d1/cp", "d0/cp d1 | sum(tp) copy(dp)"]
)
def test_a_layout_survives_as_types(layout: str) -> None:
    assert str(ours.from_types(ours.to_types(layout, MESH), 2)) == layout


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ours.to_types("n/zigzag(cp) d", MESH), "no type for 'n/zigzag(cp)'"),
        (lambda: ours.to_types("n d | mean(dp)", MESH), "no type for 'mean(dp)'"),
        (lambda: ours.from_types({"dp": "S(0)", "tp": "S(0)"}, 2), "'dp' and 'tp' shard dim 0"),
        (lambda: ours.from_types({"dp": "V"}, 2), "V of axis 'dp' does not shard a dim"),
        (lambda: ours.from_types({"dp": "S(2)"}, 2), "S(2) of axis 'dp' does not shard a dim"),
        (lambda: ours.from_types({}, 1, (None, "dp")), "shards 2 dims, the array has 1"),
        (lambda: compat.spmd_transition("R", "Q", (4,), 2, "tp"), "unknown type 'Q'"),
        (lambda: compat.spmd_transition("R", "V", (3, 2), 2, "tp"), "lacks an element for each of 2 devices"),
    ],
)  # fmt: skip
def test_what_is_no_type_or_no_layout(call: object, told: str) -> None:
    kind, text = error_of(call)  # type: ignore[arg-type]
    assert kind in ("PlanError", "XshardError", "ShapeError") and told in text
