from jax_bridge.compat.credit import *
