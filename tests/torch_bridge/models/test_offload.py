"""Parameters that are stored on the CPU: what is copied, and that values are those without it."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, check_error
from tests.torch_bridge.models.test_precision import LOW, MESH, Net, Result, batch, loss_of, made
from torch_bridge.models.offload import DeviceCopy, copy_to_device
from torch_bridge.models.parallel import parallel_of

CPU, META = torch.device("cpu"), torch.device("meta")
# Norms are replicated: modules would use them as they are stored.
RULES = {"**.norm.*": "...", "**": "o/dp ... -> o ..."}
on_two = SharedRanks(2)


def parallel(model: nn.Module, **options: Any) -> Any:
    return xt.parallelize(model, RULES, {"": "b/dp s"}, MESH, gathers="layers.*", **options)


def trained(options: dict[str, Any], again: bool | None, *, offload: bool) -> list[Tensor]:
    """Losses, norms and parameters of two steps, with a pass inside `no_sync` in each."""
    model = parallel(made(tied=False, again=again), offload=offload, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    values = []
    for step in (0, 2):
        with xt.no_sync(model):
            loss_of(model(*batch(step)), step).backward()
        loss = loss_of(model(*batch(step + 1)), step + 1)
        loss.backward()
        values += [loss.detach(), xt.clip_grad_norm_(model, 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return values + [x.detach() for x in model.parameters()]


@on_two
def test_a_step_has_the_bits_of_one_without_it() -> None:
    cases = [({}, False), ({"prefetch": 0, "keep": True}, None), ({"precision": LOW}, True)]
    for options, again in cases:
        with_it, without = (trained(options, again, offload=offload) for offload in (True, False))
        assert all(map(torch.equal, with_it, without)), (options, again)


@on_two
def test_modules_have_copies_and_nothing_else_does() -> None:
    def address(x: Tensor) -> int:
        return x.untyped_storage().data_ptr()

    model = parallel(made(tied=False), offload=True)
    blocks = dict(model.named_parameters())
    addresses = {name: address(x) for name, x in blocks.items()}
    used = set()

    def note(module: nn.Module, args: Any) -> None:
        for name, x in module.named_parameters(recurse=False):
            used.add(f"{names[module]}.{name}")
            assert address(x) != address(blocks[f"{names[module]}.{name}"])

    names = {module: name for name, module in model.named_modules()}
    for module in names:
        module.register_forward_pre_hook(note)
    loss_of(model(*batch(0)), 0).backward()
    assert used == set(addresses) == {name for name, x in blocks.items() if x.grad is not None}
    for name, x in model.named_parameters():
        assert x is blocks[name] and address(x) == addresses[name]
    # The map itself: one tensor on each device, forward, backward, and in a graph of gradients.
    x = torch.arange(3.0, requires_grad=True)
    there = copy_to_device(x, META)
    assert there.is_meta and DeviceCopy(CPU, META).backward == DeviceCopy(META, CPU)
    y = copy_to_device(x, CPU)
    assert address(y) != address(x)
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], 6 * x)
    assert torch.equal(torch.func.jvp(lambda x: copy_to_device(x, CPU), (x,), (x,))[1], x)


@on_two
def test_it_is_verified_saved_and_loaded_as_any_other() -> None:
    rules: Any = {
        "**.up.*": "o/tp ...",
        "**.down.weight": "o i/tp",
        "**.down.bias": "o -> o | sum(tp)",
        "**": "...",
    }
    inputs: Any = {"": "b s", "**.up": "b s c -> b s c | copy(tp)", "**.down": "b s f/tp"}
    outputs = {"**.down": "b s c | sum(tp) -> b s c"}
    ids, noise = batch(0, rank=0)

    def loss(result: Result) -> Tensor:
        return cross_entropy(result.logits.flatten(0, 1), ids.flatten())

    whole = made()
    models = []
    for mesh in (xs.Mesh(tp=2), xs.Mesh(tp=2)):
        model: Net = made()
        xt.parallelize(model, rules, inputs, mesh, outputs=outputs, offload=True)
        models.append(model)
    model, other = models
    xt.verify(model, (ids, noise), loss=loss)
    for x in other.parameters():
        nn.init.zeros_(x)
    xt.load_state_dict(other, xt.state_dict(model))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loss(model(ids, noise)).backward()
    optimizer.step()
    assert {x.device for state in optimizer.state.values() for x in state.values()} == {CPU}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    xt.save({"model": model, "optimizer": optimizer}, folder[0])
    again = torch.optim.AdamW(other.parameters(), 1e-2)
    xt.load(folder[0], like={"model": other, "optimizer": again})
    loss(whole(ids, noise)).backward()
    torch.optim.AdamW(whole.parameters(), 1e-2).step()
    context = parallel_of(model).context
    for name, x in whole.named_parameters():
        right = parallel_of(model).by_name[name].block_of(x, context)
        for found in (model.get_parameter(name), other.get_parameter(name)):
            assert torch.allclose(found, right, atol=1e-6), name
    for mine, loaded in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(map(torch.equal, mine.values(), loaded.values()))


@on_two
def test_processes_agree_on_it_and_a_write_in_a_pass_is_seen() -> None:
    offload = dist.get_rank() == 0
    check_error(lambda: parallel(made(), offload=offload), "DesyncError", "parallelize")
    # The layer's parameters have begun to travel when they are written to.
    results = []
    for offloaded in (True, False):
        model = parallel(made(tied=False, n_layers=3), offload=offloaded, prefetch=None)
        last = model.layers[2].down.bias
        passes = itertools.count()

        def write(*_: Any, bias: Tensor = last, passes: Any = passes) -> None:
            if next(passes) == 2:
                with torch.no_grad():
                    bias += 1

        model.layers[0].register_forward_hook(write)
        results.append([model(*batch(0)).logits.detach() for _ in range(4)])
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][1], results[0][2])
