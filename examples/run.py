"""A whole run: a small GPT learns a text, ZeRO-3 and tensor parallel; killed, it goes on on any mesh.

    python examples/run.py run/                       # one process
    torchrun --nproc-per-node 4 examples/run.py run/ --mesh dp=2,tp=2 --steps 80     # goes on, on four
    torchrun --nproc-per-node 4 examples/run.py run/ --mesh dp=4,tp=1 --steps 120    # and on another mesh

Every step has the loss and the gradients of one device, whatever the mesh is. A checkpoint is written beside
the steps and has all that decides the next one: model, optimizer, schedule, average of weights, and place in
the text. `examples/kill_and_resume.py` kills this program at a random step, and compares.
"""

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import torch_bridge as xt
from xshard import Mesh
from xshard.state.files import latest

TEXT = Path(__file__).parents[1] / "LICENSE"
WIDTH = 64
HEADS = 4
BLOCKS = 2
LENGTH = 64  # of a window of text
VOCABULARY = 256  # bytes
BATCH = 8  # windows, of all processes together
KEPT = 2  # checkpoints
# What is stored, and the loss, stay in float32. Modules inside the model are as the model is.
IN_BFLOAT16 = {
    "": xt.Precision(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
}


class Attention(nn.Module):
    """Causal attention of heads; how many there are here follows from the weights, which may be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes [batch, length] -> scores of the next byte [batch, length, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


# Heads, features of the feed-forward layer and scores are sharded over `tp`. All weights are stored in shards
# over `dp` too, and gathered over it for their layer alone, in the backward pass once more: ZeRO-3.
RULES = {
    "parameters": {
        "blocks.*.attention.{query,key,value}.*|blocks.*.mlp.0.*|head.weight": "o/tp/dp ... -> o/tp ...",
        "blocks.*.attention.out.weight|blocks.*.mlp.2.weight": "o/dp i/tp -> o i/tp",
        "**": "n/dp ... -> n ...",
    },
    "inputs": {
        "": "b/dp s",  # as the loader brings it
        "blocks.*": "b/dp s c",
        "blocks.*.{attention,mlp}|head": "b/dp s c -> b/dp s c | copy(tp)",
    },
    "outputs": {"blocks.*.{attention,mlp}": "b/dp s c | sum(tp) -> b/dp s c"},
}


class Loader:
    """Windows of the text in a random order, anew in each epoch; each process gets its part of every batch.

    All processes draw whole batches from one seed, so the place in the text means the same on any mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        self.batches_read = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        starts = torch.arange(0, len(self.text) - LENGTH, LENGTH)
        while True:
            epoch, batch = divmod(self.batches_read, len(starts) // BATCH)
            generator = torch.Generator().manual_seed(epoch)
            order = starts[torch.randperm(len(starts), generator=generator)]
            chosen = order[batch * BATCH : (batch + 1) * BATCH]
            own = xt.redistribute(chosen, "b -> b/dp", self.mesh)
            windows = self.text[own[:, None] + torch.arange(LENGTH + 1)]
            self.batches_read += 1
            yield windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"batches_read": self.batches_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches_read = state["batches_read"]


class Run:
    """All that a step changes, as the tree that is saved."""

    def __init__(self, mesh: Mesh, steps: int, precision: dict[str, xt.Precision] | None) -> None:
        torch.manual_seed(0)  # equal weights on all processes
        self.mesh = mesh
        self.model = xt.parallelize(GPT(), mesh=mesh, precision=precision, **RULES)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, steps)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.loader = Loader(mesh)
        self.step_number = 0

    def tree(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "average": self.average,
            "loader": self.loader,
            "step": self.step_number,
        }

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean over the whole batch. Scores stay sharded: three numbers per byte are exchanged."""
        tokens, following = batch
        return xt.nn.cross_entropy(model(tokens), following, "b/dp s v/tp", self.mesh)

    def verify(self) -> None:
        """Compare the loss and all gradients of the first step with those of one device."""
        tokens, following = next(iter(Loader(self.mesh)))
        whole = xt.redistribute(following, "b/dp s -> b s", self.mesh)

        def loss_of(scores: Tensor) -> Tensor:
            own = xt.redistribute(whole, "b s -> b/dp s", self.mesh)  # on one device: all of them
            return xt.nn.cross_entropy(scores, own, "b/dp s v/tp", self.mesh)

        xt.verify(self.model, tokens, loss=loss_of)

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        loss = self.loss_of(self.model, batch)
        loss.backward()
        xt.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.average.update_parameters(self.model)
        self.step_number += 1
        return loss.item()


def train(chosen: Namespace) -> None:
    precision = IN_BFLOAT16 if chosen.bfloat16 else None
    run = Run(Mesh.parse(chosen.mesh), chosen.steps, precision)
    if checkpoint_path := latest(chosen.folder):
        run.step_number = xt.load(checkpoint_path, like=run.tree())["step"]
    if chosen.verify:
        run.verify()
    saving = None
    batches = iter(run.loader)
    while run.step_number < chosen.steps:
        loss = run.step(next(batches))
        if dist.get_rank() == 0:  # it is the same on all
            print(json.dumps({"step": run.step_number, "loss": loss}), flush=True)
        if run.step_number % chosen.save_every == 0 or run.step_number == chosen.steps:
            if saving is not None:
                saving.wait()
            path = chosen.folder / f"step_{run.step_number}"
            saving = xt.async_save(run.tree(), path, keep=KEPT)  # copied: steps go on
    if saving is not None:
        saving.wait()


def options() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "folder", type=Path, help="of the checkpoints; a run goes on from the newest"
    )
    parser.add_argument("--mesh", default="dp=1,tp=1")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument(
        "--verify", action="store_true", help="compare a step with one device's first"
    )
    parser.add_argument(
        "--bfloat16", action="store_true", help="weights are gathered and used in bfloat16"
    )
    return parser.parse_args()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(options())
    dist.barrier()  # nobody leaves while another needs it
    dist.destroy_process_group()
