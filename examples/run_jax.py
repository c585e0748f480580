"""A whole run in JAX: a small GPT learns a text, ZeRO-3 and tensor parallel; killed, it goes on on any mesh.

    python examples/run_jax.py run/                                  # one device
    python examples/run_jax.py run/ --mesh dp=2,tp=2 --steps 80      # goes on where that one ended, on four
    python examples/run_jax.py run/ --mesh dp=4,tp=1 --steps 120     # and on another mesh

Every step has the loss and the gradients of one device, whatever the mesh is. A checkpoint is written beside
the steps and has all that decides the next one: weights, moments, average of weights, and place in the text.
`examples/kill_and_resume.py --jax` kills this program at a random step, and compares.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jax_bridge as xj
from jax_bridge import nn
from xshard import Mesh, Rules
from xshard.state.files import latest

TEXT = Path(__file__).parents[1] / "LICENSE"
WIDTH = 64
HEADS = 4
BLOCKS = 2
LENGTH = 64  # of a window of text
VOCABULARY = 256  # bytes
BATCH = 8  # windows
KEPT = 2  # checkpoints
AVERAGE = optax.ema(0.9, debias=False)

Tree = dict[str, Any]

# How a weight is stored -> how a layer uses it. Heads, features of the feed-forward layer and scores are
# sharded over `tp`. All weights are stored in shards over `dp` too, and gathered for their block: ZeRO-3.
USES = {
    "token": "v c/dp -> v c | copy(dp)",
    "place": "s c/dp -> s c | copy(dp)",
    "norm1": "c/dp -> c | copy(dp)",
    "query": "h/tp k c/dp -> h/tp k c | copy(dp)",
    "key": "h/tp k c/dp -> h/tp k c | copy(dp)",
    "value": "h/tp k c/dp -> h/tp k c | copy(dp)",
    "out": "h/tp k c/dp -> h/tp k c | copy(dp)",
    "norm2": "c/dp -> c | copy(dp)",
    "up": "f/tp c/dp -> f/tp c | copy(dp)",
    "down": "f/tp c/dp -> f/tp c | copy(dp)",
    "norm": "c/dp -> c | copy(dp)",
    "head": "v/tp c/dp -> v/tp c | copy(dp)",
}
STORED = Rules(
    {
        "**.blocks.{query,key,value,out}": "n h/tp k c/dp",  # n: all blocks in one array
        "**.blocks.{up,down}": "n f/tp c/dp",
        "**.blocks.{norm1,norm2}": "n c/dp",
        "**.{token,place}": "v c/dp",
        "**.norm": "c/dp",
        "**.head": "v/tp c/dp",
        "**": "...",  # counters of optax; moments and average lie as the weights do
    }
)
TOKENS = "b/dp s"


def initial_weights() -> Tree:
    """Whole arrays of the host, float32."""
    draw = np.random.default_rng(0).normal

    def random(*shape: int) -> np.ndarray:
        return draw(scale=WIDTH**-0.5, size=shape).astype("float32")

    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, "float32")

    heads = (BLOCKS, HEADS, WIDTH // HEADS, WIDTH)
    blocks = {
        "norm1": ones(BLOCKS, WIDTH),
        **{name: random(*heads) for name in ("query", "key", "value", "out")},
        "norm2": ones(BLOCKS, WIDTH),
        "up": random(BLOCKS, 4 * WIDTH, WIDTH),
        "down": random(BLOCKS, 4 * WIDTH, WIDTH),
    }
    return {
        "token": random(VOCABULARY, WIDTH),
        "place": random(LENGTH, WIDTH),
        "blocks": blocks,
        "norm": ones(WIDTH),
        "head": random(VOCABULARY, WIDTH),
    }


# ---- the model, on the blocks of one device


def gathered(weights: Tree) -> Tree:
    """Weights as they are stored -> as they are used."""
    return {
        name: xj.redistribute(weight, USES[name])
        for name, weight in weights.items()
        if name in USES
    }


def normalized(x: Array, scale: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def attention(w: Tree, x: Array) -> Array:
    """[batch, length, width], causal; how many heads there are here follows from the weights."""
    q, k, v = (jnp.einsum("bsc,hkc->bshk", x, w[name]) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("bshk,hkc->bsc", mixed, w["out"])


def feed_forward(w: Tree, x: Array) -> Array:
    return jax.nn.gelu(x @ w["up"].T) @ w["down"]


@jax.checkpoint
def block(x: Array, weights: Tree) -> tuple[Array, None]:
    """A step of a scan. For its gradients, weights are gathered and activations computed again."""
    w = gathered(weights)
    for scale, layer in (("norm1", attention), ("norm2", feed_forward)):
        own = xj.redistribute(normalized(x, w[scale]), "b/dp s c -> b/dp s c | copy(tp)")
        x = x + xj.redistribute(layer(w, own), "b/dp s c | sum(tp) -> b/dp s c")
    return x, None


def loss_of_blocks(weights: Tree, tokens: Array, following: Array) -> Array:
    """The mean over the whole batch. Scores stay sharded: three numbers per byte are exchanged."""
    w = gathered(weights)
    x = w["token"][tokens] + w["place"][: tokens.shape[1]]
    x, _ = jax.lax.scan(block, x, weights["blocks"])
    x = xj.redistribute(normalized(x, w["norm"]), "b/dp s c -> b/dp s c | copy(tp)")
    scores = x @ w["head"].T
    return nn.cross_entropy(scores.astype("float32"), following, "b/dp s v/tp")


# ---- the run


class Loader:
    """Windows of the text in a random order, anew in each epoch; each device gets its part of every batch."""

    def __init__(self, mesh: jax.sharding.Mesh, batches_read: int = 0) -> None:
        self.mesh = mesh
        self.text = np.frombuffer(TEXT.read_bytes(), np.uint8).astype("int32")
        self.batches_read = batches_read

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        starts = np.arange(0, len(self.text) - LENGTH, LENGTH)
        while True:
            epoch, batch = divmod(self.batches_read, len(starts) // BATCH)
            order = np.random.default_rng(epoch).permutation(starts)
            chosen = order[batch * BATCH : (batch + 1) * BATCH]
            windows = self.text[chosen[:, None] + np.arange(LENGTH + 1)]
            self.batches_read += 1
            yield xj.place((windows[:, :-1], windows[:, 1:]), TOKENS, self.mesh)


class Run:
    """The state, as the tree that is saved, and the step that changes it."""

    def __init__(self, mesh: jax.sharding.Mesh, steps: int, *, in_bfloat16: bool) -> None:
        self.mesh = mesh
        self.in_bfloat16 = in_bfloat16
        self.loss_on_mesh = xj.shard_map(loss_of_blocks, ((STORED, TOKENS, TOKENS), "()"), mesh)
        rate = optax.cosine_onecycle_schedule(steps, 3e-3)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
        weights = initial_weights()
        state = {
            "weights": weights,
            "optimizer": self.optimizer.init(weights),
            "average": AVERAGE.init(weights),
        }
        self.state = xj.place(state, STORED, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, self.state)  # which stay as they are
        self.step = jax.jit(self.step_of, donate_argnums=0, out_shardings=(shardings, None))

    def loss_of(self, weights: Tree, batch: tuple[Array, Array]) -> Array:
        if self.in_bfloat16:
            weights = jax.tree.map(lambda w: w.astype("bfloat16"), weights)  # and gathered so
        return self.loss_on_mesh(weights, *batch)

    def step_of(self, state: Tree, batch: tuple[Array, Array]) -> tuple[Tree, Array]:
        weights = state["weights"]
        loss, gradients = jax.value_and_grad(self.loss_of)(weights, batch)
        updates, moments = self.optimizer.update(gradients, state["optimizer"], weights)
        weights = optax.apply_updates(weights, updates)
        _, average = AVERAGE.update(weights, state["average"])
        return {"weights": weights, "optimizer": moments, "average": average}, loss


def train(chosen: Namespace) -> None:
    axes = Mesh.parse(chosen.mesh)
    types = (jax.sharding.AxisType.Auto,) * len(axes.axes)
    mesh = jax.make_mesh(axes.sizes, axes.axes, axis_types=types)
    run = Run(mesh, chosen.steps, in_bfloat16=chosen.bfloat16)
    step_number = 0
    if checkpoint := latest(chosen.folder):
        saved = xj.load(checkpoint, STORED, mesh, like={"state": run.state, "step": 0})
        run.state = saved["state"]
        step_number = saved["step"]
    saving = None
    batches = iter(Loader(mesh, step_number))  # one for each step
    while step_number < chosen.steps:
        run.state, loss = run.step(run.state, next(batches))
        step_number += 1
        print(json.dumps({"step": step_number, "loss": float(loss)}), flush=True)
        if step_number % chosen.save_every == 0 or step_number == chosen.steps:
            if saving is not None:
                saving.wait()
            tree = {"state": run.state, "step": step_number}
            saving = xj.async_save(tree, chosen.folder / f"step_{step_number}", keep=KEPT)
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
    parser.add_argument("--bfloat16", action="store_true", help="weights and products in bfloat16")
    parser.add_argument(
        "--programs", help="a folder that keeps compiled programs for the next start"
    )
    return parser.parse_args()


if __name__ == "__main__":
    chosen = options()
    jax.config.update("jax_platforms", "cpu")  # these two are for a computer without accelerators
    jax.config.update("jax_num_cpu_devices", Mesh.parse(chosen.mesh).n_devices)
    jax.config.update("jax_compilation_cache_dir", chosen.programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    train(chosen)
