"""A plan between two meshes as a value: how it prints, what it survives, what it refuses.

Long because one table has every wrong plan.
"""

import json
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import xshard as xs
from tests.messages import refused, said
from tests.two_meshes import crossing
from xshard.cost.machine import profile_of_devices
from xshard.errors import DtypeError, PlanError, ShapeError
from xshard.plans.expression import sides
from xshard.plans.transfer import Transfer

TABLE = """\
n/a d -> n d   float32[8, 4] from a=2 to b=2,c=2, devices 0-1 -> 2-5

step                  on       layout after  local shape  received  time    peak
                      a=2      n/a d         4x4
transfer, 4 messages  b=2,c=2  n/b/c d       2x4          32 B      0.1 us  128 B
all_gather n/b/c      b=2,c=2  n d           8x4          96 B      0.1 us  160 B

received 128 B (1.00x the bound of 128 B), sent between meshes 64 B, 0.2 us, peak 160 B, \
priced for bandwidth"""


def gathered(**options):
    options = {"dst_devices": range(2, 6), "dtype": "float32", **options}
    return crossing("n/a d", "n d", "a=2", "b=2,c=2", (8, 4), **options)


def test_it_prints_as_a_table():
    assert str(gathered()) == TABLE


def test_a_memory_limit_holds():
    free = gathered()
    assert gathered(memory_limit=free.peak_bytes).cost == free.cost
    with pytest.raises(PlanError) as caught:
        gathered(memory_limit=100)
    least = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
    message = (
        "no plan stays within {} B per device\n  the least of those weighed is {} B ({} bytes)"
    )
    assert str(caught.value) == message.format(100, least, least)
    plan = gathered(memory_limit=least)
    assert plan.peak_bytes == plan.memory_limit == least == 160
    with refused(PlanError, message.format(160, 192, 192)):  # nor may the gradient hold more
        _ = plan.backward


def test_devices_change_places_to_stay_within_a_limit():
    ask = {"src_mesh": "a=2", "dst_mesh": "b=2", "shape": (1, 8), "relabel": True}
    texts = "n/a d", "n d/intervals(b,[0,3],[5,8,3,5])"
    free = crossing(*texts, **ask)
    limited = crossing(*texts, **ask, memory_limit=free.peak_bytes)
    assert limited.dst_devices == free.dst_devices == (1, 0)
    assert limited.peak_bytes == free.peak_bytes
    with pytest.raises(PlanError, match="no plan stays within 8 B per device"):
        crossing(*texts, **ask, memory_limit=8)


@pytest.mark.parametrize("devices", [(0, 1), (1, 0), (2, 3)])
@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn"])
def test_no_mean_begins_of_what_cannot_be_multiplied(devices, dtype):
    with pytest.raises(DtypeError, match=dtype):
        crossing("n", "n | mean(b)", "a=2", "b=2", (4,), dst_devices=devices, dtype=dtype)


A2 = xs.Mesh(a=2)
B2 = xs.Mesh(b=2)
ALONE = {"src_mesh": None, "dst_mesh": None}
APART = {"dst_devices": (2, 3)}
ASK = "\n  pass a mesh, or src_mesh= and dst_mesh="
FOR_TWO = "MeshError: src_devices, dst_devices and relabel are for two meshes\n"
FOR_TWO += "  pass src_mesh= and dst_mesh=, which may be equal, instead of the mesh"
ANY_DIMS = "\n  write one name per dim, or '...' for any number of unsharded dims"
NUMBERS = "\n  devices are whole numbers >= 0"
NO_SUM = """DtypeError: dtype bool lacks a sum in 'n | sum(a) -> n'
  cast to an integer, or use max (any) or min (all)"""
