"""Trees of weights: which arrays there are made of which arrays here."""

from xshard.state.names import Names, concat, rename, split, stack, unstack
from xshard.state.relations import Made, Piece, Relation, Side

__all__ = ["Made", "Names", "Piece", "Relation", "Side", "concat", "rename", "split", "stack", "unstack"]
