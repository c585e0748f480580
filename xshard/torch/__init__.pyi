"""`torch_bridge` under a second name, as type checkers read it."""

from torch_bridge import *
