from torch_bridge.errors import *
