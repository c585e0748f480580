"""Weights from files and between nodes, beside orbax, torch's DCP, safetensors and DTensor."""
