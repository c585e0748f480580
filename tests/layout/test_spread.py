"""Units that several devices share, `h/spread(tp)`: on sub-axes, in moves, contractions and trees."""

import numpy as np
import pytest

import xshard as xs
from tests.messages import refused, rows
from tests.spread_cases import random_move, random_product
from tests.two_meshes import run_tree
from xshard import Layout, Mesh, Sharding
from xshard.errors import PlanError, ShapeError
from xshard.layout.lengths import global_shape
from xshard.nn.attention import attention
from xshard.state import Names, concat, plan_transfer

# A layout, the length of its dim, and how a sharding on dp=2, tp=8 writes it: the layout, and the mesh.
ON_SUB_AXES = """
h/spread(tp)               2   h/tp_0                    dp=2,tp_0=2,tp_1=4
(h 4)/spread(tp)           8   h_4/tp_0                  dp=2,tp_0=2,tp_1=4
h/spread(tp)               1   h                         dp=2,tp=8
h/spread(tp)               8   h/tp                      dp=2,tp=8
h/spread(tp)              12   h/tp                      dp=2,tp=8
h/spread(dp,tp)            4   h/(dp,tp_0)               dp=2,tp_0=2,tp_1=4
h/spread(dp,tp)            2   h/dp                      dp=2,tp=8
h/dp/spread(tp)            8   h/dp/tp_0                 dp=2,tp_0=4,tp_1=2
(h 2)/spread(tp)/dp        8   h_2/sizes(tp_0,dp,2,0,2,0,2,0,2,0) dp=2,tp_0=4,tp_1=2
h/spread(dp)/spread(tp)    2   h/dp                      dp=2,tp=8
h/spread(tp):halo(1,0)     4   h/tp_0:halo(1,0)          dp=2,tp_0=4,tp_1=2
h/spread(tp)|copy(tp)      2   h/tp_0|copy(tp_1)         dp=2,tp_0=2,tp_1=4
h/spread(tp)|sum(dp,tp)    2   h/tp_0|sum(dp,tp_1)       dp=2,tp_0=2,tp_1=4
h/spread(tp)|copy(tp)      8   h/tp                      dp=2,tp=8
"""


@pytest.mark.parametrize("row", ON_SUB_AXES.strip().splitlines())
def test_devices_that_share_a_unit_are_replicas_along_a_sub_axis(row):
    *words, length, written, mesh = row.split()
    text = " ".join(words)
    layout = Layout.parse(text)
    sharding = Sharding(layout, Mesh(dp=2, tp=8), (int(length),))
    assert (str(sharding.layout).replace(" ", ""), str(sharding.mesh)) == (written, mesh)
    assert Layout.parse(str(layout)) == layout and layout.dual.dual == layout
    for device in (0, 5, 15):
        numbers = layout.positions(Mesh(dp=2, tp=8), (int(length),), 0, device)
        assert (
            numbers.tolist()
            == sharding.layout.positions(sharding.mesh, sharding.shape, 0, device).tolist()
        )


REFUSED = """
«h/spread(tp)» -> h   no equal groups of 8 devices for 3 units of 'h'
    a group of devices for each unit, all as large; or say how many each device has, as in sizes(tp,2,1,1)
«h/dp/spread(tp)» -> h   blocks of 1 and 2 units are spread over 8 devices
    a group of devices for each unit, all as large; or say how many each device has, as in sizes(tp,2,1,1)
h/spread(tp) | copy(«tp») sum(tp) -> h   mesh axis 'tp' is used twice
    an axis shards one dim or carries one tag
h/«spread»(tp,2) -> h   1 number in spread   spread takes no number, as in (h 128)/spread(tp)
h/«spred»(tp) -> h   unknown order 'spred'
    did you mean 'spread'? orders are: block, balanced, zigzag, cyclic, sizes, intervals, by, spread
"""


@pytest.mark.parametrize(("text", "message"), rows(REFUSED))
def test_what_is_wrong_is_marked(text, message):
    with refused(xs.XshardError, message):
        xs.plan(text, Mesh(dp=2, tp=8), (3,))


