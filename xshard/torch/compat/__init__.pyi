from torch_bridge.compat import *
