"""One module, parameter or buffer under several names: right by either name, or refused and left as it is."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, check_error

WIDTH = 4


class Scale(nn.Module):
    """Has a parameter and a buffer, of one dim; they may be tied to those of others."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(_numbers(draw, WIDTH))
        self.register_buffer("shift", _numbers(draw, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


class Node(nn.Module):
    """Calls its children in turn, as attributes and in a list: some are also elsewhere in the model."""

    def __init__(self, children: list[nn.Module], listed: list[nn.Module]) -> None:
        super().__init__()
        self.names = [f"c{i}" for i in range(len(children))]
        for name, child in zip(self.names, children, strict=True):
            setattr(self, name, child)
        self.layers = nn.ModuleList(listed)

    def forward(self, x: Tensor) -> Tensor:
        for module in (*[getattr(self, name) for name in self.names], *self.layers):
            x = torch.relu(module(x)) % 7
        return x


def _numbers(draw: random.Random, *shape: int) -> Tensor:
    """Small whole numbers, with which sums and products are exact."""
    n = torch.Size(shape).numel()
    return torch.tensor([draw.choice([-1.0, 0.0, 0.0, 1.0]) for _ in range(n)]).double().view(shape)


def linear(draw: random.Random) -> nn.Linear:
    made = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5).double()
    for x in made.parameters():
        x.data = _numbers(draw, *x.shape)
    return made


def graph(seed: int, depth: int = 2) -> Node:
    """A random model of few modules, each under one name or several, at any depth."""
    draw = random.Random(seed)
    pool: list[nn.Module] = []

    def module(depth: int) -> nn.Module:
        if pool and draw.random() < 0.4:
            return draw.choice(pool)
        kind = draw.random()
        if depth and kind < 0.4:
            made = node(depth - 1)
        else:
            made = linear(draw) if kind < 0.8 else Scale(draw)
        pool.append(made)
        return made

    def node(depth: int) -> Node:
        children = [module(depth) for _ in range(draw.choice([1, 2, 2, 3]))]
        listed = [module(depth)] * draw.choice([0, 0, 1, 2])
        return Node(children, listed)

    model = node(depth)
    leaves = [m for m in pool if not isinstance(m, Node)]
    for first, second in itertools.pairwise(leaves):
        if type(first) is type(second) and draw.random() < 0.3:
            second.weight = first.weight
            if isinstance(first, Scale) and draw.random() < 0.5:
                second.register_buffer("shift", first.shift)
    if draw.random() < 0.2:
        model.again = next(iter(model.parameters()))  # a second name of its own
    return model


# ---- what is asked


def rules_for(seed: int, model: nn.Module) -> dict[str, Any]:
    """Rules by some of the names of a model's modules and parameters."""
    draw = random.Random(f"rules {seed}")
    names = [
        n
        for n, m in dict(model.named_modules(remove_duplicate=False)).items()
        if n and not isinstance(m, nn.ModuleList)
    ]
    parameters: dict[str, str] = {}
    inputs = {"": "b c -> b/dp c"}
    outputs = {}
    if draw.random() < 0.3:  # columns of some layers over tp
        inputs = {"": "b c"}
        axis = "tp"
        for name in draw.sample(names, min(len(names), 2)):
            if isinstance(model.get_submodule(name), nn.Linear):
                parameters |= {f"{name}.weight": "o/tp i"}
                if model.get_submodule(name).bias is not None:
                    parameters |= {f"{name}.bias": "o/tp"}
                inputs[name] = "b c -> b c | copy(tp)"
                outputs[name] = "b o/tp -> b o"
    else:
        axis = "dp"
        tensors = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        for name in draw.sample(tensors, draw.randint(0, min(3, len(tensors)))):
            parameters[name] = draw.choice(["o/dp ... -> o ...", "o/dp ... -> o ...", "..."])
        if draw.random() < 0.5:
            parameters |= {"**.weight": "o/dp ... -> o ..."}
        for name in draw.sample(names, draw.randint(0, min(2, len(names)))):
            inputs[name] = "b/dp c"
    rules = {
        "parameters": {**parameters, "**": "..."},
        "inputs": inputs,
        "outputs": outputs,
        "mesh": xs.Mesh({axis: 2}),
    }
    if draw.random() < 0.5:
        rules["gathers"] = draw.choice(["", *names])
    if draw.random() < 0.3:
        rules["keep"] = draw.choice([True, *[n for n, _ in model.named_parameters()]])
    return rules


X = torch.arange(8.0 * WIDTH).double().view(8, WIDTH) % 5 - 2
WEIGHTS = torch.arange(8.0 * WIDTH).double().view(8, WIDTH) % 3


def loss_of(y: Tensor, mesh: xs.Mesh) -> Tensor:
    if "dp" not in mesh.axes:
        return (y * WEIGHTS).sum()
    weights = xt.redistribute(WEIGHTS, "b c -> b/dp c", mesh)
    return xt.redistribute((y * weights).sum(), "() | sum(dp) -> ()", mesh)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}


