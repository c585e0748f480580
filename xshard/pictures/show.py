"""`show`: the picture of a layout or a plan, as a notebook or a terminal can show it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from xshard.contractions.plan import ContractionPlan
from xshard.errors import PlanError, XshardError, api_boundary
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.maps import Maps
from xshard.pictures.grid import picture
from xshard.plans.plan import Plan
from xshard.schedule import Schedule, Timeline

Shown = Layout | str | Sharding | Mesh | Plan | ContractionPlan | Schedule | Timeline


@api_boundary
def show(
    what: Shown,
    mesh: Mesh | str | None = None,
    shape: Sequence[int] | None = None,
    *,
    dims: Sequence[str] = (),
    maps: Maps | None = None,
) -> None:
    """Show which device holds which block of an array, or the steps of a plan with what travels in each.

        show("s/zigzag(cp) c", Mesh(cp=2), (8, 3))

    A notebook shows a picture, a terminal the grid and tables of `xshard show` and `xshard plan`.

    Args:
        what: A layout, with the mesh and the global shape of the array; or a sharding, a mesh, a plan,
            a schedule or its timeline alone.
        mesh: The mesh of a layout.
        shape: The global shape of the array.
        dims: The one or two dims of a sharding to draw. Default: the first two that are cut.
        maps: The `Owners` and `Needs` that a layout names.

    Raises:
        PlanError: A layout has no mesh or no shape, or another value has one.
        XshardError: A terminal needs rich, which `pip install 'xshard[cli]'` brings.

    Examples:
        >>> from xshard import Mesh, show
        >>> show("s/zigzag(cp) c", Mesh(cp=2), (8, 3))  # doctest: +ELLIPSIS
        s/zigzag(cp) c   [8, 3] on cp=2
        ...
    """
    if isinstance(what, Layout | str):
        if mesh is None or shape is None:
            raise PlanError("a layout alone cannot be drawn", hint="show(layout, mesh, shape)")
        mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        what = Sharding(Layout.parse(what, maps), mesh, tuple(shape))
    elif mesh is not None or shape is not None:
        raise PlanError(
            f"a {type(what).__name__} has a mesh and a shape of its own", hint="show it alone"
        )
    _display(picture(what, dims) if isinstance(what, Sharding) else what)


def _display(value: object) -> None:
    """Show a picture, a mesh or a plan as HTML in a notebook, else as text in a terminal."""
    if _is_in_notebook():
        from xshard.pictures.html import html

        notebook = import_module("IPython.display")
        notebook.display(notebook.HTML(html(value)))
        return
    if not find_spec("rich"):
        raise XshardError(
            "rich is not installed", hint="pip install 'xshard[cli]'; or print a plan"
        )
    from xshard.pictures.terminal import console, renderable

    console().print(renderable(value))


def _is_in_notebook() -> bool:
    """Return whether a kernel of IPython runs this, which shows HTML; its terminal does not."""
    if "IPython" not in sys.modules:
        return False
    return hasattr(sys.modules["IPython"].get_ipython(), "kernel")
