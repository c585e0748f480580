"""Plans that the table of cases lacks, on gloo ranks: every way of packing, every dtype, parts of a mesh."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes  # noqa: F401  (tells numpy of bfloat16 and 8-bit floats)
import pytest

import xshard as xs
from xshard.layout.layout import parse_expression
from xshard.steps import Exchange, Permute
from xshard.testing.plans import RUNTIMES, Verdict, in_numpy, judge, plan_question
from xshard.testing.question import Answer

(TORCH,) = (runtime for runtime in RUNTIMES if runtime.name == "torch")

EXPRESSIONS = [
    # what is sent and what arrives lies in memory as it is, is cut in the middle, or is in pieces
    ("n d/a -> n d | copy(a)", "a=4", (3, 8)),
    ("n d/zigzag(a) -> n d | copy(a)", "a=4", (3, 16)),
    ("n d/cyclic(a) m -> n d m | copy(a)", "a=4", (2, 160, 2)),
    ("n d | sum(a) -> n/zigzag(a) d", "a=8", (16, 2)),
    ("n d | sum(a) -> n d/cyclic(a)", "a=4", (2, 160)),
    ("b s/zigzag(a) c -> b s c/a", "a=8", (2, 32, 8)),
    ("b s/zigzag(a) c -> b s c/cyclic(a)", "a=4", (1, 16, 160)),
    ("n d/zigzag(a) -> n d/cyclic(a)", "a=4", (2, 200)),
    ("n/cyclic(a) d/cyclic(b) -> n/zigzag(b) d/zigzag(a)", "a=2,b=2", (160, 140)),
    # uneven and empty blocks
    ("n d | sum(a) -> n/b d/a", "a=4,b=2", (6, 5)),
    ("n d -> n/a d", "a=8", (5, 2)),
    ("n/a d -> n d | sum(a)", "a=4", (3, 2)),
    ("n/a -> n", "a=4", (0,)),
    # several axes, their order, and groups that leave an axis out
    ("n/(b,a) d -> n d | copy(a,b)", "a=2,b=4", (16, 3)),
    ("n/a/b d/c -> n/c d/b/a", "a=2,b=2,c=2", (8, 8)),
    ("n/b d -> n d/b", "a=2,b=2,c=2", (4, 4)),
    ("n/b d | sum(c) -> n/b d/c", "a=2,b=2,c=2", (4, 4)),
    ("n d | mean(a,b) -> n d", "a=2,b=2", (2, 3)),
    ("n d | max(a) -> n d | copy(a)", "a=2,b=2", (2, 3)),
]
MOVED = [
    "float64",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
]
MOVED += ["uint8", "uint16", "uint32", "uint64", "bool"]
ADDED = [d for d in MOVED if d not in ("int16", "uint16", "uint32", "uint64", "bool")]

QUESTIONS = {
    f"{expression} on {mesh} {shape}": plan_question(
        xs.plan(expression, xs.Mesh.parse(mesh), shape, "float32")
    )
    for expression, mesh, shape in EXPRESSIONS
}
for expression, shape, names in (
    ("b s/zigzag(a) c -> b s c/a", (1, 8, 4), MOVED),
    ("n/a d -> n d/a", (5, 3), MOVED),
    ("n/a d -> n d", (8, 1), [*MOVED, "float8_e4m3fn", "float8_e5m2"]),
    ("n d | sum(a) -> n d", (4, 2), ADDED),
    ("n d | sum(a) -> n/a d", (4, 2), ADDED),
    ("n d | max(a) -> n/a d", (4, 2), ["float16", "bfloat16"]),
):
    for name in names:
        QUESTIONS[f"{name} {expression}"] = plan_question(
            xs.plan(expression, xs.Mesh(a=4), shape, name)
        )

# Exchanges that add up as they arrive, which a planner rarely prefers; and with senders that are replicas in
# the receiver's node, of three devices.
for text, mesh, shape, *node in (
    ("n d | sum(a) -> n/a d", "a=2,b=2", (7, 5)),
    ("n/b d | sum(a) -> n d/a", "a=2,b=2", (7, 5)),
    ("n d | max(a) -> n d/b", "a=2,b=2", (7, 5)),
    ("n d | min(a,b) -> n/a d", "a=2,b=2", (7, 5)),
    ("n/b d -> n/a d", "a=4,b=2", (9, 4), 3),
    ("n/b d/a -> n d", "a=2,b=4", (9, 4), 3),
    ("n/zigzag(b) d -> n d/a", "a=2,b=2", (9, 4), 3),
):
    src, dst = parse_expression(text)
    plan = xs.Plan(src, dst, xs.Mesh.parse(mesh), shape, "float32", (Exchange(dst, *node),))
    QUESTIONS[f"exchange {text} on {mesh}"] = plan_question(plan)

UNEVEN = "a permutation of which the largest block need not move"
QUESTIONS[UNEVEN] = plan_question(xs.plan("n/a d/b -> n/b d/a", xs.Mesh(a=2, b=2), (7, 5)))
assert [type(step) for step in QUESTIONS[UNEVEN].plan.steps] == [Permute]


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    return dict(zip(QUESTIONS, TORCH.answers(list(QUESTIONS.values()), timeout_s=300), strict=True))


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_plan_does_what_it_says(name: str, answers: dict[str, Answer]) -> None:
    question = QUESTIONS[name]
    answer = answers[name]
    assert judge(answer, in_numpy(question)) == Verdict(0, 0)
    planned = question.plan.bytes_received
    received = answer.forward_bytes
    assert received is not None and (
        0 < received <= planned if name == UNEVEN else received == planned
    )
    if question.plan.src.is_linear and name != UNEVEN:
        assert answer.backward_bytes == question.plan.backward.bytes_received


def test_a_wrong_answer_is_seen(answers: dict[str, Answer]) -> None:
    """The comparison above can fail: one element off is a difference."""
    name = next(iter(QUESTIONS))
    blocks = [block.copy() for block in answers[name].outputs["output"]]
    blocks[-1].flat[-1] += 1
    wrong = replace(answers[name], outputs={"output": tuple(blocks)})
    assert judge(wrong, in_numpy(QUESTIONS[name])) == Verdict(1, 0)
