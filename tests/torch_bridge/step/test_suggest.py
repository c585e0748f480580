"""Models of transformers as steps: every operation has a rule, equal layers are one, and the rules train."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_bridge as xt
import xshard as xs
from tests.step.prober import N, disagreeing, judged, numbers
from tests.torch_bridge.helpers import on_ranks
from torch_bridge.step.classes import describe_call
from torch_bridge.step.record import record_step
from torch_bridge.step.suggest import mean_over_rows
from xshard.step.record.trace import Trace

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "use_cache": False}
IDS = {"input_ids": (4, 8)}
MODELS = {
    # Three heads and 103 words do not divide over two devices.
    "Llama": ("CausalLM", {**SIZES, "hidden_size": 24, **THREE_HEADS}, IDS),
    "GPT2": (
        "LMHeadModel",
        {"vocab_size": 103, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        IDS,
    ),
    "T5": (
        "ConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
        {**IDS, "decoder_input_ids": (4, 6)},
    ),
    "ViT": (
        "ImageClassification",
        {**SIZES, "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 8},
        {"pixel_values": (4, 3, 16, 16)},
    ),
    "Mixtral": (
        "CausalLM",
        {**SIZES, **HEADS, "num_local_experts": 4, "experts_implementation": "batched_mm"},
        IDS,
    ),
    "Mamba": (
        "CausalLM",
        {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        {"input_ids": (4, 4)},
    ),
}
# Operations of a step. A Llama by hand has 16: two angles, a slice of the logits and the loss come beside.
OPS = {"Llama": 21, "GPT2": 23, "T5": 45, "ViT": 21, "Mixtral": 30, "Mamba": 28}
ONE_AXIS = ("T5", "Mamba")  # their searches take longest
UNEVEN = {  # operations of which whole heads, or nearly as many words, are on each device
    "Llama": {
        "model.layers.*.self_attn.q_proj": "b/dp s (h 8)/balanced(tp)",
        "model.layers.*.self_attn:view_5": "b/dp s (h 8)/balanced(tp)",
    },
    "GPT2": {"lm_head": "b/dp s v/balanced(tp)"},
}
IN_FLOAT32 = ("Mixtral",)  # its routers
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "hidden_dropout_prob")


def build(name):
    head, sizes, shapes = MODELS[name]
    kind = getattr(transformers, f"{name}{'' if head == 'LMHeadModel' else 'For'}{head}")
    config = kind.config_class(**{"vocab_size": 64, **sizes})
    for option in DROPOUTS:
        if hasattr(config, option):
            setattr(config, option, 0.0)
    config.use_cache = False
    torch.manual_seed(0)
    model = kind(config).double()
    generator = torch.Generator().manual_seed(1)
    batch = {
        key: torch.randint(3, 64, shape, generator=generator)
        if "ids" in key
        else torch.randn(shape, generator=generator, dtype=torch.float64)
        for key, shape in shapes.items()
    }
    return model, batch


def a_machine_for_small_models():
    """Slow at computing and fast at moving, so that small arrays are sharded."""
    machine = xs.load_profile("h100")
    links = {
        name: replace(getattr(machine, name), latency_s=1e-9, bytes_per_s=1e14)
        for name in ("default", "across")
    }
    slow = tuple((dtype, flops / 1e5) for dtype, flops in machine.flops_per_s)
    launches = tuple((kind, 1e-9) for kind, _ in machine.launch_s)
    return replace(machine, **links, flops_per_s=slow, launch_s=launches, copy_bytes_per_s=1e9)


def _mesh(name):
    return xs.Mesh(tp=4) if name in ONE_AXIS else xs.Mesh(dp=2, tp=2)


def _searched(name):
    """The rules of a model: parameters, inputs, outputs, what is gathered once and together; the result."""
    model, batch = build(name)
    options = {
        "micro_batches": 1,
        "recompute": False,
        "gap": 0.05,
        "overlap": 0.8,
        "profile": a_machine_for_small_models(),
    }
    fixed = {} if name in ONE_AXIS else {next(iter(batch)): "b/dp ..."}
    fixed |= UNEVEN.get(name, {})
    plan = xt.suggest(model, batch, _mesh(name), fixed=fixed, **options)
    ops = [op for op in plan.search.problem.step.ops if op.kind != "share" or op.name == ":tied"]
    assert len(ops) == OPS[name], (name, len(ops))
    assert not [op.name for op in ops if op.kind == "opaque"], name
    assert not plan.unused, name
    assert {op.times for op in ops} == ({1} if name == "T5" else {1, 2}), name
    parameters, inputs, outputs = (
        dict(getattr(plan, s)) for s in ("parameters", "inputs", "outputs")
    )
    assert "tp" in str(parameters) and "tp" in str(inputs), name
    # Inside a module that is entered sharded an operation is idle.
    assert name not in ONE_AXIS or "mean(" in str(parameters), name
    assert f"prefetch={plan.prefetch})" in str(plan)
    if name in UNEVEN:
        assert "balanced(tp)" in str(parameters) + plan.result, name
        assert plan.estimate().seconds == pytest.approx(plan.seconds), name
    return parameters, inputs, outputs, plan.once, plan.gathers, (plan.result, plan.result_lengths)


def summed_and_counted(logits, labels):
    """Cross entropy, and the number of labels that count."""
    logits, labels = logits.flatten(0, -2), labels.flatten()
    return F.cross_entropy(logits, labels, reduction="sum"), (labels >= 0).sum()


def _train(plans):
    for name, (parameters, inputs, outputs, once, gathers, result) in plans.items():
        mesh = _mesh(name)
        model, batch = build(name)
        result_text, lengths_of = result
        logits_of = xs.Layout.parse(result_text)

        # Labels, and the logits of a whole row; every third label does not count.
        lengths = (4, *{"T5": (6,), "ViT": (), "Mamba": (4,)}.get(name, (8,)))
        labels = torch.arange(math.prod(lengths)).view(lengths)
        labels = labels.remainder(8).where(labels.remainder(3) > 0, -100)

        def loss(y, labels=labels, logits_of=logits_of, mesh=mesh, lengths_of=lengths_of):
            how = logits_of, mesh, lengths_of
            return mean_over_rows(summed_and_counted, y.logits, [labels], *how)

        how = {"outputs": outputs, "gathers": gathers, "keep": once}
        xt.parallelize(model, parameters, inputs, mesh, **how)
        tol = 1e-5 if name in IN_FLOAT32 else 1e-10
        xt.verify(model, batch, loss=loss, tol=tol)


def _rows_of_all_layouts():
    """Means over rows whose classes are sharded, of uneven blocks, and a mean that is one already."""
    mesh, logits = xs.Mesh(dp=2, tp=2), torch.arange(6 * 3 * 8.0).view(6, 3, 8).sin()
    labels = torch.arange(18).view(6, 3)
    labels = labels.remainder(8).where(
        labels > 2, -100
    )  # the first row of the batch does not count
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for text in ("b s v", "b s v/tp", "b/dp s v/tp", "b s v/dp/tp"):
        layout = xs.Layout.parse(text)
        block = xt.redistribute(logits, (layout.unsharded, layout), mesh)
        mean = mean_over_rows(summed_and_counted, block, [labels], layout, mesh)
        torch.testing.assert_close(mean, expected)
        scores = mean_over_rows(torch.square, block, [], layout, mesh)
        torch.testing.assert_close(scores, logits.square().mean())
    layout = xs.Layout("b/dp s v/balanced(tp)")  # four classes and three: no block tells how many
    odd = logits[..., :7]
    block = xt.redistribute(odd, (layout.unsharded, layout), mesh)
    scores = mean_over_rows(torch.square, block, [], layout, mesh, {"v": 7})
    torch.testing.assert_close(scores, odd.square().mean())
    with pytest.raises(xs.errors.ShapeError, match="a mean of means") as error:
        mean_over_rows(lambda y: y.mean(), logits, [], xs.Layout("b s v"), mesh)
    assert 'reduction="none"' in str(error.value)


def _search_and_train():
    """Each rank searches for some of the models, and all train all of them."""
    _rows_of_all_layouts()
    found = [{}] * 4
    dist.all_gather_object(
        found, {name: _searched(name) for name in [*MODELS][dist.get_rank() :: 4]}
    )
    plans = {name: plan for some in found for name, plan in some.items()}
    assert plans.keys() == MODELS.keys() and any(once for *_, once, _, _ in plans.values())
    _train(plans)


def test_rules_for_six_models_train_as_on_one_device():
    on_ranks(4, _search_and_train)


class Others(torch.nn.Module):
    """Operations that the models above lack."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.ConvTranspose2d(4, 6, 2, 2), torch.nn.GroupNorm(3, 6)
        normed = torch.nn.Conv2d(6, 4, 3, padding=1)
        self.normed, self.prelu = (
            torch.nn.utils.parametrizations.weight_norm(normed, dim=1),
            torch.nn.PReLU(),
        )

    def forward(self, x):
        x = F.interpolate(F.max_pool2d(self.norm(self.up(x)), 2), scale_factor=2.0, mode="bilinear")
        x = torch.cat([self.prelu(self.normed(x)), x[:, :0]], 1).flip(2).roll(2, 3)
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.ones(
            4, dtype=torch.complex128
        )
        y = x.new_zeros(*x.shape[:-1], 10)
        y[..., :2] = torch.view_as_real(turned).flatten(-2)[..., 2:4]
        y[:, :, 1] = y[:, :, 0].cos()
        known = x.sin()
        known = torch.linalg.solve_triangular(x, known, upper=False, unitriangular=True)
        known = torch.linalg.solve_triangular(x, known, upper=True, left=False, unitriangular=True)
        return y, known


