"""`import xshard.jax as xj`: `jax_bridge` under a second name."""

import jax_bridge
from xshard.modules import add_alias

add_alias(__name__, jax_bridge)
