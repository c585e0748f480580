"""Training steps of a small Llama, parallel by rules, on ranks that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
from xshard import Mesh

RANKS = 4
WIDTH = 1024
HEAD_WIDTH = 128
BATCH = 2
SEQUENCE = 4096
DTYPE = torch.bfloat16
PROFILE = "h100"  # of the machine to plan for: on CPUs sums are scattered by exchanges

Program = tuple[nn.Module, Tensor]  # with this process's block of its input


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            linear(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def zero3(layers: int) -> Program:
    """Each layer gathers its parameters when it is called."""
    model = xt.parallelize(
        Llama(layers).to(DTYPE),
        {"**": "o/dp ... -> o ..."},
        {"": "b/dp s c"},
        Mesh(dp=RANKS),
        gathers="layers.*",
        profile=PROFILE,
    )
    return model, torch.zeros(BATCH, SEQUENCE, WIDTH, dtype=DTYPE)


def tensor_parallel(layers: int) -> Program:
    """Tensor and sequence parallel: activations are gathered before a module, and scattered after it."""
    model = xt.parallelize(
        Llama(layers).to(DTYPE),
        {"**.{q,k,v,gate,up}.weight": "o/tp i", "**.{o,down}.weight": "o i/tp", "**": "..."},
        {"": "b s/tp c", "**.{attention,mlp}": "b s/tp c -> b s c | copy(tp)"},
        Mesh(tp=RANKS),
        outputs={"**.{attention,mlp}": "b s c | sum(tp) -> b s/tp c"},
        profile=PROFILE,
    )
    return model, torch.zeros(BATCH, SEQUENCE // RANKS, WIDTH, dtype=DTYPE, requires_grad=True)


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "ZeRO-3": zero3,
    "tensor and sequence parallel": tensor_parallel,
}


class _Echo(dist.Store):
    """A store in which all ranks have said what this one says, so that it need not wait for them."""

    said = b""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return expected

    def set(self, key: str, value: Any) -> None:
        self.said = value

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        pass

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.said] * len(keys)


@contextmanager
def lonely_world() -> Iterator[None]:
    """A world of ranks of which only this one exists: nothing is sent."""
    store = _Echo()  # kept: torch has no reference to what is written in Python
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        del store
