"""`import xshard.torch as xt`: `torch_bridge` under a second name."""

import torch_bridge
from xshard.modules import add_alias

add_alias(__name__, torch_bridge)
