"""Blocks handed over: the same memory where that can be, the right blocks where they move first."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec

import xshard as xs
from jax_bridge.torch_interop import to_jax, to_torch
from tests.interop.helpers import blocks_of, jax_mesh, logged, memory
from tests.jax_bridge.helpers import in_jax

NARROW = (
    *(
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bool,
    ),
    *(
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.complex64,
    ),
)
WIDE = (torch.float64, torch.int64, torch.uint64, torch.complex128)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern of the dtype, including NaNs."""
    if dtype is torch.bool:
        return torch.randint(2, shape).bool()
    size = dtype.itemsize
    return torch.randint(256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", NARROW + WIDE, ids=str)
@in_jax
def test_memory_is_shared_bit_by_bit(dtype) -> None:
    mesh = jax_mesh(dp=2, tp=2)
    with jax.enable_x64(dtype in WIDE):
        blocks = [random_bits(dtype, 8, 16) for _ in range(4)]
        array = to_jax(blocks, "n/dp d/tp", mesh, copy=False)
        assert array.shape == (16, 32) and array.dtype.name == str(dtype).removeprefix("torch.")
        assert array.sharding.spec == PartitionSpec("dp", "tp")
        assert memory(array) == memory(blocks)
        for shard, block in zip(array.addressable_shards, blocks, strict=True):
            assert np.asarray(shard.data).tobytes() == bytes(bits(block).flatten().tolist())
        back = to_torch(array, "n/dp d/tp", copy=False)
        assert memory(back) == memory(blocks) and {x.dtype for x in back} == {dtype}
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(back, blocks, strict=True))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@in_jax
def test_what_jax_would_narrow_is_refused(dtype) -> None:
    with pytest.raises(xs.errors.DtypeError, match=r"which JAX would make \w+(32|64)"):
        to_jax(torch.zeros(4, dtype=dtype), "n/a", jax_mesh(a=1))


@in_jax
def test_a_copy_that_is_asked_for_is_one() -> None:
    x = torch.arange(64.0)
    array = to_jax(x, "n/a", jax_mesh(a=1), copy=True)
    back = to_torch(array, "n/a", copy=True)
    x[0] = back[1] = -1
    assert array[0] == 0 and array[1] == 1
    assert len({*memory(x), *memory(array), *memory(back)}) == 3


@in_jax
def test_a_write_to_shared_memory_is_seen_unless_it_is_refused() -> None:
    """Which is why it can be refused, on either side."""
    x = torch.arange(64.0)
    array = to_jax(x, "n/a", jax_mesh(a=1))
    x[0] = 7
    assert np.asarray(array.addressable_shards[0].data)[0] == 7
    y = to_torch(array, "n/a", writable=False)
    for write in (
        lambda: y.add_(1),
        lambda: y[3:].zero_(),
        lambda: y.view(8, 8).T.copy_(torch.zeros(8, 8)),
        lambda: torch.mul(x, 2, out=y),
        lambda: torch._foreach_add_([x, y], 1),
    ):
        with pytest.raises(xs.XshardError, match="would write to memory that"):
            write()
    assert torch.equal(y + 0, x) and y.data_ptr() == x.data_ptr()
    results = y + 1, y.clone(), y.sum()
    assert {type(result) for result in results} == {torch.Tensor}
    assert results[1].add_(1)[1] == 2
    weight = torch.ones(64, requires_grad=True)
    (y @ weight).backward()
    assert torch.equal(weight.grad, x)
    assert memory(to_jax(y, "n/a", jax_mesh(a=1))) == memory(x)


