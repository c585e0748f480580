"""ZeRO-3 of a Llama on two ranks beside FSDP2: seconds of a step and its most bytes, in each precision."""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import torch_bridge as xt
from benchmarks import by_turns
from benchmarks.models.ways import SIZES, Step, step_of

OURS, FSDP2 = "rules", "FSDP2"
STEPS = 5  # in which bytes are counted
LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Case(NamedTuple):
    """How a model is trained: parameters used in bfloat16, activations computed again, layers compiled."""

    low: bool = False
    checkpointed: bool = False
    compiled: bool = False


CASES = {
    "float32": Case(),
    "bfloat16": Case(low=True),
    "bfloat16, checkpointed": Case(low=True, checkpointed=True),
    "bfloat16, checkpointed, compiled": Case(low=True, checkpointed=True, compiled=True),
}


def llama(layers: int, case: Case) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES))
    if case.checkpointed:
        options = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if case.compiled:
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def by_rules(model: nn.Module, low: bool) -> Step:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    precision = xt.Precision(**LOW) if low else None
    rules = {"**": "o/dp ... -> o ..."}
    options: Any = {"gathers": "model.layers.*", "precision": precision}
    return step_of(xt.parallelize(model, rules, {"": "b/dp s"}, mesh, **options))


def by_fsdp2(model: Any, low: bool) -> Step:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(**LOW) if low else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return step_of(model)


def most_bytes(step: Step, ids: torch.Tensor) -> int:
    """The most bytes that live at once in some steps, beside those that lived before them.

    One step may have fewer: FSDP2 frees what travels when it happens to be there.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(STEPS):
            step(ids)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    allocations = [event for event in events if event.get("name") == "[memory]"]
    allocations.sort(key=lambda event: event["ts"])
    live = most = 0
    for event in allocations:
        live += event["args"]["Bytes"]
        most = max(most, live)
    return most


def beside_fsdp2(layers: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """On one of two gloo ranks, by case: the median ratio of a turn, and that of the most bytes."""
    ids = torch.randint(
        0, SIZES["vocab_size"], (4, tokens), generator=torch.Generator().manual_seed(0)
    )
    own = ids.chunk(2)[dist.get_rank()]
    torch.set_num_threads(1)
    figures = {}
    for name, case in CASES.items():
        steps = {
            OURS: by_rules(llama(layers, case), case.low),
            FSDP2: by_fsdp2(llama(layers, case), case.low),
        }
        losses = [step(own) for step in steps.values()]
        assert torch.equal(*losses), losses
        calls = {way: (lambda step=step: step(own)) for way, step in steps.items()}
        times = by_turns.slowest(calls, rounds)
        nbytes = {way: most_bytes(step, own) for way, step in steps.items()}
        figures[name] = {f"{way} s": statistics.median(turns) for way, turns in times.items()} | {
            f"{way} bytes": float(n) for way, n in nbytes.items()
        }
        figures[name]["step"] = by_turns.ratio(times, OURS, FSDP2)
        figures[name]["memory"] = nbytes[OURS] / nbytes[FSDP2]
    return figures
