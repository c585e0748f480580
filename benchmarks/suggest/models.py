"""Training steps of published models, by hand from their configs: Llama-3, Mixtral 8x7B, DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xshard import Layout, Op, TrainingStep
from xshard.notation.parser import parse_sides
from xshard.step.record.arrays import placements_of

NORM = "b s c, c -> b s c"
LLAMA = {
    "8B": {"c": 4096, "g": 8, "r": 4, "d": 128, "f": 14336, "v": 128256, "layers": 32},
    "70B": {"c": 8192, "g": 8, "r": 8, "d": 128, "f": 28672, "v": 128256, "layers": 80},
}
MIXTRAL = {"c": 4096, "g": 8, "r": 4, "d": 128, "m": 14336, "e": 8, "v": 32000}
DEEPSEEK = {
    "c": 7168,
    "i": 1536,
    "h": 128,
    "q": 192,
    "k": 128,
    "p": 64,
    "w": 128,
    "l": 512,
    "f": 18432,
}
DISPATCH = (
    "b/x s c, b/x s e -> e b/x n c",
    "b s/x c, b s/x e -> e b n/x c",
    "b s c/x, b s e | copy(x) -> e b n c/x",
    "b s c | copy(x), b s e | copy(x) -> e/x b n c",
)
COMBINE = (
    "e b/x n c, b/x s e -> b/x s c",
    "e b n/x c, b s/x e -> b s/x c",
    "e b n c/x, b s e | copy(x) -> b s c/x",
    "e/x b n c, b s e/x -> b s c | sum(x)",
)


class Model:
    """The operations and parameters of a step, added one after another; `times` is for those that follow."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.parameters: dict[str, str] = {}
        self.times = 1
        self.last = self.op(
            "model.embed_tokens", "b s, v c -> b s c", ("tokens",), "v c", kind="lookup"
        )

    def op(
        self, name: str, text: str, operands: Sequence[str], weight: str = "", **how: Any
    ) -> str:
        if weight:
            self.parameters[f"{name}.weight"] = weight
            operands = (*operands, f"{name}.weight")
        if "rules" in how:  # as texts over an axis x
            sides = [parse_sides(rule, "contraction")[:2] for rule in how["rules"]]
            how["rules"] = tuple(
                tuple(placements_of(Layout(*s), "x")[0] for s in (*a, *b)) for a, b in sides
            )
        self.ops.append(Op(name, text, tuple(operands), times=self.times, **how))
        return name

    def norm(self, name: str, x: str, dim: str = "c") -> str:
        text = NORM.replace("c", dim)
        return self.op(name, text, (x,), dim, kind="pointwise", whole=(dim,))

    def layers(self, name: str, times: int, attention: Part, mlp: Part) -> None:
        """Decoder layers with two residuals."""
        self.times = times
        how = {"kind": "carry", "again": f"{name}.add2", "enters": name}
        x = self.op(name, "b s c -> b s c", (self.last,), **how)
        attended = attention(self, f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        y = self.op(f"{name}.add1", "b s c, b s c -> b s c", (x, attended), kind="linear")
        z = mlp(self, f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", y))
        self.last = self.op(f"{name}.add2", "b s c, b s c -> b s c", (y, z), kind="linear")

    def step(self, batch: int, sequence: int, lengths: dict[str, int]) -> TrainingStep:
        """With the head and the loss."""
        self.times = 1
        x = self.norm("model.norm", self.last)
        logits = self.op("lm_head", "b s c, v c -> b s v", (x,), "v c")
        self.op("loss", "b s v ->", (logits,), kind="loss")
        lengths = {**lengths, "b": batch, "s": sequence, "t": sequence}
        return TrainingStep(self.ops, lengths, {"tokens": "b s"}, self.parameters)


Part = Callable[[Model, str, str], str]


def grouped_attention(model: Model, name: str, x: str) -> str:
    q = model.op(f"{name}.q_proj", "b s c, (g r d) c -> b s (g r d)", (x,), "(g r d) c", whole="d")
    k, v = (
        model.op(f"{name}.{each}_proj", "b s c, (g d) c -> b s (g d)", (x,), "(g d) c", whole="d")
        for each in "kv"
    )
    text = "b s (g r d), b t (g d), b t (g d) -> b s (g r d)"
    scores = model.op(f"{name}.attn", text, (q, k, v), kind="attention", whole=("d", "t"))
    return model.op(
        f"{name}.o_proj", "b s (g r d), c (g r d) -> b s c", (scores,), "c (g r d)", whole="d"
    )


def latent_attention(model: Model, name: str, x: str) -> str:
    q = model.norm(
        f"{name}.q_a_layernorm",
        model.op(f"{name}.q_a_proj", "b s c, i c -> b s i", (x,), "i c"),
        "i",
    )
    q = model.op(f"{name}.q_b_proj", "b s i, (h q) i -> b s (h q)", (q,), "(h q) i", whole="q")
    kv = model.norm(
        f"{name}.kv_a_layernorm",
        model.op(f"{name}.kv_a_proj", "b s c, l c -> b s l", (x,), "l c"),
        "l",
    )
    p = model.op(f"{name}.k_rope", "b s c, p c -> b s p", (x,), "p c")
    k, v = (
        model.op(
            f"{name}.{each}_b_proj",
            f"b s l, (h {d}) l -> b s (h {d})",
            (kv,),
            f"(h {d}) l",
            whole=d,
        )
        for each, d in (("k", "k"), ("v", "w"))
    )
    text = "b s (h q), b t (h k), b t p, b t (h w) -> b s (h w)"
    whole = ("q", "k", "p", "w", "t")
    each = {n: DEEPSEEK[n] for n in "qkpw"}  # operations are for q and w, once
    flops = (each["q"] + each["w"]) / (each["q"] * each["k"] * each["p"] * each["w"])
    y = model.op(f"{name}.attn", text, (q, k, p, v), kind="attention", whole=whole, flops=flops)
    return model.op(f"{name}.o_proj", "b s (h w), c (h w) -> b s c", (y,), "c (h w)", whole="w")


def dense_mlp(model: Model, name: str, x: str, f: str = "f") -> str:
    gate, up = (
        model.op(f"{name}.{each}_proj", f"b s c, {f} c -> b s {f}", (x,), f"{f} c")
        for each in ("gate", "up")
    )
    y = model.op(f"{name}.act", f"b s {f}, b s {f} -> b s {f}", (gate, up), kind="pointwise")
    return model.op(f"{name}.down_proj", f"b s {f}, c {f} -> b s c", (y,), f"c {f}")


def experts(model: Model, name: str, x: str) -> str:
    """Tokens to their experts in blocks of n, and back."""
    inner = f"{name}.experts"
    router = model.op(f"{name}.gate", "b s c, e c -> b s e", (x,), "e c")
    how: dict[str, Any] = {"kind": "linear", "rules": DISPATCH, "enters": inner}
    sent = model.op(f"{name}.dispatch", "b s c, b s e -> e b n c", (x, router), **how)
    gate, up = (
        model.op(f"{inner}.{each}_proj", "e b n c, e m c -> e b n m", (sent,), "e m c")
        for each in ("gate", "up")
    )
    y = model.op(f"{inner}.act", "e b n m, e b n m -> e b n m", (gate, up), kind="pointwise")
    y = model.op(f"{inner}.down_proj", "e b n m, e c m -> e b n c", (y,), "e c m")
    how = {"kind": "linear", "rules": COMBINE, "leaves": inner, "keeps": (0, 1)}
    return model.op(f"{name}.combine", "e b n c, b s e -> b s c", (y, router), **how)


def with_shared_expert(model: Model, name: str, x: str) -> str:
    both = experts(model, name, x), dense_mlp(model, f"{name}.shared_experts", x, "m")
    return model.op(f"{name}.sum", "b s c, b s c -> b s c", both, kind="linear")


def llama(which: str, batch: int, sequence: int, layers: int | None = None) -> TrainingStep:
    lengths = dict(LLAMA[which])
    times = lengths.pop("layers")
    model = Model()
    model.layers("model.layers.*", layers or times, grouped_attention, dense_mlp)
    return model.step(batch, sequence, lengths)


def mixtral(batch: int, sequence: int) -> TrainingStep:
    """8x7B: two of eight experts for each token."""
    model = Model()
    model.layers("model.layers.*", 32, grouped_attention, experts)
    return model.step(batch, sequence, {**MIXTRAL, "n": sequence * 2 // 8})


def deepseek(batch: int, sequence: int) -> TrainingStep:
    """V3: three dense layers, then eight of 256 experts for each token and one that is shared."""
    model = Model()
    model.layers("model.dense_layers.*", 3, latent_attention, dense_mlp)
    model.layers("model.layers.*", 58, latent_attention, with_shared_expert)
    return model.step(
        batch, sequence, {**DEEPSEEK, "m": 2048, "e": 256, "n": sequence * 8 // 256, "v": 129280}
    )
