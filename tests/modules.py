"""The modules of xshard by name, without the two that are bridges under a second name."""

from pathlib import Path

import xshard

ALIASES = {"xshard.jax": "jax_bridge", "xshard.torch": "torch_bridge"}


def modules_of_xshard() -> list[str]:
    root = Path(xshard.__file__).parent
    names = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if name not in ALIASES and parts[-1] != "__main__":
            names.append(name)
    return names
