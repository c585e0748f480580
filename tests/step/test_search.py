"""The search against exhaustive search with the same costs, on small random steps; and its parts."""

import itertools

import numpy as np
import pytest

from tests.step.random_steps import random_step
from xshard import Link, Mesh, Profile, load_profile, plan
from xshard.step.choose import order
from xshard.step.choose import search as search_room
from xshard.step.choose.eliminate import excess, minimum
from xshard.step.choose.search import StepSearch
from xshard.step.price.moves import MovePrices
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import COPY, REPLICAS, SUM, layout_of


def all_vectors(problem):
    """The parts of the cost of every assignment, all moves planned."""
    sizes = [len(node.placements) for node in problem.nodes]
    chosen = np.indices(sizes).reshape(len(sizes), -1)
    for edge in problem.edges:
        for i, j in itertools.product(*(range(sizes[n]) for n in edge.nodes)):
            edge.raise_to_price(i, j)
    total = sum(node.costs[i] for node, i in zip(problem.nodes, chosen, strict=True))
    for edge in problem.edges:
        rows = edge.rows[chosen[edge.source]]
        columns = edge.columns[chosen[edge.user]]
        total[:, edge.parts] += edge.costs(rows, columns).T
        total[edge.banned[rows, columns]] = np.inf
    return total


@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_what_exhaustive_search_finds(seed):
    step = random_step(seed).with_shares
    moves = MovePrices(Mesh(a=4), "bfloat16", load_profile("gloo"))

    def problem():
        overlap = (None, 0.0, 0.5)[seed % 3]
        return StepProblem(step, moves, 2, recompute=bool(seed % 2), overlap=overlap)

    vectors = all_vectors(problem())
    vectors = vectors[np.isfinite(vectors).all(1)]
    n_bytes = problem().cost(1.0).largest_limit_share(vectors)
    for limit in (np.inf, *(np.quantile(n_bytes, (0.0, 0.1)) * (1 + 1e-12))):  # sums are rounded
        search = StepSearch(problem(), limit)
        seconds = search.cost.total(vectors)[n_bytes <= limit].min()
        search.run()
        assert search.bound <= seconds * (1 + 1e-9)
        search.improve()
        search.close(0.0)
        assert search.seconds == pytest.approx(seconds, rel=1e-6)
        assert seconds * (1 - 2e-4) <= search.bound <= seconds * (1 + 1e-9)
    alone = StepSearch(
        problem(), n_bytes.min() * (1 + 1e-12)
    )  # the integer program needs no plan before
    alone.close(0.0)
    assert alone.best and alone.seconds == pytest.approx(
        search.cost.total(vectors)[n_bytes == n_bytes.min()].min()
    )


def test_assignments_that_are_known_are_combined():
    """For each node an option of one of them: of all such combinations the best one that fits."""
    moves = MovePrices(Mesh(a=2), "bfloat16", load_profile("h100"))
    n_better = 0
    for seed in range(12):
        problem = StepProblem(random_step(seed).with_shares, moves)
        vectors = all_vectors(problem)
        is_possible = np.isfinite(vectors).all(1)
        n_bytes = problem.cost(1.0).largest_limit_share(np.where(is_possible[:, None], vectors, 0))
        limit = np.quantile(n_bytes[is_possible], 0.2) * (1 + 1e-12)
        search = StepSearch(problem, limit)
        search.run(most_steps=6)
        before = search.seconds
        chosen = np.indices([len(node.placements) for node in problem.nodes])
        pairs = zip(chosen.reshape(len(chosen), -1), np.array(list(search.vectors)).T, strict=True)
        is_combination = np.all([np.isin(options, known) for options, known in pairs], 0)
        fits = is_possible & is_combination & (n_bytes <= limit)
        best = search.cost.total(vectors[fits]).min(initial=np.inf)
        search._combine(0.0)
        assert search.seconds == pytest.approx(min(best, before), rel=1e-6)
        n_better += search.seconds < before
    assert n_better


