"""The form of messages: the caret stands under the same characters wherever the message is printed."""

import traceback

import pytest

import xshard as xs


def printed(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


def marked(lines: list[str]) -> str:
    at = next(i for i, line in enumerate(lines) if line.endswith("^"))
    return lines[at - 1][lines[at].index("^") : len(lines[at])]


@pytest.mark.parametrize(
    "printing",
    [
        printed,
        lambda error: [f"[rank0]: {line}" for line in printed(error)],
        lambda error: printed(ExceptionGroup("two", [error, ValueError()])),
        lambda error: f"NotationError: {error}".splitlines(),
    ],
    ids=["traceback", "rank", "group", "short"],
)
def test_the_caret_stands_under_what_is_wrong(printing):
    with pytest.raises(xs.errors.NotationError) as caught:
        xs.plan("b s/cq c -> b s c", xs.Mesh(cp=4), (2, 8, 4))
    assert marked(printing(caught.value.with_traceback(None))) == "cq"


def test_a_text_over_several_lines_is_shown_on_one():
    with pytest.raises(xs.errors.NotationError) as caught:
        xs.Layout.parse("b\n\ts/zagzig(cp)")
    assert str(caught.value).splitlines()[1:3] == ["    'b  s/zagzig(cp)'", "          ^^^^^^"]
