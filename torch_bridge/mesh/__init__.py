"""Devices and processes of torch as a mesh, and what they agree on."""
