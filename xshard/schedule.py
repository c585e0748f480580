"""The schedule of a step: what computes in which order, and what travels meanwhile.

It is a list of steps of three kinds. It knows nothing of models, plans and runtimes: it has names, bytes and
seconds.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from xshard.arguments import limit_of
from xshard.errors import PlanError
from xshard.formatting import Pictured, align_columns, format_bytes, format_seconds
from xshard.signatures import Bytes

COMPUTING = "computing"  # the lane of the device
EXPOSED = "exposed"  # where the device waits: drawn in its lane
_MARKS = {COMPUTING: "#", EXPOSED: "!"}
_LINK_MARK = "="


@dataclass(frozen=True)
class Start:
    """A move begins to travel, behind the moves that were started before it on its link.

    Attributes:
        name: Which one, as "layers.1 parameters"; of those on the way at one time, no two have one name.
        n_bytes: How many bytes a device needs for it while it is on the way.
        link: The level of links on which it travels, as "nodes".
        seconds: How long it travels.
    """

    name: str
    n_bytes: int
    link: str = "links"
    seconds: float = 0.0


@dataclass(frozen=True)
class Wait:
    """The device waits until the move of this name has arrived."""

    name: str


@dataclass(frozen=True)
class Compute:
    """The device computes a module, or an operation."""

    name: str
    seconds: float = 0.0


ScheduleStep = Start | Wait | Compute
_KINDS = {"start": Start, "wait": Wait, "compute": Compute}


class Span(NamedTuple):
    """What a lane does from one time to another; lanes are COMPUTING, EXPOSED and the names of links."""

    lane: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline(Pictured):
    """What a schedule does when, and how long it takes. Notebooks draw it."""

    spans: tuple[Span, ...]
    seconds: float

    @property
    def lanes(self) -> list[str]:
        """The lane of the device, in which it waits, too; then one for each level of links."""
        lanes = [COMPUTING, *(span.lane for span in self.spans if span.lane != EXPOSED)]
        return list(dict.fromkeys(lanes))

    @property
    def exposed_s(self) -> float:
        """The seconds in which the device waits."""
        return sum(span.end_s - span.begin_s for span in self.spans if span.lane == EXPOSED)

    def __str__(self) -> str:
        """Draw a line for the device, with `!` where it waits, and one for each level of links."""
        columns = 72
        lines: dict[str, list[str]] = {COMPUTING: [" "] * columns}
        per_column = self.seconds / columns
        for span in self.spans:
            row = COMPUTING if span.lane == EXPOSED else span.lane
            line = lines.setdefault(row, [" "] * columns)
            if span.end_s > span.begin_s:
                first_column = round(span.begin_s / per_column)
                stop_column = max(first_column + 1, round(span.end_s / per_column))
                mark = _MARKS.get(span.lane, _LINK_MARK)
                line[first_column:stop_column] = mark * len(line[first_column:stop_column])
        rows = [(lane, "".join(line)) for lane, line in lines.items()]
        summary = (
            f"{format_seconds(self.seconds)}, of which {format_seconds(self.exposed_s)} exposed"
        )
        return f"{align_columns(rows)}\n{summary}"


@dataclass(frozen=True)
class Schedule(Pictured):
    """What a device starts, awaits and computes in a step, in order; equal on all devices.

        schedule = prefetched([Turn("a", 2e-3, Start("a parameters", 8, seconds=1e-3)), ...], prefetch=1)
        print(schedule)             # a line per module: what it starts and awaits
        print(schedule.timeline())  # when, by simulation

    Raises:
        PlanError: A move is awaited that is not on the way, is started twice, or never awaited.
    """

    steps: tuple[ScheduleStep, ...]

    def __post_init__(self) -> None:
        self._awaited_starts()

    def _awaited_starts(self) -> list[Start | None]:
        """Return for each step the start of the move that it awaits; None for other steps."""
        on_way: dict[str, Start] = {}
        starts: list[Start | None] = []
        for step in self.steps:
            awaited = None
            if isinstance(step, Start):
                if step.name in on_way:
                    raise PlanError(f"{step.name} is on the way already", hint="await it first")
                on_way[step.name] = step
            elif isinstance(step, Wait):
                awaited = on_way.pop(step.name, None)
                if awaited is None:
                    raise PlanError(f"{step.name} is not on the way", hint="start it before")
            starts.append(awaited)
        if on_way:
            raise PlanError(f"{', '.join(on_way)} is never awaited", hint="end with Wait")
        return starts

    @property
    def backward(self) -> Schedule:
        """The adjoint, which runs backwards: what was awaited is started, what was started is awaited."""
        reversed_steps: list[ScheduleStep] = []
        for step, awaited in zip(
            reversed(self.steps), reversed(self._awaited_starts()), strict=True
        ):
            if isinstance(step, Start):
                reversed_steps.append(Wait(step.name))
            else:
                reversed_steps.append(step if awaited is None else awaited)
        return Schedule(tuple(reversed_steps))

    @property
    def bytes_on_way(self) -> int:
        """The most bytes that are on the way at one time."""
        max_bytes = 0
        current_bytes = 0
        for step, awaited in zip(self.steps, self._awaited_starts(), strict=True):
            if isinstance(step, Start):
                current_bytes += step.n_bytes
            elif awaited is not None:
                current_bytes -= awaited.n_bytes
            max_bytes = max(max_bytes, current_bytes)
        return max_bytes

    def timeline(self) -> Timeline:
        """Simulate the schedule on a device and its links: a link carries moves one after the other."""
        now_s = 0.0
        free_at: dict[str, float] = {}  # by link
        arrives_at: dict[str, float] = {}
        spans = []
        for step in self.steps:
            if isinstance(step, Compute):
                spans.append(Span(COMPUTING, step.name, now_s, now_s + step.seconds))
                now_s += step.seconds
            elif isinstance(step, Start):
                begin_s = max(now_s, free_at.get(step.link, 0.0))
                end_s = begin_s + step.seconds
                spans.append(Span(step.link, step.name, begin_s, end_s))
                free_at[step.link] = end_s
                arrives_at[step.name] = end_s
            elif arrives_at[step.name] > now_s:
                spans.append(Span(EXPOSED, step.name, now_s, arrives_at[step.name]))
                now_s = arrives_at[step.name]
        return Timeline(tuple(spans), now_s)

    def in_turns(self) -> Schedule:
        """Return it with a second for each module and each move: the order, where times are unknown."""
        timed: list[ScheduleStep] = []
        for step in self.steps:
            timed.append(step if isinstance(step, Wait) else replace(step, seconds=1.0))
        return Schedule(tuple(timed))

    def __str__(self) -> str:
        """Write a table: what is started and awaited before each module computes.

        Neighbours that differ in a number alone share a line: h.1 and h.2 are "h.*  x 2".
        """
        rows: list[tuple[str, ...]] = []
        starts: list[str] = []
        waits: list[str] = []
        for step in (*self.steps, Compute("(end)")):
            if isinstance(step, Start):
                size = f" {format_bytes(step.n_bytes)}" if step.n_bytes else ""
                starts.append(f"{step.name}{size}")
            elif isinstance(step, Wait):
                waits.append(step.name)
            else:
                rows.append((step.name, ", ".join(starts), ", ".join(waits)))
                starts = []
                waits = []
        lines: list[tuple[str, ...]] = [("computes", "", "starts before", "awaits before")]
        for _, group in groupby(rows, key=_without_numbers):
            members = list(group)
            name, *moves = members[0]
            times = ""
            if len(members) > 1:
                name, *moves = _without_numbers(members[0])
                times = f"x {len(members)}"
            lines.append((name, times, *moves))
        return f"{align_columns(lines)}\nat most {format_bytes(self.bytes_on_way)} on the way"

    def to_json(self) -> str:
        """Write the schedule as text, which `from_json` reads."""
        steps = [{"kind": type(step).__name__.lower(), **asdict(step)} for step in self.steps]
        return json.dumps(steps)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what `to_json` wrote. Raises PlanError for anything else."""
        try:
            plain: list[dict[str, Any]] = json.loads(text)
            return cls(tuple(_KINDS[step.pop("kind")](**step) for step in plain))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            hint = "it is what Schedule.to_json() writes"
            raise PlanError("this is no schedule", text=text[:60], hint=hint) from error


