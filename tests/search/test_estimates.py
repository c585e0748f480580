"""Estimates of moves: equal to the price of the cheapest path where one collective of each kind is best."""

import pytest

from xshard.cost.machine import load_profile
from xshard.layout import Layout, Mesh, Sharding
from xshard.search.estimates import estimate
from xshard.search.moves import NamedRoute
from xshard.search.solve import best_path

MESH = Mesh(x=2, y=4)  # x is between nodes

# A wrong estimate costs no error, only a worse plan, so that tests of plans may not see it.
MOVES = """
n c -> n/x/y c
n c -> n/x c/y
n/x/y c -> n c
n c/x -> n/y c/x
n c/y -> n c/x/y
n/y c -> n/x/y c
n/x c/y -> n/y c/x
n c | sum(x) -> n c
n c | sum(x) -> n/x c/y
n c | sum(x,y) -> n/x/y c
n c | sum(x,y) -> n c | sum(y)
n c/x | sum(y) -> n c | sum(y)
n c/x/y -> n/y c | sum(x)
"""


@pytest.mark.parametrize("move", MOVES.strip().splitlines())
def test_the_estimate_is_the_price(move):
    start, goal = (Sharding(Layout.parse(text), MESH, (64, 64)) for text in move.split(" -> "))
    space = NamedRoute(start, goal, 4, load_profile("h100:4"))
    route = space.route
    assert estimate(route.grid, route.start, route.goal) == pytest.approx(best_path(route).seconds)
