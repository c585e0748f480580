"""Trees of weights: which arrays there are made of which arrays here."""

from xshard.state.names import Made, Names, Piece, Relation, Side, concat, rename, split, stack, unstack

__all__ = ["Made", "Names", "Piece", "Relation", "Side", "concat", "rename", "split", "stack", "unstack"]
