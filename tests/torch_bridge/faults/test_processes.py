"""A rank that is killed, or that stands still: what becomes of all operations of the others."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import tests.torch_bridge.helpers  # noqa: F401  the server that ranks are forked from has their modules
from tests.torch_bridge.faults.ranks import ALL, Ranks, ends_of, say, take_part
from tests.torch_bridge.faults.table import check_column

VICTIMS = (1, 5)
OTHERS = (0, 2, 3, 4, 6, 7)  # the second rank of the world, and of the trainer
TIMEOUT_S = 3.0
WIDTH = 16


@pytest.mark.parametrize("fault", ["a rank is killed", "a rank stalls"])
def test_all_operations_end(tmp_path: Path, fault: str) -> None:
    killed = fault == "a rank is killed"
    with Ranks(tmp_path, ALL, TIMEOUT_S, take_part, WIDTH, TIMEOUT_S) as running:
        running.wait_for(*(f"ready{rank}" for rank in ALL))
        for victim in VICTIMS:
            running.send(victim, signal.SIGSTOP)
        say(tmp_path, "go")
        running.wait_for(
            *(f"begun{rank}" for rank in OTHERS)
        )  # they are in the middle of all operations
        time.sleep(0.2)
        if killed:
            for victim in VICTIMS:
                running.send(victim, signal.SIGKILL)
        running.wait_for(*(f"ends{rank}" for rank in OTHERS))
        if not killed:
            for victim in VICTIMS:
                running.send(victim, signal.SIGCONT)
            running.wait_for(*(f"ends{victim}" for victim in VICTIMS))
        say(tmp_path, "over")
        codes = running.exit_codes()
    assert codes == [-signal.SIGKILL if killed and rank in VICTIMS else 0 for rank in ALL]
    check_column(fault, ends_of(tmp_path, OTHERS), TIMEOUT_S)
    if not killed:
        for victim, error in zip(VICTIMS, ("CollectiveError", "LostVersionError"), strict=True):
            kinds = {end.kind for end in ends_of(tmp_path, [victim])[victim]}
            assert "wrong" not in kinds and error in kinds, (
                "what comes too late is an error as well"
            )
