"""Sentences of the documents can be read in one breath."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LONGEST = 35  # words
# Fenced, or indented below an empty line.
CODE_BLOCK = re.compile(r"^ *```.*?^ *```$|^\n(?: {4}.*\n)+", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# A paragraph ends at an empty line, at the next item of a list and at a heading.
PARAGRAPH_END = re.compile(r"\n\s*\n|^\s*[-*] |^\s*\d+\. |^#.*$|\|", re.MULTILINE)
SENTENCE_END = re.compile(r"[.!?:;](?:\*\*)?\s")


def long_sentences(text: str) -> list[str]:
    """The sentences with more than 35 words; a piece of code is one word."""
    prose = LINK.sub(r"\1", INLINE_CODE.sub("CODE", CODE_BLOCK.sub("", text)))
    sentences = [
        sentence
        for paragraph in PARAGRAPH_END.split(prose)
        for sentence in SENTENCE_END.split(" ".join(paragraph.split()))
    ]
    return [sentence for sentence in sentences if len(sentence.split()) > LONGEST]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path):
    assert long_sentences(path.read_text()) == []


def test_a_long_sentence_is_found():
    words = " ".join(["word"] * 36)
    assert long_sentences(f"Short. {words}. Short, `with {words}`.") == [words]
