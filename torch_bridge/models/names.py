"""Names of modules and parameters, with dots between the names of modules around them; "" is the model."""

from __future__ import annotations


def module_of(name: str) -> str:
    """Return the name of the module around a module or a parameter: "up.weight" -> "up", "up" -> ""."""
    return name.rpartition(".")[0]


def is_inside(name: str, path: str) -> bool:
    """Return whether a name is inside a module: "blocks.0.up" is in "blocks.0", and not in "blocks.00"."""
    return not path or name.startswith(f"{path}.")


def is_part(name: str, path: str) -> bool:
    """Return whether a name is that of a module, or inside it."""
    return name == path or is_inside(name, path)


def title_of(path: str) -> str:
    """Return the name of a module in errors."""
    return path if path else "the model"
