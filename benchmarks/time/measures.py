"""A step of ZeRO-3 in four ways, by turns: prefetched, not, FSDP2's, and computing alone."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
from benchmarks import by_turns
from torch_bridge.models.parallel import parallel_of
from xshard import Mesh
from xshard.schedule import Start, Turn, training_step

OURS, WAITING, FSDP2, ALONE = "prefetched", "not prefetched", "FSDP2", "computing alone"
VOCABULARY = 512
Step = Callable[[], Any]


def llama(layers: int, hidden: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def gpt2(layers: int, hidden: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=hidden,
            n_layer=layers,
            n_head=8,
            use_cache=False,
            **dropout,
        )
    )


# For each a function of layers and width, and where its layers are.
MODELS: dict[str, tuple[Callable[[int, int], nn.Module], str]] = {
    "llama": (llama, "model.layers"),
    "gpt2": (gpt2, "transformer.h"),
}


def made(name: str, layers: int, hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0](layers, hidden)


def step_of(model: nn.Module, ids: Tensor) -> Step:
    def step() -> float:
        logits = model(ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for x in model.parameters():
            x.grad = None
        return loss.item()

    return step


def parallel(name: str, layers: int, hidden: int, prefetch: int) -> nn.Module:
    n = dist.get_world_size()
    model = made(name, layers, hidden)
    return xt.parallelize(
        model,
        {"**": "o/dp ... -> o ..."},
        {"": "b/dp s"},
        Mesh(dp=n),
        gathers=f"{MODELS[name][1]}.*",
        prefetch=prefetch,
    )


def fsdp2(name: str, layers: int, hidden: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = made(name, layers, hidden)
    for layer in model.get_submodule(MODELS[name][1]).children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def zero3(name: str, layers: int, hidden: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Median seconds of a step in every way, of the slowest rank, and those of moving alone."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    n = dist.get_world_size()
    ids = torch.randint(0, VOCABULARY, (4 * n, tokens), generator=generator)
    ids = ids.chunk(n)[dist.get_rank()]
    ours = parallel(name, layers, hidden, 1)
    steps = {
        OURS: step_of(ours, ids),
        WAITING: step_of(parallel(name, layers, hidden, 0), ids),
        FSDP2: step_of(fsdp2(name, layers, hidden), ids),
        ALONE: step_of(made(name, layers, hidden), ids),
    }
    times = by_turns.slowest(steps, rounds, warm_up=2)
    seconds = {way: statistics.median(turns) for way, turns in times.items()}
    return {
        "model": name,
        "seconds": seconds,
        "faster": by_turns.ratio(times, FSDP2, OURS),
        "bound_s": bound(ours, seconds[ALONE]),
        "moving_s": moving(ours),
    }


def layer_seconds(model: nn.Module) -> float:
    """The seconds in which one layer's parameters are gathered, alone."""
    parallel = parallel_of(model)
    hooks = next(hooks for name, hooks in parallel.hooks.items() if name)
    own = hooks.parameters.parameters
    blocks = [parameter.parameter.tensor for parameter in own]
    taken = []
    with torch.no_grad():
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            hooks.parameters._moves.gather(own, blocks)
            taken.append(time.perf_counter() - start)
    seconds = torch.tensor(statistics.median(taken), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def moving(model: nn.Module) -> float:
    """The seconds of all moves of a step, one after the other: two gathers and a scatter a layer."""
    n_layers = len(parallel_of(model).hooks) - 1
    return 3 * n_layers * layer_seconds(model)


def bound(model: nn.Module, computing_s: float) -> float:
    """The seconds that the schedule takes by simulation, without what the model itself gathers."""
    names = [name for name in parallel_of(model).hooks if name]
    one = computing_s / len(names) / 3
    seconds = layer_seconds(model)
    moves = [Start(name, 1, seconds=seconds) for name in names]
    forward = [Turn(name, one, parameters=move) for name, move in zip(names, moves, strict=True)]
    backward = [
        turn._replace(seconds=2 * one, gradients=Start(f"{turn.name}'", 1, seconds=seconds))
        for turn in reversed(forward)
    ]
    return training_step(forward, backward, 1).timeline().seconds
