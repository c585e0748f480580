"""Profiles by name: the shipped ones, and files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from xshard.arguments import did_you_mean, parse_number, shown
from xshard.cost.model import Link, Profile
from xshard.errors import ProfileError


def load_profile(profile: str | Path | Profile) -> Profile:
    """A shipped name, a file or a Profile -> Profile; `h100:4`: with nodes of 4. Raises ProfileError."""
    return profile if isinstance(profile, Profile) else _load(str(profile))


@lru_cache(maxsize=64)
def _load(name: str) -> Profile:
    shipped = resources.files("xshard.cost") / "profiles"
    known = sorted(p.name[: -len(".json")] for p in shipped.iterdir() if p.name.endswith(".json"))
    base, colon, nodes = name.rpartition(":")
    if colon and base in known:
        machine = _load(base)
        if machine.across is None or not parse_number(nodes):
            own = f"nodes of {machine.node_devices}" if machine.node_devices else "one node"
            hint = f"'h100:4' has nodes of 4; {base} has {own}"
            raise ProfileError(f"no profile {name!r}", hint=hint)
        return replace(machine, name=name, node_devices=int(nodes))
    if name in known:
        return profile_of(name, (shipped / f"{name}.json").read_text())
    try:
        text = Path(name).read_text() if Path(name).is_file() else None
    except (OSError, ValueError):  # a name that no file can have, or no text
        text = None
    if text is None:
        hint = f"{did_you_mean(name, known)}shipped are: {', '.join(known)}; or give a file"
        raise ProfileError(f"no profile {shown(name)}", hint=hint)
    return profile_of(name, text)


def profile_of(name: str, text: str) -> Profile:
    """Text of `Profile.to_json` -> the profile; name: its name in errors. Raises ProfileError."""
    try:
        data: dict[str, Any] = json.loads(text)
        if not data.get("default"):
            raise ProfileError(
                f"profile {name!r} lacks a link for axes that it does not name",
                hint='give "default", as in {"latency_s": 3e-6, "bytes_per_s": 4e11}',
            )
        return Profile(
            name=data["name"],
            source=data["source"],
            default=Link(**data["default"]),
            across=Link(**data["across"]) if data.get("across") else None,
            node_devices=data.get("node_devices"),
            axes=tuple(sorted((axis, Link(**link)) for axis, link in data["axes"].items())),
            launch_s=tuple(sorted(data["launch_s"].items())),
            copy_bytes_per_s=data["copy_bytes_per_s"] or math.inf,
            inside=tuple(sorted(data.get("inside", {}).items())),
            rounds=data.get("rounds", False),
            flops_per_s=tuple(sorted(data.get("flops_per_s", {}).items())),
            disk=Link(**data["disk"]) if data.get("disk") else None,
        )
    except ProfileError:
        raise
    except Exception as error:  # a file may have any value in any place
        raise ProfileError(f"profile {name!r} is malformed: {error}") from None
