"""The parts of llama_block.py: the expressions of one block, text, and the model in torch and in JAX."""
