"""Plans on disk: a JSON file per request, in the folder that XSHARD_CACHE names.

Knows no kind of plan: it is told how to read one and how to make one.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
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
WRITES_PER_COUNT = 500  # counting 20,000 files takes longer than a plan, so few writes do it
DAY_S = 86400
# Plans, and files that are not renamed yet: digest.json, digest.json.<process and thread>.
_FILE_NAME = re.compile(r"[0-9a-f]{40}\.json(\.\d+)?")
P = TypeVar("P", bound=Any)  # a kind of plan, with `to_json`


def read_or_make(
    request: Any,
    read: Callable[[str, Profile], P],
    make: Callable[[], P],
    options: Mapping[str, Any] | None = None,
) -> P:
    """Return the plan that an earlier run wrote to disk for a request, or make one and write it.

    The file's name is a digest of the request, the options and the package's code, so that other
    code never reads it. A file that is damaged, or whose plan fails its checks, is ignored and
    written anew. Without a folder in XSHARD_CACHE, the plan is made and nothing is written.

    Args:
        request: A frozen dataclass with all that the plan depends on, its `profile` included.
        read: Makes a plan of its text and the profile; raises for text that is no plan.
        make: Makes the plan afresh.
        options: What the plan depends on beside the request.
    """
    folder = os.environ.get(VARIABLE)  # XSHARD_CACHE
    if not folder:
        return make()
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    key = json.dumps({"code": _code_digest(), "options": options, **values}, default=_plain)
    file = Path(folder) / f"{_digest(key)}.json"
    try:
        data = json.loads(file.read_bytes())
        if data["digest"] == _digest(key + data["plan"]):
            plan = read(data["plan"], request.profile)
            os.utime(file)  # used now: `_remove_oldest` goes by this time
            return plan
    # The file may be missing or hold anything: whatever goes wrong, the plan is made afresh.
    except Exception:
        pass
    plan = make()
    try:
        _write(file, key, plan.to_json())
    except OSError as error:
        warnings.warn(f"{VARIABLE}={folder} keeps no plans: {error}", stacklevel=2)
    return plan


def _write(file: Path, key: str, plan_text: str) -> None:
    """Write a plan, so that no process ever sees a part of the file."""
    # A name of its own for each writer: threads of many processes may write the same plan.
    unfinished = file.with_name(f"{file.name}.{os.getpid()}{threading.get_native_id()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(
        json.dumps({"request": key, "digest": _digest(key + plan_text), "plan": plan_text})
    )
    unfinished.replace(file)
    # Digests are as good as random: one write in so many, without a counter that ranks would share.
    if int(file.stem[:8], 16) % WRITES_PER_COUNT == 0:
        _remove_oldest(file.parent)


def _remove_oldest(folder: Path) -> None:
    """Delete the half of the cached plans that was used least recently, if there are too many.

    Files that this cache did not write stay. A file that is still being written (its name ends with
    the writer's process and thread) counts once it is a day old, since its writer has died.
    """
    yesterday = time.time() - DAY_S
    files: list[tuple[float, str]] = []  # when it was last used, its path
    for entry in os.scandir(folder):
        match = _FILE_NAME.fullmatch(entry.name)
        if match is None:
            continue
        with suppress(FileNotFoundError):  # another process has removed it
            last_used = entry.stat().st_mtime
            is_unfinished = match[1] is not None
            if not is_unfinished or last_used < yesterday:
                files.append((last_used, entry.path))
    if len(files) <= MAX_FILES:
        return
    files.sort()
    for _, path in files[: len(files) // 2]:
        Path(path).unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Return a field of a request as JSON."""
    if isinstance(value, Profile):
        return value.to_json()
    if isinstance(value, Mesh):
        return mesh_to_plain(value)
    if hasattr(value, "text"):  # a layout or an expression, as the user wrote it
        return value.text
    return str(to_plain(value))


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """Return a digest of the package's code.

    Other code may plan otherwise, and all ranks need the same plans.
    """
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _digest("".join(f"{file.name}\0{file.read_text()}" for file in files))


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=20).hexdigest()