DTYPES = "\n  as in float32, bfloat16, int64, bool, complex64"
OTHERS = "left: n   right: m   (the same names, in any order; einsum sums dims)"
REFUSED = [
    (
        {"mesh": A2},
        "MeshError: a mesh beside src_mesh or dst_mesh\n  pass either mesh, or src_mesh and dst_mesh",
    ),
    ({"dst_mesh": None}, "MeshError: no dst_mesh" + ASK),
    (ALONE, "MeshError: no src_mesh and no dst_mesh" + ASK),
    (ALONE | {"mesh": A2, "relabel": True}, FOR_TWO),
    (ALONE | {"mesh": A2, "dst_devices": (0, 1)}, FOR_TWO),
    (
        {"shape": None},
        "ShapeError: no shape\n  shape= is the global shape of the array, as in shape=(8, 4)",
    ),
    ({"shape": (4, 4)}, "ShapeError: 'n/a' has 1 dims, the array has 2 in 'n/a -> n/b'" + ANY_DIMS),
    ({"shape": (4.0,)}, "ShapeError: shape (4.0,) has 4.0, not a length >= 0 in 'n/a -> n/b'"),
    (
        {"src_devices": (0,)},
        "MeshError: 1 devices for the source, whose mesh Mesh(a=2) has 2\n"
        "  one number per device, in the order of the mesh",
    ),
    (
        {"dst_devices": (3, 3)},
        "MeshError: device 3 twice in the destination\n  a device has one place in a mesh",
    ),
    ({"dst_devices": (0, -1)}, "MeshError: device -1 of the destination" + NUMBERS),
    (
        {"src_devices": (0, 1.0)},
        "XshardError: src_devices is (0, 1.0), not Sequence[int] | None\n"
        "  plan takes collections.abc.Sequence[int] | None",
    ),
    (
        {"relabel": True, "dst_devices": (1, 2)},
        "MeshError: relabel=True is for two meshes over the same devices\n"
        "  the source has 0-1, the destination 1-2",
    ),
    (
        {"expression": "n/b -> n/b"},
        said("n/«b» -> n/b", "NotationError: unknown mesh axis 'b'", "the mesh has: a=2"),
    ),
    (
        {"expression": "n/a -> n/a"},
        said(
            "n/a -> n/«a»",
            "NotationError: unknown mesh axis 'a'",
            "the destination's mesh has: b=2",
        ),
    ),
    (
        {"expression": ("n/a", "m/b")},
        said("n/a -> «m»/b", "NotationError: dim names differ across the arrow", OTHERS),
    ),
    (
        APART | {"expression": "n/a -> n/b:halo(1,1)"},
        "PlanError: 'n/b:halo(1,1)' overlaps, and overlaps move on one mesh\n"
        "  trim or fold before, widen after",
    ),
    (
        APART | {"expression": "n/a -> n | max(b)"},
        "PlanError: 'n | max(b)' holds a max or min over b, which no transfer brings there\n"
        "  reduce it: write copy(b)",
    ),
    (APART | {"expression": "n | sum(a) -> n", "dtype": "bool"}, NO_SUM),
    (APART | {"expression": "n | sum(a) -> n", "dtype": "bool", "src_mesh": xs.Mesh(a=1)}, NO_SUM),
    ({"dtype": "banana"}, "DtypeError: unknown dtype 'banana'" + DTYPES),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_wrong_input(options, message):
    with pytest.raises(xs.XshardError) as caught:
        xs.plan(
            **{"expression": "n/a -> n/b", "src_mesh": A2, "dst_mesh": B2, "shape": (4,), **options}
        )
    assert f"{type(caught.value).__name__}: {caught.value}" == message


def test_a_block_that_does_not_fit():
    with refused(
        ShapeError, "4 blocks for 2 devices\n  one block per device of Mesh(a=2), row-major"
    ):
        xs.reference.run(gathered(), [np.zeros((4, 4))] * 4)


def test_a_wrong_plan_cannot_be_built():
    plan = gathered()
    transfer, gather = plan.steps
    ends = transfer.target, transfer.source, transfer.dst_devices, transfer.src_devices
    back = Transfer(*ends, plan.profile)
    other = xs.Sharding(xs.Layout.parse("n d/b/c"), plan.dst_mesh, (8, 4))
    steps = replace(transfer, target=other), *xs.plan("n d/b/c -> n d", plan.dst_mesh, (8, 4)).steps
    assert replace(plan, steps=steps).bytes_received == plan.bytes_received
    for wrong, message in (
        ({"steps": (transfer,)}, "the steps lead from 'n/a d' to 'n/b/c d', not to 'n d'"),
        ({"steps": (gather, transfer)}, "unknown mesh axis 'b'\n  the mesh has: a=2"),
        (
            {"steps": (transfer, gather, transfer)},
            "the transfer starts from 'n/a d' on Mesh(a=2), not from",
        ),
        ({"steps": (transfer, back)}, "2 transfers in one plan"),
        ({"shape": (16, 4)}, "the transfer starts from 'n/a d' on Mesh(a=2), not from"),
        ({"mesh": xs.Mesh(a=2, b=1)}, "not from 'n/a d' on Mesh(a=2, b=1)"),
        ({"devices": (1, 0)}, "the plan is for devices (1, 0), its transfer for (0, 1)"),
        ({"scale": Fraction(1, 2)}, "the steps scale by 1, the plan says 1/2"),
    ):
        with pytest.raises(xs.XshardError, match=re.escape(message)):
            replace(plan, **wrong)


def test_what_is_for_one_mesh_refuses_a_plan_between_two():
    with refused(
        PlanError, "no alternatives from Mesh(a=2) to Mesh(b=2, c=2)\n  they are ways on one mesh"
    ):
        gathered().explain()
    with pytest.raises(PlanError, match="leads from a=2 to b=2,c=2") as caught:
        sides(gathered())
    assert caught.value.hint == "torch_bridge.redistribute(x, plan) runs it"


GOOD = json.loads(gathered().to_json())
SENT = GOOD["steps"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src_devices": [1, 2, 3]}, "this is no plan: 3 devices for the source"),
        ({"src_devices": None}, "this is no plan: TypeError"),
        (
            {"steps": [{**SENT, "dst_devices": [1, 2]}]},
            "this is no plan: 2 devices for the destination",
        ),
        ({"steps": [{**SENT, "dst_devices": None}]}, "this is no plan: None is not a list"),
        ({"steps": [{**SENT, "target": {}}]}, "this is no plan: KeyError: 'mesh'"),
        ({"steps": [{**SENT, "target": [7]}]}, "this is no plan: TypeError"),
        (
            {"steps": [{**SENT, "source": SENT["target"]}]},
            "this is no plan: 2 devices for the source",
        ),
    ],
)
def test_malformed_json(changes, message):
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        xs.Plan.from_json(json.dumps(GOOD | changes))


