"""Models of Hugging Face that nobody here wrote, by pages of docs/models and by plans that they declare."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch

import torch_bridge as xt
from benchmarks.plans.published import same_as_on_one_device
from tests.documents.forking import in_this_world
from tests.torch_bridge.helpers import block_of_each, in_turn, on_ranks
from torch_bridge.mesh.process_mesh import alone
from torch_bridge.testing.byte_counter import Meter
from xshard.compat import styles_of_transformers

PAGES = Path(__file__).parents[3] / "docs/models"
FENCED = re.compile(r"^```(python|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = 2
IN_FLOAT32 = ("deepseek_v3", "mamba", "qwen3_moe")  # a part of them
# Collectives of a pass forward and one backward, as many as a program by hand has: activations that move,
# parameters gathered once per module, and again, gradients once per group of processes.
COLLECTIVES = {
    "bert": [(5, 7)], "deepseek_v3": [(5, 7)], "gpt2": [(5, 6)], "mamba": [(5, 6)], "qwen3_moe": [(4, 8)],
    "t5": [(12, 14)], "vit": [(4, 5)], "whisper": [(11, 14)],
    "llama": [(10, 12), (5, 6), (3, 5), (3, 4), (0, 1), (2, 7), (6, 12)],
}  # fmt: skip


def trained(names: dict[str, Any], model: Any) -> tuple[Any, Any, Any, tuple[int, int]]:
    """Losses, the last parameters, the norm of the first gradient, and collectives of the last step."""
    optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    is_parallel, forward, backward = hasattr(model, "_xshard_parallel"), Meter(), Meter()
    for step in range(STEPS):
        counted = is_parallel and step == STEPS - 1
        with forward if counted else contextlib.nullcontext():
            result = model(**names["batch"])
        loss = names["loss"](result)
        with backward if counted else contextlib.nullcontext():
            loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(xt.grad_norm(model) if is_parallel else torch.nn.utils.get_total_norm(gradients))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return losses, parameters, norms[0], (len(forward.received), len(backward.received))


def _page(path: Path) -> None:
    names, text, printed, counted, want = dict[str, Any](), path.read_text(), io.StringIO(), [], None
    tol = 1e-6 if path.stem in IN_FLOAT32 else 1e-12
    for found in FENCED.finditer(text):
        language, code = found.groups()
        if language:
            with contextlib.redirect_stdout(printed), in_this_world():
                exec(compile("\n" * text[: found.start(2)].count("\n") + code, str(path), "exec"), names)
            if want is None:
                with alone():
                    want = trained(names, names["build"]())
            model = names["model"]
            losses, parameters, norm, collectives = trained(names, model)
            torch.testing.assert_close(losses, want[0], rtol=tol, atol=0)
            torch.testing.assert_close(norm, want[2], rtol=tol, atol=0)
            torch.testing.assert_close(parameters, block_of_each(model, want[1]), rtol=tol, atol=tol)
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


def _pages() -> None:
    for path in sorted(PAGES.glob("*.md")):
        _page(path)


def _declared() -> None:
    """Each style is known; these have most of them."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    experts = {"ep_dispatch_experts", "grouped_gemm"}  # of plans for experts
    assert {*ALL_PARALLEL_STYLES} - {*styles_of_transformers("tp")} <= experts
    for name in ("Pythia", "Phi-3-mini", "Qwen3-30B-A3B", "Llama-4-Scout", "LongCat-Flash", "Granite-SWA"):
        assert same_as_on_one_device(name).worst < 1e-6, name


def test_pages_and_declared_plans_train_as_on_one_device() -> None:
    on_ranks(4, in_turn, _pages, _declared)
