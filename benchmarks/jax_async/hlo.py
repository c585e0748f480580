"""What a compiled program does while a collective travels: read from its scheduled HLO.

A collective that runs beside computing is a pair, `-start` and `-done`, with instructions between them. The
text of a scheduled module lists instructions in the order in which a device begins them. On TPUs a pair may
be fusions: `async-collective-start`, some that multiply and go on with it, and `async-collective-done`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
PRODUCTS = ("dot", "convolution")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Instruction(NamedTuple):
    """An instruction: its name, what it is, the names of its operands, and of computations that it calls."""

    name: str
    opcode: str
    operands: frozenset[str]
    called: tuple[str, ...]
    text: str


class Travelling(NamedTuple):
    """A collective of a program.

    place: "loop 1" in the order of the program, or "outside" of loops. kind: as "all-gather". is_async:
    whether it is a pair. products: how many instructions between its start and its done multiply matrices.
    """

    place: str
    kind: str
    is_async: bool
    products: int


class Module:
    """A scheduled module, by its text."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._contained: dict[tuple[str, tuple[str, ...]], bool] = {}
        name = ""
        for line in text.splitlines():
            header = _COMPUTATION.match(line)
            found = _INSTRUCTION.match(line)
            if header:
                name = header[2]
                self.computations[name] = []
                if header[1]:
                    self.entry = name
            elif found and name:
                self.computations[name] += _instruction(found[1], found[2])

    def contains(self, computation: str, opcodes: tuple[str, ...]) -> bool:
        """Whether a computation, or one that it calls, has an instruction of these kinds."""
        key = (computation, opcodes)
        if key not in self._contained:
            self._contained[key] = False
            instructions = self.computations.get(computation, [])
            self._contained[key] = any(self.does(each, opcodes) for each in instructions)
        return self._contained[key]

    def does(self, instruction: Instruction, opcodes: tuple[str, ...]) -> bool:
        """Whether an instruction is of these kinds, or calls one."""
        if instruction.opcode in opcodes:
            return True
        return any(self.contains(name, opcodes) for name in instruction.called)

    def multiplies(self, instruction: Instruction) -> bool:
        """Whether an instruction multiplies matrices, by itself, in a fusion, a branch or a library."""
        return (
            self.does(instruction, PRODUCTS) or "gemm" in instruction.text.partition("(")[2][:400]
        )

    @cached_property
    def places(self) -> dict[str, str]:
        """The computations that run as a sequence, each with its place: "outside", "loop 1", ..."""
        places = {self.entry: "outside"}
        waiting = [self.entry]
        loops = 0
        while waiting:
            name = waiting.pop(0)
            for each in self.computations[name]:
                if each.opcode == "while":
                    loops += 1
                    (body,) = re.findall(r"body=%?([\w.\-]+)", each.text)
                    places[body] = f"loop {loops}"
                    waiting.append(body)
                elif each.opcode in ("call", "conditional"):
                    new = [called for called in each.called if called not in places]
                    places |= dict.fromkeys(new, places[name])
                    waiting += new
        return places

    def travelling(self) -> Iterator[Travelling]:
        """Yield all collectives, in the order of each sequence."""
        for computation, place in self.places.items():
            instructions = self.computations[computation]
            for number, each in enumerate(instructions):
                kind = self._kind(each)
                if not kind:
                    continue
                between = self._beside(instructions, number)
                if between is None:
                    yield Travelling(place, kind, is_async=False, products=0)
                else:
                    products = sum(map(self.multiplies, between))
                    yield Travelling(place, kind, is_async=True, products=products)

    def _kind(self, instruction: Instruction) -> str:
        """Return which collective an instruction is or starts; "" for any other, and for a done."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            return opcode
        is_started = instruction.name.startswith("async-collective-start")
        is_scattered = (
            "all-reduce-scatter" in instruction.text
        )  # a fusion of TPUs, which waits for its end
        if instruction.opcode == "async-start" or is_started:
            kinds = [kind for kind in COLLECTIVES if self.does(instruction, (kind,))]
            return kinds[0] if kinds else ""
        return "reduce-scatter" if is_scattered and instruction.opcode == "fusion" else ""

    def _beside(self, instructions: list[Instruction], start: int) -> list[Instruction] | None:
        """Return what stands between a start and its done; None for a collective that is no pair."""
        first = instructions[start]
        if not (first.opcode.endswith("-start") or first.name.startswith("async-collective-start")):
            return None
        passed_on = {first.name}
        for number in range(start + 1, len(instructions)):
            each = instructions[number]
            if passed_on.isdisjoint(each.operands):
                continue
            if "-done" in each.opcode or each.name.startswith("async-collective-done"):
                return instructions[start + 1 : number]
            passed_on.add(each.name)
        return None


def _instruction(name: str, text: str) -> list[Instruction]:
    """Read an instruction: its type comes first, maybe in parentheses. [] for what is none."""
    depth = 0
    for end, character in enumerate(text):  # noqa: B007  the end of the type
        depth += (character == "(") - (character == ")")
        if character == " " and depth == 0:
            break
    opcode = re.match(r"([\w\-]+)\(", text[end + 1 :])
    if not opcode:
        return []
    rest = text[end + 1 + opcode.end() :]
    operands = frozenset(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
    called = _CALLED.findall(rest)
    for branches in _BRANCHES.findall(rest):
        called += re.findall(r"%?([\w.\-]+)", branches)
    return [Instruction(name, opcode[1], operands, tuple(called), text)]
