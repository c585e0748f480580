from torch_bridge.compat.spmd_types import *
