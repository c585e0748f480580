"""What is measured of each way: seconds of a step by turns, collectives and bytes.

Decides the model and the batch. A way that gives another loss fails.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import by_turns
from benchmarks.models.ways import COPIES, GATHERED, Step
from benchmarks.torch_calls import Figures
from torch_bridge.testing.byte_counter import Meter

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip


def steps(layers: int, tokens: int, rounds: int) -> dict[str, Figures]:
    """On one of four gloo ranks, by way, for parameters that are copies and for gathered ones."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ids = torch.randint(0, SIZES["vocab_size"], (4, tokens), generator=torch.Generator().manual_seed(0))
    own = ids.chunk(2)[dist.get_rank() // 2]
    found: dict[str, Figures] = {}
    for kind, ways in (("copies", COPIES), ("gathered", GATHERED)):
        made: dict[str, Step] = {}
        for name, way in ways.items():
            torch.manual_seed(0)
            made[name] = way(LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES)), mesh)
        counts, losses = {}, []
        for name, step in made.items():
            step(own)
            with Meter() as meter:
                losses.append(step(own))
            counts[name] = {"collectives": float(len(meter.received)), "bytes": float(sum(meter.received))}
        assert all(torch.allclose(loss, losses[0], rtol=1e-4) for loss in losses), losses
        calls = {name: (lambda step=step: step(own)) for name, step in made.items()}
        times = by_turns.seconds(calls, rounds, before=dist.barrier)
        # On a busy machine the best of many says more than the median: nothing makes a step faster.
        found[kind] = {name: counts[name] | {"step_s": min(times[name])} for name in made}
    return found
