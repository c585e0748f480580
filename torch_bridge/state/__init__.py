"""Trees of tensors on other meshes and in files."""
