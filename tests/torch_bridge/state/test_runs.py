"""A run in one folder: a model and all that trains it, saved on one mesh and resumed on others."""

from __future__ import annotations

import copy
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, assert_refused, still_connected
from tests.torch_bridge.models.test_block_guards import Lion
from xshard import Mesh
from xshard.state.files import background, latest

on_four = SharedRanks(4)
TP = {
    "norm.*": "n",
    "up.weight": "o/tp/dp i -> o/tp i",
    "up.bias": "o/tp",
    "down.weight": "o i/tp",
    "down.bias": "o -> o | sum(tp)",
}
MOVES = {"up": "b/dp c -> b/dp c | copy(tp)", "down": "b/dp f/tp"}
OUT = {"down": "b/dp c | sum(tp) -> b/dp c"}
ZERO = {"**": "o/dp ... -> o ..."}  # of 10 rows over 4: blocks of unequal sizes
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, 0.01),
    "fused": lambda p: AdamW(p, 0.01, fused=True),
    "amsgrad": lambda p: AdamW(p, 0.01, foreach=True, amsgrad=True),
    "momentum": lambda p: SGD(p, 0.01, momentum=0.9, nesterov=True),
    "Lion": lambda p: Lion(p, 0.01),
    "a rate that is a tensor": lambda p: AdamW(p, torch.tensor(0.01), foreach=False),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 10)
        self.down = nn.Linear(10, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def net(cut: str) -> nn.Module:
    """Parallel in one of three ways, or whole."""
    if cut == "tp":
        inputs = {"": "b c -> b/dp c", **MOVES}
        return xt.parallelize(Net(), TP, inputs, Mesh(dp=2, tp=2), outputs=OUT)
    if cut == "zero":
        return xt.parallelize(Net(), ZERO, {"": "b c -> b/dp c"}, Mesh(dp=4))
    model = Net()
    if cut == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    return model


class Run:
    """A model, its optimizer, and what stands around them."""

    def __init__(self, cut: str, make: Callable[[Any], Optimizer] = OPTIMIZERS["AdamW"]) -> None:
        self.cut = cut
        self.model = net(cut)
        weights = [x for x in self.model.parameters() if x.ndim > 1]
        others = [x for x in self.model.parameters() if x.ndim == 1]
        self.optimizer = make([{"params": weights}, {"params": others, "lr": 0.02}])
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, 4),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30),
            ],
            [4],
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.average = AveragedModel(self.model, avg_fn=lambda a, x, _: 0.9 * a + 0.1 * x)
        self.step = 0

    @property
    def tree(self) -> dict[str, Any]:
        """What a user writes."""
        names = ("model", "optimizer", "schedule", "scaler", "average", "step")
        return {name: getattr(self, name) for name in names}

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.step += 1
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.step)).double()
            mesh = {"tp": Mesh(dp=2, tp=2), "zero": Mesh(dp=4)}.get(self.cut)
            loss = (self.model(x) - 1).square().sum()
            if mesh is not None:
                loss = xt.redistribute(loss, "() | sum(dp) -> ()", mesh)
            if self.step == 5:
                loss = loss * torch.inf  # a step that the scaler skips
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.average.update_parameters(self.model)
        return self

    def resumed(self, folder: str) -> Run:
        found = xt.load(folder, like=self.tree)
        assert found["model"] is self.model and found["optimizer"] is self.optimizer
        self.step = found["step"]
        return self

    def whole(self) -> dict[str, Tensor]:
        found = {"scale": torch.tensor(self.scaler.get_scale())}
        for name, model in (("model", self.model), ("average", self.average.module)):
            has_blocks = hasattr(model, "_xshard_parallel")
            state = xt.state_dict(model) if has_blocks else model.state_dict()
            for key, x in state.items():
                found[f"{name}.{key}"] = x.full_tensor() if hasattr(x, "full_tensor") else x
        return found


