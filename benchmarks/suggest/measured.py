"""Suggested steps and plans by hand, run by turns: predicted beside measured seconds and bytes.

    python -m benchmarks.suggest.measured          # 4 and 8 gloo ranks, and two nodes of two over 400 Mbit/s
    python -m benchmarks.suggest.measured --quick  # 4 ranks, one model, few turns

Each machine is calibrated first. Every plan trains its own copy of a model of transformers, with AdamW; the
plans take turns, and the slowest rank counts. Prints a line for each plan, and the claims, and writes a JSON
file. Exit status 1 if a claim fails.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from scipy.stats import kendalltau
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_bridge as xt
from benchmarks import by_turns, record
from benchmarks.claim import Claim, Row, between, finish, worst
from benchmarks.memory import keep_freed_memory
from torch_bridge.step.suggest import TorchSuggestion
from xshard import Layout, Mesh, Profile
from xshard.runtimes.calibrate import Calibration, calibrate
from xshard.testing.nodes import nodes

SUGGESTED = "suggested"
MACHINES = {  # mesh, and the rate between two nodes of two
    "4 ranks": (Mesh(dp=2, tp=2), None),
    "8 ranks": (Mesh(dp=4, tp=2), None),
    "2 nodes of 2": (Mesh(dp=2, tp=2), "400mbit"),
}
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
WORDS = {"vocab_size": 2048}
CLASSES = {"num_labels": 1024, "image_size": 64, "patch_size": 8}
NONE_DROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 128, **WORDS, **NONE_DROPPED}
BATCH = 8
SEQUENCE = 128
MODELS: Mapping[str, tuple[str, Row]] = {
    "Llama": ("LlamaForCausalLM", {**SIZES, **WORDS, "num_key_value_heads": 4, "use_cache": False}),
    "GPT-2": ("GPT2LMHeadModel", {**GPT2, "use_cache": False}),
    "ViT": ("ViTForImageClassification", {**SIZES, **CLASSES}),
}
BLOCKS = 2**12, 2**15, 2**18, 2**20, 2**22  # bytes, for the calibration
RATE = 1e-3  # of AdamW
BUCKET_BYTES = 2**22  # of gradients: less than those of a layer, as the default is for large models


class Run(NamedTuple):
    """A plan as a process takes it."""

    parameters: Mapping[Any, Any]
    inputs: Mapping[Any, Any]
    outputs: Mapping[Any, Any]
    once: str
    result: str


def build(name: str) -> tuple[nn.Module, Mapping[str, Tensor], Tensor]:
    """A model, its batch and labels, equal on all processes."""
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    model = getattr(transformers, kind)
    model = model(model.config_class(**sizes))
    if name == "ViT":
        side = CLASSES["image_size"]
        return (
            model,
            {"pixel_values": torch.randn(BATCH, 3, side, side)},
            torch.randint(1024, (BATCH,)),
        )
    tokens = torch.randint(WORDS["vocab_size"], (BATCH, SEQUENCE))
    return model, {"input_ids": tokens}, tokens.roll(-1, 1)


def train(
    name: str, plans: Mapping[str, Run], mesh: Mesh, rounds: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """On every process: a copy of the model for each plan, and their steps by turns.

    Returns for each plan the seconds of its steps on the slowest rank, and the most bytes that this one held.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    steps = {}
    for plan, run in plans.items():
        try:
            step = _step(name, run, mesh)
            step()
        except (
            ValueError,
            RuntimeError,
        ) as error:  # on all ranks: code that checks lengths of its own
            if not dist.get_rank():
                print(f"{name}, {plan}: does not run: {str(error).splitlines()[0]}", flush=True)
        else:
            steps[plan] = step
    seconds = by_turns.slowest(steps, rounds, warm_up=2)
    return seconds, {plan: _held(step) for plan, step in steps.items()}


