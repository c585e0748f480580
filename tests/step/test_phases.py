"""The phases of planning a step import one way: record, price, choose, say."""

import re
from pathlib import Path

import pytest

import xshard.step

ROOM = Path(xshard.step.__file__).parent
PHASES = ("record", "price", "choose", "say")


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_imports_only_phases_before_it(phase):
    later = PHASES[PHASES.index(phase) + 1 :]
    for path in sorted((ROOM / phase).glob("*.py")):
        imported = re.findall(r"^from xshard\.step\.(\w+)", path.read_text(), re.MULTILINE)
        assert not set(imported) & {*later, "suggest"}, path


def test_there_are_no_other_folders():
    found = {path.name for path in ROOM.iterdir() if path.is_dir()} - {"__pycache__"}
    assert found == set(PHASES)
