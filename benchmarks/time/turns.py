"""A step of a batch in halves beside one of the whole batch, by turns."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
from benchmarks import by_turns
from benchmarks.time.measures import VOCABULARY, Step, llama
from torch_bridge.lower.collectives import Collective
from xshard import Mesh

WHOLE, HALVES, ALONE = "whole batch", "in halves", "computing alone"
SMALL = 4096  # bytes: numbers that decide how much travels


def sequence_parallel(layers: int, hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return xt.parallelize(
        llama(layers, hidden),
        {
            "**.{q,k,v,gate,up}_proj.weight": "o/tp i",
            "**.{o,down}_proj.weight": "o i/tp",
            "**": "...",
        },
        {
            "": "b s",
            "model.layers.0": "b s c -> b s/tp c",
            "model.layers.*|model.norm": "b s/tp c",
            "**.{self_attn,mlp}": "b s/tp c -> b s c | copy(tp)",
        },
        Mesh(tp=dist.get_world_size()),
        outputs={
            "**.{self_attn,mlp}": "b s c | sum(tp) -> b s/tp c",
            "model.norm": "b s/tp c -> b s c",
        },
    )


def experts(layers: int, hidden: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
        experts_implementation="eager",
    )
    return xt.parallelize(
        Qwen3MoeForCausalLM(config),
        {"**.experts.*": "e/ep ...", "**": "..."},
        {"": "b/ep s", "**.experts": "t/ep c -> t/to(ep) c"},
        Mesh(ep=dist.get_world_size()),
    )


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "tensor + sequence parallel": sequence_parallel,
    "experts": experts,
}


@contextlib.contextmanager
def links_cut() -> Iterator[None]:
    """Nothing large travels: zeros arrive at once."""
    run = Collective.run
    begin = Collective.begin

    def run_cut(self: Any, messages: Tensor, shape: Any) -> Tensor:
        return run(self, messages, shape) if messages.nbytes <= SMALL else messages.new_zeros(shape)

    def begin_cut(self: Any, messages: Tensor, shape: Any) -> Any:
        if messages.nbytes <= SMALL:
            return begin(self, messages, shape)
        return lambda: messages.new_zeros(shape)

    with mock.patch.multiple(Collective, run=run_cut, begin=begin_cut):
        yield


def turns(
    kind: str, layers: int, hidden: int, rows: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Median seconds of a step in each way, of the slowest rank, and the median of each turn's ratio."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank() if kind == "experts" else 0)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)
    whole = KINDS[kind](layers, hidden)
    in_halves = xt.halves(KINDS[kind](layers, hidden), module="model", dims={"input_ids": 0})

    def step_of(model: nn.Module) -> Step:
        def step() -> None:
            # Sums of gradients, which travel beside computing in any case, are of another pass.
            with xt.no_sync(model):
                logits = model(ids).logits[:, :-1]
                nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            for x in model.parameters():
                x.grad = None

        return step

    def alone() -> None:
        with links_cut():
            step_of(whole)()

    steps = {WHOLE: step_of(whole), HALVES: step_of(in_halves), ALONE: alone}
    times = by_turns.slowest(steps, rounds, warm_up=2)
    return {
        "kind": kind,
        "seconds": {way: statistics.median(seconds) for way, seconds in times.items()},
        "ratio": by_turns.ratio(times, HALVES, WHOLE),
        "moving": by_turns.ratio(times, WHOLE, ALONE) - 1,
    }
