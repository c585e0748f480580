"""The notebooks with their outputs, for readers who see them without the site.

    python docs/site/notebooks.py

runs docs/notebooks/*.py and writes each as .ipynb beside its source.
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
from cells import forget, outputs_of, stop
from pictures import picture

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def notebook(path: Path) -> nbformat.NotebookNode:
    """A source -> its cells with their outputs; pictures as SVG, since GitHub shows no HTML with drawings."""
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"display_name": "Python 3", "name": "python3"}}
    )
    for number, cell in enumerate(jupytext.read(path).cells):
        source = re.sub(r"\]\((\w+)\.py\)", r"](\1.ipynb)", cell.source)
        new = (
            nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        )
        book.cells.append(new(source, id=f"cell-{number}"))
        if cell.cell_type == "code":
            book.cells[-1].outputs = [_shown(output) for output in outputs_of(cell.source)]
    return book


def _shown(output: tuple[str, str]) -> nbformat.NotebookNode:
    kind, content = output
    if kind == "text":
        return nbformat.v4.new_output("stream", text=content)
    return nbformat.v4.new_output(
        "display_data", {"image/svg+xml": picture([output]), "text/plain": "a picture"}
    )


if __name__ == "__main__":
    for source in sorted(NOTEBOOKS.glob("*.py")):
        forget()
        nbformat.write(notebook(source), source.with_suffix(".ipynb"))
    stop()
