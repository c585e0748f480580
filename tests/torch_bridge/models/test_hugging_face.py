"""Models of Hugging Face that nobody here wrote, by pages of docs/models and by plans that they declare."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

import torch_bridge as xt
import xshard as xs
from benchmarks.plans.published import same_as_on_one_device
from tests.documents.forking import in_this_world
from tests.torch_bridge.helpers import SharedRanks, block_of_each
from torch_bridge.mesh.process_mesh import on_this_process_alone
from torch_bridge.testing.byte_counter import Meter
from xshard.compat import styles_of_transformers
from xshard.errors import ShapeError

PAGES = Path(__file__).parents[3] / "docs/models"
FENCED = re.compile(r"^```(python|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = 2
IN_FLOAT32 = ("deepseek_v3", "mamba", "qwen3_moe")  # a part of them
# Collectives of a pass forward and one backward, as many as a program by hand has: activations that move,
# parameters gathered once per module, and again, gradients once per group of processes.
COLLECTIVES = {
    "bert": [(5, 7)], "deepseek_v3": [(5, 7)], "gpt2": [(5, 6)], "mamba": [(5, 6)], "qwen3_moe": [(6, 6)],
    "t5": [(12, 14)], "vit": [(4, 5)], "whisper": [(11, 14)],
    "llama": [(10, 12), (5, 6), (3, 5), (3, 4), (0, 1), (3, 7), (6, 12)],
}  # fmt: skip


def trained(names: dict[str, Any], model: Any) -> tuple[Any, Any, Any, tuple[int, int]]:
    """Losses, the last parameters, the norm of the first gradient, and collectives of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    norms = []
    is_parallel = hasattr(model, "_xshard_parallel")
    forward = Meter()
    backward = Meter()
    for step in range(STEPS):
        counted = is_parallel and step == STEPS - 1
        with forward if counted else contextlib.nullcontext():
            result = model(**names["batch"])
        loss = names["loss"](result)
        with backward if counted else contextlib.nullcontext():
            loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(
            xt.grad_norm(model) if is_parallel else torch.nn.utils.get_total_norm(gradients)
        )
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return losses, parameters, norms[0], (len(forward.received), len(backward.received))


def check_page(path: Path) -> None:
    names: dict[str, Any] = {}
    text = path.read_text()
    printed = io.StringIO()
    counted = []
    want = None
    tol = 1e-6 if path.stem in IN_FLOAT32 else 1e-12
    for found in FENCED.finditer(text):
        language, code = found.groups()
        if language:
            with contextlib.redirect_stdout(printed), in_this_world():
                exec(
                    compile("\n" * text[: found.start(2)].count("\n") + code, str(path), "exec"),
                    names,
                )
            if want is None:
                with on_this_process_alone():
                    want = trained(names, names["build"]())
            model = names["model"]
            losses, parameters, norm, collectives = trained(names, model)
            torch.testing.assert_close(losses, want[0], rtol=tol, atol=0)
            torch.testing.assert_close(norm, want[2], rtol=tol, atol=0)
            torch.testing.assert_close(
                parameters, block_of_each(model, want[1]), rtol=tol, atol=tol
            )
            counted.append(collectives)
    said = {" ".join(line.split()) for line in printed.getvalue().splitlines()}
    shown = [
        " ".join(line.split())
        for kind, code in FENCED.findall(text)
        if not kind
        for line in code.splitlines()
    ]
    assert len(shown) >= 2 and said.issuperset(shown), (
        path.stem,
        [line for line in said if line.startswith("a ")],
    )
    assert counted == COLLECTIVES[path.stem], (path.stem, counted)


on_four = SharedRanks(4)


@on_four
def test_pages_train_as_on_one_device() -> None:
    for path in sorted(PAGES.glob("*.md")):
        check_page(path)


EXPERTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 12,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4,
    },
}  # fmt: skip


