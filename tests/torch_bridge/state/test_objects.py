"""Objects in a tree that is saved, in one process: they get what was saved, or an error names why not."""

from __future__ import annotations

import copy
import multiprocessing
import shutil
import threading
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

import torch_bridge as xt
from torch_bridge.versions.pytree import tree_map_only
from xshard import XshardError
from xshard.state.files import FileError, background, latest


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> nn.Module:
    for seed in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def moments(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [dict(optimizer.state[x]) for group in optimizer.param_groups for x in group["params"]]


def plain(tree: Any) -> Any:
    """A tree that Python can compare."""
    return tree_map_only(Tensor, lambda x: (x.dtype, x.tolist()), tree)


def assert_equal(found: Any, expected: Any) -> None:
    assert plain(found) == plain(expected)


class Loader:
    """An object with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


# ---- numbers and texts


class Pair(NamedTuple):
    first: int
    second: int


STATES: tuple[Any, ...] = (
    {"seen": [1, 2, 3], "of": {"x": 1}},
    {"seen": [], "of": {}},
    [1, 2.5, "a", None, True, float("inf"), 2**70],
    {"nested": (1, (2, [3])), 4: {"a.b": 5}, "": 6, (7, "key"): 8, True: 9},
    Counter({4: 2, 2: 1}),
    OrderedDict(b=1, a=deque([1, 2])),
    {"x": np.float32(0.1), "n": np.int64(3), "is": np.True_},
    {"shadow": {"up.weight": torch.arange(3.0), "n": 1}, "list": [torch.ones(2, 2).bfloat16()]},
    {},
    torch.ones(3),
    7,
)


@pytest.mark.parametrize("own", [{}, {"seen": [5, 6], "x": torch.zeros(1)}, [0, [1]]])
def test_an_object_gets_the_state_that_was_saved(own: Any, tmp_path: Path) -> None:
    for number, state in enumerate(STATES):
        xt.save({"loader": Loader(state)}, tmp_path / str(number))
        loader = Loader(copy.deepcopy(own))
        xt.load(tmp_path / str(number), like={"loader": loader})
        assert type(loader.state) is type(state)
        assert_equal(loader.state, state)


def test_a_deque_keeps_its_limit(tmp_path: Path) -> None:
    state = {"losses": deque([torch.ones(1), 2], maxlen=3)}
    xt.save({"loader": Loader(state)}, tmp_path)
    loader = Loader({})
    xt.load(tmp_path, like={"loader": loader})
    assert loader.state["losses"].maxlen == 3
    assert_equal(loader.state, state)


@pytest.mark.parametrize(
    "state", [Pair(1, 2), {"x": np.ones(2)}, {"x": [{1, 2}]}, {"x": 1j}, {Pair(1, 2): 3}, [b"a"]]
)
def test_a_state_that_would_come_back_as_something_else(state: Any, tmp_path: Path) -> None:
    words = "is .*\n  tensors, numbers and texts are saved, in dicts, lists"
    with pytest.raises(XshardError, match=f"^leaf 'loader.*{words}"):
        xt.save({"loader": Loader(state)}, tmp_path)
    twice = Loader({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}})
    for tree in ({"loader": twice}, {"m": net(), "m.0.weight": torch.ones(1)}):
        with pytest.raises(XshardError, match="two leaves are called"):
            xt.save(tree, tmp_path)


def test_numbers_and_texts_are_in_both_the_tree_and_the_checkpoint(tmp_path: Path) -> None:
    model = net()
    xt.save({"model": model, "losses": [1, 2, 3], "n": np.int64(4)}, tmp_path)
    optimizer = AdamW(model.parameters())
    tree = {"model": model, "losses": [0, 0, 0], "n": 0}
    beside = {"optimizer": optimizer, "schedule": lr_scheduler.StepLR(optimizer, 1)}
    for wanted, words in (
        (tree | {"step": 0}, "in the tree alone: step"),
        (tree | beside, "in the tree alone: schedule, optimizer.param_groups"),
        (tree | {"losses": [0, 0]}, "in the checkpoint alone: losses.2"),
        (tree | {"losses": [0, 0, 0, 0]}, "in the tree alone: losses.3"),
        (tree | {"losses": []}, "in the checkpoint alone: losses.0, losses.1, losses.2"),
        ({"model": model}, "in the checkpoint alone: losses.0, losses.1, losses.2, n"),
    ):
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(XshardError, match=words):
            xt.load(tmp_path, like=wanted)
        assert optimizer.state_dict() == before
    with pytest.warns(
        UserWarning, match=r"in the tree alone: step, schedule, optimizer\.param_groups"
    ):
        found = xt.load(tmp_path, like=tree | beside | {"step": 5}, strict=False)
    assert (found["losses"], found["n"], found["step"]) == ([1, 2, 3], 4, 5)
    assert xt.load(tmp_path, like=tree)["n"] == 4


# ---- schedulers, scalers and modules

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.MultiStepLR(o, [1, 3])],
        [2],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.05),
}


def rates(schedule: Any, optimizer: Optimizer, losses: range) -> list[Any]:
    found = []
    for loss in losses:
        optimizer.step()
        schedule.step(*[loss // 3] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))
        found.append([(g["lr"], g["momentum"]) for g in optimizer.param_groups])
    return found


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")
@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)])
def test_every_schedule_of_torch_goes_on(rate: Any, tmp_path: Path) -> None:
    classes = {
        name
        for name, x in vars(lr_scheduler).items()
        if isinstance(x, type) and issubclass(x, lr_scheduler.LRScheduler)
    }
    assert classes - {"LRScheduler", "_LRScheduler"} == SCHEDULES.keys() - {"SWALR"}
    model = net()
    for name, make in SCHEDULES.items():
        if isinstance(rate, Tensor) and name == "SWALR":
            continue  # it takes numbers alone

        def begun(make: Callable[[Optimizer], Any] = make) -> tuple[Optimizer, Any]:
            optimizer = SGD(model.parameters(), copy.deepcopy(rate), momentum=0.9)
            return optimizer, make(optimizer)

        optimizer, schedule = begun()
        rates(schedule, optimizer, range(3))
        xt.save({"m": model, "o": optimizer, "s": schedule}, tmp_path / name)
        expected = copy.deepcopy(rates(schedule, optimizer, range(3, 12)))
        optimizer, schedule = begun()
        rates(schedule, optimizer, range(5))
        xt.load(tmp_path / name, like={"m": model, "o": optimizer, "s": schedule})
        assert_equal(rates(schedule, optimizer, range(3, 12)), expected)


def test_a_scaler_goes_on(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model, loaded = net(), torch.amp.GradScaler("cpu")
    optimizer = SGD(model.parameters(), 0.1)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    xt.save({"scaler": scaler}, tmp_path)
    xt.load(tmp_path, like={"scaler": loaded})
    assert loaded.state_dict() == scaler.state_dict()


class Counts(nn.Module):
    """A module with a state that is no buffer."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, seen: Any) -> None:
        self.seen = seen


@pytest.mark.parametrize("seen", [7, "text", torch.ones(2), {"n": (1, [2]), "x": torch.ones(1)}])
def test_what_a_module_has_beside_its_tensors(seen: Any, tmp_path: Path) -> None:
    xt.save({"m": nn.Sequential(Counts(seen), nn.Linear(1, 1))}, tmp_path)
    for own in (0, torch.zeros(2), None):
        found = nn.Sequential(Counts(own), nn.Linear(1, 1))
        xt.load(tmp_path, like={"m": found})
        assert_equal(found[0].seen, seen)  # type: ignore[union-attr]
    with pytest.raises(XshardError, match=r"in the checkpoint alone: .*m\.0\._extra_state"):
        xt.load(tmp_path, like={"m": nn.Sequential(nn.Module(), nn.Linear(1, 1))})


def test_tied_weights_are_stored_under_one_name_or_both(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    model = tied()
    xt.save(model, tmp_path / "both")
    one = {name: x for name, x in model.state_dict().items() if name != "1.weight"}
    xt.save(one, tmp_path / "one")
    for stored in ("both", "one"):
        loaded = tied()
        xt.load(tmp_path / stored, like=loaded)
        assert_equal(loaded.state_dict(), model.state_dict())


# ---- optimizers


def grouped(model: nn.Sequential, *groups: dict[str, Any], **options: Any) -> AdamW:
    """AdamW with these groups, whose parameters are named."""
    made = []
    for group in groups:
        parameters = [model.get_parameter(name) for name in group["params"]]
        made.append({**group, "params": parameters})
    return AdamW(made, **options)


def test_groups_are_matched_by_their_parameters(tmp_path: Path) -> None:
    model = net()
    weights, biases = ["0.weight", "2.weight"], ["0.bias", "2.bias"]
    saved = grouped(
        model, {"params": weights, "lr": 0.5, "weight_decay": 0.9}, {"params": biases, "lr": 0.25}
    )
    xt.save({"m": train(model, saved), "o": saved}, tmp_path)

    def loaded(*groups: list[str]) -> dict[str, tuple[float, float]]:
        optimizer = grouped(model, *[{"params": names} for names in groups])
        xt.load(tmp_path, like={"m": model, "o": optimizer})
        found = {}
        for names, group in zip(groups, optimizer.param_groups, strict=True):
            found |= dict.fromkeys(names, (group["lr"], group["weight_decay"]))
        for x, values in saved.state.items():
            assert_equal(dict(optimizer.state[x]), dict(values))
        return found

    expected = dict.fromkeys(weights, (0.5, 0.9)) | dict.fromkeys(biases, (0.25, 0.01))
    assert loaded(weights, biases) == loaded(biases, weights[::-1]) == expected
    assert loaded(weights[:1], biases, weights[1:]) == expected
    assert loaded(*([name] for name in (*biases, *weights))) == expected
    own = r"\(0.weight, 0.bias\), \(2.weight, 2.bias\)"
    both = rf"has groups {own}, and the stored one \(0.weight, 2.weight\), \(0.bias, 2.bias\)"
    differ = "parameters of one group had other values of lr, weight_decay"
    with pytest.raises(XshardError, match=f"^leaf 'o': the optimizer {both}: {differ}"):
        loaded(["0.weight", "0.bias"], ["2.weight", "2.bias"])
    with pytest.raises(XshardError, match=r"one of them lacks 2.bias"):
        loaded(weights, biases[:1])

    fewer = grouped(model, {"params": weights})
    xt.save({"m": model, "o": fewer}, tmp_path)
    with pytest.raises(XshardError, match=r"one of them lacks 0.bias, 2.bias"):
        loaded(weights, biases)
    other = grouped(model, {"params": biases, "lr": 0.3}, {"params": weights})
    xt.load(tmp_path, like={"m": model, "o": other}, strict=False)
    assert [group["lr"] for group in other.param_groups] == [0.3, 0.001]


def test_groups_of_equal_options_may_be_merged(tmp_path: Path) -> None:
    model = net()
    saved = grouped(model, {"params": ["0.weight"]}, {"params": ["0.bias", "2.weight"]}, lr=0.5)
    xt.save({"m": model, "o": saved}, tmp_path)
    merged = grouped(model, {"params": ["2.weight", "0.bias", "0.weight"]})
    xt.load(tmp_path, like={"m": model, "o": merged})
    assert merged.param_groups[0]["lr"] == 0.5
    assert len(merged.param_groups[0]["params"]) == 3


def test_moments_that_are_not_stored_stay(tmp_path: Path) -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    xt.save({"m": model}, tmp_path / "model")
    xt.save({"m": model, "o": optimizer}, tmp_path / "fresh")
    train(model, optimizer)
    before = copy.deepcopy(moments(optimizer))
    for folder in ("model", "fresh"):
        with pytest.raises(XshardError, match=r"in the tree alone: o\."):
            xt.load(tmp_path / folder, like={"m": model, "o": optimizer})
        xt.load(tmp_path / folder, like={"m": model, "o": optimizer}, strict=False)
        assert_equal(moments(optimizer), before)


def test_what_has_nothing_in_common_is_refused_even_if_some_may_be_missing(tmp_path: Path) -> None:
    """As a model from the folder of a run: with `strict=False` nothing was loaded, and nobody told."""
    model = net()
    xt.save({"model": model, "step": 1}, tmp_path)
    with pytest.raises(
        XshardError, match=r"(?s)nothing of the tree .* which has model\..*like={'model'"
    ):
        xt.load(tmp_path, like=net(), strict=False)
    loaded = net()
    xt.load(tmp_path, like={"model": loaded}, strict=False)
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_moments_keep_their_bits_and_dtypes(dtypes: tuple[str, str], tmp_path: Path) -> None:
    of_parameters, of_moments = (getattr(torch, name) for name in dtypes)
    saved, like = [{}, {}]
    for tree in (saved, like):
        model = net(of_parameters)
        tree |= {"m": model, "o": AdamW(model.parameters())}
    for x in saved["o"].param_groups[0]["params"]:
        saved["o"].state[x] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(x.shape, dtype=of_moments),
            "n": 4,
        }
    xt.save(saved, tmp_path)
    xt.load(tmp_path, like=like)
    assert_equal(moments(like["o"]), moments(saved["o"]))


def test_one_optimizer_of_several_models_and_tensors(tmp_path: Path) -> None:
    def begun() -> dict[str, Any]:
        tree = {"a": net(), "b": net(), "t": nn.Parameter(torch.ones(1))}  # names twice
        parameters = [*tree["a"].parameters(), *tree["b"].parameters(), tree["t"]]
        return tree | {"o": AdamW(parameters, 0.1)}

    saved, like = begun(), begun()
    for x in saved["o"].param_groups[0]["params"]:
        x.grad = torch.rand_like(x)
    saved["o"].step()
    xt.save(saved, tmp_path)
    xt.load(tmp_path, like=like)
    assert_equal(moments(like["o"]), moments(saved["o"]))
    assert_equal(like["t"], saved["t"])
    average = AveragedModel(saved["a"])
    alone = SGD([saved["t"]], 0.1, momentum=0.9)
    xt.save({"t": saved["t"], "o": alone, "average": average}, tmp_path / "alone")
    xt.load(tmp_path / "alone", like={"t": saved["t"], "o": alone, "average": average})


class Wrapped(AdamW):
    """An optimizer whose state is elsewhere, as ZeroRedundancyOptimizer's is."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "shards": []}


def test_optimizers_that_are_refused(tmp_path: Path) -> None:
    model = net()
    wrapped = Wrapped(model.parameters())
    for call in (xt.save, lambda tree, folder: xt.load(folder, like=tree)):
        xt.save({"m": model}, tmp_path / "model")
        with pytest.raises(
            XshardError, match=r"leaf 'o': Wrapped has a state_dict.* of its own\n .*inside"
        ):
            call({"m": model, "o": wrapped}, tmp_path / "model")
    xt.save({"m": model, "o": SGD(model.parameters())}, tmp_path)
    adam = Adam(model.parameters())  # its options have the same names as those of AdamW
    with pytest.raises(XshardError, match=r"leaf 'o': .* optimizer SGD, for one that is Adam\n"):
        xt.load(tmp_path, like={"m": model, "o": adam})
    unfit = AdamW(model.parameters())
    unfit.state[model[0].weight] = {"n": 1}
    before = (unfit.state, unfit.param_groups)
    xt.save({"m": model, "o": unfit}, tmp_path)
    with pytest.raises(XshardError, match=r"AdamW does not take this state: KeyError"):
        xt.load(tmp_path, like={"m": model, "o": unfit})
    assert unfit.state is before[0] and unfit.param_groups is before[1]


@pytest.mark.parametrize("make", [Adafactor, Muon])
def test_factored_and_orthogonal_moments_of_whole_parameters(make: Any, tmp_path: Path) -> None:
    """Blocks are refused by these optimizers' first step."""
    torch.manual_seed(0)
    model, loaded = (nn.Linear(4, 6, bias=False) for _ in range(2))
    trees = [{"m": x, "o": make(x.parameters(), lr=0.01)} for x in (model, loaded)]
    train(model, trees[0]["o"])
    xt.save(trees[0], tmp_path)
    xt.load(tmp_path, like=trees[1])
    for tree in trees:
        train(tree["m"], tree["o"])
    assert torch.equal(model.weight, loaded.weight)


# ---- a save beside the program


def failing(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def failed_save(folder: Path) -> background.BackgroundSave:
    with (
        mock.patch.object(background, "write", failing),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        saving = xt.async_save({"step": 1}, folder)
        while not saving.done():
            pass
    assert f"the save into {folder} has failed" in str(told[-1].message)
    return saving


def test_a_failed_save_is_told_at_the_next_one(tmp_path: Path) -> None:
    failed_save(tmp_path)
    with pytest.raises(FileError, match=r"has failed: .*No space left on device"):
        xt.save({"step": 2}, tmp_path)
    assert latest(tmp_path) is None and not list(tmp_path.iterdir())
    saving = failed_save(tmp_path)
    with pytest.raises(FileError, match="No space left on device"):
        saving.wait()
    xt.save({"step": 2}, tmp_path)  # it was told
    assert xt.load(tmp_path) == {"step": 2}


def test_a_folder_that_goes_away_beside_its_save(tmp_path: Path) -> None:
    hold = threading.Event()
    write = background.write

    def late(*given: Any) -> Any:
        assert hold.wait(60)
        return write(*given)

    with mock.patch.object(background, "write", late), warnings.catch_warnings():
        warnings.simplefilter("error")  # which changes nothing of what is raised
        saving = xt.async_save({"w": torch.ones(2)}, tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
        hold.set()
        with pytest.raises(FileError, match=r"No such file.*\n  no checkpoint was there"):
            saving.wait()


def test_a_process_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    hold, end = threading.Event(), multiprocessing.get_context("fork").Event()
    with mock.patch.object(
        background, "write", side_effect=lambda *_: {} if hold.wait(60) else None
    ):
        saving = xt.async_save({"step": 1}, tmp_path)
        child = multiprocessing.get_context("fork").Process(target=end.wait, daemon=True)
        child.start()
        hold.set()
        saving.wait()
    xt.save({"step": 2}, tmp_path)
    end.set()
    child.join()