NOT_SHARED = {
    "strides": lambda: torch.zeros(8, 8).T,
    "off a multiple of 64": lambda: torch.zeros(65)[1:],
    "conjugated": lambda: torch.zeros(8, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(8, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("why", NOT_SHARED)
@in_jax
def test_a_copy_that_cannot_be_avoided_has_a_reason(why) -> None:
    x = NOT_SHARED[why]()
    mesh = jax_mesh(a=1)
    with pytest.raises(xs.XshardError, match=why):
        to_jax(x, "...", mesh, copy=False)
    with logged() as lines:
        array = to_jax(x, "...", mesh)
    assert len(lines) == 1 and why in lines[0] and "is copied" in lines[0]
    assert np.array_equal(np.asarray(array), x.resolve_conj().resolve_neg().numpy())
    with logged() as lines:
        to_jax(x, "...", mesh, copy=True)
    assert not lines


@in_jax
def test_memory_lives_as_long_as_either_side_needs_it() -> None:
    mesh = jax_mesh(a=1)
    array = to_jax(torch.full((1000,), 3.0), "n/a", mesh)
    tensor = to_torch(jax.device_put(jnp.full(1000, 5.0), array.sharding), "n/a")
    gc.collect()
    other = [torch.zeros(1000) for _ in range(100)]
    assert (np.asarray(array) == 3).all() and (tensor == 5).all() and len(other) == 100


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)], ids=str)
@in_jax
def test_shapes_with_few_elements(shape) -> None:
    x = torch.ones(shape)
    array = to_jax(x, "...", jax_mesh(a=1), copy=False)
    assert array.shape == shape and torch.equal(to_torch(array, "...", copy=False), x)


MOVES = [  # torch's mesh, JAX's, and the layouts on them
    ("a=2,b=2", "a=2,b=2", "n/(a,b) d", "n d/(a,b)"),
    ("a=2,b=2", "a=2,b=2", "n/a/b d", "n/b/a d"),
    ("a=2,b=2", "a=2,b=2", "n/zigzag(a) d/b", "n/a d/b"),
    ("a=2,b=2", "a=2,b=2", "n/a d", "n/zigzag(a) d/b"),
    ("a=2,b=2", "a=2,b=2", "n d/a | sum(b)", "n/b d/a"),
    ("a=2,b=2", "a=2,b=2", "n d/a | sum(b)", "n d/a"),
    ("a=2,b=2", "a=2,b=2", "n d | sum(a,b)", "n/a d/b"),
    ("x=4", "a=2,b=2", "n/x d", "n/b d/a"),
    ("x=4", "a=2,b=2", "n/cyclic(x) d", "n/(a,b) d"),
    ("x=2,y=2", "a=4", "n/y d/x", "n/a d"),
    ("x=2,y=2", "a=4", "n d | sum(x,y)", "n d/a"),
    ("x=8", "a=2,b=4", "n/x d", "n/a d"),
    # Other devices: fewer, more, and axes that do not divide each other.
    ("x=4", "a=2", "n/x d", "n d/a"),
    ("x=2", "a=2,b=3", "n/zigzag(x) d", "n/a d/b"),
    ("x=4", "a=3", "n d | sum(x)", "n d/a"),
    ("x=3,y=2", "a=2,b=3", "n/y d/x", "n/a d/b"),
]


@pytest.mark.parametrize(("torchs", "jaxs", "src", "dst"), MOVES)
@in_jax
def test_any_layout_is_handed_over_as_any_other(torchs, jaxs, src, dst) -> None:
    """There and back, of whole numbers: every device has exactly its block."""
    there = xs.Mesh.parse(torchs)
    here = xs.Mesh.parse(jaxs)
    mesh = jax_mesh(**dict(zip(here.axes, here.sizes, strict=True)))
    x = np.arange(16.0 * 24, dtype=np.float32).reshape(16, 24) - 100
    blocks = blocks_of(x, src, there)
    expected = blocks_of(x, dst, here)
    before = [block.clone() for block in blocks]
    array = to_jax(blocks, (src, dst), mesh, torch_mesh=there)
    for shard, block in zip(array.addressable_shards, expected, strict=True):
        assert np.array_equal(np.asarray(shard.data), block.numpy())
    assert all(map(torch.equal, blocks, before))
    back = to_torch(array, (dst, src), there)
    assert np.array_equal(xs.reference.gather([b.numpy() for b in back], src, there, x.shape), x)


