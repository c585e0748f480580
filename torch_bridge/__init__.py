"""torch_bridge: torch carries out the plans of xshard, forward and backward.

Rooms beside the names below, imported when they are first used:
`ops` collectives by their usual names; `nn` layers on sharded tensors; `dtensor` layouts and placements;
`live` weights that follow a running trainer; `testing` ranks on one machine; `errors` of torch programs;
`compat` functions of other systems, a module per system.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.between import redistribute_between
from torch_bridge.contractions.einsum import einsum
from torch_bridge.dtensor.redistribution import redistribute_dtensor
from torch_bridge.many import redistribute_many
from torch_bridge.models.explain import explain
from torch_bridge.models.parallel import check_replicas, clip_grad_norm_, grad_norm, no_sync
from torch_bridge.models.parallelize import parallelize
from torch_bridge.models.state import load_state_dict, state_dict
from torch_bridge.models.verify import verify
from torch_bridge.positions import positions
from torch_bridge.redistribution import redistribute
from torch_bridge.state.files import load, save
from torch_bridge.state.transfer import transfer

if TYPE_CHECKING:
    from torch_bridge import compat, dtensor, errors, live, nn, ops, testing  # noqa: F401

__all__ = [
    "PendingTensor",
    "check_replicas",
    "clip_grad_norm_",
    "einsum",
    "explain",
    "grad_norm",
    "load",
    "load_state_dict",
    "no_sync",
    "parallelize",
    "positions",
    "redistribute",
    "redistribute_between",
    "redistribute_dtensor",
    "redistribute_many",
    "save",
    "state_dict",
    "transfer",
    "verify",
]

ROOMS = ("compat", "dtensor", "errors", "live", "nn", "ops", "testing")


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return import_module(f"torch_bridge.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
