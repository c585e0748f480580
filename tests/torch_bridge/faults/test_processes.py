"""A rank that is killed, or that stands still: what becomes of all operations of the others."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import tests.torch_bridge.helpers  # noqa: F401  the server that ranks are forked from has their modules
from tests.torch_bridge.faults.ranks import ALL, Ranks, ends_of, ranks, say, take_part
from tests.torch_bridge.faults.table import check_column

VICTIMS, OTHERS = (1, 5), (0, 2, 3, 4, 6, 7)  # the second rank of the world, and of the trainer
TIMEOUT_S = 5.0
WIDTH = 16


def _others_begin(running: Ranks, folder: Path) -> None:
    """All but the victims, which stand still, are in the middle of all operations."""
    running.wait_for(*(f"ready{rank}" for rank in ALL))
    for victim in VICTIMS:
        running.send(victim, signal.SIGSTOP)
    say(folder, "go")
    running.wait_for(*(f"begun{rank}" for rank in OTHERS))


def test_a_rank_is_killed(tmp_path: Path) -> None:
    with ranks(tmp_path, ALL, TIMEOUT_S, take_part, WIDTH, TIMEOUT_S) as running:
        _others_begin(running, tmp_path)
        time.sleep(0.2)
        for victim in VICTIMS:
            running.send(victim, signal.SIGKILL)
        running.wait_for(*(f"ends{rank}" for rank in OTHERS))
        say(tmp_path, "over")
        codes = running.exit_codes()
    assert codes == [-signal.SIGKILL if rank in VICTIMS else 0 for rank in ALL]
    check_column("a rank is killed", ends_of(tmp_path, OTHERS), TIMEOUT_S)


def test_a_rank_stalls(tmp_path: Path) -> None:
    with ranks(tmp_path, ALL, TIMEOUT_S, take_part, WIDTH, TIMEOUT_S) as running:
        _others_begin(running, tmp_path)
        running.wait_for(*(f"ends{rank}" for rank in OTHERS))
        for victim in VICTIMS:
            running.send(victim, signal.SIGCONT)
        running.wait_for(*(f"ends{victim}" for victim in VICTIMS))
        say(tmp_path, "over")
        codes = running.exit_codes()
    assert codes == [0 for _ in ALL]
    check_column("a rank stalls", ends_of(tmp_path, OTHERS), TIMEOUT_S)
    for victim, error in zip(VICTIMS, ("CollectiveError", "LostVersionError"), strict=True):
        kinds = {end.kind for end in ends_of(tmp_path, [victim])[victim]}
        assert "wrong" not in kinds and error in kinds, "what comes too late is an error as well"