def test_groups_of_two_sides_have_to_nest():
    with pytest.raises(PlanError, match="share units in groups that do not nest"):
        xs.plan("h/spread(tp) k -> h k/spread(tp)", Mesh(tp=6), (2, 3))
    sizes = {"h": 2, "k": 3}
    with pytest.raises(PlanError, match="over groups that do not nest"):
        xs.plan("h/spread(tp), k/spread(tp) -> h k", Mesh(tp=6), sizes=sizes)


@pytest.mark.parametrize("seed", range(24))
def test_random_moves_are_right_with_their_gradients(seed):
    move = random_move(seed)
    mesh = Mesh(move.mesh)
    plan = xs.plan(move.text, mesh, move.whole.shape, "int64")
    assert xs.Plan.from_json(plan.to_json()) == plan and Layout(str(plan.dst)) == plan.dst
    assert plan.bytes_received >= plan.bytes_lower_bound
    moved = xs.reference.run(plan, move.blocks)
    move.check(moved, xs.reference.run(plan.backward, move.cotangents))
    whole = xs.reference.gather(moved, str(move.dst), mesh, move.moved.shape)
    assert np.array_equal(whole, move.moved)


@pytest.mark.parametrize("seed", range(4))
def test_random_contractions_are_right_with_their_gradients(seed):
    product = random_product(seed)
    plan = xs.plan(product.text, Mesh(product.mesh), sizes=product.sizes, dtype="int64")
    assert xs.ContractionPlan.from_json(plan.to_json()) == plan
    result = xs.reference.run(plan, *product.blocks)
    product.check(result, *xs.reference.pullback(plan, product.blocks, product.cotangents))


def test_trees_move_shared_units_at_the_bound():
    """Keys and values of two heads on eight devices become one weight on three, and it becomes them again."""
    shapes = {"q": (24, 2), "k": (4, 2), "v": (4, 2)}
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.permutation(n * m).reshape(n, m).astype("float32")
        for name, (n, m) in shapes.items()
    }
    fused = Names(concat(["q", "k", "v"], "qkv"))
    apart = {"q": "(h 3)/tp i", "*": "(g 2)/spread(tp) i"}
    there = fused.apply(arrays)
    one_way = plan_transfer(
        shapes, (apart, {"qkv": "o/tp i"}), names=fused, src_mesh=Mesh(tp=8), dst_mesh=Mesh(tp=3)
    )
    back = plan_transfer(
        {"qkv": (32, 2)},
        ({"qkv": "o/tp i"}, apart),
        names=fused.inverse,
        src_mesh=Mesh(tp=3),
        dst_mesh=Mesh(tp=8),
    )
    for plan, given, wanted in ((one_way, arrays, there), (back, there, arrays)):
        blocks = {}
        for name, source in plan.sources.items():
            sharding = source.sharding
            blocks[name] = xs.reference.scatter(given[name], sharding.layout, sharding.mesh)
        found = run_tree(plan, blocks)
        for array in plan.arrays:
            sharding = array.sharding
            right = xs.reference.scatter(wanted[array.name], sharding.layout, sharding.mesh)
            for block, expected in zip(found[array.name], right, strict=True):
                assert np.array_equal(block, expected)
        assert plan.bytes_received == plan.bytes_lower_bound


def test_attention_wants_heads_that_no_devices_share():
    four = Mesh(tp=4)
    queries = Sharding(Layout("b h/tp s d"), four, (1, 8, 4, 3))
    keys = Sharding(Layout("b g/spread(tp) s d"), four, (1, 2, 4, 3))
    with pytest.raises(ShapeError, match=r"devices share heads of 'b g/spread.tp. s d'"):
        attention(queries, keys, keys)


def test_a_block_does_not_say_how_many_units_there_are():
    with pytest.raises(ShapeError, match="1 rows do not say how long dim 'h' is"):
        global_shape(Layout("h/spread(tp) d"), Mesh(tp=4), (1, 3), "h/spread(tp) d")
