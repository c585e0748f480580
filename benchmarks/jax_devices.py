"""Host devices of JAX."""

import jax


def configure(devices: int, x64: bool = False) -> None:
    """Make host devices; before JAX starts any. x64: whether float64 exists."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_x64", x64)
