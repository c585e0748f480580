"""Every sharding decision of the example: torch and JAX read the same strings.

Two mesh axes: `dp` cuts the batch, `sp` cuts the sequence. A weight is stored in parts, and gathered
where it is used. One question decides its tag: over which axes is the work split that uses it?

- Over `dp` and `sp`, for every weight that acts on tokens: each device uses a copy of its own, and
  the copies' gradients add up. That is `copy(dp,sp)`, and the gradient is a reduce-scatter.
- Over `dp` only, for the classifier, which comes after the mean over the sequence: its tag is
  `copy(dp)`. Along `sp` the devices repeat the same work and get the same gradient; adding it
  up would count it twice. An axis that is not named holds one logical value.

So no gradient is reduced or scaled by hand, and training matches that on a single device.
"""

from xshard import Layout, Mesh
from xshard.layout.layout import parse_expression

MESH = Mesh(dp=2, sp=2)

# Inputs, as each device gets them. b: batch, s: sequence of patches, p: pixels of a patch.
IMAGES = "b/dp s/sp p"
LABELS = "b/dp"

# Weights: as stored -> as used. i, o: in and out, d: model width.
TOKEN_WEIGHT = "i/(dp,sp) o -> i o | copy(dp,sp)"
TOKEN_SCALE = "d/(dp,sp) -> d | copy(dp,sp)"
POSITIONS = "s/sp d/dp -> s/sp d | copy(dp)"  # cut over `sp` as the tokens are: no copies along it
CLASSIFIER = "d/dp k -> d k | copy(dp)"

# Activations. h: heads, e: width of a head, k: classes.
TOKENS_TO_HEADS = "qkv b/dp s/sp h e -> qkv b/dp s h/sp e"  # the whole sequence, some of the heads
HEADS_TO_TOKENS = "b/dp s h/sp e -> b/dp s/sp h e"
POOL = "b/dp d | mean(sp) -> b/dp d"
LOSS = "() | mean(dp) -> ()"
GATHER_LOGITS = "b/dp k -> b k"

WEIGHTS = {
    "embed": TOKEN_WEIGHT,
    "positions": POSITIONS,
    "norm1": TOKEN_SCALE,
    "qkv": TOKEN_WEIGHT,
    "out": TOKEN_WEIGHT,
    "norm2": TOKEN_SCALE,
    "up": TOKEN_WEIGHT,
    "down": TOKEN_WEIGHT,
    "norm": TOKEN_SCALE,
    "classifier": CLASSIFIER,
}


def weight_expression(name: str) -> str:
    """The expression of a weight: `"0.qkv"`, in layer 0, has the same as `"qkv"`."""
    return WEIGHTS[name.rpartition(".")[2]]


def stored(name: str) -> Layout:
    """The layout in which a weight and its momentum are stored; its gradient arrives in it."""
    return parse_expression(weight_expression(name))[0]
