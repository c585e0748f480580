from jax_bridge.ops import *
