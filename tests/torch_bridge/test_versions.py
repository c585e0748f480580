"""What is used of torch without a promise: all of it in one room, all of it there on this torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.torch_bridge.helpers import on_ranks
from torch_bridge import versions
from torch_bridge.versions import (
    autograd,
    checkpoints,
    compiler,
    dtensor,
    functorch,
    kernels,
    modes,
    modules,
    process_groups,
    pytree,
    support,
)

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "torch_bridge" / "versions"
# Places outside the room: hot ones, where a function would cost a call, by file and name.
ELSEWHERE = {("torch_bridge/mesh/process_mesh.py", "_world")}
# Python's own: of named tuples, and of frames.
PYTHONS = {"_replace", "_asdict", "_make", "_fields", "_getframe", "_current_frames"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported_of_torch(tree: ast.AST) -> dict[str, str]:
    """The names that a file imports of torch, with the full text of each."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    imported[alias.asname or "torch"] = alias.name
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return imported


def private_uses(tree: ast.AST, ours: Collection[str] = ()) -> Iterator[str]:
    """Each private name: in imports of torch, after what is of torch, and after what is not ours."""
    imported = imported_of_torch(tree)
    for text in imported.values():
        yield from filter(is_private, text.split("."))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_of_torch = ast.unparse(node).split(".")[0] in imported
            if is_of_torch or node.attr not in ours:
                yield node.attr


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """Private names that our own files define: functions, fields and attributes of `self`."""
    names = set(PYTHONS)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{node.attr}":
                names.add(node.attr)
    return names


def private_uses_of_torch() -> set[tuple[str, str]]:
    """All uses outside the room: file, and name."""
    folders = [ROOT / "torch_bridge", ROOT / "jax_bridge" / "torch_interop"]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in files if ROOM not in path.parents}
    ours = own_names(trees.values())
    return {
        (path.relative_to(ROOT).as_posix(), name)
        for path, tree in trees.items()
        for name in private_uses(tree, ours)
    }


def test_private_names_of_torch_are_in_one_room():
    assert private_uses_of_torch() == ELSEWHERE
    for path, name in ELSEWHERE:
        place = path.removeprefix("torch_bridge/")
        assert place in str(versions.__doc__) and name in str(versions.__doc__)


@pytest.mark.parametrize(
    "source",
    [
        "torch._C.f()",
        "import torch._dynamo",
        "from torch._subclasses import fake_tensor",
        "from torch.utils import _pytree as pytree",
        "x._version",
        "from torch.distributed import distributed_c10d as c10d\nc10d._world",
    ],
)
def test_a_private_name_is_seen(source):
    assert list(private_uses(ast.parse(source)))


@pytest.mark.parametrize(
    "room", sorted(path.stem for path in ROOM.glob("*.py") if path.stem != "__init__")
)
def test_a_room_has_what_it_promises(room):
    module = importlib.import_module(f"torch_bridge.versions.{room}")
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), name


def test_transforms_are_told():
    assert functorch.active_transforms() == [] and not functorch.is_transformed()
    seen = []

    def function(x):
        seen.append((functorch.active_transforms(), functorch.is_batched(x)))
        assert functorch.has_functorch_transforms() and functorch.is_transformed()
        return x.sum()

    torch.func.vmap(torch.func.grad(function))(torch.ones(3, 2))
    assert seen == [(["vmap of 3", "grad"], False)]
    torch.func.vmap(function)(torch.ones(3, 2))
    assert seen[1] == (["vmap of 3"], True)
    outlives = []

    def keep(x):
        outlives.append(x)
        return x.sum()

    torch.func.grad(keep)(torch.ones(3))
    assert functorch.unwrap_if_dead(outlives[0]) is not outlives[0]
    assert not functorch.is_forward_mode()
    with forward_ad.dual_level():
        assert functorch.is_forward_mode() and functorch.is_transformed()


