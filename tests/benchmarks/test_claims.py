"""The claims that the repository keeps follow from the rows beside them, and each of them can fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from benchmarks.einsum import claims as einsum
from benchmarks.einsum import host as einsum_host
from benchmarks.interop import __main__ as interop
from benchmarks.jax_reshard import claims as jax_reshard
from benchmarks.models import __main__ as models
from benchmarks.nodes import __main__ as nodes
from benchmarks.planner import claims as planner
from benchmarks.plans import __main__ as plans
from benchmarks.state import claims as state
from benchmarks.suggest import __main__ as suggest
from benchmarks.suggest import gspmd, iopddl, measured
from benchmarks.time import __main__ as steps
from benchmarks.torch_redistribute import claims as torch
from tests.benchmarks.helpers import recorded


def judged_models(data: dict[str, Any]) -> Any:
    by_kind: dict[str, dict[str, Any]] = {}
    for row in data["steps"]:
        by_kind.setdefault(row["parameters"], {})[row["way"]] = row
    assert models.shown(by_kind).row_count == 4
    in_turns = {row["case"]: row for row in data["beside_fsdp2"]}
    assert models.shown_beside_fsdp2(in_turns).row_count == 4
    return [*models.claims(by_kind), *models.claims_beside_fsdp2(in_turns)]


JUDGED: dict[str, Callable[[Any], Any]] = {
    "einsum": lambda data: einsum.judge(data["cases"], data["cached_s"], data["timed"]),
    "einsum_host": lambda data: [einsum_host.judge(data["cases"])],
    "gpu": lambda data: (*torch.host_times(data["host"]), *torch.packing(data["packs"])),
    "interop": lambda data: interop.judge(data["handed"]),
    "jax_reshard": lambda data: jax_reshard.judge(
        data["compiled"], data["timed"], data["dispatch"]
    ),
    "models": judged_models,
    "nodes": lambda data: nodes.judge(data["cases"], data["profiles"], data["jax"]),
    "planner": lambda data: planner.judge(
        data["public"], data["scaled"], data["speed"], quick=False
    ),
    "plans": lambda data: plans.claims(data["models"]),
    "state": lambda data: state.judge(data["loads"], data["transfers"]),
    "suggest": lambda data: suggest.judge(data["cases"]),
    "suggest_gspmd": lambda data: gspmd.judge(data["steps"]),
    "suggest_iopddl": lambda data: iopddl.judge(data["instances"]),
    "suggest_measured": lambda data: measured.judge(data["plans"]),
    "time": lambda data: [*steps.judge(data["zero3"]), *steps.judge_halves(data["halves"])],
    "torch_redistribute": lambda data: torch.judge(
        **{rows: data[rows] for rows in ("host", "ends", "memory", "packs")}
    ),
}
FAILING = {
    "gpu": ["forward call, us", "with the gradient, us", "to copy as many bytes, GPU"],
    "planner": ["for h100_nvlink: geometric mean", "planned for h100: geometric mean"],  # aims
    "state": ["orbax / ours"],
    "suggest": ["the gap to the bound"],  # of experts, and of 80 layers at the limit of memory
    "suggest_gspmd": ["without constraints: geometric mean"],  # 0.51
    "suggest_measured": ["Kendall's tau", "the best measured", "largest", "smallest", "bytes"],
    "time": [
        "the bound of its schedule",
        "ZeRO-3: predicted / measured seconds: largest",
        "parallel, 512 wide",  # ranks that send with the cores on which they compute
        "parallel, 1024 wide",
    ],
    "torch_redistribute": ["by hand / ours: worst", "to copy as many bytes, CPU"],
}


@pytest.mark.parametrize("name", JUDGED)
def test_recorded_rows_give_the_recorded_claims(name: str) -> None:
    data = recorded(name)
    found = JUDGED[name](data)
    assert name == "interop" or data["claims"] == json.loads(
        json.dumps([claim.to_dict() for claim in found])
    )
    check_failing(found, FAILING.get(name, []))


def check_failing(claims: Any, words: list[str]) -> set[str]:
    """Exactly the claims with these words fail, and name their worst cases -> their statements."""
    found = [claim for claim in claims if not claim.holds]
    said = [claim.statement for claim in found]
    assert len(said) == len(words) and all(map(str.__contains__, said, words)), said
    assert all(claim.failing for claim in found if ": worst" in claim.statement)
    return set(said)


# What is set in the recorded rows first: all claims hold, and a change of one figure breaks few of them.
OURS: dict[str, Any] = {
    "steps": ["all_gather"],
    "plan_bytes": 64,
    "received_bytes": 64,
    "temporary_bytes": 0,
}
OURS |= {"plan_counts": {"all-gather": 1}, "counts": {"all-gather": 1}, "compile_s": 0.1}
PROFILES = jax_reshard.FEWEST_BYTES, jax_reshard.DEFAULT
COMPILED: dict[str, Any] = {
    "case": "one",
    "source_elements": 1,
    "target_elements": 1,
    "ended_sums": 1,
}
COMPILED["xla"] = {
    "received_bytes": 128,
    "reduced_bytes": 0,
    "temporary_bytes": 0,
    "compile_s": 0.1,
}
COMPILED["ours"] = dict.fromkeys((*PROFILES, *map(jax_reshard.within, PROFILES)), OURS)
PLANS = [
    {
        "machine": "4 ranks",
        "model": "Llama",
        "plan": plan,
        "predicted_s": seconds,
        "measured_s": seconds,
        "predicted_bytes": 64,
        "measured_bytes": 64,
    }
    for plan, seconds in (("suggested", 1.0), ("ZeRO-3", 2.0), ("HSDP", 3.0))
]
ZERO3_S = {"prefetched": 1.2, "not prefetched": 1.5, "FSDP2": 2.0, "computing alone": 1.0}
HALVES_S = {"whole batch": 2.0, "in halves": 1.4}
START: dict[str, dict[str, Any]] = {
    "jax_reshard": {"compiled": [COMPILED]},
    "nodes": {
        "cases/*/seconds": {
            "nodes known": 1.0,
            "DTensor": 3.0,
            "blind to nodes": 3.0,
            "by hand": 3.0,
        },
        "jax/*/seconds": {"nodes known": 1.0, "XLA": 2.0},
    },
    "planner": {
        "scaled/*/plans/h100_nvlink/seconds": 1e-18,
        "scaled/*/nodes/crossing_bytes/h100": 0.0,
    },
    "state": {
        "loads/*/seconds": {
            "xshard": [1.0],
            "reading": [0.4],
            "memcpy": [0.4],
            "safetensors' slices": [1.0],
        },
        "transfers/*/seconds": {
            "xshard": [1.0],
            "DTensor": [2.0],
            "DCP's state dict, from rank 0": [3.0],
        },
        "transfers/*/bound_bytes": 100,
        "transfers/*/across_bytes/xshard": 102,
    },
    "suggest": {"cases/*/gap": 0.005, "cases/*/planning_s": 4.0},
    "suggest_gspmd": {"steps/20/received_bytes": 2**26},
    "suggest_measured": {"plans": PLANS},
    "time": {
        "zero3/*/seconds": ZERO3_S,
        "zero3/*/predicted_s": 1.2,
        "zero3/*/bound_of_cores_s": 1.1,
        "zero3/*/moving_s": 1.0,
        "zero3/*/faster": 1.5,
        "halves/*/seconds": HALVES_S,
        "halves/*/predicted_s": HALVES_S,
        "halves/*/moving": 1.0,
        "halves/*/ratio": 0.7,
    },
    "torch_redistribute": {
        "ends/*/faster_than": {"DTensor": 3.0, "by hand": 1.0},
        "memory": [
            {"move": "packed", "extra_bytes": 64, "packed_bytes": 64, "needs_packing": True},
            {"move": "flat", "extra_bytes": 0, "packed_bytes": 64, "needs_packing": False},
        ],
        "packs/*/slower_than_copy": 1.1,
    },
}
# By benchmark: what is set, and words of the claims that fail then.
XLA_BYTES = "cases/*/peers/*/received_bytes/*"
OUR_BYTES = "cases/*/ours/*/*/received_bytes"
EVER = 1e18
OPERATIONS = ["more operations than XLA"]
MEAN = "ours: geometric mean"
WORST = "ours: worst"
FASTER = [({"timed/*/faster": 1.1}, [MEAN]), ({"timed/*/faster": 0.8}, [MEAN, WORST])]
PLANNED = "compiled/0/ours/*/plan_bytes"
TAKEN = "compiled/0/ours/*/received_bytes"
XLA_MEAN = "bytes / XLA's: geometric mean"
XLA_WORST = "bytes / XLA's: worst"
BREAKS: dict[str, list[tuple[dict[str, Any], list[str]]]] = {
    "einsum": [
        *FASTER,
        ({XLA_BYTES: 256, OUR_BYTES: 128}, ["geometric mean"] * 2),
        ({XLA_BYTES: 256, OUR_BYTES: 257}, ["XLA", "plain planner", "geometric mean"] * 2),
        ({"cases/*/flops_limits/xla/0": 8, "cases/*/ours/xla/*/flops": 9}, OPERATIONS),
        ({"cases/*/flops_limits/xla/1": 8, "cases/*/ours/xla/*/backward_flops": 9}, OPERATIONS),
        ({"cases/*/cold_s/*": 0.1}, ["empty: median"]),
        ({"cases/*/cold_s/*": 0.3}, ["empty: median", "empty: worst"]),
        ({"cached_s": 6e-6}, ["asked for again"]),
    ],
    "einsum_host": [({"cases/2/beyond_s": 16e-6}, ["torch.einsum: worst"])],
    "interop": [
        ({"handed/1/bytes_copied/to_jax": 1}, ["bytes that to_jax copies"]),
        ({"handed/1/bytes_copied/to_torch": 1}, ["bytes that to_torch copies"]),
        (
            {"handed/0/seconds/to_jax": 1.0, "handed/4/seconds/to_jax": 3.0},
            ["to_jax: time of the largest"],
        ),
        (
            {"handed/0/seconds/to_torch": 1, "handed/4/seconds/to_torch": 3},
            ["to_torch: time of the largest"],
        ),
    ],
    "jax_reshard": [
        *FASTER,
        ({PLANNED: 60}, [jax_reshard.UNPLANNED]),
        ({"compiled/0/ours/*/counts": {"all-gather": 2}}, [jax_reshard.UNPLANNED]),
        (
            {"compiled/0/ours/*/temporary_bytes": 5000},
            [jax_reshard.MORE_MEMORY, jax_reshard.OVER_LIMIT],
        ),
        ({"compiled/0/ours/*/compile_s": 0.2}, ["seconds to compile / XLA's: geometric mean"]),
        ({TAKEN: 80, PLANNED: 80}, [XLA_MEAN]),
        ({TAKEN: 130, PLANNED: 130}, [XLA_MEAN, XLA_WORST]),
        ({"dispatch/ratio": 1.6}, ["host time of a cached reshard / of a cached jit"]),
    ],
    "models": [
        ({"steps/0/collectives": 1e9}, ["collectives"]),
        ({"steps/0/bytes": 1e9}, ["bytes"]),
        ({"steps/0/step_s": 1e9}, ["seconds of a step"]),
        ({"beside_fsdp2/0/step": 1e9}, ["time of a turn"]),
        ({"beside_fsdp2/0/memory": 1e9}, ["most bytes"]),
    ],
    "nodes": [
        ({"cases/*/seconds/nodes known": 4.0}, ["best", "DTensor", "blind to nodes", "by hand"]),
        ({"cases/*/seconds/DTensor": 1.5}, ["DTensor / ours"]),
        ({"cases/*/seconds/blind to nodes": 1.1}, ["blind to nodes / ours"]),
        (
            {"cases/*/seconds/by hand": 0.9},
            ["ours / the best of the others: worst", "by hand / ours"],
        ),
        ({"jax/*/seconds/XLA": 0.9}, ["XLA / ours"]),
        ({"profiles/0/error": 0.3}, ["predicted against measured"]),
    ],
    "planner": [
        (
            {"scaled/*/plans/bandwidth/received_bytes": EVER},
            ["bandwidth: geometric mean", "bandwidth: worst"],
        ),
        ({"public/*/plans/bandwidth/received_bytes": EVER}, ["uneven cuts: received bytes"]),
        ({"scaled/*/plans/h100/seconds": EVER}, ["for h100: worst", "for h100: geometric mean"]),
        (
            {"scaled/*/plans/h100_nvlink/seconds": EVER},
            ["h100_nvlink: worst", "h100_nvlink: geometric mean"],
        ),
        (
            {"scaled/*/nodes/crossing_bytes/network": EVER},
            ["for what crosses", "where none must: worst"],
        ),
        (
            {"scaled/*/nodes/crossing_bytes/h100": EVER},
            ["planned for h100", "where none must: worst"],
        ),
        ({"scaled/4/nodes/crossing_bytes/network": 1}, ["where none must: worst"]),
        ({"public/*/plans/bandwidth/total_bytes": EVER}, ["partial sums"]),
        ({"public/0/plans/h100/peak_over_ends": 1.01}, ["largest local array"]),
        (
            {"scaled/0/plans/h100/values_right": False},
            ["cases with a plan that gives wrong values"],
        ),
        ({"public/*/plans/network/values_right": False}, ["wrong values", "uneven cases"]),
        ({"public/*/cold_s": 0.06}, ["public cases: median", "public cases: worst"]),
        ({"speed/cached_s": 0.06}, ["asked for again: median"]),
        ({"speed/large_mesh_s/*": 0.06}, ["4096 x 32 devices"]),
    ],
    "state": [
        ({"loads/0/seconds/memcpy": [0.2]}, ["load / (memcpy + reading)"]),
        ({"loads/0/seconds/safetensors' slices": [0.9]}, ["load / safetensors' slices"]),
        ({"loads/0/seconds/orbax": [7.9]}, ["orbax / ours"]),
        ({"loads/0/seconds/DCP": [1.9]}, ["DCP / ours"]),
        (
            {"loads/0/seconds/DCP's reader of Hugging Face": [0.9]},
            ["DCP's reader of Hugging Face / ours"],
        ),
        ({"loads/0/seconds/torch.load": [0.9]}, ["torch.load / ours"]),
        ({"loads/0/bytes_read": 65}, ["loads that read other bytes than they need"]),
        ({"loads/0/bytes_beyond": 2**28 + 1}, ["memory beyond the result, in buckets"]),
        ({"transfers/0/across_bytes/xshard": 106}, ["transfer: bytes over the link / the fewest"]),
        ({"transfers/0/seconds/DTensor": [1.4]}, ["transfer: torch's own / ours"]),
        (
            {"transfers/0/seconds/DCP's state dict, from rank 0": [1.4]},
            ["transfer: torch's own / ours"],
        ),
    ],
    "suggest": [
        (
            {"cases/0/seconds": 0.28},
            ["best plan by hand", "AutoParallel's, 8B at 16 x 8192, scheduled"],
        ),
        ({"cases/1/autoparallel": 0.36}, ["AutoParallel's, 8B at 16 x 8192, no overlap"]),
        ({"cases/2/gap": 0.02}, ["the gap to the bound"]),
        ({"cases/3/rules": 13}, ["rules for a Llama"]),
        ({"cases/4/planning_s": 9.0}, ["planning, a Llama"]),
        (
            {"cases/17/planning_s": 61.0, "cases/16/planning_bytes": 2**31},
            ["experts on three", "GiB beyond"],
        ),
    ],
    "suggest_gspmd": [
        ({"steps/0/error": 0.1}, [gspmd.WRONG]),
        (
            {"steps/0/received_bytes": 2**40},
            ["bytes, suggested / without constraints: geometric mean", "worst"],
        ),
        ({"steps/1/priced_s": 1e3}, ["priced seconds"]),
        ({"steps/1/measured_s": 1e3}, ["measured seconds"]),
    ],
    "suggest_iopddl": [
        ({"instances/2/cost": 2e6}, ["cost / the best known"]),
        ({"instances/0/of_limit": 1.1}, ["bytes at the peak"]),
        ({"instances/1/seconds": 1e3}, ["processor seconds / the contest's limit"]),
    ],
    "suggest_measured": [
        (
            {"plans/1/predicted_s": 2.95, "plans/1/measured_s": 2.95, "plans/2/measured_s": 2.9},
            ["Kendall's tau"],
        ),
        ({"plans/0/predicted_s": 2.1, "plans/0/measured_s": 2.1}, ["suggested / the best"]),
        ({"plans/2/predicted_s": 3.6}, ["seconds predicted / measured: largest"]),
        ({"plans/2/predicted_s": 2.5}, ["seconds predicted / measured: smallest"]),
        ({"plans/0/measured_bytes": 80}, ["bytes predicted against measured"]),
    ],
    "time": [
        ({"zero3/0/bound_of_cores_s": 1.0}, ["a step / the bound of its schedule"]),
        ({"zero3/0/predicted_s": 1.4}, ["ZeRO-3: predicted / measured seconds: largest"]),
        ({"zero3/0/predicted_s": 1.0}, ["ZeRO-3: predicted / measured seconds: smallest"]),
        ({"zero3/*/faster": 1.3}, ["where moving takes as long as computing: median"]),
        ({"zero3/0/moving_s": 5.0, "zero3/0/faster": 0.9}, ["FSDP2 / ours elsewhere"]),
        (
            {"halves/*/predicted_s/in halves": 1.7},
            ["halves: predicted / measured seconds: largest"],
        ),
        (
            {"halves/*/predicted_s/in halves": 1.1},
            ["halves: predicted / measured seconds: smallest"],
        ),
        (
            {"halves/*/ratio": 0.8},
            ["experts, 512", "parallel, 512", "parallel, 1024", "parallel, 2048"],
        ),
    ],
    "torch_redistribute": [
        ({"host/0/xshard/forward_s": 7e-5}, ["host time of a forward call, us"]),
        ({"host/0/xshard/both_s": 3e-4}, ["host time with the gradient, us"]),
        (
            {"host/*/DTensor/forward_s": 2e-5},
            ["DTensor's host time / ours, forward: geometric mean"],
        ),
        ({"memory/0/extra_bytes": 65}, ["bytes held beyond input and result / one packed copy"]),
        (
            {"memory/1/extra_bytes": 1},
            ["bytes held beyond input and result where nothing is packed"],
        ),
        ({"packs/0/slower_than_copy": 1.4}, ["time to pack / to copy as many bytes, CPU"]),
        (
            {"packs/0/slower_than_copy_of_pieces": 1.4},
            ["the same, to copy them in a quarter of a row each"],
        ),
        ({"ends/*/faster_than/DTensor": 1.5}, ["run time, DTensor / ours: geometric mean"]),
        ({"ends/*/faster_than/DTensor": 0.9}, [f"DTensor / {MEAN}", f"DTensor / {WORST}"]),
        ({"ends/*/faster_than/by hand": 0.9}, [f"by hand / {MEAN}", f"by hand / {WORST}"]),
    ],
}


def put(data: Any, path: str, value: Any) -> None:
    """Set what is at a path of keys with slashes between, `*` for all; data without a key are left."""
    key, _, rest = path.partition("/")
    keys: Iterable[Any] = range(len(data)) if isinstance(data, list) else list(data)
    for each in keys if key == "*" else [int(key) if isinstance(data, list) else key]:
        if not rest:
            data[each] = value
        elif isinstance(data, list) or each in data:
            put(data[each], rest, value)


@pytest.mark.parametrize("name", BREAKS)
def test_every_claim_can_fail(name: str) -> None:
    def judged(changes: dict[str, Any]) -> Any:
        data = recorded(name)
        for path, value in (START.get(name, {}) | changes).items():
            put(data, path, copy.deepcopy(value))
        return JUDGED[name](data)

    seen = {
        words for change, broken in BREAKS[name] for words in check_failing(judged(change), broken)
    }
    assert {claim.statement for claim in judged({})} <= seen
    check_failing(judged({}), [])