@on_four
def test_experts_train_as_on_one_device() -> None:
    """One rule, no code: loss and gradients of one device, also if tokens go to one process, or few."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}
    cases = [("mixtral", 4, None), ("mixtral", 2, 0), ("qwen3_moe", 4, 5), ("qwen3_moe", 2, None)]
    for kind, ep, towards in (*cases, ("deepseek_v3", 4, None)):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            kind, **sizes, **EXPERTS[kind], experts_implementation="eager"
        )
        model = AutoModelForCausalLM.from_config(config).double()
        mesh = xs.Mesh(dp=4 // ep, ep=ep)
        if towards is not None:  # the experts of one process, as far as there are enough
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.mlp.gate.weight.zero_()
                    layer.mlp.gate.weight[towards : towards + 3] = (
                        9 * torch.eye(16, dtype=torch.float64)[:3]
                    )
        xt.parallelize(
            model,
            {"**.experts.*": "e/ep ...", "**": "..."},
            {"": "b s -> b/(dp,ep) s", "**.experts": "t/ep c -> t/to(ep) c"},
            mesh,
        )

        def loss(result: Any, mesh: xs.Mesh = mesh) -> torch.Tensor:
            labels = xt.redistribute(ids.roll(-1, 1), "b s -> b/(dp,ep) s", mesh)
            return xt.nn.cross_entropy(result.logits, labels, "b/(dp,ep) s v", mesh)

        router = type(model.model.layers[-1].mlp.gate)
        with mock.patch.object(router, "forward", _in_float64(router.forward)):
            xt.verify(model, {"input_ids": ids}, loss=loss, tol=1e-12)


def _in_float64(forward: Any) -> Any:
    """A router that computes in float32, which rounds otherwise as soon as numbers of rows differ."""

    def wide(*args: Any) -> Any:
        casts = {"float": torch.Tensor.double, "type": lambda x, _: x.double()}
        with (
            mock.patch.object(torch, "float", torch.float64),
            mock.patch.multiple(torch.Tensor, **casts),
        ):
            return forward(*args)

    return wide


@on_four
def test_declared_plans_train_as_on_one_device() -> None:
    """Each style is known; these have most of them."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    experts = {"ep_dispatch_experts", "grouped_gemm"}  # of plans for experts
    assert {*ALL_PARALLEL_STYLES} - {*styles_of_transformers("tp")} <= experts
    for name in (
        "Pythia",
        "Phi-3-mini",
        "Qwen3-30B-A3B",
        "Llama-4-Scout",
        "LongCat-Flash",
        "Granite-SWA",
    ):
        assert same_as_on_one_device(name).worst < 1e-6, name


# A family with a declared plan, processes, heads of keys, heads of queries for each, and whether processes
# share a head of keys. The first eight cut projections by heads; the others bring all heads together.
PLANNED = [
    ("Llama", 4, 2, 2, True),
    ("Qwen2", 3, 1, 3, True),
    ("Qwen3", 4, 1, 4, True),
    ("Mistral", 3, 4, 2, False),
    ("Mixtral", 4, 2, 4, True),
    ("Gemma", 3, 2, 2, False),  # a process has none
    ("Granite", 4, 2, 3, False),
    ("GPTNeoX", 4, 6, 1, False),
    ("GptOss", 3, 2, 2, False),
    ("Olmo3", 4, 3, 2, False),
    ("Phi", 3, 5, 1, False),
    ("Phi3", 4, 3, 1, False),
]