def test_autograd_tells_of_writes_views_and_backward_passes():
    x = torch.ones(4)
    written = autograd.writes_to(x)
    view = x[1:].add_(1)
    assert autograd.writes_to(x) == written + 1
    assert autograd.viewed_tensor(view) is x and autograd.viewed_tensor(x) is None

    events = []
    weight = nn.Parameter(torch.ones(2, 3))
    assert autograd.shape_in_graph(weight) == (2, 3)

    def hook(gradient):
        events.append(autograd.is_in_backward_pass())
        autograd.call_after_backward(
            lambda: events.append("end"), if_failed=lambda: events.append("over")
        )

    weight.register_hook(hook)
    assert not autograd.is_in_backward_pass()
    weight.sum().backward()
    assert events == [True, "end", "over"]
    weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        weight.sum().backward()
    assert events == [True, "end", "over", True, "over"]
    events.clear()

    root = weight.exp().sum()
    weight.register_hook(lambda _: events.extend(autograd.roots_of_backward_pass()))
    numbers = [autograd.number_of_node(root.grad_fn), autograd.number_of_next_node()]
    assert numbers[1] == numbers[0] + 1 and autograd.shape_of_node(root.grad_fn) == ()
    with pytest.raises(ZeroDivisionError):
        root.backward()
    assert autograd.roots_of_backward_pass() == []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            events.append(autograd.is_forward_mode_enabled())
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    assert autograd.is_forward_mode_enabled()
    Asks.apply(weight)
    assert events[-1] is False


def test_modes_are_told_and_left():
    assert modes.dispatch_mode_count() == 0 and not modes.is_faking() and not modes.is_profiling()
    with modes.FakeTensorMode():
        assert modes.is_faking() and modes.dispatch_mode_count() == 1
        assert isinstance(torch.ones(2), modes.FakeTensor)
        with modes.unset_fake_temporarily():
            assert not modes.is_faking()
        with modes.without_modes():
            assert modes.dispatch_mode_count() == 0
    with torch.profiler.profile():
        assert modes.is_profiling()
    assert not modes.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert modes.is_any_autocast_enabled()

    seen = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Functions() as mode:
        assert modes.function_modes() == [mode]
        with modes.without_torch_function():
            torch.add(torch.ones(1), 1)
    assert seen == []


def test_operations_have_schemas_and_classes_of_tensors_their_memory():
    names = [argument.name for argument in modes.schema_of(torch.ops.aten.add.Tensor).arguments]
    assert names == ["self", "other", "alpha"]

    class Block(torch.Tensor):
        __torch_function__ = modes.plain_torch_function

    x = torch.ones(2)
    block = modes.subclass_of(Block, x)
    assert type(block) is Block and block.data_ptr() == x.data_ptr()
    assert type(block + 1) is torch.Tensor


def test_modules_have_dicts_hooks_and_checks():
    source = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    layer = source[1]
    assert list(modules.parameters_of(layer)) == ["weight", "bias"]
    assert "running_mean" in modules.buffers_of(source[0])
    assert list(modules.children_of(source)) == ["0", "1"]
    layer.register_forward_hook(print)
    copy = nn.Linear(1, 1)
    modules.copy_forward_hooks(copy, layer)
    before, after = modules.forward_hooks_of(copy)
    assert (len(before), len(after)) == (0, 1) and after is not modules.forward_hooks_of(layer)[1]
    assert all(name in layer.__dict__ for name in modules._FORWARD_HOOKS)
    modules.share_tensors_and_children(copy, layer)
    assert copy.weight is layer.weight
    modules.replace_children(copy, {"child": source})
    assert copy.child is source

    with pytest.raises(ValueError, match="expected 2D or 3D"):
        modules.check_input_dim(source[0], torch.ones(1, 2, 3, 4))
    assert modules.dim_count_without_batch(nn.InstanceNorm1d(2)) == 2
    compiled = torch.compile(layer)
    assert compiled is not layer and modules.uncompiled(compiled) is layer
    assert modules.uncompiled(layer) is layer
    assert modules.norm_of([torch.full((4,), 2.0)]) == 4


def test_a_scaler_finds_overflows_by_one_method():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([6.0, torch.inf])
    optimizer = torch.optim.SGD([parameter])
    scaler = torch.amp.GradScaler("cpu")
    found = torch.zeros(())
    by_device = modules.unscale_gradients(scaler, optimizer, torch.tensor(0.5), found, False)
    assert list(by_device.values()) == [torch.ones(())] and parameter.grad[0] == 3


