from torch_bridge.compat.ksuit import *