def one_device(seed: int) -> dict[str, Tensor | None]:
    model = graph(seed)
    (model(X) * WEIGHTS).sum().backward()
    return gradients_of(model)


def check_gradients(model: nn.Module, seed: int, mesh: xs.Mesh) -> None:
    """A step of the parallel model has this process's blocks of the gradients of one device."""
    model.zero_grad()
    loss_of(model(X), mesh).backward()
    by_name = model._xshard_parallel.by_name
    for name, wanted in one_device(seed).items():
        found = dict(model.named_parameters(remove_duplicate=False))[name].grad
        if wanted is None or found is None:
            assert found is None or not found.any(), name
            assert wanted is None or not wanted.any(), name
        else:
            block = by_name[name].block_of(wanted, model._xshard_parallel.context)
            assert torch.equal(found, block), (name, found, block)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    state = xt.state_dict(model)
    return {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in state.items()}


# ---- what is left as it is


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a user can see of a model: classes, attributes, hooks, tensors, their values and places."""
    seen: dict[str, Any] = {}
    for name, module in dict(model.named_modules(remove_duplicate=False)).items():
        for key, value in vars(module).items():
            seen[f"{name}: {key}"] = list(value.items()) if isinstance(value, dict) else value
        seen[f"{name}: type"] = type(module)
        for key, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None:
                facts = (id(x), type(x), x.device, x.dtype, x.requires_grad, x.grad)
                seen[f"{name}: value of {key}"] = (*facts, x.tolist() if not x.is_meta else x.shape)
    return seen


def check_unchanged(model: nn.Module, before: Mapping[str, Any]) -> None:
    after = snapshot(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, list):
            assert [(k, id(v)) for k, v in value] == [(k, id(v)) for k, v in after[name]], name
        else:
            assert value == after[name], name


def outcome(call: Callable[[], Any], model: nn.Module) -> str:
    """The error of a call, which all ranks have and which leaves the model as it is; empty without one."""
    before = snapshot(model)
    error = ""
    try:
        call()
    except xs.XshardError as raised:
        error = f"{type(raised).__name__}: {raised}"
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    assert len(set(errors)) == 1, errors
    if error:
        check_unchanged(model, before)
    return error


# ---- the properties


def _parallel(seed: int) -> tuple[str, nn.Module, dict[str, Any]]:
    model = graph(seed)
    rules = rules_for(seed, model)
    return outcome(lambda: xt.parallelize(model, **rules), model), model, rules


def check_parallel(seed: int) -> str:
    error, model, rules = _parallel(seed)
    if error:
        return error
    mesh = rules["mesh"]
    check_gradients(model, seed, mesh)
    check_gradients(model, seed, mesh)  # nothing is left over from the first step
    table = xt.explain(model)
    assert "a process" in table
    xt.verify(model, X, loss=lambda y: loss_of(y, mesh))
    whole = graph(seed).state_dict()
    state = whole_state(model)
    assert state.keys() == whole.keys() and all(torch.equal(x, whole[n]) for n, x in state.items())
    doubled = {n: 2 * x for n, x in whole.items()}
    xt.load_state_dict(model, doubled)
    assert all(torch.equal(x, doubled[n]) for n, x in whole_state(model).items())
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    xt.save(model, folder[0])
    xt.load_state_dict(model, whole)
    xt.load(folder[0], like=model)
    assert all(torch.equal(x, doubled[n]) for n, x in whole_state(model).items())
    return ""


def same_objects(model: nn.Module) -> list[list[str]]:
    """The names of each module and tensor that has several."""
    names: dict[int, list[str]] = {}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    for name, x in (*model.named_modules(remove_duplicate=False), *tensors.items()):
        names.setdefault(id(x), []).append(name)
    return list(names.values())


def check_copied(seed: int, copied: Callable[[nn.Module], nn.Module]) -> str:
    error, model, rules = _parallel(seed)
    if error:
        return error
    two = copied(model)
    assert same_objects(two) == same_objects(model)
    for either in (two, model, two):
        check_gradients(either, seed, rules["mesh"])
    xt.verify(two, X, loss=lambda y: loss_of(y, rules["mesh"]))
    assert xt.explain(two).splitlines()[:4] == xt.explain(model).splitlines()[:4]
    return ""


def deep(seed: int) -> str:
    return check_copied(seed, copy.deepcopy)


def pickled(seed: int) -> str:
    return check_copied(seed, lambda model: pickle.loads(pickle.dumps(model)))


def check_suggested(seed: int) -> str:
    model = graph(seed, depth=1)
    before = snapshot(model)
    state = torch.get_rng_state()
    mesh = xs.Mesh(dp=2) if seed % 2 else xs.Mesh(tp=2)
    plan = xt.suggest(model, X, mesh, micro_batches=1, recompute=False, profile="h100")
    check_unchanged(model, before)
    assert torch.equal(state, torch.get_rng_state())
    rules = (plan.parameters, plan.inputs, mesh)
    error = outcome(lambda: xt.parallelize(model, *rules, outputs=plan.outputs), model)
    if error:
        return error
    whole = " ".join(dim.partition("/")[0] for dim in plan.result.partition("|")[0].split())

    def loss(y: Tensor) -> Tensor:
        return (xt.redistribute(y, f"{plan.result} -> {whole}", mesh) * WEIGHTS).sum()

    xt.verify(model, X, loss=loss)
    return ""


def _outcomes(check: Callable[[int], str], seeds: range) -> Counter[str]:
    """How often each outcome came, "" for all that is right; a failure names its seed."""
    outcomes = Counter[str]()
    for seed in seeds:
        try:
            outcomes[check(seed)] += 1
        except BaseException as error:
            error.add_note(f"in the graph of seed {seed}")
            raise
    return outcomes


on_two = SharedRanks(2)


@on_two
def test_objects_with_several_names_are_right_or_refused() -> None:
    outcomes = _outcomes(check_parallel, range(24))
    assert outcomes[""] >= 14, outcomes


@on_two
def test_suggested_rules_are_for_all_names() -> None:
    outcomes = _outcomes(check_suggested, range(2))
    assert outcomes[""] == 2, outcomes


@on_two
def test_copies_keep_their_names() -> None:
    for check in (deep, pickled):
        outcomes = _outcomes(check, range(12))
        assert outcomes[""] >= 6, outcomes


class Twice(nn.Module):
    """One layer under two names, and in a list of another module."""

    def __init__(self) -> None:
        super().__init__()
        draw = random.Random(0)
        self.a = linear(draw)
        self.b = self.a
        self.inner = Node([], [self.a])
        self.heads = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.b(torch.relu(self.a(x))))


@on_two
def test_rules_go_by_either_name() -> None:
    mesh = xs.Mesh(tp=2)
    for name, other in (("a", "b"), ("b", "inner.layers.0"), ("inner.layers.0", "a")):
        rules: dict[str, Any] = {
            "parameters": {f"{name}.*": "o/tp ...", "**": "..."},
            "inputs": {"": "b c", other: "b c -> b c | copy(tp)"},
            "outputs": {name: "b o/tp -> b o"},
            "gathers": other,
            "keep": f"{other}.weight",
            "counts": {"heads": "h/tp"},
        }
        model = xt.parallelize(Twice(), mesh=mesh, **rules)
        assert model.heads == 2
        wanted = Twice()
        (wanted(X) * WEIGHTS).sum().backward()
        (model(X) * WEIGHTS).sum().backward()
        rank = dist.get_rank()
        assert torch.equal(model.a.weight.grad, wanted.a.weight.grad.chunk(2)[rank])
        xt.verify(model, X, loss=lambda y: (y * WEIGHTS).sum())

    mesh = xs.Mesh(dp=2)
    gathered = xt.parallelize(
        Twice(),
        {"b.weight": "o/dp i -> o i", "**": "..."},
        {"": "b c -> b/dp c", "inner": "b/dp c"},  # both would gather the layer
        mesh,
    )
    assert xt.explain(gathered).count("o/dp i -> o i | copy(dp)") == 1
    xt.verify(gathered, X, loss=lambda y: loss_of(y, mesh))


def _refused(model: nn.Module, words: str, **changed: Any) -> None:
    rules: dict[str, Any] = {
        "parameters": {"**": "..."},
        "inputs": {"": "b c -> b/dp c"},
        "mesh": xs.Mesh(dp=2),
        **changed,
    }
    error = outcome(lambda: xt.parallelize(model, **rules), model)
    assert words in error, error


@on_two
def test_what_is_refused_leaves_the_model_as_it_is() -> None:
    contradictory = {"a.weight": "o/dp i -> o i", "b.weight": "o i", "**": "..."}
    _refused(Twice(), "a.weight and b.weight are one parameter", parameters=contradictory)
    _refused(Twice(), "a and b are one module", outputs={"a": "b/dp c", "b": "b/dp o"})
    # All rows inside one of them, so that its gradients are not summed.
    for text in ("...", "o/dp ... -> o ..."):
        _refused(
            Twice(),
            "activations differ along 'dp'",
            parameters={"**": text},
            inputs={"": "b c -> b/dp c", "inner": "b/dp c -> b c"},
            outputs={"inner": "b c -> b/dp c"},
        )
    inputs = {"": "b c", "inner": "b c -> b/dp c", "b": "s c"}
    _refused(Twice(), "activations differ along 'dp'", inputs=inputs)
    knot = Twice()
    knot.inner.outer = knot
    for call in (
        lambda: xt.parallelize(knot, {"**": "..."}, {"": "b c"}, xs.Mesh(dp=2)),
        lambda: xt.suggest(knot, X, xs.Mesh(dp=2)),
    ):
        check_error(call, "XshardError", "inside itself")
    buffered = Twice()
    buffered.register_buffer("shift", buffered.a.weight)
    _refused(buffered, "the buffer shift is the parameter a.weight")


class Lookup(nn.Module):
    """What preparing changes: the class of an embedding, and a hook of a layer."""

    def __init__(self) -> None:
        super().__init__()
        draw = random.Random(0)
        self.table = nn.Embedding(8, WIDTH).double()
        self.layer = linear(draw)
        self.last = linear(draw)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.layer(self.table(ids)))


@on_two
def test_an_error_at_any_time_leaves_the_model_as_it_is() -> None:
    rules: dict[str, Any] = {
        "parameters": {"table.weight": "v/tp c", "layer.weight": "o/tp i", "**": "..."},
        "inputs": {"": "b"},
        "outputs": {"table": "b c | sum(tp) -> b c", "layer": "b o/tp -> b o"},
        "mesh": xs.Mesh(tp=2),
    }
    torch.manual_seed(0)
    whole = Lookup().state_dict()
    late = {"last.weight": "o i | sum(tp)", **rules["parameters"]}
    _refused(Lookup(), "last.weight", **rules | {"parameters": late})
    # Each rank has prepared its model, and they disagree about an option, or values.
    model = Lookup()
    before = snapshot(model)
    with pytest.raises(xs.XshardError, match="options"):
        xt.parallelize(model, **rules, keep=dist.get_rank() == 0)
    check_unchanged(model, before)
    model.last.weight.data += dist.get_rank()
    _refused(model, "last.weight differs between", **rules)
    with torch.device("meta"):
        empty = Lookup()
    less = {n: x for n, x in whole.items() if n != "last.weight"}

    def fails(module: nn.Module) -> None:
        module.reset_parameters()
        if module is empty.last:
            raise xs.XshardError("no values")

    _refused(empty, "last.weight is on the meta device, and init= lacks it", **rules, init=less)
    _refused(empty, "no values", **rules, init=fails)
    torch.manual_seed(dist.get_rank())
    _refused(empty, "differs between", **rules, init=lambda m: m.reset_parameters())
    xt.parallelize(empty, **rules, init=whole)
    alive = Lookup()
    result = alive(torch.arange(8))
    _refused(alive, "waits for its backward pass", **rules)
    result.sum().backward()
    assert alive.table.weight.grad.shape == (8, WIDTH)


class Named(nn.Module):
    """A layer and a parameter with names of the caller's choice; what it leaves behind are attributes."""

    def __init__(self, layer: str, parameter: str) -> None:
        super().__init__()
        self.used = layer, parameter
        setattr(self, layer, nn.Linear(4, 8))
        self.register_parameter(parameter, nn.Parameter(torch.ones(8)))
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        self.cache["x"] = self.last = x
        self.register_buffer("table", torch.arange(8.0))
        layer, parameter = self.used
        y = getattr(self, layer)(x) * getattr(self, parameter) + weight
        return y + self.table + torch.rand(8)