def test_kernels_of_attention_return_log_sum_exps_and_gradients():
    q = torch.rand(1, 2, 5, 8)
    y, log_sum = kernels.cpu_attention(q, q, q, is_causal=False, attn_mask=None, scale=None)
    expected = torch.logsumexp(q @ q.mT / 8**0.5, -1)
    torch.testing.assert_close(log_sum, expected)
    gradients = kernels.cpu_attention_gradients(
        y, q, q, q, y, log_sum, 0.0, False, attn_mask=None, scale=None
    )
    assert [x.shape for x in gradients] == [q.shape] * 3
    assert len(modes.schema_of(kernels.gpu_attention.default).arguments) == 8
    assert len(modes.schema_of(kernels.gpu_attention_gradients.default).arguments) == 13


def test_operations_that_tables_name_exist():
    for namespace, name in (
        ("aten", "_prelu_kernel"),
        ("aten", "_weight_norm_interface"),
        ("aten", "_local_scalar_dense"),
        ("profiler", "_record_function_enter_new"),
        ("_c10d_functional", "wait_tensor"),
    ):
        assert hasattr(getattr(torch.ops, namespace), name), name


def test_dtensors_and_their_placements():
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        block = torch.ones(2, 3, requires_grad=True)
        x = DTensor.from_local(block, mesh, [Shard(0), Shard(0)])
        assert x.grad_fn.name() == autograd.FROM_LOCAL_NODE
        for entry in dtensor.shard_order(x):
            assert (entry.tensor_dim, tuple(entry.mesh_dims)) == (0, (0, 1))
        assert dtensor.StridedShard(0, split_factor=2).split_factor == 2
        assert hasattr(dtensor.AsyncCollectiveTensor, "wait")
    finally:
        dist.destroy_process_group()


def test_views_of_files_and_offsets_in_them(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.arange(4), path)
    with path.open("rb") as file:
        view = checkpoints.file_view(file, 0, path.stat().st_size)
        x = torch.load(view, map_location="meta", weights_only=True)
    offset = checkpoints.storage_offset_bytes(x.untyped_storage())
    assert path.read_bytes()[offset : offset + x.nbytes] == torch.arange(4).numpy().tobytes()


def test_trees():
    tree = {"a": [torch.ones(1), 2]}
    leaves = pytree.tree_leaves(tree)
    structure = pytree.treespec_loads(pytree.treespec_dumps(pytree.tree_structure(tree)))
    assert pytree.tree_unflatten(leaves, structure) == tree


def test_the_compiler_has_decorators_and_real_meshes():
    assert callable(compiler.nonstrict_trace)
    assert compiler.unwrapped_mesh("a mesh") == "a mesh"
    lengths = []

    @compiler.nonstrict_trace
    def asks(x):
        if not isinstance(x.shape[0], int):  # it is a symbol while the compiler traces
            lengths.append(compiler.first_value(x.shape[0]))
        return x + 1

    torch.compile(lambda x: asks(x), backend="eager", dynamic=True)(torch.ones(5))
    assert lengths == [5]


def _groups() -> None:
    world = dist.group.WORLD
    assert world is not None
    backend, store = process_groups.backend_and_store(world)
    assert "gloo" in backend
    assert process_groups.default_store().num_keys() > 0
    waits = timedelta(seconds=20)
    group = process_groups.new_group((0, 1), dist.get_rank(), "a name", store, backend, waits)
    assert set(process_groups.timeouts_of(group)) == {waits}
    assert dist.get_process_group_ranks(group) == [0, 1]
    process_groups.register_name("another name", group)
    assert process_groups.group_by_name("another name") is group
    for method in process_groups.METHODS.values():
        assert hasattr(group, method), method
    x = process_groups.functional_collectives.all_reduce(torch.ones(1), "sum", "another name")
    assert process_groups.functional_collectives.wait_tensor(x).item() == 2


def test_groups_are_made_by_their_members() -> None:
    on_ranks(2, _groups)


def test_a_torch_without_a_name_is_refused_with_the_releases_that_have_it():
    with (
        pytest.raises(ImportError, match=r"needs torch 2\.11 or later, this is .*_gone"),
        support.private_names(),
    ):
        _ = torch._C._gone  # type: ignore[attr-defined]


def test_an_older_torch_is_refused():
    program = "import torch; torch.__version__ = '2.10.1'; import torch_bridge.versions.support"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: torch_bridge needs torch 2.11 or later, this is 2.10.1" in done.stderr
