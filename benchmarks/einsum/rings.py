"""Contractions in rounds beside the plain form, over a link that is slow for real.

    python -m benchmarks.einsum.rings            # 1+1 and 2+2 gloo ranks; needs namespaces
    python -m benchmarks.einsum.rings --quick    # 1+1 ranks, few rounds

Two nodes on this machine are joined by a link of 400 Mbit/s. Link and products are measured first, by
all ranks together; then contractions are so large that the product takes a quarter of the time of the move,
as long, or twice as long. Both forms of a plan are timed by turns, and the plain form twice; of every turn
the slowest rank counts. A case below 0.95 is timed again with three times the turns, which count. It prints a
table and writes a JSON file. Exit status 1 if a claim fails.
"""

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from benchmarks import by_turns, record
from benchmarks.claim import Row, finish, mean, worst
from xshard.cost.model import Link
from xshard.testing.nodes import nodes

RATE = "400mbit"
ROWS = 1024
WIDTH = 512  # of the block that travels
BALANCES = (0.25, 1.0, 2.0)  # the time of the product, in times of its move
FORMS = {
    "gather, parts side by side": "s/tp d, d f/tp -> s f/tp",
    "gather, parts added": "f/tp s, s/tp d -> f/tp d",
    "reduce-scatter": "s f/tp, f/tp d -> s/tp d",
}
FASTER = 1.3
LEAST = 0.95
LONG = "plain time / in rounds, product as long as its move, or twice: geometric mean"
CHOSEN = 'plain time / in rounds, where "auto" takes rounds: worst'


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("einsum.rings", __doc__, quick="1+1 ranks, few rounds").parse_args(
        arguments
    )
    rows: list[Row] = []
    for ranks in (1,) if options.quick else (1, 2):
        with nodes(2, ranks=ranks, rate=RATE) as cluster:
            rows += cluster.run_torch(_rows, ranks, 3 if options.quick else 7, timeout_s=900.0)[0]
    even = [(row["case"], row["faster"]) for row in rows if row["balance"] >= 1.0]
    chosen = [(row["case"], row["faster"]) for row in rows if row["auto"]]
    judged = (mean(LONG, even, FASTER, at_least=True), worst(CHOSEN, chosen, LEAST, at_least=True))
    _show(rows)
    facts = {"rate": RATE, "load": os.getloadavg()}
    return finish(options, "Contractions in rounds", judged, "torch", rows={"cases": rows}, **facts)


def _rows(per_node: int, rounds: int) -> list[Row]:
    """The rows of all cases, equal on every rank."""
    n = dist.get_world_size()
    mesh = xs.Mesh(tp=n)
    rows: list[Row] = []
    profile = _profile(mesh, per_node)
    flops = dict(profile.flops_per_s)["float32"]
    assert profile.across is not None
    move_s = (n - 1) * 4 * ROWS * WIDTH / profile.across.bytes_per_s
    for form, balance in product(FORMS, BALANCES):
        k = max(1, round(balance * move_s * flops / (2 * ROWS * n * WIDTH)))
        sizes = {"s": ROWS * n, "d": WIDTH, "f": k * n}
        rows += _timed(form, mesh, sizes, profile, balance, rounds)
    return rows


def _profile(mesh: xs.Mesh, per_node: int) -> xs.Profile:
    """The profile of gloo, with the link between nodes and the products of all ranks as they are now."""
    x = torch.ones(ROWS, WIDTH)
    y = torch.ones(WIDTH, ROWS)
    gloo = xs.load_profile("gloo")
    calls = {"move": lambda: xt.redistribute(x, "n/tp d -> n d", mesh), "product": lambda: x @ y}
    move_s, product_s = map(statistics.median, by_turns.slowest(calls, 7, warm_up=2).values())
    link = Link(gloo.default.latency_s, (mesh.n_devices - 1) * x.nbytes / move_s)
    rate = 2 * ROWS * WIDTH * ROWS / product_s
    return replace(gloo, across=link, node_devices=per_node, flops_per_s=(("float32", rate),))


def _timed(
    form: str,
    mesh: xs.Mesh,
    sizes: dict[str, int],
    profile: xs.Profile,
    balance: float,
    rounds: int,
) -> list[Row]:
    """A row for the forward pass, and one with all gradients; none if no move can run in rounds."""
    text = FORMS[form]
    options = {"sizes": sizes, "dtype": "float32", "profile": profile}
    plans = {
        name: xs.plan(text, mesh, overlap=name, **options) for name in ("never", "auto", "always")
    }
    never = plans["never"]
    ring = plans["always"].parts[0].ring
    if ring is None:
        return []
    shapes = (move.source.local_shape(dist.get_rank()) for move in never.moves)
    blocks = [torch.ones(shape).requires_grad_() for shape in shapes]
    rows = []
    for objective in ("forward", "forward+backward"):
        calls = {
            name: partial(_run, plans[name.split()[0]], blocks, objective != "forward")
            for name in ("never", "always", "never again")
        }
        seconds = by_turns.slowest(calls, rounds, warm_up=2)
        if by_turns.ratio(seconds, "never", "always") < LEAST:
            # These count: a slow spell of the machine may be short.
            seconds = by_turns.slowest(calls, 3 * rounds, warm_up=2)
        rows.append(
            {
                "case": f"{mesh.n_devices} ranks, {form}, product/move {balance:g}, {objective}",
                "expression": text,
                "sizes": sizes,
                "balance": balance,
                "local": never.local,
                "ring": [ring.operand, ring.dim],
                "auto": plans["auto"].parts[0].ring is not None,
                "plain_predicted_s": never.forward_cost,
                "predicted": never.forward_cost / plans["always"].forward_cost,
                "flops_per_s": dict(profile.flops_per_s)["float32"],
                "link_bytes_per_s": profile.across and profile.across.bytes_per_s,
                "plain_s": statistics.median(seconds["never"]),
                "rounds_s": statistics.median(seconds["always"]),
                "faster": by_turns.ratio(seconds, "never", "always"),
                "noise": by_turns.ratio(seconds, "never", "never again"),
                "turns": len(seconds["never"]),
            }
        )
    return rows


def _run(plan: xs.ContractionPlan, blocks: Sequence[torch.Tensor], with_gradients: bool) -> None:
    with torch.set_grad_enabled(with_gradients):
        y = xt.einsum(plan, *blocks, mesh=plan.mesh)
    if with_gradients:
        torch.autograd.grad(y, blocks, torch.ones_like(y))


def _show(rows: Sequence[Row]) -> None:
    heads = ("case", "plain ms", "rounds ms", "faster", "predicted, forward", "noise", "auto")
    lines = []
    for row in rows:
        ms = (f"{1e3 * row[name]:.0f}" for name in ("plain_s", "rounds_s"))
        ratios = (f"{row[name]:.2f}" for name in ("faster", "predicted", "noise"))
        lines.append((row["case"], *ms, *ratios, "rounds" if row["auto"] else "plain"))
    record.console().print(record.table("Both forms", heads, lines))


if __name__ == "__main__":
    sys.exit(main())
