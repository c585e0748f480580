"""Pictures of the documents as files, for readers who see them without the site.

A block of code followed by an image of `docs/images/shown/` is a cell: the site runs it and shows its outputs
in place of the image. The image is made from the same outputs.

    python docs/site/pictures.py

draws every image again, and makes a cell of each block that begins with `# picture`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path

from cells import forget, outputs_of, stop

DOCS = Path(__file__).parents[1]
SHOWN = DOCS / "images" / "shown"
CODE = r"^```python\n{}((?:(?!```).*\n)*)```\n"
NEW = re.compile(CODE.format("# picture\n"), re.MULTILINE)
CELL = re.compile(
    CODE.format("") + r"\n!\[[^\]]*\]\(([\w./]*images/shown/[\w.-]*)\)$", re.MULTILINE
)
TITLE = re.compile(r"<div style=\"[^\"]*font-weight:bold[^\"]*\">(.*?)</div>")
DRAWN = re.compile(r"<svg [^>]*viewBox=\"[\d.]+ [\d.]+ ([\d.]+) ([\d.]+)\".*?</svg>", re.DOTALL)
STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#f0f6fc}}</style>"
LINE, GAP, LETTER = (
    18,
    8,
    7.3,
)  # pixels: a line of text, the space below a picture, the width of a letter


def picture(outputs: list[tuple[str, str]]) -> str:
    """The outputs of a cell, one below the other, as one SVG in the colours of the reader's scheme."""
    parts, top, width = [], 0.0, 0.0
    for kind, content in outputs:
        for line, drawing, size in _parts(content) if kind == "html" else _lines(content):
            if drawing:
                drawing = re.sub(r' style="max-width[^"]*"', "", drawing, count=1)  # is for a page
                parts.append(
                    drawing.replace("<svg ", f'<svg y="{top + GAP / 2:.0f}" height="{size[1]}" ', 1)
                )
                top, width = top + size[1] + GAP, max(width, size[0])
            else:
                top, width = top + LINE, max(width, LETTER * len(line))
                weight = "bold" if kind == "html" else "normal"
                place = f'x="0" y="{top - 4:.0f}" fill="currentColor" font-weight="{weight}"'
                parts.append(f'<text {place} xml:space="preserve">{escape(line)}</text>')
    size = f'viewBox="0 0 {width:.0f} {top:.0f}" width="{width:.0f}" height="{top:.0f}"'
    font = 'font-size="12" font-family="ui-monospace, monospace" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{STYLE}{"".join(parts)}</svg>\n'


def _lines(text: str) -> Iterator[tuple[str, str, tuple[float, float]]]:
    yield from ((line, "", (0, 0)) for line in text.splitlines())


def _parts(content: str) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """Titles and drawings of a page in their order; steps of a plan have their titles in the drawing."""
    found = sorted(
        [*TITLE.finditer(content), *DRAWN.finditer(content)], key=lambda match: match.start()
    )
    for match, following in zip(found, [*found[1:], None], strict=True):
        if match.re is DRAWN:
            yield "", match[0], (float(match[1]), float(match[2]))
        elif not following or "data-step" not in following[0]:
            yield unescape(match[1]), "", (0, 0)


def title(outputs: list[tuple[str, str]]) -> str:
    """A few words in place of the picture, for readers who do not see it."""
    titles = [
        unescape(title)
        for kind, content in outputs
        if kind == "html"
        for title in TITLE.findall(content)[:1]
    ]
    return re.sub(r"[\[\]]|  +", " ", "; ".join(titles)).strip()


def main() -> None:
    used = set()
    for path in sorted(DOCS.glob("**/*.md")):
        text = NEW.sub(r"```python\n\1```\n\n![](images/shown/new.svg)\n", path.read_text())
        number = 0

        def drawn(found: re.Match[str], path: Path = path) -> str:
            nonlocal number
            number += 1
            outputs = outputs_of(found[1])
            name = f"{'_'.join(path.relative_to(DOCS).with_suffix('').parts)}-{number}.svg"
            (SHOWN / name).write_text(picture(outputs))
            used.add(name)
            link = f"{'../' * (len(path.relative_to(DOCS).parts) - 1)}images/shown/{name}"
            return f"```python\n{found[1]}```\n\n![{title(outputs)}]({link})"

        forget()
        path.write_text(CELL.sub(drawn, text))
    for path in SHOWN.glob("*.svg"):
        if path.name not in used:
            path.unlink()
    stop()


if __name__ == "__main__":
    SHOWN.mkdir(exist_ok=True)
    main()
