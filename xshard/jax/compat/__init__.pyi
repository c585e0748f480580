from jax_bridge.compat import *
