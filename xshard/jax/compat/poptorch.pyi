from jax_bridge.compat.poptorch import *