def _step(name: str, run: Run, mesh: Mesh) -> Callable[[], float]:
    model, batch, labels = build(name)
    rules = run.parameters, run.inputs, mesh
    how = {"keep": run.once, "gathers": GATHERS[name], "bucket_bytes": BUCKET_BYTES}
    xt.parallelize(model, *rules, outputs=run.outputs, **how)
    logits = Layout.parse(run.result)
    rows = Layout(logits.dims[:-1])
    own = xt.redistribute(labels, f"{' '.join(rows.names)} -> {rows}", mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step() -> float:
        loss = xt.nn.cross_entropy(
            model(**batch).logits, own, logits, mesh, classes=logits.names[-1]
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


GATHERS = {
    "Llama": "model.embed_tokens|model.layers.*|model.norm|lm_head",
    "GPT-2": "transformer.{wte,wpe}|transformer.h.*|transformer.ln_f|lm_head",
    "ViT": "vit.embeddings|vit.layers.*|vit.layernorm|classifier",
}


class Held(TorchDispatchMode):
    """The most bytes of tensors that are there at a time, and were not when this was made."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self.kept = {_storage(x) for x in kept}
        self.there: dict[StorageWeakRef, int] = {}
        # A lazy copy has the memory of another storage: that one's, or of a lazy copy the first one's.
        self.owner: dict[StorageWeakRef, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.there |= {_storage(x): x.untyped_storage().nbytes() for x in tensors}
        if func is torch.ops.aten._lazy_clone.default:
            copied = _storage(args[0])
            self.owner[_storage(result)] = self.owner.get(copied, copied)
        # Gloo's threads let go of some: no list of what is freed has them all.
        self.there = {ref: n for ref, n in self.there.items() if not ref.expired()}
        by_owner = {self.owner.get(ref, ref): n for ref, n in self.there.items()}
        self.most = max(self.most, sum(n for ref, n in by_owner.items() if ref not in self.kept))
        return result


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())


def _held(step: Callable[[], float]) -> int:
    """The most bytes of tensors while a step runs."""
    optimizer = step.optimizer  # type: ignore[attr-defined]
    kept = [x for own in optimizer.state.values() for x in own.values()]
    kept += [p for group in optimizer.param_groups for p in group["params"]]
    with Held(kept) as held:
        step()
    return sum(x.nbytes for x in kept) + held.most


def rows_of(
    machine: str, name: str, mesh: Mesh, machine_profile: Profile, rounds: int, launch: Any
) -> list[Row]:
    """A row per plan of one model."""
    model, batch, _ = build(name)
    # Halves are measured by benchmarks.time: here all plans take the whole batch.
    how = {"profile": machine_profile, "micro_batches": 1, "recompute": False, "batch_parts": 1}
    plan = xt.suggest(model, batch, mesh, **how)
    plans = {SUGGESTED: plan} | {each: plan_by_hand(plan, each) for each in plan.by_hand}
    runs = {
        each: Run(*(dict(getattr(p, side)) for side in Run._fields[:3]), p.once, p.result)
        for each, p in plans.items()
    }
    results = launch(train, name, runs, mesh, rounds)
    seconds = results[0][0]
    held = {each: max(own[each] for _, own in results) for each in seconds}
    return [
        {
            "machine": machine, "model": name, "plan": each,
            "predicted_s": p.seconds, "measured_s": statistics.median(seconds[each]),
            "predicted_bytes": sum(p.memory.values()), "measured_bytes": held[each],
            "parts_s": p.parts, "memory": p.memory,
        }
        for each, p in plans.items() if each in held
    ]  # fmt: skip


def plan_by_hand(plan: TorchSuggestion, name: str) -> TorchSuggestion:
    """One of the plans that a suggestion was compared with, as a `TorchSuggestion` like it."""
    search, vector = plan.by_hand[name]
    chosen = next(each for each, own in search.vectors.items() if (own == vector).all())
    return TorchSuggestion(search, chosen, 0.0, {}, unused=plan.unused, mesh=plan.mesh)


def calibrated(mesh: Mesh, rounds: int) -> Calibration:
    """A profile of the running ranks, or of as many new ones."""
    keep_freed_memory()
    return calibrate("torch", mesh, "here", BLOCKS, rounds)


def judge(rows: Sequence[Row]) -> list[Claim]:
    """The claims, of each model on each machine."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(f"{row['machine']}, {row['model']}", []).append(row)
    order = []
    best = []
    seconds = []
    memory = []
    for case, plans in cases.items():
        predicted, measured = ([p[key] for p in plans] for key in ("predicted_s", "measured_s"))
        order.append((case, float(kendalltau(predicted, measured).statistic)))
        ours = next((p["measured_s"] for p in plans if p["plan"] == SUGGESTED), math.inf)
        best.append((case, ours / min(measured)))
        seconds += [(f"{case}, {p['plan']}", p["predicted_s"] / p["measured_s"]) for p in plans]
        memory += [
            (f"{case}, {p['plan']}", abs(p["predicted_bytes"] / p["measured_bytes"] - 1))
            for p in plans
        ]
    return [
        worst("Kendall's tau of predicted and measured orders", order, 0.8, at_least=True),
        worst("suggested / the best measured", best, 1.03),
        *between("seconds predicted / measured", seconds, 0.85, 1.15),
        worst("bytes predicted against measured", memory, 0.1),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("suggest.measured", __doc__, quick="4 ranks, one model, few turns")
    parser.add_argument("--machines", default="", help="some of them only, as '4 ranks|8 ranks'")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # ranks are forks
    rounds = 3 if options.quick else 7
    chosen = "4 ranks" if options.quick else options.machines
    rows: list[Row] = []
    profiles: list[Row] = []
    for machine, (mesh, rate) in MACHINES.items():
        if chosen and machine not in chosen.split("|"):
            continue
        if rate is None:
            work = partial(xt.testing.run_ranks, mesh.n_devices, timeout_s=900.0)
            rows += _measure(machine, mesh, rounds, work, options.quick, profiles)
        else:
            with nodes(2, ranks=mesh.n_devices // 2, rate=rate) as cluster:
                work = partial(cluster.run_torch, timeout_s=900.0)
                rows += _measure(machine, mesh, rounds, work, options.quick, profiles)
    return finish(
        options, "Plans of a step", judge(rows), "torch", "transformers",
        rows={"plans": rows, "profiles": profiles},
    )  # fmt: skip


def _measure(
    machine: str, mesh: Mesh, rounds: int, launch: Any, quick: bool, profiles: list[Row]
) -> list[Row]:
    calibration = launch(calibrated, mesh, rounds)[0]
    profiles.append(
        {"machine": machine, "error": calibration.error, "profile": calibration.profile.to_json()}
    )
    rows: list[Row] = []
    for name in list(MODELS)[: 1 if quick else None]:
        rows += (own := rows_of(machine, name, mesh, calibration.profile, rounds, launch))
        print("\n".join(map(line, own)), flush=True)
    return rows


def line(row: Row) -> str:
    """A plan in one line."""
    return (
        f"{row['machine']:13} {row['model']:6} {row['plan']:36} predicted {row['predicted_s']:.3f} s, "
        f"measured {row['measured_s']:.3f} s; {row['predicted_bytes'] / 2**20:.0f} MiB, "
        f"measured {row['measured_bytes'] / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
