from jax_bridge.nn import *
