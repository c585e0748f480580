"""The claims that the repository keeps follow from the rows beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.einsum import claims as einsum
from benchmarks.einsum import host as einsum_host
from benchmarks.jax_reshard import claims as jax_reshard
from benchmarks.models import __main__ as models
from benchmarks.state import claims as state
from benchmarks.torch_redistribute import claims as torch
from tests.benchmarks.helpers import as_recorded, model_figures, recorded

JUDGED: dict[str, Callable[[Any], Any]] = {
    "einsum": lambda data: einsum.judge(data["cases"], data["cached_s"], data["timed"]),
    "einsum_host": lambda data: [einsum_host.judge(data["cases"])],
    "gpu": lambda data: (*torch.host_times(data["host"]), *torch.packing(data["packs"])),
    "jax_reshard": lambda data: jax_reshard.judge(data["compiled"], data["timed"], data["dispatch"]),
    "models": lambda data: models.claims(model_figures(data)),
    "state": lambda data: state.judge(data["loads"], data["transfers"]),
    "torch_redistribute": lambda data: torch.judge(
        **{rows: data[rows] for rows in ("host", "ends", "memory", "packs")}
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_recorded_rows_give_the_recorded_claims(name: str) -> None:
    data = recorded(name)
    assert as_recorded(JUDGED[name](data)) == data["claims"]
