from jax_bridge.specs import *