def check_equal(run: Run, alone: Run) -> None:
    expected = alone.whole()
    for name, x in run.whole().items():
        torch.testing.assert_close(x, expected[name], msg=f"{run.cut}: {name}")


@contextmanager
def one_folder() -> Iterator[str]:
    """A folder that all ranks share, until the end."""
    with ExitStack() as stack:
        paths = [""]
        if dist.get_rank() == 0:
            paths = [stack.enter_context(tempfile.TemporaryDirectory())]
        dist.broadcast_object_list(paths)
        yield paths[0]
        dist.barrier()


@on_four
def test_a_run_goes_on_as_one_device_on_any_mesh() -> None:
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        n_steps = 3
        cuts = ["zero", "whole"]
        if name == "AdamW":
            n_steps = 8  # past a step at which the scale grows, and moments are added to again
        else:  # of what differs between optimizers, either shows it
            del cuts[number % 2]
        alone = Run("whole", make).train(6)
        with one_folder() as folder:
            run = Run("tp", make).train(6)
            check_equal(run, alone)
            xt.save(run.tree, folder)
            alone.train(n_steps)
            if name == "AdamW":
                check_equal(run.train(n_steps), alone)
            for cut in cuts:
                try:
                    check_equal(Run(cut, make).resumed(folder).train(n_steps), alone)
                except AssertionError as error:
                    error.add_note(f"{name}, resumed as {cut}")
                    raise


