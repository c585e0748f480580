"""Settings for every test: repeatable examples, and one thread per process."""

import os

from hypothesis import settings

pytest_plugins = ["tests.order", "tests.without"]

# Test processes start processes of their own; each of them takes one core.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# XLA compiles each program for one run or two: what its backend would optimise takes longer than it saves.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

# As many as the largest case of tests/data/halo.json has.
os.environ.setdefault("XSHARD_HOST_DEVICES", "18")

# The same examples on every machine and in every run; no example is judged by its time.
settings.register_profile("xshard", derandomize=True, deadline=None, database=None, max_examples=150)
settings.load_profile("xshard")


def pytest_addoption(parser):
    parser.addoption("--pairs", default="5", help="pairs of layouts per mesh of three axes, or: all")
