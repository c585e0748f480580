"""torch_bridge: torch carries out the plans of xshard, forward and backward.

Move blocks:     redistribute, transfer (trees, between meshes), route (rows by their values), einsum
Train a model:   suggest (which rules), parallelize, explain, verify, clip_grad_norm_, grad_norm, no_sync
Save a run:      save, async_save, load; state_dict, optimizer_state_dict and their load_... for DCP
Also:            positions (of a block's rows), check_replicas, halves, own_experts, PendingTensor

Rooms beside the names below, imported when they are first used:
`ops` collectives by their usual names; `nn` layers on sharded tensors; `dtensor` layouts and placements;
`live` weights that follow a running trainer; `testing` ranks on one machine; `errors` of torch programs;
`compat` functions of other systems, a module per system.
"""

from xshard.modules import import_later

# Its names are in `__init__.pyi`.
__all__, __getattr__, __dir__ = import_later(__name__, __file__, "torch")