@on_four
def test_the_same_mesh_goes_on_with_the_same_bits() -> None:
    with one_folder() as folder:
        run = Run("zero").train(6)
        xt.save(run.tree, folder)
        resumed = Run("zero").resumed(folder)
        expected = run.train(6).whole()
        assert all(torch.equal(x, expected[name]) for name, x in resumed.train(6).whole().items())


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters and moments, each whole."""
    has_blocks = hasattr(model, "_xshard_parallel")
    found = dict(xt.state_dict(model) if has_blocks else model.state_dict())
    get = xt.optimizer_state_dict if has_blocks else get_optimizer_state_dict
    for name, values in get(model, optimizer)["state"].items():
        found |= {f"{name}.{key}": x for key, x in values.items()}
    return {
        n: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for n, x in found.items()
    }


def stepped(cut: str, steps: int) -> tuple[nn.Module, Optimizer]:
    model = net(cut)
    optimizer = AdamW(model.parameters(), 0.01)
    for seed in range(steps):
        for i, x in enumerate(model.parameters()):
            x.grad = torch.full_like(x, 1.0 + seed + i)
        optimizer.step()
    return model, optimizer


@on_four
def test_moments_travel_between_fully_shard_and_rules_in_both_formats() -> None:
    cuts = ("fsdp", "tp", "zero", "whole")
    for number, source in enumerate(cuts[:3]):
        model, optimizer = stepped(source, 3)
        expected = whole_state(model, optimizer)
        get_model, get = xt.state_dict, xt.optimizer_state_dict
        if source == "fsdp":
            get_model, get = get_model_state_dict, get_optimizer_state_dict
        with one_folder() as folder:
            state = {"model": get_model(model), "optimizer": get(model, optimizer)}
            dcp.save(state, checkpoint_id=f"{folder}/dcp")
            xt.save({"model": model, "optimizer": optimizer}, f"{folder}/ours")
            xt.save(state, f"{folder}/dict")
            for i, path in enumerate(("dcp", "ours", "dict")):
                # Two of four, so that all pairs of two of source, format and target come.
                for target in cuts[(number + i) % 2 :: 2]:
                    model, optimizer = stepped(target, 0)
                    xt.load(f"{folder}/{path}", like={"model": model, "optimizer": optimizer})
                    for name, x in whole_state(model, optimizer).items():
                        torch.testing.assert_close(x, expected[name], msg=f"{path} {target} {name}")


@on_four
def test_a_state_dict_is_loaded_in_another_layout() -> None:
    model, optimizer = stepped("tp", 3)
    expected = whole_state(model, optimizer)
    state = xt.optimizer_state_dict(model, optimizer)
    other, loaded = stepped("zero", 0)
    xt.load_state_dict(other, xt.state_dict(model))
    xt.load_optimizer_state_dict(other, loaded, state)
    optimizer.step()  # of which the loaded one knows nothing
    for name, x in whole_state(other, loaded).items():
        torch.testing.assert_close(x, expected[name])


@on_four
def test_a_number_beside_a_block_of_one_element_is_no_block() -> None:
    """A bias [4] has blocks [1] on dp=4, as moments of it have, and a count of shape [1] has not."""

    def begun(shard: str) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        mesh = Mesh(dp=2, tp=2)
        model = nn.Linear(3, 4)
        xt.parallelize(model, {"**": f"o/{shard} ... -> o ..."}, {"": "b c -> b/dp c"}, mesh)
        return model, SGD(model.parameters(), torch.tensor([0.5]))

    def set_state(model: nn.Module, optimizer: Optimizer) -> None:
        """Give the parameters a count [7], and moments that are the parameters."""
        for x in model.parameters():
            optimizer.state[x] = {"n": torch.tensor([7.0]), "moment": x.detach().clone()}

    def is_right(model: nn.Module, optimizer: Optimizer) -> bool:
        """Tell whether the state is that of `set_state`, for blocks of any size."""
        states = [(x, optimizer.state[x]) for x in model.parameters()]
        rates = [group["lr"].tolist() for group in optimizer.param_groups]
        return rates == [[0.5]] and all(
            state["n"].tolist() == [7] and torch.equal(state["moment"], x) for x, state in states
        )

    saved = begun("dp/tp")
    set_state(*saved)
    whole = xt.optimizer_state_dict(*saved)
    assert [x["n"].shape for x in whole["state"].values()] == [(1,), (1,)]
    with one_folder() as folder:
        xt.save({"m": saved[0], "o": saved[1]}, folder)
        for shard in ("dp", "dp/tp", "tp"):
            model, optimizer = begun(shard)
            optimizer.param_groups[0]["lr"] = torch.tensor([0.1])
            xt.load(folder, like={"m": model, "o": optimizer})
            assert is_right(model, optimizer), shard
            other = begun(shard)
            xt.load_optimizer_state_dict(*other, whole)
            assert is_right(*other), shard


@on_four
def test_states_that_no_layout_follows_for() -> None:
    model, optimizer = stepped("tp", 1)
    _, own = stepped("whole", 1)
    before = whole_state(model, optimizer)
    packed = torch.optim.AdamW(model.parameters())
    packed.state[model.up.weight] = {"absmax": torch.ones(3)}
    listed = torch.optim.AdamW(model.parameters())
    listed.state[model.up.weight] = {"history": [torch.ones(3)]}
    state = xt.optimizer_state_dict(model, optimizer)
    odd = copy.deepcopy(state)
    odd["state"]["up.weight"]["exp_avg"] = torch.ones(8, 10)
    unknown = {**state, "state": {"nowhere": {}}}
    groups = {**state, "param_groups": [{**state["param_groups"][0], "params": ["up.bias"]}]}
    load = xt.load_optimizer_state_dict
    with one_folder() as folder:
        assert_refused(
            (
                optimizer.state_dict,
                "XshardError: state_dict() of an optimizer of blocks has blocks",
            ),
            (
                lambda: xt.optimizer_state_dict(model, packed),
                "ShapeError: up.weight: absmax: a state of shape (3,), of a parameter (10, 8)",
            ),
            (
                lambda: xt.save({"m": model, "o": packed}, folder),
                "ShapeError: leaf 'o.state.up.weight.absmax': a state of shape (3,)...store the",
            ),
            (
                lambda: xt.save({"m": model, "o": listed}, folder),
                "XshardError: leaf 'o': the state 'history' of up.weight is [tensor",
            ),
            (
                lambda: xt.save({"optimizer": optimizer}, folder),
                "XshardError: leaf 'optimizer': the optimizer trains a tensor...{\"model\": model",
            ),
            (
                lambda: xt.optimizer_state_dict(model, own),
                "XshardError: the optimizer trains a tensor",
            ),
            (
                lambda: load(model, optimizer, odd),
                "ShapeError: up.weight: exp_avg: a state of shape",
            ),
            (lambda: load(model, optimizer, unknown), "XshardError: a state of nowhere"),
            (lambda: load(model, optimizer, groups), "XshardError: the optimizer has groups"),
            (lambda: load(model, optimizer, {}), "XshardError: the state's 'state' is None"),
            (
                lambda: load(model, optimizer, state | {"param_groups": None}),
                "XshardError: param_groups is None",
            ),
            (
                lambda: load(model, optimizer, state | {"param_groups": [{"lr": 1}]}),
                "XshardError: one of param_groups is {'lr': 1}",
            ),
            (
                lambda: load(model, optimizer, state | {"state": {"up.bias": 3}}),
                "XshardError: the state of up.bias is 3",
            ),
            (
                lambda: load(model, optimizer, state | {"state": {"up.bias": {"exp_avg": [1]}}}),
                "XshardError: the state 'exp_avg' of up.bias is [1]",
            ),
            (
                lambda: load(model, optimizer, state | {"state": {"up.bias": {"n": 1}}}),
                "XshardError: AdamW does not take this state: KeyError('step')",
            ),
            (
                lambda: xt.save({"bias": model.up.bias}, folder),
                "ReplicaError: leaf 'bias': blocks differ along 'world'...rules= says how",
            ),
            (
                lambda: xt.save({"n": torch.ones(2) * dist.get_rank()}, f"{folder}/last", keep=2),
                "XshardError: keep=2",
            ),
            is_alike=True,
        )
        assert not list(Path(folder).iterdir())
        xt.save({"m": model, "o": optimizer}, folder)
        fewer = torch.optim.AdamW([model.up.weight])
        assert_refused(
            (
                lambda: xt.load(folder, like={"m": model, "o": fewer}),
                "XshardError: leaf 'o': the optimizer has",
            ),
            (
                lambda: xt.load(folder, like={"m": model}),
                "XshardError: in the checkpoint alone: o.param_groups",
            ),
        )
    after = whole_state(model, optimizer)
    assert all(torch.equal(x, before[name]) for name, x in after.items())
    assert still_connected()


@on_four
def test_replicas_are_compared_before_anything_is_written() -> None:
    rank = dist.get_rank()
    both = Mesh(dp=2, tp=2)
    cut = {"w": "o/tp i", "**": "..."}
    for x, is_equal in (
        (torch.arange(6.0).view(2, 3) + rank % 2, True),  # along dp alone
        (torch.ones(2, 3) * (1 + 1e-7 * rank), True),  # kernels that add in another order
        (torch.arange(6).view(2, 3) + rank // 2, False),
        (torch.full((2, 3), rank > 1), False),
        (torch.full((2, 3), 1 + rank).to(torch.float8_e4m3fn), False),
        (torch.full((2, 3), torch.nan), True),
    ):
        for save in (xt.save, lambda *given: xt.async_save(*given).wait()):
            with one_folder() as folder:
                tree = {"a": torch.ones(1), "w": x, "step": 3}
                if is_equal:
                    save(tree, folder, cut, both)
                    continue
                with pytest.raises(
                    xs.errors.ReplicaError, match="leaf 'w': blocks differ along 'dp'"
                ):
                    save(tree, folder, cut, both)
                assert not list(Path(folder).iterdir())
    assert still_connected()


@on_four
def test_what_is_compiled_is_saved_under_its_own_names() -> None:
    model = xt.parallelize(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)),
        {"**": "o/dp ... -> o ..."},
        {"": "b c -> b/dp c"},
        Mesh(dp=4),
    )
    expected = {name: x.full_tensor() for name, x in xt.state_dict(model).items()}
    model[0] = torch.compile(model[0], backend="eager")
    for compiled in (model, torch.compile(model, backend="eager")):
        state = xt.state_dict(compiled)
        assert {
            name: x.full_tensor() for name, x in state.items() if x.ndim
        }.keys() == expected.keys()
        xt.load_state_dict(compiled, state)
        with one_folder() as folder:
            xt.save({"model": compiled}, folder)
            loaded = xt.load(folder)
        assert all(torch.equal(loaded[f"model.{name}"], x) for name, x in expected.items())


class Extra(Net):
    """Has a state that is no buffer."""

    seen: Any = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, seen: Any) -> None:
        self.seen = seen


def zero_of(model: nn.Module) -> nn.Module:
    return xt.parallelize(model, ZERO, {"": "b c -> b/dp c"}, Mesh(dp=4))


@on_four
def test_a_model_on_the_meta_device_is_still_its_optimizers() -> None:
    model, optimizer = stepped("zero", 2)
    expected = whole_state(model, optimizer)
    with one_folder() as folder:
        for path, saved in (("both", {"m": model, "o": optimizer}), ("model", {"m": model})):
            xt.save(saved, f"{folder}/{path}")
            with torch.device("meta"):
                loaded = Net()
            loaded = zero_of(loaded)
            its = AdamW(loaded.parameters(), 0.01)
            xt.load(
                f"{folder}/{path}",
                like={"m": loaded, "o": its} if path == "both" else {"m": loaded},
            )
            parameters = its.param_groups[0]["params"]
            assert all(x is y for x, y in zip(parameters, loaded.parameters(), strict=True))
            found = whole_state(loaded, its)
            assert found.keys() == expected.keys() or path == "model"
            assert all(torch.equal(x, expected[name]) for name, x in found.items())


@on_four
def test_what_parallel_models_have_beside_their_parameters() -> None:
    def begun(seen: Any) -> tuple[nn.ModuleDict, Optimizer]:
        both = nn.ModuleDict({"a": zero_of(Extra()), "b": net("tp")})
        both["a"].seen = seen
        return both, AdamW(both.parameters(), 0.01)

    (both, optimizer), (loaded, its) = begun({"rows": (1, [2])}), begun(None)
    for number, x in enumerate(both.parameters()):
        x.grad = torch.full_like(x, 1.0 + number)
    optimizer.step()
    with one_folder() as folder:
        xt.save({"models": both, "o": optimizer}, folder)
        xt.load(folder, like={"models": loaded, "o": its})
        assert loaded["a"].seen == {"rows": (1, [2])}
        for x, y in zip(both.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(x, y)
            assert torch.equal(optimizer.state[x]["exp_avg"], its.state[y]["exp_avg"])
        both["a"].late = nn.Linear(2, 2)
        changed = "XshardError: the model has changed since parallelize: late.weight came into it"
        assert_refused((lambda: xt.save({"models": both}, folder), changed))


class Held:
    """An object with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@on_four
