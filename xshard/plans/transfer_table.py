"""A plan between two meshes as text: its steps with the mesh that they lead to, and the totals.

Decides the columns and the words; the rows of steps on one mesh are those of `table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.plans import table

if TYPE_CHECKING:
    from xshard.plans.transfer_plan import TransferPlan  # which prints itself by this table


def text(plan: TransferPlan) -> str:
    """The whole table, aligned."""
    rows = [("on", *table.HEAD), *(tuple(row) for row in _rows(plan))]
    columns = [(step, on, *others) for on, step, *others in rows]
    return "\n".join([_title(plan), "", align_columns(columns), "", _total(plan)])


def numbers(devices: Sequence[int]) -> str:
    """`(0, 1, 2, 3, 6)` -> `0-3,6`."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _rows(plan: TransferPlan) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [
        (str(plan.src_mesh), "", str(plan.src), table.shape_text(plan.source), "", "", "")
    ]
    if plan.src_plan:
        found += [(str(plan.src_plan.mesh), *row) for row in table.rows(plan.src_plan)[1:]]
    if plan.transfer:
        after = plan.dst_plan.source if plan.dst_plan else plan.target
        price = plan.transfer_price
        costs = (
            format_bytes(price.received_bytes),
            format_seconds(price.seconds),
            format_bytes(price.peak_bytes),
        )
        layout, shape = str(after.layout), table.shape_text(after)
        found.append((str(plan.dst_mesh), str(plan.transfer), layout, shape, *costs))
    if plan.dst_plan:
        found += [(str(plan.dst_mesh), *row) for row in table.rows(plan.dst_plan)[1:]]
    return found


def _title(plan: TransferPlan) -> str:
    return (
        f"{plan.src} -> {plan.dst}   {plan.dtype}{list(plan.shape)} from {plan.src_mesh} to {plan.dst_mesh}, "
        f"devices {numbers(plan.src_devices)} -> {numbers(plan.dst_devices)}"
    )


def _total(plan: TransferPlan) -> str:
    bound = plan.bytes_lower_bound
    ratio = (
        f"{plan.bytes_received / bound:.2f}x the bound of {format_bytes(bound)}"
        if bound
        else "the bound is 0 B"
    )
    sent = plan.transfer.sent * plan.itemsize if plan.transfer else 0
    return (
        f"received {format_bytes(plan.bytes_received)} ({ratio}), sent between meshes {format_bytes(sent)}, "
        f"{table.seconds_text(plan)}, peak {format_bytes(plan.peak_bytes)}, priced for {plan.profile.name}"
    )
