"""Every sharding decision of the block, and the arrays it is compared on: torch and JAX read the same.

Two mesh axes. `tp` cuts heads and the width of the feed-forward; between those parts it cuts the
sequence, so that norms and residuals work on different tokens (sequence parallelism). `dp` cuts the batch.
"""

import numpy as np

MESHES = "dp=1,tp=4; dp=2,tp=2"
N_HEADS = 4
WIDTH = 16
BATCH = 2
TOKENS = 8

# b: batch, s: tokens, d: width, h: heads, e: width of a head, f: width of the feed-forward.
X = "b/dp s/tp d"
GATHER = (
    "b/dp s/tp d -> b/dp s d | copy(tp)"  # each device multiplies all tokens by columns of its own
)
SCATTER = "b/dp s d | sum(tp) -> b/dp s/tp d"  # and adds its share of a product of rows

WEIGHTS = {
    "norm1": "d",
    "qkv": "d c h/tp e",  # c: query, key, value
    "out": "h/tp e d",
    "norm2": "d",
    "up": "d f/tp",
    "up_bias": "f/tp",
    "down": "f/tp d",
    "down_bias": "d",
}
# Every device along `dp` uses a weight on tokens of its own, and along `tp` too if that does not cut the
# weight: each has a copy, and the copies' gradients add up.
TO_COPIES = {
    name: f"{cut} -> {cut} | copy({'dp' if 'tp' in cut else 'dp,tp'})"
    for name, cut in WEIGHTS.items()
}


def arrays(seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Weights by name, and tokens [batch, tokens, width]: whole arrays."""
    rng = np.random.default_rng(seed)
    e = WIDTH // N_HEADS
    f = 4 * WIDTH
    shapes = {
        "norm1": (WIDTH,),
        "qkv": (WIDTH, 3, N_HEADS, e),
        "out": (N_HEADS, e, WIDTH),
        "norm2": (WIDTH,),
        "up": (WIDTH, f),
        "up_bias": (f,),
        "down": (f, WIDTH),
        "down_bias": (WIDTH,),
    }
    weights = {
        name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()
    }
    return weights, rng.normal(size=(BATCH, TOKENS, WIDTH)).astype(np.float32)
