"""Published models of transformers, trained by the plans that they declare and on one device: the same?

    python -m benchmarks.plans           # 30 models in small, on 4 gloo ranks, float64
    python -m benchmarks.plans --quick   # 3 of them

Prints a table and writes a JSON file. Exit status 1 if one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import record
from benchmarks.claim import Claim, finish, worst
from benchmarks.plans.published import SMALL, trained
from benchmarks.torch_calls import on_ranks

IN_FLOAT32 = 1e-6  # norms or routers of some


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("plans", __doc__, quick="3 models").parse_args(arguments)
    names = [*SMALL][: 3 if options.quick else None]
    ranks = on_ranks(4, trained, names)
    rows = [
        {"model": name, "loss": max(x.loss for x in each), "parameters": max(x.parameters for x in each),
         "held": max(x.held for x in each), "rules": each[0].rules}
        for name, each in zip(names, zip(*ranks, strict=True), strict=True)
    ]  # fmt: skip
    lines = [
        (
            r["model"],
            f"{r['loss']:.1e}",
            f"{r['parameters']:.1e}",
            f"{r['held']:.2f}",
            str(r["rules"]),
        )
        for r in rows
    ]
    heads = ("model", "losses differ", "parameters differ", "share held", "rules")
    record.console().print(record.table("Three steps by the declared plan, tp=4", heads, lines))
    return finish(
        options,
        "As on one device",
        claims(rows),
        "torch",
        "transformers",
        rows={"models": rows},
        ranks=4,
    )


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    return [
        worst(
            f"{what}, relative to one device's", [(r["model"], r[what]) for r in rows], IN_FLOAT32
        )
        for what in ("loss", "parameters")
    ]


if __name__ == "__main__":
    sys.exit(main())
