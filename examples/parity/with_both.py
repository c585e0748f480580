"""The classifier in torch on four processes, its attention in JAX on the same four.

    python -m parity.with_both STEPS

The model is from `with_torch`, the attention from `with_jax`; neither was written for the other. Blocks
pass from one to the other without a copy, and gradients pass back to torch's weights.
"""

import multiprocessing
import sys

import jax
from support.runs import report_first
from torch import Tensor

import torch_bridge as xt
from jax_bridge import torch_interop
from jax_bridge.torch_interop import from_jax
from parity import shardings, with_jax, with_torch

TOKENS = "b/dp s/sp d"
MATRIX = "i o"  # a global array in JAX: one value, and one gradient
# In torch every process has a copy, and the copies' gradients add up. The gradient from JAX is the sum
# already, so it must be counted once.
ONE_VALUE = "i o | copy(dp,sp) -> i o"


def train(steps: int) -> None:
    """Every process calls this."""
    torch_interop.initialize()
    mesh = jax.make_mesh(shardings.MESH.sizes, shardings.MESH.axes)
    cut = jax.P("dp", "sp")
    attention = jax.shard_map(
        with_jax.attention, mesh=mesh, in_specs=(cut, jax.P(), jax.P()), out_specs=cut
    )
    in_jax = from_jax(attention, (TOKENS, MATRIX, MATRIX), TOKENS, mesh)

    def attend(x: Tensor, w_qkv: Tensor, w_out: Tensor, move: with_torch.Move) -> Tensor:
        return in_jax(x, move(w_qkv, ONE_VALUE), move(w_out, ONE_VALUE))

    report_first(with_torch.sharded, steps, attend)


if __name__ == "__main__":
    # Forked from a server that has imported both frameworks and run nothing: importing them once is enough.
    multiprocessing.set_forkserver_preload(
        ["jax_bridge.torch_interop", "parity.with_torch", "torch._dynamo"]
    )
    xt.testing.run_ranks(
        shardings.MESH.n_devices, train, int(sys.argv[1]), start_method="forkserver"
    )
