"""Trees of weights: which target arrays are made of which source arrays, and how they move."""

from xshard.state.names import Names, concat, rename, split, stack, unstack
from xshard.state.transfer import plan_transfer
from xshard.state.tree_plan import TreePlan

__all__ = ["Names", "TreePlan", "concat", "plan_transfer", "rename", "split", "stack", "unstack"]
