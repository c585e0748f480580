"""Slow imports of torch and its bridge, made once by the process that ranks are forked from."""

# ruff: noqa: F401
import torch._dynamo.guards
import torch._dynamo.testing
import torch._functorch.aot_autograd
import torch._inductor.pattern_matcher  # of a graph with a backward pass
import torch.distributed.tensor.experimental  # of any call that is compiled

import torch_bridge.live
import torch_bridge.models.verify
import torch_bridge.nn
import torch_bridge.testing.worker

# Dynamo times the guards of every graph for its log alone, and first writes 32 MB, so that no cache has them.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
