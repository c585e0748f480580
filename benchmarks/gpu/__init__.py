"""The torch bridge on one GPU, and what a profile of the GPU says."""