def _without_numbers(row: Sequence[str]) -> list[str]:
    return [re.sub(r"(?<=[a-z])\.\d+\b", ".*", cell) for cell in row]


class Turn(NamedTuple):
    """A module's turn in a pass.

    Attributes:
        name: The module.
        seconds: How long it computes.
        parameters: The move that has to arrive before; None: there is none.
        gradients: The move of its gradients, which can begin afterwards.
        activations: The move of activations that it awaits; it comes before all others.
        beside: The move that travels while it computes, as activations of another part of the batch.
    """

    name: str
    seconds: float = 0.0
    parameters: Start | None = None
    gradients: Start | None = None
    activations: Start | None = None
    beside: Start | None = None


def last_started(n_bytes: Sequence[int], prefetch: Bytes) -> list[int]:
    """Return for each turn of a pass the last one whose move has been started when it computes.

    Of turns with 4, 4 and 8 bytes, with prefetch=1: [1, 2, 2], and with prefetch="4 B": [1, 1, 2].

    Args:
        n_bytes: The bytes that travel for each turn.
        prefetch: How much travels ahead: a number of modules, bytes as "64MiB", or None for all.
    """
    last_turn = len(n_bytes) - 1
    limit = limit_of(prefetch, "prefetch")
    if limit is None:
        return [last_turn] * len(n_bytes)
    if not isinstance(prefetch, str):
        return [min(i + limit, last_turn) for i in range(len(n_bytes))]
    cumulative_bytes = list(accumulate(n_bytes))  # of each turn and those before it
    return [
        bisect_right(cumulative_bytes, cumulative_bytes[i] + limit) - 1 for i in range(len(n_bytes))
    ]


