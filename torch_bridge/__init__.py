"""torch_bridge: torch carries out the plans of xshard, forward and backward.

Rooms beside the names below, imported when they are first used:
`ops` collectives by their usual names; `nn` layers on sharded tensors; `dtensor` layouts and placements;
`live` weights that follow a running trainer; `testing` ranks on one machine; `errors` of torch programs;
`compat` functions of other systems, a module per system.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_bridge import compat, dtensor, errors, live, nn, ops, testing
    from torch_bridge.autodiff.pending import PendingTensor
    from torch_bridge.contractions.einsum import einsum
    from torch_bridge.mesh.process_mesh import positions
    from torch_bridge.models.explain import explain
    from torch_bridge.models.own_experts import own_experts
    from torch_bridge.models.parallel import check_replicas, clip_grad_norm_, grad_norm, no_sync
    from torch_bridge.models.parallelize import parallelize
    from torch_bridge.models.state import load_state_dict, state_dict
    from torch_bridge.models.verify import verify
    from torch_bridge.redistribution import redistribute
    from torch_bridge.routing import route
    from torch_bridge.state.files import load, save
    from torch_bridge.state.transfer import transfer
    from torch_bridge.step.suggest import suggest

# Names and their modules, imported with their first use: most programs use few of them.
_LATER = {
    "PendingTensor": "autodiff.pending",
    "check_replicas": "models.parallel",
    "clip_grad_norm_": "models.parallel",
    "einsum": "contractions.einsum",
    "explain": "models.explain",
    "grad_norm": "models.parallel",
    "load": "state.files",
    "load_state_dict": "models.state",
    "no_sync": "models.parallel",
    "own_experts": "models.own_experts",
    "parallelize": "models.parallelize",
    "positions": "mesh.process_mesh",
    "redistribute": "redistribution",
    "route": "routing",
    "save": "state.files",
    "state_dict": "models.state",
    "suggest": "step.suggest",
    "transfer": "state.transfer",
    "verify": "models.verify",
}
ROOMS = ("compat", "dtensor", "errors", "live", "nn", "ops", "testing")

__all__ = [
    "PendingTensor", "check_replicas", "clip_grad_norm_", "compat", "dtensor", "einsum", "errors",
    "explain", "grad_norm", "live", "load", "load_state_dict", "nn", "no_sync", "ops",
    "own_experts", "parallelize", "positions", "redistribute", "route", "save", "state_dict",
    "suggest", "testing", "transfer", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a room or a function when it is first used; Python asks for names that are not here."""
    if name in ROOMS:
        return import_module(f"torch_bridge.{name}")
    if name in _LATER:
        value = getattr(import_module(f"torch_bridge.{_LATER[name]}"), name)
        return globals().setdefault(name, value)  # from now on found without this function
    rooms = ", ".join(ROOMS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its rooms: {rooms}")


def __dir__() -> list[str]:
    """List also the names that have not been imported yet, for completion in notebooks."""
    return sorted({*globals(), *__all__})
