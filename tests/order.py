"""The order of the tests' files: the longest first, so that none of them is left for the end.

`pytest --durations=0` prints the seconds for the table. xdist keeps the order with `--no-loadscope-reorder`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

# All files over 15 seconds, the longest first.
LONGEST = (
    "documents/test_examples.py",
    "torch_bridge/calls/test_compile.py",
    "runtimes/test_case_table.py",
    "fuzz/test_chains.py",
    "benchmarks/test_torch.py",
    "torch_bridge/state/test_kills.py",
    "fuzz/test_texts.py",
    "jax_bridge/test_transforms.py",
    "jax_bridge/test_nn.py",
    "jax_bridge/test_processes.py",
    "search/test_optimal.py",
    "benchmarks/test_jax.py",
    "jax_bridge/test_nn_cases.py",
    "documents/test_documents.py",
    "torch_bridge/dtensor/test_layouts.py",
    "interop/test_processes.py",
    "torch_bridge/test_hygiene.py",
    "testing/test_equivalence.py",
    "testing/test_invariance.py",
    "torch_bridge/nn/test_layers.py",
    "documents/test_context.py",
    "runtimes/test_calibrate.py",
    "torch_bridge/autodiff/test_transforms.py",
    "interop/test_from_torch.py",
    "test_neutral.py",
    "torch_bridge/redistribution/test_between.py",
    "jax_bridge/test_vmap.py",
    "plans/test_transfer.py",
    "plans/test_public_cases.py",
    "compat/test_jax_compat.py",
)
PLACES = {ROOT / name: place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES.get(item.path, len(PLACES)))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.option.durations is None:
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    terminalreporter.section("longest files")
    for name, taken in seconds.most_common(len(LONGEST)):
        terminalreporter.line(f"{taken:7.1f}s {name}")