def prefetched(turns: Sequence[Turn], prefetch: Bytes) -> Schedule:
    """Schedule a pass: parameters of later modules begin to travel before a module computes.

    Args:
        turns: The modules in the order in which they compute.
        prefetch: As in `last_started`.
    """
    moves = [turn.parameters for turn in turns]
    n_bytes = [0 if move is None else move.n_bytes for move in moves]
    steps: list[ScheduleStep] = []
    n_started = 0
    for turn, last_index in zip(turns, last_started(n_bytes, prefetch), strict=True):
        steps += _steps_of_turn(turn, moves[n_started : last_index + 1])
        n_started = last_index + 1
    return Schedule(tuple(steps))


def _steps_of_turn(turn: Turn, ahead: Sequence[Start | None]) -> list[ScheduleStep]:
    """List what the device starts, awaits and computes in a turn.

    ahead: The moves of parameters, of its own and of later turns, that begin to travel now.
    """
    return [
        # All start before it waits: so the links are not idle while its own parameters arrive.
        *_starts([turn.activations, *ahead]),
        *_waits([turn.parameters, turn.activations]),
        *_starts([turn.beside]),
        Compute(turn.name, turn.seconds),
        *_waits([turn.beside]),
    ]


def _starts(moves: Sequence[Start | None]) -> list[Start]:
    return [move for move in moves if move is not None]


def _waits(moves: Sequence[Start | None]) -> list[Wait]:
    return [Wait(move.name) for move in moves if move is not None]


def training_step(forward: Sequence[Turn], backward: Sequence[Turn], prefetch: Bytes) -> Schedule:
    """Schedule a forward and a backward pass.

    Gradients travel as the adjoint of prefetched parameters: they start after a module's turn, and are
    awaited where its parameters would have been started in a forward pass in the reversed order.

    Args:
        forward: The modules in the order in which they compute.
        backward: In the order of the backward pass; `parameters` are those gathered again.
        prefetch: As in `last_started`.
    """
    gathered = prefetched(backward, prefetch)
    as_forward = [Turn(turn.name, parameters=turn.gradients) for turn in reversed(backward)]
    scattered = prefetched(as_forward, prefetch).backward
    activations = [turn.activations for turn in backward]
    first_gathering, *gatherings = _moves_between_computing(gathered)
    _, *scatterings = _moves_between_computing(scattered)
    steps = [*prefetched(forward, prefetch).steps, *first_gathering]
    for turn, scattering, gathering in zip(backward, scatterings, gatherings, strict=True):
        steps.append(Compute(turn.name, turn.seconds))
        # Activations come before what has time: the sort keeps the order of all others.
        steps += sorted([*scattering, *gathering], key=lambda step: step not in activations)
    return Schedule(tuple(steps))


def _moves_between_computing(schedule: Schedule) -> list[list[ScheduleStep]]:
    """Return the steps before the first module computes, between each two, and after the last."""
    step_groups: list[list[ScheduleStep]] = [[]]
    for step in schedule.steps:
        if isinstance(step, Compute):
            step_groups.append([])
        else:
            step_groups[-1].append(step)
    return step_groups
