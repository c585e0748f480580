"""The drop-ins in torch beside three other ways to the same values."""
