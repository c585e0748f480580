"""Training that torchrun starts again after a rank was killed has the losses of a run without a fault."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import torch_bridge as xt
from tests.torch_bridge.helpers import torchrun
from xshard import Mesh

STEPS = 7
EVERY = 2
FATAL = 5
RANKS = 2


def _trained(folder: Path, dies: bool) -> dict[int, float]:
    """Train a layer with its columns on both ranks, from the last checkpoint on -> the losses by step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = Mesh(tp=RANKS)
    torch.manual_seed(0)
    whole = torch.randn(8, 6)
    data = torch.randn(STEPS, 4, 6)
    weight = whole.chunk(RANKS)[rank].clone().requires_grad_()  # "n/tp d"
    optimiser = torch.optim.Adam([weight], lr=0.1)
    start = 0
    losses = {}
    if (latest := folder / "latest").exists():
        saved = torch.load(folder / f"{latest.read_text()}.{rank}")
        start = saved["step"]
        losses = saved["losses"]
        optimiser.load_state_dict(saved["optimiser"])
        with torch.no_grad():
            weight.copy_(saved["weight"])
    for step in range(start, STEPS):
        if step % EVERY == 0:
            state = {
                "step": step,
                "losses": losses,
                "weight": weight,
                "optimiser": optimiser.state_dict(),
            }
            torch.save(state, folder / f"{step}.{rank}")
            dist.barrier()  # what is the latest has been saved by all
            if rank == 0:
                latest.write_text(str(step))
            dist.barrier()
        y = torch.tanh(xt.redistribute(data[step] @ weight.T, "b n/tp -> b n | copy(tp)", mesh))
        loss = xt.redistribute(y[rank::RANKS].square().sum(), "| sum(tp) -> | copy(tp)", mesh)
        if dies and rank == 1 and step == FATAL and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        (loss / RANKS).backward()
        optimiser.step()
        optimiser.zero_grad()
        losses = {**losses, step: loss.item()}
    dist.destroy_process_group()
    return losses


def test_training_goes_on_with_the_losses_that_it_would_have_had(tmp_path: Path) -> None:
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    expected, other = torchrun(RANKS, _trained, tmp_path / "undisturbed", False)
    found = torchrun(RANKS, _trained, tmp_path / "disturbed", True, max_restarts=1)
    assert list(expected) == list(range(STEPS)) and expected == other
    assert found == [expected, expected]
    assert (tmp_path / "disturbed" / "latest").read_text() == str(STEPS - 1)
