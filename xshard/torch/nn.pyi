from torch_bridge.nn import *
