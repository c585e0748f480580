from torch_bridge.live import *