def test_tensors_in_the_state_of_an_object_keep_their_layouts() -> None:
    model = net("zero")
    rank = torch.tensor([dist.get_rank()])
    with one_folder() as folder:
        for path in ("ours", "dcp"):
            held = {"weights": xt.state_dict(model), "seen": [1]}
            own = {"weights": xt.state_dict(net("tp")), "seen": [0]}
            rules = None
            if path == "ours":  # DCP has leaves alone, which fill those of the object
                held |= {"rank": rank}
                own |= {"rank": torch.zeros_like(rank), "seen": []}
                rules = {"held.rank": "n/dp", "**": "..."}
                xt.save({"held": Held(held)}, f"{folder}/{path}", rules, Mesh(dp=4))
            else:
                dcp.save({"held": held}, checkpoint_id=f"{folder}/{path}")
            with torch.no_grad():
                for x in own["weights"].values():
                    x.mul_(0)
            loaded = Held(own)
            xt.load(f"{folder}/{path}", rules, Mesh(dp=4), like={"held": loaded})
            assert loaded.state["seen"] == [1]
            assert path == "dcp" or torch.equal(loaded.state["rank"], rank)
            for name, x in xt.state_dict(model).items():
                found = loaded.state["weights"][name]
                wholes = [y.full_tensor() if isinstance(y, DTensor) else y for y in (found, x)]
                assert torch.equal(*wholes), (path, name)


