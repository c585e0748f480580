from jax_bridge.torch_interop import *
