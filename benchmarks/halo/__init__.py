"""Halo exchange in torch beside two other ways."""
