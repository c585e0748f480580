"""What ranks import, imported once by the server that they are forked from.

Ranks look for cyclic garbage rarely, and never among these modules: it would copy the pages that they share.
"""

# ruff: noqa: E402, F401
import gc

gc.disable()

import hypothesis
import pytest
import sklearn.datasets
import transformers.models.llama.modeling_llama
import transformers.models.qwen3_moe.modeling_qwen3_moe

import jax_bridge.nn
import jax_bridge.torch_interop
import tests.torch_bridge.preloaded_torch
import torch_bridge.dtensor

gc.freeze()
gc.set_threshold(500_000, 50, 100)
gc.enable()
