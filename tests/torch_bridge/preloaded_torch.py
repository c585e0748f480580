"""Slow imports of torch and its bridge, made once by the process that ranks are forked from."""

# ruff: noqa: F401
import torch._dynamo.testing
import torch._functorch.aot_autograd
import torch._inductor.pattern_matcher  # of a graph with a backward pass

import torch_bridge.live
import torch_bridge.models.verify
import torch_bridge.nn
import torch_bridge.testing.worker
