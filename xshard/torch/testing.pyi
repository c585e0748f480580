from torch_bridge.testing import *
