from torch_bridge.compat.credit import *
