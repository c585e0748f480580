"""What a model does in a training step: operations with named dims, recorded, repeated, fused."""
