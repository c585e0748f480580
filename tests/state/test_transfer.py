"""Plans of trees between two meshes: all elements arrive, at the bound, from senders that share the work."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import xshard as xs
from tests.two_meshes import run_tree
from xshard import Mesh, XshardError
from xshard.state import Names, TreePlan, concat, plan_transfer, rename, split, stack

MESHES = {"src_mesh": Mesh(dp=4), "dst_mesh": Mesh(tp=2)}
DEVICES = {"same": (0, 1), "overlapping": (3, 4), "apart": (4, 5)}
HERE = "o/dp ..."
THERE = "... o/tp"

# A Llama-like model in miniature: its names, layouts by them, and the names and layouts of a server's.
LAYER = {
    "q": (8, 6),
    "k": (4, 6),
    "v": (4, 6),
    "o": (6, 8),
    "gate": (10, 6),
    "up": (10, 6),
    "down": (6, 10),
}
SHAPES = {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()}
SHAPES |= {
    "embed.weight": (12, 6),
    "norm.weight": (6,),
    "experts.0.w": (4, 6),
    "experts.1.w": (4, 6),
}
FUSED = Names(
    concat([f"**.{x}.weight" for x in "qkv"], "**.qkv", rows=(4, 2, 2)),
    concat(
        ["**.gate.weight", "**.up.weight"], "**.gate_up.kernel", 1, rows=(1, 1), order="o i -> i o"
    ),
    stack("experts.*.w", "experts"),
    rename("**.down.weight", "**.down.kernel", "o i -> i o"),
    rename("**", "**"),
)
FUSED_RULES = (
    {"norm.weight": "o", "**": "o/dp i"},
    {
        "**.qkv": "o/tp i",
        "**.gate_up.kernel": "i o/tp",
        "**.down.kernel": "i o/tp",
        "experts": "e/tp o i",
        "norm.weight": "o",
        "embed.weight": "v/tp e",
        "**": "o i/tp",
    },
)


def whole(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, np.ndarray]:
    """Arrays whose elements are all different."""
    rng = np.random.default_rng(0)
    return {
        name: rng.permutation(int(np.prod(s))).reshape(s).astype(dtype)
        for name, s in shapes.items()
    }


def check_arrives(
    plan: TreePlan, arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    blocks = {
        name: xs.reference.scatter(arrays[name], source.sharding.layout, plan.src_mesh)
        for name, source in plan.sources.items()
    }
    found = run_tree(plan, blocks)
    assert set(found) == set(expected)
    for array in plan.arrays:
        wanted = xs.reference.scatter(expected[array.name], array.sharding.layout, plan.dst_mesh)
        for block, right in zip(found[array.name], wanted, strict=True):
            assert block.dtype == right.dtype == array.dtype
            np.testing.assert_array_equal(block, right, err_msg=array.name)


@pytest.mark.parametrize("where", DEVICES)
def test_fused_arrays_arrive_at_the_bound(where: str) -> None:
    plan = plan_transfer(SHAPES, FUSED_RULES, names=FUSED, **MESHES, dst_devices=DEVICES[where])
    arrays = whole(SHAPES)
    check_arrives(plan, arrays, FUSED.apply(arrays))
    assert plan.bytes_received == plan.bytes_lower_bound == received(plan, arrays)
    assert plan.messages == {"same": 6, "overlapping": 7, "apart": 8}[where]


def received(plan: TreePlan, arrays: dict[str, np.ndarray]) -> int:
    """What the busiest device needs and does not hold, element by element."""
    tagged = {}
    start = 0
    for name, array in arrays.items():
        tagged[name] = (start + np.arange(array.size)).reshape(array.shape)
        start += array.size
    there = FUSED.apply(tagged)

    def elements(
        whole: dict[str, np.ndarray], shardings: dict[str, xs.Sharding], device: int
    ) -> set[int]:
        blocks = (
            xs.reference.scatter(whole[n], at.layout, at.mesh)[device]
            for n, at in shardings.items()
        )
        return {number for block in blocks for number in block.ravel().tolist()}

    sources = {name: source.sharding for name, source in plan.sources.items()}
    targets = {array.name: array.sharding for array in plan.arrays}
    lacking = []
    for d, device in enumerate(plan.dst_devices):
        is_here = device in plan.src_devices
        held = elements(tagged, sources, plan.src_devices.index(device)) if is_here else set()
        lacking.append(4 * len(elements(there, targets, d) - held))
    return max(lacking)


def test_back_to_parts_of_their_own() -> None:
    """What was fused is split again, from a mesh of two dims to one that shares a device with it."""
    arrays = FUSED.apply(whole(SHAPES))
    shapes = {name: array.shape for name, array in arrays.items()}
    rules = ({"norm.weight": "o/dp", "experts": "e o/tp i/dp", "**": "a/dp b/tp"}, {"**": "..."})
    devices = {"src_mesh": Mesh(dp=2, tp=2), "dst_mesh": Mesh(r=2), "dst_devices": (3, 9)}
    plan = plan_transfer(shapes, rules, names=FUSED.inverse, **devices)
    check_arrives(plan, arrays, whole(SHAPES))
    assert plan.bytes_received == plan.bytes_lower_bound


def test_plans_of_parts_that_some_devices_lack_are_read_back() -> None:
    names = Names(concat(["a", "b"], "ab"))
    ends = {"src_mesh": Mesh(tp=4), "dst_mesh": Mesh(tp=3), "names": names}
    plan = plan_transfer({"a": (4, 3), "b": (2, 3)}, ({"**": "o/tp i"}, {"ab": "o/tp i"}), **ends)
    [array] = plan.arrays
    assert [str(move.plan.dst) for move in array.moves] == [
        "o/tp i",
        "o/intervals(tp,[],[],[0,2]) i",
    ]
    for move in array.moves:
        assert xs.Plan.from_json(move.plan.to_json()) == move.plan


def test_replicas_share_the_sending_of_all_arrays() -> None:
    """300 arrays that four devices hold, for one: each sends a quarter, where one alone would send all."""
    shapes = {f"b{i}": (32,) for i in range(300)}
    ends = {"src_mesh": Mesh(dp=4), "dst_mesh": Mesh(tp=1), "dst_devices": (9,)}
    plan = plan_transfer(shapes, {"**": "n"}, **ends)
    sent: Counter[int] = Counter()
    for array in plan.arrays:
        sent.update({giver: n for (giver, _), n in array.traffic.items()})  # there is one taker
    assert sent == dict.fromkeys(range(4), 300 * 32 * 4 // 4)


def test_a_row_travels_once_to_a_node() -> None:
    """Replicas on the four devices of another node: a part to each, which they gather among themselves."""
    ends = {"src_mesh": Mesh(dp=4), "dst_mesh": Mesh(r=4), "dst_devices": range(4, 8)}
    ends["profile"] = xs.Profile("nodes", "made up", xs.Link(1e-6, 4e9), xs.Link(1e-6, 1e6), 4)
    shapes = {"w": (64, 16), "gate": (32, 16), "up": (32, 16)}
    names = Names(concat(["gate", "up"], "gate_up"), rename("**", "**"))
    plan = plan_transfer(shapes, ({"**": "o/dp i"}, {"**": "o i"}), names=names, **ends)
    across = [n for array in plan.arrays for (giver, _), n in array.traffic.items() if giver < 4]
    assert sum(across) == 4 * sum(map(np.prod, shapes.values()))
    assert plan.bytes_received == plan.bytes_lower_bound
    arrays = whole(shapes)
    check_arrives(plan, arrays, names.apply(arrays))


def test_values_are_cast_where_fewer_bytes_travel() -> None:
    shapes = {"down": (8,), "up": (8,)}
    dtypes = {"down": "float32", "up": "float16"}
    names = Names(rename("down", "down", dtype="float16"), rename("up", "up", dtype="float32"))
    plan = plan_transfer(
        shapes, ({"*": "n/dp"}, {"*": "n/tp"}), names=names, dtypes=dtypes, **MESHES
    )
    assert [move.plan.dtype for array in plan.arrays for move in array.moves] == ["float16"] * 2
    arrays = {name: array.astype(dtypes[name]) for name, array in whole(shapes).items()}
    check_arrives(plan, arrays, names.apply(arrays))


def test_buckets_hold_what_one_device_may_move() -> None:
    shapes = {f"w{i}": (64,) for i in range(6)} | {"large": (512,), "small": (4,)}
    ends = {**MESHES, "dst_devices": (4, 5)}
    rules = {"small": "n", "**": "n/dp -> n/tp"}
    plan = plan_transfer(shapes, rules, **ends, bucket_bytes=256)
    names = [[array.name for array in bucket] for bucket in plan.buckets]
    assert names == [["w0", "w1"], ["w2", "w3"], ["w4", "w5"], ["large"], ["small"]]
    one = plan_transfer(shapes, rules, **ends, bucket_bytes=None)
    assert (len(one.buckets), one.messages, plan.messages) == (1, 5, 18)


def test_the_table_says_what_moves() -> None:
    rules = {"w": "o/dp i -> o i/tp", "b": "o/dp -> o"}
    plan = plan_transfer(
        {"w": (8, 4), "b": (8,)}, rules, **MESHES, dtypes={"w": "bfloat16", "b": "float32"}
    )
    assert str(plan) == (
        "   here    there   dtype     received  bound  messages\n"
        "w  o/dp i  o i/tp  bfloat16  24 B      24 B   6\n"
        "b  o/dp    o       float32   24 B      24 B   6\n"
        "\n"
        "2 arrays from dp=4 to tp=2, devices 0-3 -> 0-1: moved 96 B, received 48 B by the busiest device "
        "(the bound is 48 B), messages 6, buckets 1, priced for h100"
    )


@pytest.mark.parametrize(
    ("rules", "names", "message"),
    [
        ({"w": "o/dp i"}, Names(rename("**", "**")), "with names=, the two sides of an arrow"),
        (
            {"w": "o/dp i -> o/cp i"},
            None,
            "leaf 'w': unknown mesh axis 'cp' in\n    'o/dp i -> o/cp i'",
        ),
        (({"w": "o/dp i"}, {"w": "i o"}), None, "leaf 'w': dim 'i' of 'i o' is dim 'o' of w"),
        (({"w": "o i"}, {"v": "o i"}), None, "no rule for 1 of 1 names: w"),
        (
            ({"w": "o:halo(1,1) i"}, {"*": "o i"}),
            Names(split("w", ["a", "b"])),
            "leaf 'a': 'o:halo(1,1)' has blocks that overlap",
        ),
        (
            {"w": "o/zigzag(dp,3,3) i -> o i"},
            None,
            "leaf 'w': 'zigzag(dp,3,3)' adds up to 6 rows, not 8",
        ),
    ],
)
def test_refused(rules: object, names: Names | None, message: str) -> None:
    with pytest.raises(XshardError) as raised:
        plan_transfer({"w": (8, 4)}, rules, names=names, **MESHES)
    assert message in str(raised.value)
