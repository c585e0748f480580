"""Train a transformer in torch whose attention is a JAX function, and compare every loss with torch alone.

    python examples/jax_layer_in_torch.py

1. torch on a single device;
2. torch on four processes, its attention a `jax.shard_map` over the same four (parity/with_both.py).

Same digits, same initial weights, same batches: so the losses must be the same, to rounding.
The exit status is 1 where they are not, or where a model has not learned to read.
"""

from __future__ import annotations

import argparse
import sys
from subprocess import CalledProcessError

from support.runs import follow_all
from train_parity import ACCURACY_FLOOR, judge

RUNS = {
    "torch, 1 device": ["parity.with_torch", "single"],
    "torch, attention in JAX": ["parity.with_both"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--any-accuracy", action="store_true", help="for few steps: compare the losses only")
    options = parser.parse_args()
    try:
        results = follow_all(RUNS, options.steps)
    except CalledProcessError as error:  # the run has said why
        print(error, file=sys.stderr)
        return 1
    return judge(results, accuracy_floor=0.0 if options.any_accuracy else ACCURACY_FLOOR)


if __name__ == "__main__":
    sys.exit(main())
