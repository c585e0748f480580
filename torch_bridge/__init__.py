"""torch_bridge: torch carries out the plans of xshard, forward and backward.

Rooms beside the names below, imported when they are first used:
`ops` collectives by their usual names; `nn` layers on sharded tensors; `dtensor` layouts and placements;
`live` weights that follow a running trainer; `testing` ranks on one machine; `errors` of torch programs;
`compat` functions of other systems, a module per system.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_bridge import compat, dtensor, errors, live, nn, ops, testing  # noqa: F401
    from torch_bridge.autodiff.pending import PendingTensor
    from torch_bridge.contractions.einsum import einsum
    from torch_bridge.mesh.process_mesh import positions
    from torch_bridge.models.explain import explain
    from torch_bridge.models.parallel import check_replicas, clip_grad_norm_, grad_norm, no_sync
    from torch_bridge.models.parallelize import parallelize
    from torch_bridge.models.state import load_state_dict, state_dict
    from torch_bridge.models.verify import verify
    from torch_bridge.redistribution import redistribute
    from torch_bridge.state.files import load, save
    from torch_bridge.state.transfer import transfer

# The module of each name, imported with its first use: most programs use few of them.
_MODULES = {
    "PendingTensor": "autodiff.pending",
    "check_replicas": "models.parallel",
    "clip_grad_norm_": "models.parallel",
    "einsum": "contractions.einsum",
    "explain": "models.explain",
    "grad_norm": "models.parallel",
    "load": "state.files",
    "load_state_dict": "models.state",
    "no_sync": "models.parallel",
    "parallelize": "models.parallelize",
    "positions": "mesh.process_mesh",
    "redistribute": "redistribution",
    "save": "state.files",
    "state_dict": "models.state",
    "transfer": "state.transfer",
    "verify": "models.verify",
}
ROOMS = ("compat", "dtensor", "errors", "live", "nn", "ops", "testing")

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
    "save",
    "state_dict",
    "transfer",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return import_module(f"torch_bridge.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"torch_bridge.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *ROOMS})
