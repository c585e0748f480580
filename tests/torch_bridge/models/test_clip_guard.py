"""The guard that keeps torch's `clip_grad_norm_` from blocks: late, and never missing in silence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.utils import clip_grad

import xshard as xs
from torch_bridge.models.clip_guard import guard_clipping
from torch_bridge.versions.modules import CLIP_TARGET

PROGRAM = """
from torch.nn.utils import clip_grad
before = clip_grad._clip_grads_with_norm_
import torch_bridge as xt
xt.parallelize, xt.clip_grad_norm_, xt.verify
print(clip_grad._clip_grads_with_norm_ is before)
"""


class Model:
    """A model without blocks."""

    sharded = ()


def test_the_import_changes_nothing_in_torch() -> None:
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "True"


def test_the_first_model_puts_the_guard_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def torchs(*_: object) -> None:
        raise AssertionError("torch's own function is called without a look at blocks")

    monkeypatch.setattr(clip_grad, CLIP_TARGET, torchs)
    model = Model()
    guard_clipping(model)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert torch.allclose(parameter.grad.norm(), torch.ones(()))


def test_a_torch_without_the_guarded_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(clip_grad, CLIP_TARGET)
    with pytest.raises(
        xs.XshardError, match=rf"torch {torch.__version__[:3]}.* has no .*{CLIP_TARGET}"
    ) as e:
        guard_clipping(Model())
    assert "install a release of torch" in str(e.value)
    assert not hasattr(clip_grad, CLIP_TARGET)
