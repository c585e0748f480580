"""Mixed precision: the bits of FSDP2 with the same policy, and what is stored, summed, kept and saved."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_bridge as xt
import xshard as xs
from benchmarks.torch_redistribute.host import Allocations
from tests.torch_bridge.helpers import SharedRanks, check_error
from torch_bridge.models.parallel import parallel_of

BF16, F32 = torch.bfloat16, torch.float32
MESH = xs.Mesh(dp=2)
WIDTH, WORDS = 32, 64
ZERO = {"**": "o/dp ... -> o ..."}
LOW = xt.Precision(param_dtype=BF16, reduce_dtype=F32)
NORM = xt.Precision(param_dtype=F32, output_dtype=BF16)

SECONDS_TO_LET_GO = 10.0
FEW_BYTES = 512  # of a layer: no weight, activations alone

on_two = SharedRanks(2)


@dataclass
class Result:
    """Not a tree that torch knows: FSDP2 casts what is in it, too."""

    logits: Tensor


class Layer(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        assert self.scale.dtype == gain.new_empty(0, dtype=F32).dtype  # buffers are as they were
        hidden = gelu(self.up(self.norm(x)))
        return x + self.down(hidden) * gain * self.scale.to(x.dtype)


class Net(nn.Module):
    """A tied embedding, or not; layers get a float from outside of any module."""

    def __init__(self, *, tied: bool = True, again: bool | None = None, n_layers: int = 2) -> None:
        super().__init__()
        self.again = again  # layers are computed again, reentrantly or not
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, noise: Tensor) -> Result:
        x = self.words(ids) + noise
        gain = torch.linspace(0.5, 1.5, WIDTH)
        for layer in self.layers:
            if self.again is None:
                x = layer(x, gain)
            else:
                x = checkpoint(layer, x, gain, use_reentrant=self.again)
        return Result(self.head(self.norm(x)))


def made(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Words and floats of one rank: this one."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, WORDS, (4, 8), generator=generator)
    return ids, torch.randn(4, 8, WIDTH, generator=generator)


def loss_of(result: Result, step: int) -> Tensor:
    return cross_entropy(result.logits.flatten(0, 1), batch(step)[0].flatten())


def by_fsdp2(
    model: Net, root: xt.Precision, low: xt.Precision, norm: xt.Precision | None, **options: bool
) -> Net:
    def policy(precision: xt.Precision) -> MixedPrecisionPolicy:
        words = {**vars(precision)}
        return MixedPrecisionPolicy(cast_forward_inputs=words.pop("cast_inputs"), **words)

    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for layer in model.layers:
        if norm is not None:
            fully_shard(layer.norm, mesh=mesh, mp_policy=policy(norm), **options)
        fully_shard(layer, mesh=mesh, mp_policy=policy(low), **options)
    fully_shard(model, mesh=mesh, mp_policy=policy(root))
    return model


CASES: list[dict[str, Any]] = [
    {},
    {"low": xt.Precision(BF16), "prefetch": 1},
    {"root": xt.Precision(BF16, F32, output_dtype=F32), "again": False},
    {"again": True, "prefetch": 1},
    {"low": xt.Precision(None, BF16)},
    {"keep": True, "tied": False, "micro_batches": 3},
    {"keep": True, "tied": False, "low": xt.Precision(BF16), "micro_batches": 2, "prefetch": 1},
    {"norm": NORM, "again": False},
]


def check_case(
    low: xt.Precision = LOW,
    root: xt.Precision | None = None,
    norm: xt.Precision | None = None,
    keep: bool = False,
    micro_batches: int = 1,
    prefetch: int = 0,
    **model: Any,
) -> None:
    precision: Any = low  # of the model and of its layers, which gather
    if root is not None:
        precision = {"layers.*": low, "": root}
    elif norm is not None:
        precision = {"layers.*.norm": norm, "|layers.*": low}
    root = low if root is None else root
    ours = made(**model)
    # Nothing of FSDP2's is computed again: up to torch 2.11 its inputs are not cast again there.
    model["again"] = None
    theirs = by_fsdp2(made(**model), root, low, norm, reshard_after_forward=not keep)
    xt.parallelize(
        ours, ZERO, {"": "b/dp s"}, MESH,
        gathers="layers.*", keep=keep, prefetch=prefetch, precision=precision,
    )  # fmt: skip
    for step in range(0, 2 * micro_batches, micro_batches):
        for number in range(step, step + micro_batches):
            is_last = number == step + micro_batches - 1
            theirs.set_requires_gradient_sync(is_last)
            without_sync: AbstractContextManager[Any] = (
                nullcontext() if is_last else xt.no_sync(ours)
            )
            expected, found = theirs(*batch(number)), None
            loss_of(expected, number).backward()
            with without_sync:
                found = ours(*batch(number))
                (loss_of(found, number) / 2).backward()  # FSDP2 takes the mean over both ranks
            assert found.logits.dtype == expected.logits.dtype
            assert torch.equal(found.logits, expected.logits)
        for (name, x), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert x.dtype == F32 and x.grad is not None and x.grad.dtype == F32, name
            assert torch.equal(x.grad, right.grad.to_local()), (name, step)
            with torch.no_grad():
                right.to_local().sub_(right.grad.to_local())
                x.sub_(x.grad)
        theirs.zero_grad()
        ours.zero_grad()


@on_two
def test_values_have_the_bits_of_fsdp2() -> None:
    for case in CASES:
        try:
            check_case(**case)
        except AssertionError as error:
            error.add_note(str(case))
            raise


TENSOR_PARALLEL: dict[str, Any] = {
    "parameters": {
        "**.up.*": "o/tp ...",
        "**.down.weight": "o i/tp",
        "**.down.bias": "o -> o | sum(tp)",
        "**": "...",
    },
    "inputs": {"": "b s", "**.up": "b s c -> b s c | copy(tp)", "**.down": "b s f/tp"},
    "outputs": {"**.down": "b s c | sum(tp) -> b s c"},
    "mesh": xs.Mesh(tp=2),
}


@on_two
def test_parameters_that_nothing_gathers_are_cast_too() -> None:
    one = made()
    model = made()
    used: dict[str, set[torch.dtype]] = {}

    def note(module: nn.Module, args: Any) -> None:
        used.setdefault(names[module], set()).update({module.weight.dtype, args[0].dtype})

    precision = {"**.norm": NORM, "": xt.Precision(BF16, F32, output_dtype=F32)}
    xt.parallelize(model, **TENSOR_PARALLEL, precision=precision)
    ids, noise = batch(0, rank=0)

    def loss(result: Result) -> Tensor:
        return cross_entropy(result.logits.flatten(0, 1), ids.flatten())

    xt.verify(model, (ids, noise), loss=loss)
    names = {module: name for name, module in model.named_modules() if hasattr(module, "weight")}
    for module in names:
        module.register_forward_pre_hook(note)
    loss(model(ids, noise)).backward()
    del used["words"]
    assert used.pop("norm") == used.pop("layers.0.norm") == used.pop("layers.1.norm") == {F32}
    assert set(map(frozenset, used.values())) == {frozenset({BF16})}, used
    loss(one(ids, noise)).backward()
    parallel = parallel_of(model)
    for name, x in one.named_parameters():
        found = model.get_parameter(name)
        right = parallel.by_name[name].block_of(x.grad, parallel.context)
        assert found.grad.dtype == F32 and found.dtype == F32
        assert (found.grad - right).norm() < 0.05 * right.norm(), name
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    xt.save(model, folder[0])
    assert all(torch.equal(x, one.state_dict()[n]) for n, x in xt.load(folder[0]).items())


@on_two
def test_sums_over_replicas_are_added_in_the_reduce_dtype() -> None:
    """1 + 2**-9 is 1 in bfloat16, and each rank adds its half of that."""
    for reduce_dtype, whole in ((F32, 1 + 2**-9), (None, 1.0)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        precision = xt.Precision(BF16, reduce_dtype)
        xt.parallelize(model, {"**": "..."}, {"": "b/dp i"}, MESH, precision=precision)
        model(torch.tensor([[1.0 if dist.get_rank() else 2.0**-9]])).sum().backward()
        assert model.weight.grad.item() == whole
    # All compute the same: in bfloat16 the copy on one device has the same bits.
    torch.manual_seed(0)
    same = nn.Linear(8, 8)
    xt.parallelize(same, {"**": "..."}, {"": "b i"}, MESH, precision=xt.Precision(BF16))
    x = torch.linspace(0, 1, 32).view(4, 8)
    xt.verify(same, x, loss=lambda y: y.float().square().mean(), tol=1e-6)


@on_two
def test_a_compiled_step_has_the_same_bits() -> None:
    model: Any = made(tied=False)
    xt.parallelize(model, ZERO, {"": "b/dp s"}, MESH, gathers="layers.*", precision=LOW)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    steps = []
    for run in (model, compiled):
        result = run(*batch(0))
        loss_of(result, 0).backward()
        steps.append([result.logits, *[x.grad for x in model.parameters()]])
        model.zero_grad()
    assert all(map(torch.equal, *steps))


def held_after_forward(n_layers: int, context: AbstractContextManager[Any], **options: Any) -> int:
    """Bytes that live after the forward pass of a model, beside it; they are freed by a backward pass.

    Gloo's thread lets go of what the last gather has brought a moment after the wait for it has ended:
    the fewest of many looks.
    """
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(n_layers)]
    model = nn.Sequential(*layers)
    xt.parallelize(model, ZERO, {"": "b/dp i"}, MESH, gathers="*", **options)
    x = torch.ones(2, 64)
    model(x).sum().backward()
    with Allocations() as allocations:
        with context:
            y = model(x)
        held = allocations.live
        deadline = time.monotonic() + SECONDS_TO_LET_GO
        while held > n_layers * FEW_BYTES and time.monotonic() < deadline:
            time.sleep(0.01)
            held = allocations.live
        y.sum().backward()
        y, weight = None, model[0][0].weight
        assert weight.grad is not None
    return held


@on_two
def test_a_backward_pass_gathers_again_and_casts_are_not_kept() -> None:
    weight_bytes = 64 * 64 * 2  # of bfloat16
    autocast = torch.autocast("cpu", BF16)
    for options in ({"precision": xt.Precision(BF16)}, {}):
        context = nullcontext() if options else autocast
        shorter, longer = (held_after_forward(n, context, **options) for n in (2, 6))
        assert longer - shorter < 4 * weight_bytes / 4, (options, shorter, longer)


class Copies(TorchDispatchMode):
    """While active, counts what writes the values of one tensor into another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_foreach_copy_", "copy_", "_to_copy", "cat", "add"):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


