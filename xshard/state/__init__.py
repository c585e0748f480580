"""Trees of weights: which arrays there are made of which arrays here, and how they get there."""

from xshard.state.names import Names, concat, rename, split, stack, unstack
from xshard.state.relations import Made, Piece, Relation, Side
from xshard.state.transfer import plan_transfer
from xshard.state.tree_plan import ArrayPlan, TreePlan

__all__ = [
    "ArrayPlan",
    "Made",
    "Names",
    "Piece",
    "Relation",
    "Side",
    "TreePlan",
    "concat",
    "plan_transfer",
    "rename",
    "split",
    "stack",
    "unstack",
]
