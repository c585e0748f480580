"""What ranks import, imported once by the server that they are forked from.

Ranks look for cyclic garbage rarely, and never among these modules: it would copy the pages that they share.
Their assertions are rewritten, as pytest rewrites those of its own process: a failure has the values in it.
"""

# ruff: noqa: E402, F401
import gc

gc.disable()

import _pytest.assertion
import _pytest.config
import hypothesis
import pytest

from tests.rewriting import helper_modules

# Before ranks import modules of tests. pytest has no public way to do this outside its own process.
rewriting = _pytest.assertion.install_importhook(_pytest.config.get_config())
rewriting.mark_rewrite(*helper_modules())

import sklearn.datasets
import torch._decomp.decompositions_for_jvp  # of any forward derivative
import transformers.models.llama.modeling_llama
import transformers.models.qwen3_moe.modeling_qwen3_moe

import jax_bridge.nn
import jax_bridge.torch_interop
import tests.torch_bridge.preloaded_torch
import torch_bridge.dtensor

gc.freeze()
gc.set_threshold(500_000, 50, 100)
gc.enable()
