"""The six ways in which others have moved weights wrongly without a word: refused here, or right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.state.checkpoints import load, save
from xshard import Layout, Mesh, Sharding, XshardError, load_profile
from xshard.errors import ShapeError
from xshard.state import Names, concat, rename, split, stack
from xshard.state.files import open_checkpoint
from xshard.state.files.difference import diff_checkpoints
from xshard.state.files.loading import load_of, plan_load, read_block, stored_as

HEADS = 4
KV_HEADS = 2
HEAD = 8
ROWS = HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD
QKV = [f"attn.{x}" for x in "qkv"]
FUSED = Names(
    concat(QKV, "attn.qkv", rows=ROWS),
    concat(["mlp.gate", "mlp.up"], "mlp.gate_up"),
    rename("**", "**"),
)
SHAPES = {
    **dict(zip(QKV, ((n, 16) for n in ROWS), strict=True)),
    "mlp.gate": (24, 16),
    "mlp.up": (24, 16),
    "mlp.down": (16, 24),
}
Arrays = dict[str, NDArray[Any]]


def model(seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Arrays:
    numbers = np.random.default_rng(seed)
    return {name: numbers.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def refused(error: type[Exception], message: str, work: Any, *arguments: Any) -> None:
    with pytest.raises(error) as raised:
        work(*arguments)
    assert str(raised.value) == message


def refused_shape(
    folder: Path,
    name: str,
    stored: tuple[int, ...],
    shape: tuple[int, ...],
    names: Names | None = None,
) -> None:
    with open_checkpoint(folder) as checkpoint:
        made = stored_as(checkpoint, names)[name]
        here = Sharding(Layout.parse("o i"), Mesh(tp=1), shape)
        message = f"shape {stored} in the checkpoint, {shape} here\n  names= maps arrays"
        refused(
            ShapeError, message, load_of, checkpoint, made, made.dtype, here, load_profile("h100")
        )


def test_a_fused_weight_that_is_never_updated(tmp_path: Path) -> None:
    """The trainer has q, k and v, the server qkv; by name nothing reaches it (torchtitan#3867)."""
    save(tmp_path, model())
    message = (
        "rule 'attn.qkv' fits no array\n"
        "  the arrays are: attn.q, attn.k, attn.v, mlp.gate, mlp.up, mlp.down"
    )
    refused(XshardError, message, load, tmp_path, {"attn.qkv": "o/tp i", "**": "..."}, Mesh(tp=2))
    only_two = Names(concat(QKV[:2], "attn.qkv"), rename("**", "**"))
    refused_shape(tmp_path, "attn.qkv", (48, 16), (64, 16), only_two)
    found = load(tmp_path, {"attn.qkv": "o i", "**": "..."}, Mesh(tp=1), FUSED)
    np.testing.assert_array_equal(
        found["attn.qkv"][0], np.concatenate([model()[name] for name in QKV])
    )


def test_halves_that_are_swapped(tmp_path: Path) -> None:
    """No shape shows it (sglang#32430): the file has its own mapping, and `diff` names it."""
    save(tmp_path / "right", model(), names=FUSED)
    swapped = Names(
        concat(QKV, "attn.qkv", rows=ROWS),
        concat(["mlp.up", "mlp.gate"], "mlp.gate_up"),
        rename("**", "**"),
    )
    save(tmp_path / "swapped", model(), names=swapped)
    for kind in ("right", "swapped"):
        names = open_checkpoint(tmp_path / kind).names
        assert names is not None
        found = load(tmp_path / kind, {"**": "..."}, Mesh(tp=1), names.inverse)
        assert found.keys() == SHAPES.keys()
        for name, x in model().items():
            np.testing.assert_array_equal(found[name][0], x, err_msg=f"{kind}: {name}")
    both = open_checkpoint(tmp_path / "right"), open_checkpoint(tmp_path / "swapped")
    assert [*diff_checkpoints(*both)] == [
        ("mlp.gate_up", "the halves of dim 0 are swapped, as gate and up")
    ]


def test_experts_that_are_never_synced(tmp_path: Path) -> None:
    """Which no relation, no rule, or no number stands for (ATOM#2028)."""
    experts = {f"experts.{i}.w": (4, 6) for i in range(4)}
    save(tmp_path, model(0, experts | {"norm": (6,)}))
    four = "experts.0.w, experts.1.w, experts.2.w, experts.3.w"
    message = f"no rule for 4 of 5 arrays: {four}\n  the rules are for: 'norm'; "
    message += "'**' is for all others, '...' for whole arrays"
    refused(XshardError, message, load, tmp_path, {"norm": "n"}, Mesh(tp=2))
    message = f"no relation for 4 names: {four}\n  rename('**', '**') keeps all others as they are"
    refused(XshardError, message, Names(rename("norm", "norm")).resolve, experts | {"norm": (6,)})
    stacked = Names(stack("experts.*.w", "experts.w"), rename("**", "**"))
    del experts["experts.2.w"]
    message = "experts.*.w -> experts.w: there is no experts.2.w\n  did you mean 'experts.3.w'? "
    refused(XshardError, message, stacked.resolve, experts)
    found = load(tmp_path, {"experts.w": "e/ep o i", "norm": "n"}, Mesh(ep=2), stacked)
    whole = model(0, {f"experts.{i}.w": (4, 6) for i in range(4)} | {"norm": (6,)})
    for device in range(2):
        expected = np.stack([whole[f"experts.{2 * device + i}.w"] for i in range(2)])
        np.testing.assert_array_equal(found["experts.w"][device], expected)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_checkpoint_cut_for_another_degree(tp: int, tmp_path: Path) -> None:
    """Files have whole arrays, whoever wrote them; a fused one is cut part by part (sglang#36438)."""
    qkv = np.concatenate([model()[name] for name in QKV])
    block = "o/block(tp," + ",".join(map(str, ROWS)) + ") i"
    save(tmp_path, {"qkv": qkv}, {"qkv": block}, Mesh(tp=4))
    assert str(open_checkpoint(tmp_path).layouts["qkv"]) == block
    found = load(tmp_path, {"qkv": block}, Mesh(tp=tp))["qkv"]
    for device, x in enumerate(found):
        parts = [np.split(model()[name], tp)[device] for name in QKV]
        np.testing.assert_array_equal(x, np.concatenate(parts))
    parts = load(
        tmp_path, {"*": "o/tp i"}, Mesh(tp=tp), Names(split("qkv", ["q", "k", "v"], rows=ROWS))
    )
    for name in "qkv":
        np.testing.assert_array_equal(np.concatenate(parts[name]), model()[f"attn.{name}"])


def test_a_file_of_one_rank_is_not_the_whole(tmp_path: Path) -> None:
    save(tmp_path, {"w": model()["mlp.gate"][:12]})
    refused_shape(tmp_path, "w", (12, 16), (24, 16))


def test_a_segment_at_a_wrong_offset(tmp_path: Path) -> None:
    """Offsets are counted from shapes; what does not add up is refused (Megatron-LM#142 of ISEEKYAN)."""
    q, k, v = ROWS
    parts = {name: SHAPES[name] for name in QKV}
    wrong = "dim 0 of 64 rows is not a whole number of groups of"
    hint = "  rows= has the rows of each part that come in turn"
    message = f"attn.q, attn.k, attn.v -> qkv: {wrong} [32, 16, 15] rows\n{hint}"
    refused(ShapeError, message, Names(concat(QKV, "qkv", rows=(q, k, v - 1))).resolve, parts)
    message = f"qkv -> attn.q, attn.k, attn.v: {wrong} [32, 16, 24] rows\n{hint}"
    refused(
        ShapeError, message, Names(split("qkv", QKV, rows=(q, k, v + 8))).resolve, {"qkv": (64, 16)}
    )
    save(tmp_path, {"qkv": model(0, {"qkv": (64, 16)})["qkv"]})
    exchanged = Names(split("qkv", QKV, rows=(k, q, v)))  # adds up, but not to what is there
    refused_shape(tmp_path, "attn.q", (16, 16), SHAPES["attn.q"], exchanged)
    fused = FUSED.resolve(SHAPES)["attn.qkv"]
    times = np.zeros(fused.shape, int)
    for piece in fused.pieces:
        times[piece.dst.numpy_index(fused.shape)] += 1
    assert (times == 1).all()


def test_all_of_it_copied_at_every_sync(tmp_path: Path) -> None:
    """A device reads the rows of its own block, and no other byte (torchtitan#4706)."""
    mesh = Mesh(tp=4)
    rules = {"mlp.{gate,up}": "o/tp i", "mlp.down": "o i/tp", "attn.*": "o/tp i"}
    save(tmp_path, model())
    with open_checkpoint(tmp_path) as checkpoint:
        for name, plan in plan_load(checkpoint, rules, mesh).items():
            for device in range(4):
                before = checkpoint.bytes_read
                block = read_block(checkpoint, plan, device)
                assert checkpoint.bytes_read - before == block.nbytes == model()[name].nbytes // 4
