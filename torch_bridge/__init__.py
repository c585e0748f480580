"""torch_bridge: torch carries out the plans of xshard, forward and backward."""

from typing import TYPE_CHECKING, Any

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.between import redistribute_between
from torch_bridge.contractions.einsum import einsum
from torch_bridge.dtensor.placements import from_placements, to_placements
from torch_bridge.dtensor.redistribution import redistribute_dtensor
from torch_bridge.many import redistribute_many
from torch_bridge.mesh.desync import DesyncError
from torch_bridge.mesh.failures import CollectiveError
from torch_bridge.models.explain import explain
from torch_bridge.models.parallel import check_replicas, clip_grad_norm_, grad_norm, no_sync
from torch_bridge.models.parallelize import parallelize
from torch_bridge.models.state import load_state_dict, state_dict
from torch_bridge.models.verify import verify
from torch_bridge.nn.halo import HaloExchange
from torch_bridge.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    halo_exchange,
    reduce_from,
    reduce_scatter,
    slice,
    trim_halo,
)
from torch_bridge.positions import positions
from torch_bridge.redistribution import redistribute
from torch_bridge.state.files import load, save
from torch_bridge.state.live import LostVersionError, Publisher, Subscriber
from torch_bridge.state.transfer import transfer
from torch_bridge.testing.launch import RankError, run_ranks

if TYPE_CHECKING:
    from jax_bridge.torch_interop import from_jax

__all__ = [
    "CollectiveError",
    "DesyncError",
    "HaloExchange",
    "LostVersionError",
    "PendingTensor",
    "Publisher",
    "RankError",
    "Subscriber",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "check_replicas",
    "clip_grad_norm_",
    "copy_to",
    "einsum",
    "explain",
    "from_jax",
    "from_placements",
    "grad_norm",
    "halo_exchange",
    "load",
    "load_state_dict",
    "nn",
    "no_sync",
    "parallelize",
    "positions",
    "redistribute",
    "redistribute_between",
    "redistribute_dtensor",
    "redistribute_many",
    "reduce_from",
    "reduce_scatter",
    "run_ranks",
    "save",
    "slice",
    "state_dict",
    "to_placements",
    "transfer",
    "trim_halo",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "from_jax":  # which needs JAX: it is imported when it is asked for
        from jax_bridge.torch_interop import from_jax

        return from_jax
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
