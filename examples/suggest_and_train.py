"""Suggest the layouts of a Llama, train by them on four processes, and compare what was predicted.

    python examples/suggest_and_train.py                  # --steps 3: a short run
    python examples/suggest_and_train.py --profile my.json  # as `xshard calibrate` wrote it on this machine

The model is recorded on the meta device, and the rules go to `parallelize` as they are. `verify` compares the
loss and all gradients with one device. Then a process measures the seconds of a step, and the bytes that it
holds where the forward pass ends: optimizer states, and parameters, also gathered, with saved activations.
The exit status is 1 if a gradient differs from one device, or if nothing was learned.
"""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from support.losses import verdict
from support.runs import options
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import torch_bridge as xt
from xshard import Layout, Mesh
from xshard.formatting import format_bytes, format_seconds

MESH = Mesh(dp=2, tp=2)
BATCH = 8
LENGTH = 128
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 256}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
STEPS = 20
RATE = 1e-3


class Measured(NamedTuple):
    """The losses of a process, the median seconds of its steps, and its bytes by kind."""

    losses: list[float]
    seconds: float
    memory: Mapping[str, int]


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)  # equal parameters on all processes
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def tokens() -> Tensor:
    """Rows of bytes of this file, each beginning at another place."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    return torch.stack([text[i * 97 :][:LENGTH] for i in range(BATCH)])


def train(rules: Mapping[str, Any], steps: int) -> Measured:
    """On every process: the model by its rules, `verify`, and a few steps of AdamW."""
    moves = {
        "outputs": rules["outputs"],
        "gathers": rules["gathers"],
        "keep": rules["once"],
        "prefetch": rules["prefetch"],
    }
    model = xt.parallelize(build(), rules["parameters"], rules["inputs"], MESH, **moves)
    batch = {"input_ids": tokens()}
    logits = Layout.parse(rules["result"])
    rows = Layout(logits.dims[:-1])

    def loss_of(result: Any) -> Tensor:
        text = f"{' '.join(rows.names)} -> {rows}"
        following = xt.redistribute(batch["input_ids"].roll(-1, 1), text, MESH)
        return xt.nn.cross_entropy(result.logits, following, logits, MESH, classes=logits.names[-1])

    xt.verify(model, batch, loss=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    seconds = []
    saved: dict[int, int] = {}
    stored = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.data_ptr() not in stored:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    for _ in range(steps):
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            saved.clear()
            loss = loss_of(model(**batch))
            losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    memory = {
        "optimizer state": sum(x.nbytes for own in optimizer.state.values() for x in own.values()),
        "parameters, activations": sum(p.nbytes for p in model.parameters()) + sum(saved.values()),
    }
    return Measured(losses, statistics.median(seconds), memory)


def main() -> int:
    parser = options(__doc__, steps=STEPS)
    parser.add_argument(
        "--profile", default="gloo", help="the machine: a shipped profile or a file"
    )
    chosen = parser.parse_args()
    how = {"profile": chosen.profile, "micro_batches": 1, "recompute": False, "batch_parts": 1}
    plan = xt.suggest(build(), {"input_ids": tokens()}, MESH, **how)
    print(plan)
    kept = ("once", "gathers", "prefetch", "result")
    rules: dict[str, Any] = {name: getattr(plan, name) for name in kept}
    rules |= {
        name: dict(getattr(plan, name).items()) for name in ("parameters", "inputs", "outputs")
    }
    four = xt.testing.run_ranks(4, train, rules, chosen.steps)
    memory = {
        **plan.memory,
        "parameters, activations": plan.memory["parameters"] + plan.memory["activations"],
    }
    return judge(plan.seconds, memory, four[0], Console())


def judge(seconds: float, memory: Mapping[str, int], run: Measured, console: Console) -> int:
    """Print what was measured beside what was predicted; 0 if something was learned."""
    table = Table(box=SIMPLE, pad_edge=False, title="A process in a step")
    for title in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(title, justify="right" if title else "left")
    table.add_row(
        "seconds", *map(format_seconds, (seconds, run.seconds)), f"{run.seconds / seconds:.2f}"
    )
    for kind, n in run.memory.items():
        table.add_row(kind, *map(format_bytes, (memory[kind], n)), f"{n / memory[kind]:.2f}")
    console.print(table)
    first = run.losses[0]
    last = run.losses[-1]
    complaints = [] if last < first else [f"The loss went from {first:.3f} to {last:.3f}."]
    good = f"All gradients are those of one device; the loss went from {first:.3f} to {last:.3f}."
    return verdict(console, complaints, good)


if __name__ == "__main__":
    raise SystemExit(main())
