from torch_bridge.ops import *
