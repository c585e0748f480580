"""`route`: rows to processes that values name, as tokens to experts, and back.

`xshard.routing` says what goes where.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.routing.call import RouteCall
from torch_bridge.routing.copies import Routed
from xshard.errors import api_boundary
from xshard.ops import Axes
from xshard.signatures import Length

__all__ = ["RouteCall", "Routed", "route"]


@api_boundary
@between_graphs
def route(
    x: Tensor,
    to: Tensor,
    axis: Axes,
    mesh: MeshLike,
    *,
    groups: int | Sequence[int] | None = None,
    capacity: Length | None = None,
    sizes: Length | None = None,
    debug: bool = False,
) -> Routed:
    """Send rows to the processes of the groups they chose (tokens to experts), differentiably.

        routed = xt.route(x, to, "ep", mesh, groups=8)   # x [rows, c], to [rows, k] -> routed.rows [n, c]
        y = routed.back(experts(routed.rows, routed.sizes), weights=weights)      # [n, c] -> [rows, c]

    `routed.rows` has one row per choice of a group of this process: those of its first group, then
    those of the second, and so on; within a group in the order of the processes and rows they come
    from. `routed.sizes` says how many each group has. `back` sends one result per row back, and
    adds up those of a row. A process gets one copy of a row, however many of its groups the row
    chose, and one sum returns. Gradients take the same two ways in the opposite direction.

    All processes of the axis call it, with any number of rows. The host waits once, for the numbers of
    copies; then rows travel in one all-to-all, with 4 bytes beside each for every choice.

    Args:
        x: This process's rows, `[rows, ...]`.
        to: The group of each row, `[rows]`, or several, `[rows, k]`; a number below 0 goes nowhere.
        axis: A mesh axis, or several taken as one, in the order of the mesh.
        mesh: As for `redistribute`.
        groups: Their number, sharded as `"g/axis"` says, or for each the part of the axis that it is on.
            Default: one per process.
        capacity: At most so many copies from each process to each; the first rows go. `Routed.dropped` is a
            tensor with the number of copies that were dropped here. Default: none are.
        sizes: The number of copies from each process to each, if it is known: nothing is counted, the host
            does not wait. Further ones are dropped, and missing ones are padding, which no group has.
        debug: Compare the calls of all processes first, as in `redistribute`.

    Returns:
        What came, and the way back.

    Raises:
        ShapeError: Groups are not there, on all processes of the axis, before rows are sent; or arguments
            have shapes that do not fit.
        MeshError: As `redistribute` does; so are NotationError, DesyncError and CollectiveError.

    Examples:
        >>> import torch, torch_bridge as xt, xshard as xs
        >>> def doubled():
        ...     x, to = torch.arange(3.0)[:, None], torch.tensor([[3, 0], [0, 1], [3, -1]])
        ...     there = xt.route(x, to, "ep", xs.Mesh(ep=2), groups=4)
        ...     return there.sizes.tolist(), there.back(
        ...         2 * there.rows, weights=torch.ones(3, 2)
        ...     ).flatten().tolist()
        >>> xt.testing.run_ranks(2, doubled)
        [([4, 2], [0.0, 4.0, 4.0]), ([0, 4], [0.0, 4.0, 4.0])]
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    routed, _ = RouteCall(axes, mesh, groups, capacity, sizes, debug).send([x], to)
    return routed