def test_devices_that_do_not_begin_at_a_node_cross_it():
    """Nodes of four: a mesh on 4-7 is inside one, a mesh on 2-5 is not, and pays for that."""
    near = xs.Link(0.0, 8e9)
    far = xs.Link(0.0, 1e9)
    machine = xs.Profile("nodes", "made up", near, far, 4)
    at = lambda *devices: profile_of_devices(machine, xs.Mesh(x=2, y=2), devices)  # noqa: E731
    assert at(0, 1, 2, 3) is at(4, 5, 6, 7) is machine
    assert dict(at(2, 3, 4, 5).axes) == {"x": far, "y": near}
    assert dict(at(0, 4, 1, 5).axes) == {"x": near, "y": far}
    # Halves of eight devices are nodes where they begin at one, and not where they begin inside.
    eight = xs.Mesh(x=8)
    for first, sizes in ((8, [2, 4]), (2, [8])):
        profile = profile_of_devices(machine, eight, tuple(range(first, first + 8)))
        assert [span.size for span in profile.link_spans(eight)] == sizes
    plans = [
        crossing("n", "n", "a=1", "b=4", (4096,), dst_devices=range(k, k + 4), profile=machine)
        for k in (4, 6)
    ]
    assert [p.prices[1].seconds for p in plans] == [3 * 8192 / 8e9, 3 * 8192 / 1e9]
    assert xs.Plan.from_json(plans[1].to_json(), machine) == plans[1]


def test_devices_that_send_or_receive_alone_have_the_port_of_their_node():
    """Two devices of a node of four cross its port twice as fast as links of their own, four as fast."""
    for topology, alone, together in (("switch", 1.0, 1.0), ("port", 0.5, 1.0)):
        across = xs.Link(0.0, 1e9, topology)
        machine = xs.Profile("nodes", "made up", xs.Link(0.0, 1e12), across=across, node_devices=4)
        for n, share in ((2, alone), (4, together)):
            plan = crossing(
                "n/a",
                "n/b",
                f"a={n}",
                f"b={n}",
                (4096,),
                dst_devices=range(4, 4 + n),
                profile=machine,
            )
            assert plan.cost == share * plan.bytes_lower_bound / 1e9
            assert plan.bytes_received == plan.bytes_lower_bound == 8 * 4096 // n


def test_both_passes_count_where_they_are_asked_for():
    forward = gathered()
    both = gathered(objective="forward+backward")
    assert both.steps == forward.steps
    assert both.cost == forward.cost + forward.backward.cost
    assert "with the backward's" in str(both)
    assert xs.Plan.from_json(both.to_json()) == both


def test_devices_are_relabelled_for_both_passes_at_once():
    """One assignment serves both; the sum decides whether it pays."""
    mesh = xs.Mesh(a=2, b=2)
    ask = {"src_mesh": mesh, "dst_mesh": mesh, "shape": (1 << 20,), "relabel": True}
    for objective in ("forward", "forward+backward"):
        plan = xs.plan("n/a/b -> n/b/a", objective=objective, **ask)
        assert plan.dst_devices == (0, 2, 1, 3)
        assert (plan.cost, plan.backward.cost, plan.objective) == (0, 0, objective)


def test_steps_at_either_end_may_split_axes():
    """Every mesh has its own split: the source's is the plan's, the destination's is in the transfer."""
    mesh = xs.Mesh(x=4, y=2)
    apart = xs.Mesh(z=8)
    inner = xs.plan("a/x b -> a/y b", mesh, (16, 16), "int64")
    assert inner.split
    far = xs.Sharding(xs.Layout.parse("a/z b"), apart, (16, 16))
    here = inner.stages[0].before
    there = inner.stages[-1].after
    devices = tuple(range(8)), tuple(range(8, 16))
    into = Transfer(far, here, *devices, inner.profile)
    out = Transfer(there, far, *devices, inner.profile)
    ends = (far.layout, inner.dst, apart), (inner.src, far.layout, mesh)
    options = {"shape": (16, 16), "dtype": "int64"}
    after = xs.Plan(*ends[0], steps=(into, *inner.steps), **options)
    before = xs.Plan(*ends[1], steps=(*inner.steps, out), split=inner.split, **options)
    x = np.arange(256).reshape(16, 16)
    for plan in (after, before):
        assert xs.Plan.from_json(plan.to_json()) == plan
        assert sum(price == other for price in plan.prices for other in inner.prices) >= len(
            inner.prices
        )
        blocks = xs.reference.run(plan, xs.reference.scatter(x, plan.src, plan.src_mesh))
        assert np.array_equal(xs.reference.gather(blocks, plan.dst, plan.dst_mesh, x.shape), x)
    assert (after.dst_mesh, before.src_mesh, after.split) == (mesh, mesh, ())
