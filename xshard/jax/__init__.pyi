"""`jax_bridge` under a second name, as type checkers read it."""

from jax_bridge import *
from jax_bridge import compat as compat
from jax_bridge import nn as nn
from jax_bridge import ops as ops
from jax_bridge import specs as specs
from jax_bridge import torch_interop as torch_interop