@on_two
def test_parameters_are_cast_into_their_message_by_one_call() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    xt.parallelize(model, ZERO, {"": "b/dp i"}, MESH, gathers="0", precision=xt.Precision(BF16))
    gathers = parallel_of(model).hooks["0"].parameters
    blocks = [gathered.parameter.tensor for gathered in gathers.parameters]
    with torch.no_grad(), Copies() as forward:
        whole = gathers._moves.gather(gathers.parameters, blocks)
    with torch.no_grad(), Copies() as backward:
        gathers._moves.reduce_gradients(gathers.parameters, whole)
    # A call for the message of both, and one for each that has arrived.
    assert forward.count == {"_foreach_copy_": 1, "cat": 2}
    # This process adds what the other one has sent to what it has itself; then it stores float32.
    assert backward.count == {"copy_": 2, "add": 2, "_to_copy": 2}


@on_two
def test_kept_parameters_are_freed_as_their_gradients_come() -> None:
    """Of four whole weights that are kept, less is left at the first layer than blocks of gradients add."""
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers)
    xt.parallelize(model, ZERO, {"": "b/dp i"}, MESH, gathers="*", keep=True, prefetch=0)
    x = torch.ones(2, 64)
    model(x).sum().backward()
    model.zero_grad()
    live = []
    with Allocations() as allocations:
        layers[0].register_full_backward_hook(lambda *_: live.append(allocations.live))
        y = model(x)
        kept = allocations.live
        y.sum().backward()
    assert kept > 4 * 64 * 64 * 4 > live[0], (kept, live)


