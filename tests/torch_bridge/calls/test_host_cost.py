"""What a cached call costs the host, and what the import loads: counted, not timed."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_bridge as xt
import xshard as xs

SLOW = (
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "sympy",
)
PROGRAM = """
import sys, torch
before = set(sys.modules)
import torch_bridge as xt
print(sorted(set(sys.modules) - before))
xt.redistribute, xt.einsum, xt.positions, xt.parallelize, xt.ops, xt.nn
print([name for name in {slow} if name in sys.modules])
"""


def calls_of(function) -> int:
    """How many functions a call calls, of Python and of C, itself not counted."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call") - 2  # `function` itself, and `setprofile`


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        with xs.use_profile("h100"):
            yield init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    finally:
        dist.destroy_process_group()


def test_a_cached_differentiable_all_gather_makes_few_calls(mesh):
    x = torch.ones(4, 8, requires_grad=True)

    def gather():
        return xt.redistribute(x, "n/a d -> n d | copy(a)", mesh)

    gradient = torch.ones(16, 8)
    gather().backward(gradient)
    # Since 2.14 torch binds the arguments of a Function by `inspect`, in every call: 87 calls of its own.
    own_of_torch = 87 if torch.__version__ >= "2.14" else 0
    assert calls_of(gather) <= 50 + own_of_torch
    y = gather()
    assert calls_of(lambda: y.backward(gradient)) <= 80, "torch's own are about 35"


def test_the_import_loads_what_is_used_when_it_is_used():
    command = [sys.executable, "-c", PROGRAM.format(slow=SLOW)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["['torch_bridge', 'xshard', 'xshard.modules']", "[]"]


def test_the_rooms_are_listed():
    rooms = {name for name in xt.__all__ if getattr(xt, name).__class__ is ModuleType}
    assert len(rooms) > 6 and {*xt.__all__} <= {*dir(xt)}
    assert all(f"`{room}`" in str(xt.__doc__) for room in rooms)
    with pytest.raises(
        AttributeError, match="no attribute 'redistribute_many'; its rooms: compat, "
    ):
        _ = xt.redistribute_many
