"""Seconds that `xt.suggest` predicts for the steps of this benchmark, for the links they run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torch_bridge as xt
from benchmarks.suggest import measured
from benchmarks.time.measures import MODELS, ROWS, SIDE, VOCABULARY, llama
from xshard import Mesh, Profile
from xshard.runtimes.calibrate import calibrate

ROUNDS = 7  # of the calibration
# `suggest` cannot record the loop of Mixtral's experts, whose operations depend on the data.
RECORDED = "llama", "gpt2", "vit"


def profile_of(cluster: Any, mesh: Mesh) -> Profile:
    """Calibrate the ranks of a cluster, whose processes free memory as those of the steps do."""
    how = "torch", mesh, "here", measured.BLOCKS, ROUNDS
    profile: Profile = cluster.run_torch(calibrate, *how, timeout_s=900.0)[0].profile
    return profile


def zero3_s(
    name: str, layers: int, hidden: int, tokens: int, mesh: Mesh, profile: Profile
) -> float:
    """A step of ZeRO-3 as `measures.zero3` takes it, without an optimizer."""
    n_rows = ROWS * mesh.n_devices
    shape = (n_rows, 3, SIDE, SIDE) if name == "vit" else (n_rows, tokens)
    dtype = torch.float32 if name == "vit" else torch.int64
    batch = torch.empty(shape, dtype=dtype, device="meta")
    return _step_s(MODELS[name][0](layers, hidden), batch, mesh, profile, "ZeRO-3", n_parts=1)


def sequence_parallel_s(
    layers: int, hidden: int, rows: int, tokens: int, mesh: Mesh, profile: Profile, n_parts: int
) -> float:
    """A step of tensor and sequence parallelism as `turns.turns` takes it."""
    batch = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
    # The vocabulary must not be as long as the model is wide: plans by hand tell dims by their lengths.
    model = llama(layers, hidden, VOCABULARY + 8)
    return _step_s(model, batch, mesh, profile, "tensor + sequence parallel", n_parts)


def _step_s(
    model: nn.Module, batch: torch.Tensor, mesh: Mesh, profile: Profile, by_hand: str, n_parts: int
) -> float:
    suggested = xt.suggest(
        model, batch, mesh, profile=profile, micro_batches=1, recompute=False, batch_parts=n_parts
    )
    plan = measured.plan_by_hand(suggested, by_hand)
    return plan.seconds - plan.parts["optimizer"]
