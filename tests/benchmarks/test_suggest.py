"""The benchmark of suggested steps runs, and its claims can fail."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.suggest import gspmd, iopddl
from benchmarks.suggest.__main__ import judge
from benchmarks.suggest.models import COMBINE, DISPATCH, deepseek, mixtral
from benchmarks.suggest.pool import Messages
from jax_bridge.step.suggest import JaxSuggestion
from tests.benchmarks.helpers import quick_run
from tests.jax_bridge.helpers import in_jax
from tests.jax_bridge.losses import transformer


def test_a_quick_run_has_claims_that_can_fail(tmp_path: Path) -> None:
    _, data, printed = quick_run("suggest", tmp_path)
    rows = data["cases"]
    assert [row["model"] for row in rows] == ["8B"] and "best by hand" in printed
    assert all(row["seconds"] < min(row["by_hand"].values()) for row in rows)
    assert [claim["statement"] for claim in data["claims"]] == [
        claim.statement for claim in judge(rows)
    ]
    for name in ("seconds", "gap", "rules", "planning_bytes"):
        worse = copy.deepcopy(rows)
        worse[0][name] = 2**40
        failing = [claim.failing[0] for claim in judge(worse) if not claim.holds]
        assert failing and all("8B 16 x 8192" in each for each in failing), name


@in_jax
def test_each_way_of_a_step_of_jax_is_compared_with_one_device() -> None:
    broken = lambda plan, loss: lambda *args: 1.01 * loss(*args)  # noqa: E731
    with mock.patch.object(JaxSuggestion, "constrain", broken):
        rows = gspmd.rows_of("scan", "host", transformer(True, batch=16, c=64, n=2), 1)
    ways = [(row["way"], row["partitioner"]) for row in rows]
    first = [(way, by) for way in (gspmd.SUGGESTED, gspmd.FREE) for by in ("GSPMD", "Shardy")]
    assert ways == [*first, (gspmd.FSDP, "Shardy"), (gspmd.TENSOR, "Shardy")]
    assert [row["error"] > 0.009 for row in rows] == [True, True, False, False, False, False]
    wrong = next(claim for claim in gspmd.judge(rows) if claim.statement == gspmd.WRONG)
    assert wrong.failing == ("scan, suggested, GSPMD", "scan, suggested, Shardy")
    assert all(row["collectives"]["all-gather"] > 8 for row in rows[4:5]), (
        "gathered in both passes of each layer"
    )


def test_what_a_loop_receives_counts_as_often_as_it_runs() -> None:
    gather = "%y = f32[8]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}"
    loop = "%z = f32[8]{0} while(%x), condition=%more, body=%body"
    times = '{"known_trip_count":{"n":"3"}}'
    text = f"%body (x: f32[8]) -> f32[8] {{\n  {gather}\n}}\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n  {loop}"
    lines = gspmd.executed(f"{text}, backend_config={times}\n}}\n")
    assert [n for n, line in lines if "all-gather" in line] == [3]
    with pytest.raises(ValueError, match="cannot tell how often"):
        list(gspmd.executed(f"{text}\n}}\n"))


def test_an_all_reduce_of_which_parts_are_read_is_a_reduce_scatter() -> None:
    reduced = "  %sum = (f32[6], f32[2]) all-reduce(%x, %y), replica_groups={{0,1}}"
    parts = [f"  %p{i} = f32[{n}] get-tuple-element(%sum), index={i}" for i, n in enumerate((6, 2))]
    text = "\n".join(
        [reduced, *parts, "  %z = f32[3] fusion(%p0)", "  ROOT %w = (f32[2]) tuple(%p1)"]
    )
    assert gspmd.scattered(text, reduced) == 0.75 and gspmd.scattered(text, parts[0]) == 0


def test_rules_of_experts_are_those_of_the_texts() -> None:
    for step in (mixtral(8, 64), deepseek(8, 64)):
        texts = [[op.text_of(rule) for rule in op.rules] for op in step.ops if op.rules]
        assert texts == [list(DISPATCH), list(COMBINE)]


def test_a_graph_is_solved_with_all_its_options(monkeypatch: Any) -> None:
    random = np.random.default_rng(0)
    sizes = [22, 24, 23, 21]
    costs = [random.integers(0, 100, n).astype(float) for n in sizes]
    usages = [random.integers(0, 100, n).astype(float) for n in sizes]
    edges = {
        (i, j): random.integers(0, 100, (sizes[i], sizes[j])) for i in range(4) for j in range(i)
    }
    total = np.zeros(())
    used = np.zeros(())
    shapes = np.eye(4, dtype=int)
    for cost, usage, shape in zip(costs, usages, shapes, strict=True):
        shape = np.where(shape, -1, 1)
        total = total + cost.reshape(shape)
        used = used + usage.reshape(shape)
    for (i, j), table in edges.items():
        total = total + np.moveaxis(table.T.reshape(sizes[j], sizes[i], 1, 1), (0, 1), (j, i))
    best = np.where(used <= 60, total, np.inf).min()
    assert best > total.min()  # the limit counts
    monkeypatch.setattr(iopddl, "STEPS", ((3.0,),))
    for most in (iopddl.MOST_PAIRS, 0):
        monkeypatch.setattr(iopddl, "MOST_PAIRS", most)
        graph = iopddl.Graph(list(costs), list(usages), [(0, 2)] * 4, {}, 60.0)
        for edge, table in edges.items():
            graph.add(edge, table)
        whole = copy.deepcopy(graph)
        chosen, bound = iopddl.solve(graph, 2000, 0.0)
        assert chosen is not None and bound <= best + 1e-6
        solution = iopddl.restored(graph, chosen)
        assert whole.cost(solution) == best and whole.peak(solution) <= 60


def test_messages_along_a_chain_give_its_minimum() -> None:
    random = np.random.default_rng(1)
    costs = [random.integers(0, 100, 5).astype(float) for _ in range(4)]
    tables = {(i, i + 1): random.integers(0, 100, (5, 5)) for i in range(3)}
    messages = Messages(costs, [np.zeros((5, 0))] * 4, tables)
    messages.sweep(np.zeros(0), forward=True)
    bound = messages.sweep(np.zeros(0), forward=False)
    least = costs[0]
    for i, table in enumerate(tables.values()):
        least = (least[:, None] + table).min(0) + costs[i + 1]
    graph = iopddl.Graph(costs, costs, [(0, 1)] * 4, tables, 1.0)
    assert abs(bound - least.min()) < 1e-9
    assert graph.cost(messages.assignment(np.zeros(0))) == least.min()
