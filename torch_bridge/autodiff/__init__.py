"""The one differentiable wrapper of plans, and tensors that are on their way."""