def _cut_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each table of a minimum be minimized by itself."""
    monkeypatch.setattr(search_room, "FEW_ADDED_UP", 1)
    monkeypatch.setattr(search_room, "MOST_ADDED_UP", 1)
    monkeypatch.setattr(order, "LEAST_LIMIT", 1)


def test_a_bound_by_moves_that_do_not_exist_still_has_a_plan(monkeypatch):
    """Where tables are too large, a bound's assignment need not run: there is a plan with whole arrays."""
    _cut_all_tables(monkeypatch)
    moves = MovePrices(Mesh(a=4), "bfloat16", load_profile("h100"))
    for seed in range(5):
        search = StepSearch(StepProblem(random_step(seed).with_shares, moves), np.inf)
        search.start()
        assert search.best, seed


def test_a_search_ends_where_all_options_take_longer_than_a_known_plan(monkeypatch):
    """Bounds of parts of a table, each with a value of its own, may leave a node no option."""
    moves = MovePrices(Mesh(a=4), "bfloat16", load_profile("h100"))
    for seed in range(2):
        problem = StepProblem(random_step(seed).with_shares, moves)
        monkeypatch.undo()
        known = StepSearch(problem, np.inf)
        known.run()
        known.improve()
        _cut_all_tables(monkeypatch)
        for share in (1.1, 0.9, 0.5):
            search = StepSearch(problem, np.inf)
            search.start()
            search.cutoff = known.seconds * share
            search.run()
            assert min(search.bound, search.cutoff) <= known.seconds


