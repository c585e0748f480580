"""Plans kept between runs: a JSON file per request, in the folder that XSHARD_CACHE names."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from xshard.cost.model import Profile
from xshard.layout import Mesh
from xshard.plans.serialize import mesh_to_plain, to_plain

VARIABLE = "XSHARD_CACHE"
MAX_FILES = 20_000  # of about 2 kB; then the half that was used least recently goes
WRITES = 500  # one of so many plans that are written counts the files
_OWN = re.compile(r"[0-9a-f]{40}\.json(\.\d+)?")  # plans, and files that are not renamed yet
P = TypeVar("P", bound=Any)  # a kind of plan, with `to_json`


def kept(
    request: Any, read: Callable[[str, Profile], P], make: Callable[[], P], options: Any = None
) -> P:
    """The plan that an earlier run has kept for a request and options, or one that is made and kept. A file
    counts only if the same code wrote it whole, for the same request, and its plan passes all checks.
    """
    if not (folder := os.environ.get(VARIABLE)):
        return make()
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    key = json.dumps({"code": _code(), "options": options, **values}, default=_plain)
    file = Path(folder) / f"{_digest(key)}.json"
    try:
        data = json.loads(file.read_bytes())
        if data["digest"] == _digest(key + data["plan"]):
            plan = read(data["plan"], request.profile)
            os.utime(file)
            return plan
    except Exception:  # no file, or one with any value in any place: it is planned afresh
        pass
    plan = make()
    text = plan.to_json()
    part = file.with_name(f"{file.name}.{os.getpid()}{threading.get_native_id()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"request": key, "digest": _digest(key + text), "plan": text}))
        part.replace(file)  # at once, so that no process sees a part of it
        if int(file.stem[:8], 16) % WRITES == 0:
            _bound(file.parent)
    except OSError as error:
        warnings.warn(f"{VARIABLE}={folder} keeps no plans: {error}", stacklevel=2)
    return plan


def _bound(folder: Path) -> None:
    """Remove the older half of the plans if there are too many, and parts of a day ago; other files stay."""
    ages = []
    yesterday = time.time() - 86400
    for entry in os.scandir(folder):
        match = _OWN.fullmatch(entry.name)
        with suppress(FileNotFoundError):  # another process has removed it
            if match and (match[1] is None or entry.stat().st_mtime < yesterday):
                ages.append((entry.stat().st_mtime, entry.path))
    for _, path in sorted(ages)[: len(ages) // 2] if len(ages) > MAX_FILES else ():
        Path(path).unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """A field of a request as JSON."""
    if isinstance(value, Profile):
        return value.to_json()
    return (
        mesh_to_plain(value)
        if isinstance(value, Mesh)
        else getattr(value, "text", str(to_plain(value)))
    )


@lru_cache(maxsize=1)
def _code() -> str:
    """A digest of the package's code: other code may plan otherwise, and all ranks need the same plans."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _digest("".join(f"{file.name}\0{file.read_text()}" for file in files))


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=20).hexdigest()