@on_four
def test_an_object_that_fails_on_one_process_is_told_to_all() -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if dist.get_rank() == 1:
                raise ValueError("not here")

    with one_folder() as folder:
        xt.save({"picky": Picky()}, folder)
        with pytest.raises(xs.XshardError, match="ValueError: not here"):
            xt.load(folder, like={"picky": Picky()})
    assert still_connected()


@on_four
def test_training_goes_on_beside_a_save() -> None:
    with one_folder() as folder:
        run = Run("zero").train(3)
        expected = run.whole()
        hold = threading.Event()
        write = background.write

        def late(*args: Any) -> Any:
            assert hold.wait(60)
            return write(*args)

        with mock.patch.object(background, "write", late):
            saving = xt.async_save(run.tree, f"{folder}/step_3")
            run.train(3)
            assert not saving.done() and latest(folder) is None
            refused = "another save is writing into it"
            with pytest.raises(xs.XshardError, match=refused):
                xt.save(run.tree, f"{folder}/step_3")
            hold.set()
            saving.wait()
        found = Run("tp").resumed(str(latest(folder))).whole()
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x)


@on_four
def test_a_process_that_fails_beside_the_program_is_told_to_all() -> None:
    rank = dist.get_rank()
    with one_folder() as folder:
        xt.save({"w": torch.ones(2)}, folder, {"w": "n/tp"}, Mesh(tp=4))
        full = (
            {"side_effect": OSError(28, "No space left on device")}
            if rank == 2
            else {"wraps": os.pwrite}
        )
        with mock.patch.object(os, "pwrite", **full):
            saving = xt.async_save({"w": torch.zeros(2)}, folder, {"w": "n/tp"}, Mesh(tp=4))
            with pytest.raises(xs.XshardError, match="No space left on device"):
                saving.wait()
        dist.barrier()
        write_report = background._write_report

        def unreported(path: Path, process: int, report: Any) -> None:
            if process == 2:
                raise OSError(28, "No space left on device")
            time.sleep(0.5 * (process == 3))  # the folder stays until all have ended
            write_report(path, process, report)

        with mock.patch.object(background, "_write_report", unreported):
            saving = xt.async_save({"w": torch.zeros(2)}, folder, {"w": "n/tp"}, Mesh(tp=4))
            with pytest.raises(xs.XshardError, match="process 2 has ended, and has not reported"):
                saving.wait()
        if rank == 3:
            assert saving._future.exception() is None
        dist.barrier()
        assert torch.equal(xt.load(folder)["w"], torch.ones(8))
        assert not list(Path(folder).glob(".saving-*"))
        xt.async_save({"w": torch.zeros(2)}, folder, {"w": "n/tp"}, Mesh(tp=4)).wait()
        assert torch.equal(xt.load(folder)["w"], torch.zeros(8))


@on_four
def test_the_last_checkpoints_of_a_run_stay() -> None:
    with one_folder() as folder:
        for step in range(8, 12):
            save = xt.save if step % 2 else xt.async_save
            saving = save({"step": step}, f"{folder}/step_{step}", keep=2)
            if saving is not None:
                saving.wait()
            xt.save({"step": step}, f"{folder}/other{step}")
        xt.save({"step": 3}, f"{folder}/step_3", keep=2)  # begun again: it is not removed at once
        dist.barrier()
        steps = {path.name for path in Path(folder).iterdir() if path.name.startswith("step")}
        assert steps == {"step_3", "step_10", "step_11"}
        assert latest(folder) == Path(folder) / "step_11"
        assert xt.load(latest(folder)) == {"step": 11}
        assert len(list(Path(folder).iterdir())) == 7
