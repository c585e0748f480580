"""What ranks import, imported once by the server that they are forked from.

Ranks look for cyclic garbage rarely, and never among these modules: it would copy the pages that they share.
"""

# ruff: noqa: E402, F401
import gc

gc.disable()

import hypothesis
import pytest
import torch._dynamo.testing
import torch._functorch.aot_autograd
import torch._inductor.pattern_matcher  # of a graph with a backward pass
import transformers.models.llama.modeling_llama
import transformers.models.qwen3_moe.modeling_qwen3_moe

import jax_bridge.nn
import jax_bridge.torch_interop
import torch_bridge.dtensor
import torch_bridge.live
import torch_bridge.models.verify
import torch_bridge.nn
import torch_bridge.testing.worker

gc.freeze()
gc.set_threshold(500_000, 50, 100)
gc.enable()
