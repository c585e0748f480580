"""The names that ways have in rows and claims."""

OURS = "xshard"
TORCH, DCP, HF = "torch.load", "DCP", "DCP's reader of Hugging Face"
ORBAX, SLICES = "orbax", "safetensors' slices"
READING, MEMCPY = "reading", "memcpy"
DTENSOR, EXCHANGING, STATE_DICT = "DTensor", "DTensor with an all-to-all", "DCP's state dict, from rank 0"
BUCKET = 256 * 2**20  # bytes that a load may hold beyond its result
