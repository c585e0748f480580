from jax_bridge.compat.ksuit import *
