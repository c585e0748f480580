"""The equivalence kit: a torch function and its JAX port, or one function on every mesh, are the same."""

from xshard.runtimes.processes import FunctionError
from xshard.testing.diagnosis.causes import CAUSES, Cause, likely_cause
from xshard.testing.equivalence import assert_equivalent, assert_mesh_invariant
from xshard.testing.mismatch import EquivalenceError, Mismatch, Subject
from xshard.testing.question import StructureError

__all__ = [
    "CAUSES", "Cause", "EquivalenceError", "FunctionError", "Mismatch", "StructureError", "Subject",
    "assert_equivalent", "assert_mesh_invariant", "likely_cause",
]  # fmt: skip
