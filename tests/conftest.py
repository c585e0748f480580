"""Settings for every test: repeatable examples, and no processor time for what none of them needs."""

import gc
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from hypothesis import settings

from tests.rewriting import helper_modules

pytest.register_assert_rewrite(*helper_modules())
pytest_plugins = ["tests.order", "tests.without"]

# Hundreds of processes import the packages and the tests: each would compile them again, also where the
# environment asks for no bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Test processes start processes of their own; each of them takes one core.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# XLA compiles each program for one run or two: what its backend would optimise takes longer than it saves,
# and so do an emitter by way of MLIR and a module of LLVM for each kernel of a few instructions.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
os.environ.setdefault(
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0"
)  # of each operation, while it is lowered
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK += " --xla_cpu_parallel_codegen_split_count=1"
# Later versions do not know this one, and a flag that XLA does not know ends its process.
if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", QUICK)

# A test that fails shows where: users' tracebacks end at their own line.
os.environ.setdefault("XSHARD_TRACEBACK", "full")

# As many as the largest case of tests/data/halo.json has.
os.environ.setdefault("XSHARD_HOST_DEVICES", "18")

# The same examples on every machine and in every run; no example is judged by its time. Twenty times as many:
# pytest --hypothesis-profile many
SAME = {"derandomize": True, "deadline": None, "database": None}
settings.register_profile("xshard", max_examples=50, **SAME)
settings.register_profile("many", max_examples=1000, **SAME)
settings.load_profile("xshard")

gc.disable()  # while frameworks are imported and tests are collected, all of which stay


def pytest_addoption(parser):
    parser.addoption(
        "--pairs",
        default="3",
        help="pairs of layouts per mesh of three axes, and 20 times as many of two; or: all",
    )


def pytest_collection_finish():
    """What is there now is never looked at again."""
    gc.freeze()
    gc.set_threshold(500_000, 50, 100)
    gc.enable()
