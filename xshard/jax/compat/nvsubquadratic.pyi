from jax_bridge.compat.nvsubquadratic import *
