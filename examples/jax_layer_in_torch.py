"""Train a transformer in torch, its attention a JAX function, and compare every loss with torch alone.

    python examples/jax_layer_in_torch.py

1. torch on a single device;
2. torch on four processes, its attention a `jax.shard_map` over the same four (parity/with_both.py).

All else is as in train_parity.py.
"""

import sys

from train_parity import main

RUNS = {
    "torch, 1 device": ["parity.with_torch", "single"],
    "torch, attention in JAX": ["parity.with_both"],
}

if __name__ == "__main__":
    sys.exit(main(RUNS, __doc__))
