"""Layouts, plans and meshes as SVG; text has the colour of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh, Sharding
from xshard.pictures import elements as el
from xshard.pictures.blocks import grid_drawing
from xshard.pictures.elements import Shape
from xshard.pictures.grid import Picture, picture, title
from xshard.plans.plan import Plan, Stage
from xshard.schedule import COMPUTING, EXPOSED, Timeline

MAX_DEVICES = 64  # up to here they are drawn one by one
# In pixels.
BAND = 84.0  # height of the messages of a step
ROW = 24.0  # height of a row of devices
DEVICE_STEP = 34.0  # from one device to the next
DEVICE_RADIUS = 11
DEVICE_LEFT = 14  # middle of the first device
DEVICE_TOP = 12.0  # middle of the upper devices
LINE_GAP = 22.0  # from the edge of a band to the end of a line
TIMELINE_WIDTH = 720.0
EXPOSED_COLOUR = "#CC3311"  # where a device waits


def sharding_svg(drawn: Picture) -> str:
    """Draw the blocks of an array, each a share of its area.

    There is a card for each place along axes that shard no drawn dim.
    """
    return el.element(grid_drawing(drawn), title(drawn.sharding))


def plan_svg(plan: Plan) -> str:
    """Draw a plan as SVG: the array's blocks before and after each step, one below the other.

    Between them stand the step, its price, and a line for each message between two devices, thicker
    for more bytes.
    """
    dims = _plan_dims(plan)
    devices = plan.src_devices
    shapes = [_captioned(plan.source, dims, devices)]
    for step_number, (stage, price) in enumerate(
        zip(plan.stages, plan.prices, strict=True), start=1
    ):
        # A transfer, if there is one, is the step after which the array lies on other devices.
        senders = devices
        if stage.step is plan.transfer:
            devices = plan.dst_devices
        costs = f"{format_bytes(price.received_bytes)}, {format_seconds(price.seconds)}"
        # The last layout as the user wrote it: the stages are in normal form.
        target = plan.target if step_number == len(plan.stages) else stage.after
        step = el.stacked(
            [
                el.line_of(f"↓ {stage.step}: {costs}"),
                _messages(stage, plan.itemsize, senders, devices),
                _captioned(target, dims, devices),
            ]
        )
        shapes.append(step._replace(body=f'<g data-step="{step_number}">{step.body}</g>'))
    return el.element(el.stacked(shapes), f"{plan.src} to {plan.dst} in {len(plan.stages)} steps")


def mesh_svg(mesh: Mesh) -> str:
    """Draw the devices of a mesh as SVG: the last axis goes across, and all others go down.

    Mesh dp=2, cp=2, tp=4 has 4 rows of 4 devices, called "dp=0 cp=0", "dp=0 cp=1", ...
    """
    n_columns = mesh.sizes[-1] if mesh.sizes else 1
    heads = [""]  # a mesh without axes has one device
    if mesh.axes:
        heads = [f"{mesh.axes[-1]}={coord}" for coord in range(n_columns)[:MAX_DEVICES]]
    width = max(map(len, heads)) * el.CHAR + el.GAP
    shapes = []
    for column_index, head in enumerate(heads):
        shapes.append(el.label((column_index + 0.5) * width, -6, head))
    first_devices = range(0, mesh.n_devices, n_columns)
    for row_index, first_device in enumerate(first_devices[:MAX_DEVICES]):
        devices = range(first_device, first_device + len(heads))
        shapes += _row_of_devices(mesh, devices, row_index * ROW, width)
    return el.element(el.framed(shapes), f"devices of {mesh}")


def _row_of_devices(mesh: Mesh, devices: Sequence[int], top: float, width: float) -> list[Shape]:
    """Draw devices beside each other, each `width` wide, after what they share: "dp=0 cp=1"."""
    coords = zip(mesh.axes[:-1], mesh.coords(devices[0]), strict=False)
    row_head = " ".join(f"{axis}={coord}" for axis, coord in coords)
    shapes = [el.label(-6, top + 16, row_head, "end")]
    for column_index, device in enumerate(devices):
        left = column_index * width
        box = (left, top, left + width, top + ROW)
        fill = el.colour((device,))
        shapes += [el.rectangle(box, fill), *el.label_in(box, str(device), fill)]
    return shapes


def timeline_svg(timeline: Timeline) -> str:
    """Draw a timeline as SVG: a lane for the device, red where it waits, and one for each link."""
    per_second = TIMELINE_WIDTH / max(timeline.seconds, 1e-9)
    row_of_lane = {lane: row for row, lane in enumerate(timeline.lanes)}
    shapes = []
    for lane, row in row_of_lane.items():
        shapes.append(el.label(-6, row * ROW + 16, lane, "end"))
    for span in timeline.spans:
        if span.lane == EXPOSED:  # the device waits, in the lane of its computing
            row = row_of_lane[COMPUTING]
            fill = EXPOSED_COLOUR
        else:
            row = row_of_lane[span.lane]
            fill = el.colour((row,))
        box = (span.begin_s * per_second, row * ROW, span.end_s * per_second, (row + 1) * ROW)
        tooltip = f"{span.name}: {format_seconds(span.end_s - span.begin_s)}, {span.lane}"
        shapes += [el.rectangle(box, fill, tooltip), *el.label_in(box, span.name, fill)]
    return el.element(el.framed(shapes), "what computes and travels when")


def _messages(
    stage: Stage, itemsize: int, senders: Sequence[int], receivers: Sequence[int]
) -> Shape:
    """Draw the messages of a step: senders above, receivers below, a line from each to each.

    A line is thicker for more elements, and says "d0 to d1: 8 B" under the mouse. With too many
    devices for a drawing, the result is a line of text.

    Args:
        stage: The step with the sharding before it.
        itemsize: Bytes of an element.
        senders: The number of every device of the mesh before the step.
        receivers: The number of every device of the mesh after it.
    """
    messages = stage.step.pair_traffic(stage.before)
    max_elements = max((message.elements for message in messages), default=0)
    if not max_elements:
        return el.line_of("nothing travels")
    if max(len(senders), len(receivers)) > MAX_DEVICES:
        return el.line_of(f"{len(messages)} messages between {len(senders)} devices")
    shapes = []
    for message in messages:
        src = senders[message.src]
        dst = receivers[message.dst]
        # From below the upper device to above the lower one.
        box = (_device_x(message.src), LINE_GAP, _device_x(message.dst), BAND - LINE_GAP)
        x1, y1, x2, y2 = box
        ends = f'x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"'
        width = 0.5 + 3.5 * message.elements / max_elements
        ink = f'stroke="currentColor" stroke-opacity=".55" stroke-width="{width:.1f}"'
        tooltip = f"d{src} to d{dst}: {format_bytes(message.elements * itemsize)}"
        devices = f'data-src="{src}" data-dst="{dst}"'
        shapes.append(Shape(f"<line {ends} {ink} {devices}><title>{tooltip}</title></line>", box))
    shapes += _devices(senders, DEVICE_TOP)
    shapes += _devices(receivers, BAND - DEVICE_TOP)
    return el.framed(shapes)


def _device_x(position: int) -> float:
    return position * DEVICE_STEP + DEVICE_LEFT


def _devices(devices: Sequence[int], y: float) -> Iterator[Shape]:
    """Draw a row of devices as numbered circles."""
    for position, device in enumerate(devices):
        x = _device_x(position)
        fill = el.colour((device,))
        body = f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{DEVICE_RADIUS}" fill="{fill}"/>'
        box = (x - DEVICE_RADIUS, y - DEVICE_RADIUS, x + DEVICE_RADIUS, y + DEVICE_RADIUS)
        yield Shape(body, box)
        yield el.label(x, y + 4, str(device), behind=fill)


def _plan_dims(plan: Plan) -> list[str]:
    """Choose the dims that all pictures of a plan show: the two that are cut most often."""
    shardings = (plan.source, *(stage.after for stage in plan.stages))
    n_cuts: Counter[str] = Counter()
    for sharding in shardings:
        n_cuts.update(dim.name for dim in sharding.layout.dims if dim.axes or dim.overlap)
    names = [name for name, _ in n_cuts.most_common()]
    names += [name for name in reversed(plan.src.names) if name not in n_cuts]
    return names[:2]


def _captioned(sharding: Sharding, dims: Sequence[str], devices: Sequence[int]) -> Shape:
    """Draw a picture below its title."""
    names = [name for name in sharding.layout.names if name in dims]
    drawn = grid_drawing(picture(sharding, names, devices))
    return el.stacked([el.line_of(title(sharding), bold=True), drawn])
