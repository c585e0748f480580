"""torch_bridge: torch carries out the plans of xshard, forward and backward.

Rooms beside the names below, imported when they are first used:
`ops` collectives by their usual names; `nn` layers on sharded tensors; `dtensor` layouts and placements;
`live` weights that follow a running trainer; `testing` ranks on one machine; `errors` of torch programs;
`compat` functions of other systems, a module per system.
"""

from xshard.modules import import_later

# Its names are in `__init__.pyi`.
__all__, __getattr__, __dir__ = import_later(__name__, __file__, "torch")
