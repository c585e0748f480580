from torch_bridge.compat.nvsubquadratic import *
