"""The names of `torch_bridge`, for type checkers and for the package, which imports them when used."""

from torch_bridge import compat, dtensor, errors, live, nn, ops, testing
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.contractions.einsum import einsum
from torch_bridge.mesh.process_mesh import positions
from torch_bridge.models.explain import explain
from torch_bridge.models.halves import halves
from torch_bridge.models.optimizers import load_optimizer_state_dict, optimizer_state_dict
from torch_bridge.models.own_experts import own_experts
from torch_bridge.models.parallel import check_replicas, clip_grad_norm_, grad_norm, no_sync
from torch_bridge.models.parallelize import parallelize
from torch_bridge.models.state import load_state_dict, state_dict
from torch_bridge.models.verify import verify
from torch_bridge.precision import Precision
from torch_bridge.redistribution import redistribute
from torch_bridge.routing import route
from torch_bridge.state.files import async_save, load, save
from torch_bridge.state.transfer import transfer
from torch_bridge.step.suggest import suggest

__all__ = [
    "PendingTensor", "Precision", "async_save", "check_replicas", "clip_grad_norm_", "compat", "dtensor",
    "einsum", "errors", "explain", "grad_norm", "halves", "live", "load", "load_optimizer_state_dict",
    "load_state_dict", "nn", "no_sync", "ops", "optimizer_state_dict", "own_experts", "parallelize",
    "positions", "redistribute", "route", "save", "state_dict", "suggest", "testing", "transfer",
    "verify",
]  # fmt: skip
