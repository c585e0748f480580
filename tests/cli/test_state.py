"""`xshard state`: tables of checkpoints, other forms of them, and the mistakes that make two differ."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from typer.testing import CliRunner

from xshard.cli.app import app
from xshard.state.files import open_checkpoint


def xshard(*arguments: object, code: int = 0) -> str:
    told = CliRunner().invoke(
        app, ["state", *map(str, arguments)], env={"NO_COLOR": "1", "COLUMNS": "160"}
    )
    assert told.exit_code == code, told.output
    return told.output


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two arrays in a folder as others write it."""
    (tmp_path / "model").mkdir()
    arrays = {
        "l.gate": np.arange(24, dtype=np.float32).reshape(6, 4),
        "l.up": np.ones((6, 4), np.float32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_a_converted_checkpoint_is_shown(model: Path, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('[{"parts": ["*.gate", "*.up"], "whole": "*.gate_up"}]')
    (tmp_path / "rules.json").write_text('{"**": "o/block(tp,6,6) i"}')
    options = [
        "--names",
        tmp_path / "names.json",
        "--rules",
        tmp_path / "rules.json",
        "--mesh",
        "tp=2",
    ]
    told = xshard("convert", model, tmp_path / "out", *options, "--dtype", "bfloat16")
    assert told.split() == ["1", "arrays,", "96", "B,", "in", str(tmp_path / "out")]
    told = xshard("show", tmp_path / "out", "--verify")
    (file,) = (path.name for path in (tmp_path / "out").glob("*.safetensors"))
    row = ["l.gate_up", "12x4", "bfloat16", "o/block(tp,6,6)", "i", "96", "B", file]
    assert row in rows(told) and ["1", "arrays,", "96", "B,", "on", "Mesh(tp=2)"] in rows(told)
    assert ["4", "checksums", "are", "right"] in rows(told)  # two segments on each of two devices
    with open_checkpoint(tmp_path / "out") as found:
        bits = found.read("l.gate_up", (slice(0, 6), slice(0, 4)))
        found_rows = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(found_rows, np.arange(24).reshape(6, 4))


def test_diff_names_each_mistake(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    right: dict[str, NDArray[np.float32]] = {
        name: rng.normal(size=(8, 8)).astype(np.float32)
        for name in (
            "same",
            "gate_up",
            "square",
            "order",
            "stale",
            "other",
            "kind",
            "shape",
            "lost",
        )
    }
    wrong = {
        "same": right["same"],
        "gate_up": np.concatenate([right["gate_up"][4:], right["gate_up"][:4]]),
        "square": np.ascontiguousarray(right["square"].T),
        "order": right["order"][::-1].copy(),
        "stale": right["stale"] + 1,
        "other": right["other"] + np.eye(8, dtype=np.float32),
        "kind": right["kind"].astype(np.float64),
        "shape": right["shape"][:4].copy(),
        "new": right["same"],
    }
    a, b, old = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "old"))
    safetensors.numpy.save_file(right, a)
    safetensors.numpy.save_file(wrong, b)
    safetensors.numpy.save_file({"stale": wrong["stale"]}, old)
    found = {
        row[0]: " ".join(row[1:])
        for row in rows(xshard("diff", a, b, "--before", old, code=1))
        if row
    }
    expected = {
        "gate_up": "the halves of dim 0 are swapped, as gate and up",
        "square": "transposed",
        "order": "the rows of dim 0 are in another order",
        "stale": "not updated",
        "other": "8 of 64 elements differ",
        "kind": "float32 and float64",
        "shape": "shape (8, 8) and (4, 8)",
        "lost": "only in the first",
        "new": "only in the second",
        "9": "of 9 arrays differ",
    }
    assert {name: found.get(name) for name in expected} == expected and "same" not in found
    assert xshard("diff", a, a) == "0 of 9 arrays differ\n"


def test_what_is_refused_leaves_nothing(model: Path, tmp_path: Path) -> None:
    for option, value, message in (
        ("--names", "llama-to-flox", "did you mean 'llama-to-flax'"),
        ("--rules", {"x": "o i"}, "no rule for 2 of 2 arrays"),
        ("--names", [{"parts": ["a"], "whole": "b"}], "no relation for 2 names"),
    ):
        given = value if isinstance(value, str) else written(tmp_path, value)
        assert message in xshard("convert", model, tmp_path / "out", option, given, code=2)
    (tmp_path / "a.pt").write_bytes(b"\x80")
    assert "is a pickle" in xshard("show", tmp_path / "a.pt", code=2)
    assert not (tmp_path / "out").exists()


def written(folder: Path, value: object) -> Path:
    (folder / "value.json").write_text(json.dumps(value))
    return folder / "value.json"
