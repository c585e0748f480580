"""The list in docs/layers.md of what `domain_parallel` follows, from the tables of the code.

python docs/site/followed.py        # writes it again
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from torch_bridge.nn.domain_parallel import FOLLOWED
from torch_bridge.nn.functions import FUNCTIONS
from torch_bridge.nn.layers import LAYERS
from torch_bridge.nn.propagation import _RULES, _pointwise, _run_reader
from torch_bridge.nn.views import VIEWS

PAGE = Path(__file__).parents[1] / "layers.md"
BEGIN = "```\nmodules that become layers\n"
END = "```\n"


def listing() -> str:
    """Return the list as the page has it: a line of title, then names."""
    others = []
    for name, rule in _RULES.items():
        if name not in {**FUNCTIONS, **VIEWS} and rule not in (None, _pointwise, _run_reader):
            others.append(name.replace("fft_", "fft."))
    groups = {
        "modules that become layers": [kind.__name__ for kind in LAYERS],
        "modules that are followed": [kind.__name__ for kind in FOLLOWED],
        "functions that compute what a layer does": FUNCTIONS,
        "views of sharded dims": [name for name in VIEWS if name != "__getitem__"],
        "along dims, beside parameters, and others": others,
        "by elements, beside all with torch's tag for pointwise functions": [
            name for name, rule in _RULES.items() if rule is _pointwise
        ],
    }
    return "".join(f"{title}\n{_wrapped(names)}\n" for title, names in groups.items())


def _wrapped(names: Iterable[str]) -> str:
    text = " ".join(sorted(names, key=str.lower))
    return textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="  ")


def page() -> str:
    """Return the page with the list as it is now."""
    text = PAGE.read_text()
    before, _, after = text.partition(BEGIN)
    assert after, f"no list in {PAGE}"
    return before + "```\n" + listing() + END + after.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
