"""The modules whose assertions pytest rewrites beside those of test files, so that failures show values."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent


def helper_modules() -> list[str]:
    """Return the modules of helpers that are not imported yet: "tests.torch_bridge.helpers", ..."""
    modules = []
    for file in sorted(ROOT.rglob("*.py")):
        if file.name.startswith(("test_", "__")):
            continue
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        modules.append(".".join(parts))
    # An imported module is too late to rewrite, of which pytest would warn.
    return [module for module in modules if module not in sys.modules]