def test_suggest_tells_names_of_arguments_from_those_of_modules_and_parameters() -> None:
    plans = {}
    for names in (("up", "scale"), ("x", "scale"), ("up", "weight"), ("weight", "x")):
        model = Named(*names)
        before = snapshot(model)
        batch = torch.randn(8, 4), torch.randn(8, 8)
        state = torch.get_rng_state()
        options = {"micro_batches": 1, "recompute": False, "profile": "h100"}
        plan = xt.suggest(model, batch, xs.Mesh(tp=2), **options)
        check_unchanged(model, before)
        assert torch.equal(state, torch.get_rng_state())
        assert set(plan.inputs[""]) == {"x", "weight"}
        assert plan.estimate().seconds == plan.seconds  # rules are read as they are written
        plans[names] = plan.seconds, plan.inputs[""], sorted(plan.parameters.values())
    assert len(set(map(str, plans.values()))) == 1, plans


def test_a_tied_parameter_is_fixed_by_either_name() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)

    def suggested(fixed: Mapping[str, str]) -> Any:
        options = {"micro_batches": 1, "recompute": False, "profile": "h100"}
        plan = xt.suggest(model, torch.ones(8, 4), xs.Mesh(tp=2), fixed=fixed, **options)
        return plan.parameters.find("0.weight")

    assert suggested({"0.weight": "o/tp i"}).startswith("o/tp i")
    assert suggested({"2.weight": "o/tp i", "**": "..."}).startswith("o/tp i")
    with pytest.raises(xs.XshardError, match=r"0\.weight and 2\.weight are one array"):
        suggested({"0.weight": "o/tp i", "2.weight": "o i/tp"})