@pytest.mark.parametrize("seed", range(4))
def test_a_bound_where_few_nodes_have_a_choice_is_that_of_their_best_options(seed):
    """Moves between all others count, planned or not; where one is not possible it is infinite."""
    moves = MovePrices(Mesh(a=4), "bfloat16", load_profile("h100"))
    problem = StepProblem(random_step(seed).with_shares, moves)
    search = StepSearch(problem, np.inf)
    weights, constant = search.cost.weights(search.multipliers)
    search.start()
    mixed = [len(node.placements) // 2 for node in problem.nodes]
    for assignment in (search.best, mixed):
        for free, node in enumerate(problem.nodes):
            flags = [
                np.arange(len(n.placements)) == k
                for n, k in zip(problem.nodes, assignment, strict=True)
            ]
            flags[free][:] = True
            found = search.within(flags).bound_by(search.multipliers)
            values = []
            for option in range(len(node.placements)):
                vector = problem.vector([*assignment[:free], option, *assignment[free + 1 :]])
                is_possible = np.isfinite(vector).all()
                values.append(weights @ vector - constant if is_possible else np.inf)
            assert found.seconds == pytest.approx(min(values))
            if np.isfinite(min(values)):
                assert values[found.assignment[free]] == pytest.approx(min(values))


def test_less_memory_than_any_plan_needs():
    moves = MovePrices(Mesh(a=2), "bfloat16", load_profile("h100"))
    search = StepSearch(StepProblem(random_step(0).with_shares, moves), 1000.0)
    search.run(most_steps=20)
    search.improve()
    assert search.best is None and search.bound > 1


@pytest.mark.parametrize("has_impossible", [False, True])
def test_minima_are_those_of_all_assignments(monkeypatch, has_impossible):
    draw = np.random.default_rng(1)
    sizes = (3, 4, 2, 5, 3)
    unary = [draw.random(n) for n in sizes]
    pairs = {
        (i, j): draw.random((sizes[i], sizes[j]))
        for i, j in ((0, 1), (1, 2), (3, 1), (2, 0), (3, 4))
    }
    if has_impossible:
        for table in pairs.values():
            table[draw.random(table.shape) < 0.3] = np.inf
    assignments = list(itertools.product(*map(range, sizes)))
    chosen = np.array(assignments).T
    sums = sum(u[a] for u, a in zip(unary, chosen, strict=True))
    sums = sums + sum(table[chosen[i], chosen[j]] for (i, j), table in pairs.items())
    value, found, buckets = minimum(unary, pairs, 2**22)
    assert value == pytest.approx(sums.min()) and tuple(found) == assignments[int(sums.argmin())]
    monkeypatch.setattr(order, "LEAST_LIMIT", 1)
    bound = minimum(unary, pairs, 1)
    assert len(bound.buckets) > len(buckets) and value / 2 < bound.value <= value
    more = excess(buckets)
    more_by_bound = excess(bound.buckets)
    for v, n in enumerate(sizes):
        least = [sums[[each[v] == k for each in assignments]].min() for k in range(n)]
        assert more[v] + value == pytest.approx(np.array(least))
        assert (more_by_bound[v] + bound.value <= np.array(least) + 1e-9).all()


def test_tables_that_are_minimized_apart_prefer_the_same_values(monkeypatch):
    """By itself each table has the minimum 0; their sum is 9 for every value of variable 0."""
    monkeypatch.setattr(order, "LEAST_LIMIT", 1)
    rising = np.array([[0.0, 0.0], [9.0, 9.0]])
    zeros = [np.zeros(2)] * 3
    assert minimum(zeros, {(0, 1): rising, (0, 2): rising[::-1]}, 1).value == 9


# Its links decide, so that a bound nears the price: nothing else takes time.
SLOW_STEP = Profile("slow", "made up", Link(0.0, 1e9), call_s=1e-3, step_slowdown=3.0)


@pytest.mark.parametrize(
    ("mesh", "machine"),
    [
        (Mesh(dp=8, tp=8), "h100"),
        (Mesh(a=2, b=3, c=2), "gloo"),
        (Mesh(a=2, b=3), "h100:4"),  # a node ends in the middle of b
        (Mesh(dp=2, tp=2), SLOW_STEP),
    ],
    ids=str,
)
def test_bounds_of_moves_are_below_prices(mesh, machine):
    moves = MovePrices(mesh, "bfloat16", load_profile(machine))
    draw = np.random.default_rng(2)
    ways = np.array(list(itertools.product((SUM, COPY, REPLICAS, 0, 1, 2), repeat=len(mesh.axes))))
    for i, j in draw.integers(len(ways), size=(30, 2)):
        lengths = draw.choice((96, 384, 4608), 3)
        [[bound]] = moves.bounds(ways[[i]], ways[[j]], lengths)
        assert bound <= moves.planned_seconds(ways[i], ways[j], lengths) * (1 + 1e-9)


def test_prices_of_moves_are_the_planner_s():
    mesh = Mesh(dp=4, tp=8)
    moves = MovePrices(mesh, "bfloat16", load_profile("h100"))
    shape = (512, 1024, 512)
    gathers = (
        ((0, 1), (0, REPLICAS)),
        ((0, 1), (REPLICAS, 1)),
        ((2, 2), (REPLICAS, 2)),
        ((0, 0), (REPLICAS, 0)),
    )
    sums = ((0, SUM), (0, 1))
    others = (((0, 1), (0, 2)), ((SUM, REPLICAS), (1, COPY)))
    for src, dst in (*gathers, sums, *others):
        layouts = (layout_of(ways, "xyz", mesh.axes) for ways in (src, dst))
        cost = plan(tuple(layouts), mesh, shape, "bfloat16").cost
        assert moves.planned_seconds(src, dst, shape) == pytest.approx(cost, rel=0.02)


def test_a_variable_has_more_neighbours_than_an_array_has_axes():
    """Those with one value are no variables: their tables count, and they keep that value."""
    unary = [np.arange(3.0), *[np.zeros(1)] * 40]
    pairs = {(0, neighbour): np.array([[2.0], [1.0], [0.0]]) for neighbour in range(1, 41)}
    value, assignment, buckets = minimum(unary, pairs, 2**22)
    assert (value, assignment) == (2.0, [2, *[0] * 40])
    assert excess(buckets)[0].tolist() == [78.0, 39.0, 0.0]
