"""Small random steps: a repeated block of a few operations between an input and a loss."""

import random

from xshard import Op, TrainingStep

LENGTHS = {"b": 512, "c": 1024, "f": 4096}
TEXTS = {"b c -> b f": "f c", "b f -> b c": "c f", "b c -> b c": "c"}


def random_step(seed: int, *, repeated: bool = True) -> TrainingStep:
    """One or two operations with parameters in a block, which adds its input or repeats, or both."""
    pick = random.Random(seed)
    times = pick.choice((1, 4)) if repeated else 1
    ops = [
        Op(
            "block.*",
            "b c -> b c",
            ("x",),
            "carry",
            again="block.*.last",
            times=times,
            enters="block.*",
        )
    ]
    parameters = {}
    here = "c"
    at = "block.*"
    for i in range(pick.choice((1, 2))):
        there = pick.choice("cf")
        name = f"block.*.op{i}"
        text = f"b {here}, {there} {here} -> b {there}"
        kind = "contraction"
        whole = ()
        if here == there:
            text = f"b {here}, {here} -> b {here}"
            kind = "pointwise"
            whole = pick.choice(((), (here,)))
        parameters[f"{name}.weight"] = text.split(", ")[1].split(" ->")[0]
        ops.append(Op(name, text, (at, f"{name}.weight"), kind, whole, times=times))
        here = there
        at = name
    if here == "c":
        ops.append(Op("block.*.last", "b c, b c -> b c", ("block.*", at), "linear", times=times))
    else:
        ops.append(Op("block.*.last", "b f, c f -> b c", (at, "block.*.last.weight"), times=times))
        parameters["block.*.last.weight"] = "c f"
    ops.append(Op("loss", "b c ->", ("block.*.last",), "loss"))
    return TrainingStep(ops, LENGTHS, {"x": "b c"}, parameters)