def planned_model(family: str, keys: int, queries_of_key: int) -> Any:
    """A model of any heads, and of a vocabulary and a width that 3 and 4 do not divide."""
    length = 4
    queries = keys * queries_of_key
    options = {
        "num_attention_heads": queries, "num_key_value_heads": keys, "hidden_size": queries * length,
        "intermediate_size": 26, "vocab_size": 53, "tie_word_embeddings": keys % 2 == 0,
        "num_hidden_layers": 1, "max_position_embeddings": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "num_local_experts": 2,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    if family != "GPTNeoX":
        options["head_dim"] = length
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    config._experts_implementation = "eager"
    return getattr(transformers, f"{family}ForCausalLM")(config).double()


@on_four
def test_declared_plans_of_any_heads_are_right() -> None:
    """On 3 and 4 processes, also with fewer heads of keys than processes, which share them or have none."""
    ids = torch.randint(3, 33, (4, 6), generator=torch.Generator().manual_seed(1))
    meshes = {n: DeviceMesh("cpu", torch.arange(n), mesh_dim_names=("tp",)) for n in (3, 4)}
    for family, tp, keys, queries_of_key, is_shared in PLANNED:
        model = planned_model(family, keys, queries_of_key)
        mesh = meshes[tp]
        if mesh.get_coordinate() is None:  # a process that the mesh lacks
            continue

        def loss(result: Any, mesh: DeviceMesh = mesh) -> torch.Tensor:
            return xt.nn.cross_entropy(result.logits, ids.roll(-1, 1), "b s v", mesh)

        with warnings.catch_warnings(action="ignore"):  # gpt-oss has a plan for experts
            rules = xs.Rules.from_transformers(model, "tp", xs.Mesh(tp=tp))
        assert ("counts" in rules) == is_shared, family
        xt.parallelize(model, mesh=mesh, **rules)
        xt.verify(model, {"input_ids": ids}, loss=loss, tol=1e-6)


@on_four
def test_processes_share_a_head_of_keys() -> None:
    """Two heads on four processes: gradients of copies are summed, and a copy counts once in the norm."""
    options = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 32}
    options |= {
        "vocab_size": 53,
        "num_hidden_layers": 1,
        "intermediate_size": 27,
        "use_cache": False,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).double()
    mesh = xs.Mesh(kv=2, rep=2)
    ids = torch.randint(3, 53, (4, 6), generator=torch.Generator().manual_seed(1))

    def loss(result: Any) -> torch.Tensor:
        return xt.nn.cross_entropy(result.logits, ids.roll(-1, 1), "b s v", mesh)

    with on_this_process_alone():
        whole = copy.deepcopy(model)
        expected = torch.nn.functional.cross_entropy(
            whole(input_ids=ids).logits.flatten(0, 1), ids.roll(-1, 1).flatten()
        )
        expected.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    xt.parallelize(model, mesh=mesh, **xs.Rules.from_transformers(model, ("kv", "rep")))
    xt.verify(model, {"input_ids": ids}, loss=loss, tol=1e-6)
    loss(model(input_ids=ids)).backward()
    torch.testing.assert_close(xt.grad_norm(model), norm, rtol=1e-12, atol=0)
    block = model.model.layers[0].self_attn.k_proj.weight
    rows = slice(4 * (torch.distributed.get_rank() // 2), None)
    gradient = whole.model.layers[0].self_attn.k_proj.weight.grad[rows][:4]
    torch.testing.assert_close(block.grad, gradient, rtol=1e-10, atol=1e-12)


@on_four
def test_a_block_that_ends_inside_a_head_is_refused() -> None:
    model = planned_model("Llama", 2, 2)
    weight = model.get_output_embeddings().weight
    before = weight.detach().clone()
    rules = xs.Rules.from_transformers(model, "tp")
    rows = len(model.model.layers[0].self_attn.k_proj.weight)
    by_rows = {"model.layers.*.self_attn.k_proj.weight": f"o/sizes(tp,1,0,0,{rows - 1}) i"}
    rules["parameters"] = {**rules["parameters"], **by_rows}
    with pytest.raises(
        ShapeError, match=r"k_proj\.weight: a block of 1 of \d+ rows ends inside a head"
    ):
        xt.parallelize(model, mesh=xs.Mesh(tp=4), **rules)
    assert torch.equal(weight, before)  # nothing was cut
