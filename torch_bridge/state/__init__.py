"""Trees of tensors on other meshes, in one program or in two, and in files."""
