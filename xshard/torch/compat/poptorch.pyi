from torch_bridge.compat.poptorch import *
