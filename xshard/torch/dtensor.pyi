from torch_bridge.dtensor import *
