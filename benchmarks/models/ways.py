"""The same Llama in parallel, written in several ways, and the time and bytes of a step in each.

A way takes a whole model and returns a function that makes one step's gradients. All have tensor and sequence
parallelism over `tp` and cut the batch over `dp`; parameters are copies along `dp`, or stored in parts there
and gathered for use.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

import torch_bridge as xt
from benchmarks import by_turns
from benchmarks.torch_calls import Figures
from torch_bridge.testing.byte_counter import Meter

# This process's sequences -> its share of the loss, after its backward pass.
Step = Callable[[Tensor], Tensor]
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROW = ("o_proj", "down_proj")
INPUTS = {
    "": "b/dp s",
    "model.layers.0": "b s c -> b s/tp c",
    "model.layers.*|model.norm": "b s/tp c",
    "**.{self_attn,mlp}|lm_head": "b s/tp c -> b s c | copy(tp)",
}
OUTPUTS = {"**.{self_attn,mlp}": "b s c | sum(tp) -> b s/tp c", "lm_head": "b s v/tp -> b s v"}


def step_of(model: nn.Module, after: Callable[[], object] = lambda: None) -> Step:
    def step(ids: Tensor) -> Tensor:
        model.zero_grad()
        logits = model(ids).logits[:, :-1]
        following = ids[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        loss.backward()
        after()
        return loss.detach()

    return step


def rules(columns: str, rows: str, others: str, gathers: str | None = None) -> Callable[..., Step]:
    """Parallel by these layouts of parameters."""
    parameters = {
        "**.{q,k,v,gate,up}_proj.weight|lm_head.weight": columns,
        "**.{o,down}_proj.weight": rows,
        "**": others,
    }
    return lambda model, mesh: step_of(
        xt.parallelize(model, parameters, INPUTS, mesh, outputs=OUTPUTS, gathers=gathers)
    )


def by_hand(model: nn.Module, mesh: DeviceMesh) -> Step:
    """Cuts, hooks and sums of gradients by `redistribute`."""
    sums = {}
    for name, p in model.named_parameters():
        layer = name.split(".")[-2]
        dst = "o/tp i" if layer in COLUMN else "o i/tp" if layer in ROW else None
        if dst is not None:
            p.data = xt.redistribute(p.data, f"o i -> {dst}", mesh)
        over = "dp" if dst is not None or "embed" in name else "dp,tp"
        sums[name] = (
            f"{'i' if p.ndim == 1 else 'o i'} | sum({over}) -> {'i' if p.ndim == 1 else 'o i'}"
        )

    def moved(expression: str) -> Any:
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (xt.redistribute(args[0], expression, mesh), *args[1:]), kwargs
            return args, kwargs | {
                "hidden_states": xt.redistribute(kwargs["hidden_states"], expression, mesh)
            }

        return before

    def scattered(_: nn.Module, args: Any, result: Any) -> Any:
        expression = "b s c | sum(tp) -> b s/tp c"
        if isinstance(result, tuple):
            return (xt.redistribute(result[0], expression, mesh), *result[1:])
        return xt.redistribute(result, expression, mesh)

    whole = moved("b s/tp c -> b s c | copy(tp)")
    model.model.layers[0].register_forward_pre_hook(moved("b s c -> b s/tp c"), with_kwargs=True)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_pre_hook(whole, with_kwargs=True)
            part.register_forward_hook(scattered)
    model.lm_head.register_forward_pre_hook(whole, with_kwargs=True)
    model.lm_head.register_forward_hook(
        lambda m, a, y: xt.redistribute(y, "b s v/tp -> b s v", mesh)
    )

    def after() -> None:
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for name, gradient in xt.redistribute(gradients, sums, mesh).items():
            model.get_parameter(name).grad = gradient

    return step_of(model, after)


def dtensor(model: nn.Module, mesh: DeviceMesh) -> Step:
    """`parallelize_module` and `fully_shard`."""
    rows = Shard(1)
    whole = Replicate()
    prepared = {"input_kwarg_layouts": {"hidden_states": rows}}
    prepared |= {"desired_input_kwarg_layouts": {"hidden_states": whole}}
    inside = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**prepared),
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        **{f"self_attn.{name}": ColwiseParallel() for name in COLUMN[:3]},
        **{f"mlp.{name}": ColwiseParallel() for name in COLUMN[3:5]},
        "self_attn.o_proj": RowwiseParallel(output_layouts=rows),
        "mlp.down_proj": RowwiseParallel(output_layouts=rows),
    }
    outside = {
        "model.layers.0": PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(rows,), use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=whole),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], inside)
    parallelize_module(model, mesh["tp"], outside)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return step_of(model)


COPIES = {"rules": rules("o/tp i", "o i/tp", "..."), "by hand": by_hand}
STORED = "o/tp/dp i -> o/tp i", "o/dp i/tp -> o i/tp", "o/dp ... -> o ..."
GATHERED = {"rules": rules(*STORED, gathers="model.layers.*"), "DTensor": dtensor}


def steps(layers: int, tokens: int, rounds: int) -> dict[str, Figures]:
    """On one of four gloo ranks, by way, for parameters that are copies and for gathered ones."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ids = torch.randint(
        0, SIZES["vocab_size"], (4, tokens), generator=torch.Generator().manual_seed(0)
    )
    own = ids.chunk(2)[dist.get_rank() // 2]
    figures: dict[str, Figures] = {}
    for kind, ways in (("copies", COPIES), ("gathered", GATHERED)):
        step_by_way: dict[str, Step] = {}
        for name, way in ways.items():
            torch.manual_seed(0)
            step_by_way[name] = way(
                LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES)), mesh
            )
        counts = {}
        losses = []
        for name, step in step_by_way.items():
            step(own)
            with Meter() as meter:
                losses.append(step(own))
            counts[name] = {
                "collectives": float(len(meter.received)),
                "bytes": float(sum(meter.received)),
            }
        assert all(torch.allclose(loss, losses[0], rtol=1e-4) for loss in losses), losses
        calls = {name: (lambda step=step: step(own)) for name, step in step_by_way.items()}
        times = by_turns.seconds(calls, rounds, before=dist.barrier)
        # On a busy machine the best of many says more than the median: nothing makes a step faster.
        figures[kind] = {name: counts[name] | {"step_s": min(times[name])} for name in step_by_way}
    return figures