@on_two
def test_kept_parameters_get_gradients_by_a_result_that_nobody_finds() -> None:
    """The backward pass comes into the module by a tensor inside an object, not by the one beside it."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Result]:
            y = self.up(x)
            return y.sum(), Result(y)

    model = Both()
    whole = model.up.weight.detach().clone()
    xt.parallelize(model, ZERO, {"": "b i"}, MESH, gathers="", keep=True)
    x = torch.arange(8.0).view(2, 4)
    seen, hidden = model(x)
    hidden.logits.square().sum().backward()
    right = 2 * (x @ whole.T).T @ x
    own = xt.redistribute(right, "o i -> o/dp i", MESH)
    assert seen.requires_grad and torch.allclose(model.up.weight.grad, own)


@on_two
def test_casts_that_are_no_plain_ones_come_back_as_they_were() -> None:
    """The backward pass gets a cast parameter in the memory format in which the forward pass had it."""

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(24.0).view(2, 3, 2, 2))

        def forward(self, x: Tensor) -> Tensor:
            last = self.weight.to(BF16, memory_format=torch.channels_last)
            return (x * last * last.transpose(0, 1).transpose(1, 0)).sum() + last.exp().sum()

    whole, model = Squares(), nn.Sequential(Squares())
    xt.parallelize(model, ZERO, {"": "b/dp"}, MESH, gathers="0")
    x = torch.tensor([2.0])
    model(x).backward()
    (2 * whole(x)).backward()
    assert torch.equal(model[0].weight.grad, whole.weight.grad[dist.get_rank()][None])


@on_two
def test_what_says_nothing_or_two_things_is_refused() -> None:
    def make(**options: Any) -> Any:
        return lambda: xt.parallelize(made(), ZERO, {"": "b/dp s"}, MESH, **options)

    both = {"precision": LOW, "comm_dtype": BF16}
    check_error(make(**both), "XshardError", "comm_dtype=torch.bfloat16 and precision= both say")
    check_error(make(precision={"layer.*": LOW}), "XshardError", "layer.*", "layers.0")
    check_error(make(precision={"": BF16}), "XshardError", "precision")
    check_error(make(precision=BF16), "XshardError", "precision")
    float8 = torch.float8_e4m3fn
    check_error(lambda: xt.Precision(param_dtype=float8), "DtypeError", "param_dtype=torch.float8")
    check_error(lambda: xt.Precision(reduce_dtype="bf16"), "XshardError", "reduce_dtype")