class Twice(torch.nn.Module):
    """A rule for the first argument moves one of two that are the same here."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Bilinear(4, 4, 4)

    def forward(self, x):
        return self.inner(x.sin(), x) + self.inner(x, x)


def test_operations_that_are_less_common_have_rules():
    step, _ = record_step(Others(), torch.empty(4, 4, 4, 4))
    assert not [op.name for op in step.ops if op.kind == "opaque"]
    written = next(op for op in step.ops if op.name == ":written")  # a slice of the last dim
    assert written.text == "b n4 n8_3 n10, b n4 n8_3 n2 -> b n4 n8_3 n10"
    assert [rule[0] for rule in written.axis_rules if rule[0] >= 0] == [0, 1, 2]
    row = next(op for op in step.ops if op.name == ":written_2")  # of one place in dim 2
    assert row.text == "b n4 n8_3 n10, b n4 n10 -> b n4 n8_3 n10"
    assert [rule[0] for rule in row.axis_rules if rule[0] >= 0] == [0, 1, 3]


def test_operations_that_differ_from_batch_to_batch_are_refused():
    class Picks(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)[x.sum(-1).nonzero()[:, 0]]

    with pytest.raises(
        xs.errors.PlanError, match=r"^the model calls 'nonzero'\n  operations have to"
    ):
        xt.suggest(Picks(4, 4), torch.zeros(8, 4), xs.Mesh(dp=2), micro_batches=1)


def test_arrays_without_elements_are_in_no_operation():
    """A batch norm makes one and lets go of it: its identity is given to another array."""

    blocks = [
        layer
        for _ in range(4)
        for layer in (torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 4, 3, 1, 1))
    ]
    model = torch.nn.Sequential(*blocks, torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
    step, _ = record_step(model, torch.empty(4, 4, 4, 4))
    assert [op.name for op in step.ops if op.kind == "opaque"] == ["0", "2", "4", "6"]


def test_lengths_that_are_said_are_those_of_the_result():
    """A transposed array is copied first, and then has the lengths that were read."""

    class Turned(torch.nn.Linear):
        def forward(self, x):
            b, s, c = x.shape
            return super().forward(x).reshape(b * s, 4, c // 4).transpose(1, 2).reshape(b, s, c) + x

    step, _ = record_step(Turned(16, 16), torch.empty(4, 8, 16))
    by_name = {op.name: op.operands[1:] for op in step.ops}
    assert by_name[":clone"] == () and by_name[":_unsafe_view"] == ("x",)


class Heads(torch.nn.Sequential):
    """The first length of the result is read from the input, by a keyword."""

    def forward(self, x):
        return super().forward(x).reshape(x.size(dim=0), 4, 4)


def test_a_loss_of_a_result_with_a_length_that_was_read():
    model = Heads(torch.nn.Linear(16, 16))
    plan = xt.suggest(model, torch.empty(8, 16), xs.Mesh(dp=2), micro_batches=1)
    assert plan.result == "b n16" and plan.search.problem.step.ops[-1].operands == ("0", "x")


def test_an_array_that_is_two_arguments_of_a_module_does_not_move_there():
    step, _ = record_step(Twice(), torch.empty(4, 4))
    assert [op.enters for op in step.ops if op.enters] == ["inner"]


class Counted(torch.nn.Module):
    """A module inside returns a number and no tensor."""

    class Count(torch.nn.Module):
        def forward(self, x):
            return len(x)

    def __init__(self):
        super().__init__()
        self.linear, self.count = torch.nn.Linear(4, 4), self.Count()

    def forward(self, x):
        return self.linear(x) * self.count(x)


class OneExample(torch.nn.Linear):
    """A loss of scores without a batch."""

    def forward(self, x, target):
        return F.nll_loss(super().forward(x)[0], target[0])


def test_a_module_that_returns_no_tensor_is_recorded():
    step, _ = record_step(Counted(), torch.empty(4, 4))
    assert [op.name for op in step.ops][-3:] == ["linear", ":mul", ":loss"]


def test_a_loss_of_one_example_is_recorded():
    target = torch.zeros(4, dtype=torch.int64)
    step, _ = record_step(OneExample(4, 4), (torch.empty(4, 4), target))
    assert (step.ops[-1].kind, step.ops[-1].text) == ("loss", "n4, () ->")


class Calls(TorchDispatchMode):
    """The operations of a forward pass, with their arguments: one of each kind. All arrays have elements."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2].rstrip("_")
        kwargs = kwargs or {}
        args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        kept = tree_map_only(torch.Tensor, torch.Tensor.clone, args)
        out = func(*args, **kwargs)
        schema = func._schema.arguments
        named = {each.name: each.default_value for each in schema if each.has_default_value()}
        named |= {**dict(zip((each.name for each in schema), kept, strict=False)), **kwargs}
        results, given = (
            [x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in (out, args)
        )
        for i, x in enumerate(results if all(x.numel() for x in (*results, *given)) else ()):
            call = describe_call(name, named, x, torch.Tag.pointwise in func.tags)
            trace = Trace(1)
            names = [trace.parameter(f"x{k}", each.shape) for k, each in enumerate(call.operands)]
            trace.add("y", call.op, names, x.shape)
            key = name, call.op.text if call.op.kind != "pointwise" else ""
            self.calls.setdefault(key, (trace, call, func, kept, kwargs, x.shape, i))
        return out


def _judged(op, trace, call, func, args, kwargs, shape, which):
    def run(mine, start, end):
        mine = {id(x): torch.as_tensor(y) for x, y in zip(call.operands, mine, strict=True)}
        if call.added is not None:
            mine[id(call.added)] = (
                torch.zeros((), dtype=call.added.dtype) if call.added.ndim else call.added
            )
        given = tree_map_only(torch.Tensor, lambda x: mine.get(id(x), x).clone(), args)
        sizes = [list(x) if isinstance(x, list | torch.Size) else x for x in given]
        for x, name in zip(sizes, (each.name for each in func._schema.arguments), strict=False):
            if name == "size" and end is not None and x[end - len(shape)] == shape[end]:
                x[end - len(shape)] //= N
        if func is torch.ops.aten.convolution.default:
            sizes[2] = None  # no bias
            sizes[-1] //= N if sizes[-1] > 1 and start == 1 else 1  # groups
        if func is torch.ops.aten.native_group_norm.default:
            sizes[3] = len(sizes[0])
        try:
            results = [
                x for x in tree_leaves(func(*sizes, **kwargs)) if isinstance(x, torch.Tensor)
            ]
        except (IndexError, RuntimeError):  # these blocks do not fit, or rows are missing
            return np.full(shape, np.nan)
        x = results[which]
        return (x.real + x.imag if x.is_complex() else x).numpy()

    values = [numbers(x.numpy()) for x in call.operands]
    return judged(op, trace.lengths, values, lambda runs: [run(*each) for each in runs])


def test_rules_are_right_on_blocks():
    seen = {}
    wrong = {}
    for name in (*MODELS, "others"):
        others = Others().double(), {"x": torch.rand(4, 4, 4, 4, dtype=torch.float64)}
        model, batch = build(name) if name in MODELS else others
        with Calls() as recorded, torch.no_grad():
            model(**batch)
        seen |= recorded.calls
    for (name, _), (trace, *call) in seen.items():
        (op,) = trace.ops
        if op.kind not in ("source", "opaque", "loss"):
            both = disagreeing(op, *_judged(op, trace, *call))
            if any(both):
                wrong[name, op.text] = both
    assert not wrong and len(seen) > 90
    trace, *call = next(each for (name, _), each in seen.items() if name == "_softmax")
    stated, right = _judged(replace(trace.ops[0], whole=()), trace, *call)
    assert len(stated - right) == 1


class Tied(torch.nn.Module):
    """An embedding that is the head too, and a parameter without a use."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False)
        self.head.weight, self.idle = self.embed.weight, torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.embed(x).sin())


def test_rules_of_unusual_parameters_are_priced():
    plan = xt.suggest(Tied(), torch.zeros(8, 4, dtype=torch.int64), xs.Mesh(dp=2), micro_batches=1)
    assert plan.parameters["idle"] == "..." and "embed.weight|head.weight" in plan.parameters
    assert plan.estimate(dict(plan.parameters)).seconds == pytest.approx(plan.seconds)
    sharded = {**plan.parameters, "embed.weight|head.weight": "o/dp i -> o i"}
    assert plan.estimate(sharded).seconds > plan.estimate(sharded, once="embed.*|head.*").seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_multiplied_in_groups_are_cut_inside(dtype: torch.dtype) -> None:
    """As gpt-oss loads: rows are sorted by expert, and their groups end where the data says."""
    config = transformers.GptOssConfig(
        **{"vocab_size": 64, **SIZES, **HEADS}, num_local_experts=4, head_dim=8
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=dtype
        )
    step, _ = record_step(model, torch.zeros(4, 6, dtype=torch.int64))
    ops = {op.name.rpartition(":")[2]: op for op in step.ops}
    assert ops["histc"].kind != "opaque"  # a rule is known: of all rows
    for name in ("_grouped_mm", "_grouped_mm_2"):
        rows, matrices, groups = ops[name].text.partition(" ->")[0].split(", ")
        experts, inside, _ = matrices.split()
        assert ops[name].kind == "contraction" and groups == experts
        assert rows.endswith(inside) and experts in ops[name].whole
        assert not {inside, matrices.split()[-1]} & set(ops[name].whole)


def test_a_precision_says_what_is_stored_used_and_summed() -> None:
    """Float32 parameters used in bfloat16 need no copy for the optimizer; wider sums take longer."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(4096, 4096, bias=False) for _ in range(2)]
        model, batch = torch.nn.Sequential(*layers), torch.empty(65536, 4096)
    fixed = {"*.weight": "o/dp i", "input": "b/dp s"}  # so that weights are gathered
    options = {"fixed": fixed, "micro_batches": 1, "recompute": False, "overlap": 0.0}
    low = xt.Precision(torch.bfloat16)
    wide = xt.Precision(torch.bfloat16, reduce_dtype=torch.float32)
    stored, used, summed = (
        xt.suggest(model, batch, xs.Mesh(dp=4), precision=precision, **options)
        for precision in (None, low, wide)
    )
    narrow = xt.suggest(model.bfloat16(), batch, xs.Mesh(dp=4), **options)
    whole = 2 * 4096 * 4096  # elements of both weights, which are gathered once
    for plan, stored_bytes, used_bytes, state_bytes in (
        (stored, 4, 4, 8),
        (used, 4, 2, 8),
        (narrow, 2, 2, 12),  # with a copy in full precision
    ):
        expected = stored_bytes * whole // 4 + used_bytes * whole
        assert plan.memory["parameters"] == expected, plan
        assert plan.memory["optimizer state"] == state_bytes * whole // 4, plan
    assert used.seconds < summed.seconds < stored.seconds