@in_jax
def test_the_adjoint_of_a_hand_over_is_the_one_back() -> None:
    """The adjoint is the hand-over back, between the dual layouts."""
    there = xs.Mesh(x=4)
    here = xs.Mesh(a=2)
    mesh = jax_mesh(order=[5, 4], a=2)
    x, y = (np.random.default_rng(i).integers(-4, 4, (8, 6)).astype(np.float32) for i in (0, 1))
    for src, dst in (("n/x d", "n d/a"), ("n d | sum(x)", "n/a d"), ("n d", "n/a d")):
        src_layout = xs.Layout(src)
        dst_layout = xs.Layout(dst)
        blocks = [torch.tensor(b) for b in xs.reference.scatter(x, src, there)]
        array = to_jax(blocks, (src, dst), mesh, torch_mesh=there)
        assert np.array_equal(np.asarray(array), x) and array.devices() == set(mesh.devices.flat)
        cotangent = to_jax(blocks_of(y, str(dst_layout.dual), here), str(dst_layout.dual), mesh)
        back = to_torch(cotangent, (dst_layout.dual, src_layout.dual), there)
        expected = blocks_of(y, str(src_layout.dual), there)
        assert len(back) == 4 and all(map(torch.equal, back, expected))


@in_jax
def test_the_same_blocks_under_another_name_are_not_copied() -> None:
    blocks = [torch.zeros(4, 6) for _ in range(4)]
    array = to_jax(
        blocks, "n/x d -> n/(a,b) d", jax_mesh(a=2, b=2), torch_mesh=xs.Mesh(x=4), copy=False
    )
    assert memory(array) == memory(blocks)
    with pytest.raises(xs.XshardError, match="cannot be handed over without a copy"):
        to_jax(
            blocks, "n/x d -> n/(b,a) d", jax_mesh(a=2, b=2), torch_mesh=xs.Mesh(x=4), copy=False
        )


@in_jax
def test_tensors_are_in_the_order_of_the_mesh() -> None:
    """Which need not be that of the devices."""
    mesh = jax_mesh(a=2, b=2, order=[2, 0, 3, 1])
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    blocks = blocks_of(x, "n/(a,b) d", xs.Mesh(a=2, b=2))
    array = to_jax(blocks, "n/(a,b) d", mesh)
    assert np.array_equal(np.asarray(array), x) and memory(array) == memory(blocks)
    moved = to_torch(array, "n/(a,b) d -> n/a d/b")
    assert all(map(torch.equal, moved, blocks_of(x, "n/a d/b", xs.Mesh(a=2, b=2))))


@in_jax
def test_addends_stand_on_explicit_axes() -> None:
    mesh = jax_mesh(AxisType.Explicit, a=2, b=2)
    blocks = [torch.full((4,), float(i)) for i in range(4)]
    array = to_jax(blocks, "n/a | sum(b)", mesh, copy=False)
    assert array.sharding.spec.unreduced == {"b"}
    whole = jax.reshard(array, jax.NamedSharding(mesh, PartitionSpec("a")))
    assert np.asarray(whole).tolist() == [1.0] * 4 + [5.0] * 4
    assert memory(to_torch(array, "n/a | sum(b)")) == memory(blocks)


@in_jax
def test_addends_on_other_axes_are_refused() -> None:
    blocks = [torch.full((4,), float(i)) for i in range(4)]
    with pytest.raises(xs.errors.MeshError, match="a mesh of Explicit axes only"):
        to_jax(blocks, "n/a | sum(b)", jax_mesh(a=2, b=2))


@in_jax
def test_the_side_with_the_cheaper_plan_moves() -> None:
    """Of sides that can; one process with several devices is no rank of torch's."""
    blocks = [torch.zeros(4, 4) for _ in range(4)]
    with logged() as lines:
        to_jax(blocks, "n/a d -> n d/a", jax_mesh(a=4))
    assert lines == ["jax moves the blocks first: n/a d -> n d/a"]
    with pytest.raises(
        xs.errors.PlanError, match=r"torch cannot bring .*\n  torch: no process group"
    ):
        to_jax(blocks, "n/a d -> n d/a", jax_mesh(a=4), via="torch")
