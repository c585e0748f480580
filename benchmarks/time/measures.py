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
SIDE, PATCH = 256, 16  # of images, in pixels
ROWS = 4  # of a batch, on each rank
Step = Callable[[], Any]


def llama(layers: int, hidden: int, vocabulary: int = VOCABULARY) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
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


def vit(layers: int, hidden: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            num_labels=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 4,
            num_hidden_layers=layers,
            num_attention_heads=8,
            image_size=SIDE,
            patch_size=PATCH,
        )
    )


def mixtral(layers: int, hidden: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 2,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=2,
            num_experts_per_tok=2,
            use_cache=False,
            experts_implementation="eager",
        )
    )


# For each a function of layers and width, where its layers are, and how its batch is cut.
MODELS: dict[str, tuple[Callable[[int, int], nn.Module], str, str]] = {
    "llama": (llama, "model.layers", "b/dp s"),
    "gpt2": (gpt2, "transformer.h", "b/dp s"),
    "vit": (vit, "vit.layers", "b/dp c h w"),
    "mixtral": (mixtral, "model.layers", "b/dp s"),
}


def made(name: str, layers: int, hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0](layers, hidden)


def batch_of(name: str, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a model's input and of its labels."""
    generator = torch.Generator().manual_seed(0)
    n = dist.get_world_size()
    shape = (rows * n,) if name == "vit" else (rows * n, tokens)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    x = torch.randn(rows * n, 3, SIDE, SIDE, generator=generator) if name == "vit" else labels
    rank = dist.get_rank()
    return x.chunk(n)[rank], labels.chunk(n)[rank]


def step_of(model: nn.Module, x: Tensor, labels: Tensor) -> Step:
    def step() -> float:
        logits = model(x).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.item()

    return step


def parallel(name: str, layers: int, hidden: int, prefetch: int) -> nn.Module:
    n = dist.get_world_size()
    model = made(name, layers, hidden)
    return xt.parallelize(
        model,
        {"**": "o/dp ... -> o ..."},
        {"": MODELS[name][2]},
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
    batch = batch_of(name, ROWS, tokens)
    ours = parallel(name, layers, hidden, 1)
    steps = {
        OURS: step_of(ours, *batch),
        WAITING: step_of(parallel(name, layers, hidden, 0), *batch),
        FSDP2: step_of(fsdp2(name, layers, hidden), *batch),
        ALONE: step_of(made(name, layers, hidden), *batch),
    }
    times = by_turns.slowest(steps, rounds, warm_up=2)
    seconds = {way: statistics.median(turns) for way, turns in times.items()}
    move = LayerMove(ours)
    gather_s = move.seconds()
    exposed = move.exposed_share(gather_s)
    return {
        "model": name,
        "seconds": seconds,
        "faster": by_turns.ratio(times, FSDP2, OURS),
        "exposed": exposed,
        "bound_s": bound(ours, seconds[ALONE], gather_s),
        "bound_of_cores_s": bound(ours, seconds[ALONE], gather_s, exposed),
        # Of all moves of a step, one after the other: two gathers and a scatter a layer.
        "moving_s": 3 * len(layers_of(ours)) * gather_s,
    }


def layers_of(model: nn.Module) -> list[str]:
    """The layers that gather their parameters, by name."""
    return [name for name in parallel_of(model).hooks if name]


class LayerMove:
    """The gather of one layer's parameters, outside of a step."""

    def __init__(self, model: nn.Module) -> None:
        module = parallel_of(model).hooks[layers_of(model)[0]].parameters
        self.moves = module._moves
        self.parameters = module.parameters
        self.blocks = [parameter.parameter.tensor for parameter in self.parameters]

    def _median_of(self, function: Callable[[], Any]) -> float:
        """The median seconds of a call that all ranks begin together, of the slowest rank."""
        taken = []
        with torch.no_grad():
            for _ in range(7):
                dist.barrier()
                start = time.perf_counter()
                function()
                taken.append(time.perf_counter() - start)
        seconds = torch.tensor(statistics.median(taken), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def seconds(self) -> float:
        """The seconds of the gather alone."""
        return self._median_of(lambda: self.moves.gather(self.parameters, self.blocks))

    def exposed_share(self, gather_s: float) -> float:
        """The share of its seconds that it takes from products beside it, as ranks send with their cores."""
        x = torch.ones(512, 512)
        product_s = self._median_of(lambda: x @ x)
        n_products = max(1, round(gather_s / product_s))

        def compute() -> None:
            for _ in range(n_products):
                x @ x

        def do_both() -> None:
            begun = self.moves.begin_gather(self.parameters, self.blocks)
            compute()
            begun.wait(self.parameters, self.blocks)

        computing_s = self._median_of(compute)
        both_s = self._median_of(do_both)
        hidden_s = gather_s + computing_s - both_s
        return min(1.0, max(0.0, 1 - hidden_s / min(gather_s, computing_s)))


def bound(model: nn.Module, computing_s: float, gather_s: float, exposed: float = 0.0) -> float:
    """The seconds that the schedule takes by simulation, without what the model itself gathers.

    exposed: the share of what travels beside a module that is taken from its computing.
    """
    names = layers_of(model)
    n_layers = len(names)
    one = computing_s / n_layers / 3
    # How many moves travel beside a layer: the next gather, and in the backward pass gradients too.
    beside = [1] * (n_layers - 1) + [0]
    beside_backward = [1] + [2] * (n_layers - 2) + [1]
    forward = []
    for name, n_moves in zip(names, beside, strict=True):
        move = Start(name, 1, seconds=gather_s)
        forward.append(Turn(name, one + exposed * n_moves * gather_s, parameters=move))
    backward = []
    for turn, n_moves in zip(reversed(forward), beside_backward, strict=True):
        gradients = Start(f"{turn.name}'", 1, seconds=gather_s)
        seconds = 2 * one + exposed * n_moves * gather_s
        backward.append(turn._replace(seconds=seconds, gradients=gradients))
    return training_step(forward, backward, 1).timeline().seconds
