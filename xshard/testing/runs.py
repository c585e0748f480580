"""Runs of a comparison: one device first, which gives the truth, then every mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from xshard.errors import XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.lengths import global_shape
from xshard.runtimes.backends import BACKENDS, kit_process
from xshard.steps.base import Block
from xshard.testing.blocks import cotangents_of, whole_layout
from xshard.testing.diagnosis.evidence import whole
from xshard.testing.functions import broadcast_prefix
from xshard.testing.moves import Seen
from xshard.testing.problem import Problem
from xshard.testing.question import (
    Answer,
    Devices,
    Question,
    Result,
    Side,
    Slopes,
    StructureError,
    Update,
)

Key = TypeVar("Key", str, int)  # the name of an output, or the number of an argument


@dataclass(frozen=True)
class Truth:
    """The right values, as whole arrays.

    Attributes:
        outputs: By name of output.
        layouts: Of the outputs, as declared.
        cotangents: By name of output.
        gradients: By number of argument.
        updated: Parameters after an optimiser step, by number of argument.
        source: Where the values are from, as a message says it.
        mesh: Of one device; without axes for a reference on unsharded arrays.
        derivatives: Gradients beside differences, by number of argument.
        draws: Whether the framework's own random numbers were used.
    """

    outputs: dict[str, Block]
    layouts: dict[str, Layout]
    cotangents: dict[str, Block]
    gradients: dict[int, Block]
    updated: dict[int, Block]
    source: str
    mesh: Mesh
    derivatives: Slopes
    draws: bool


class RunAnswer(NamedTuple):
    """An answer, with the runtime and the mesh that gave it."""

    runtime: Side
    mesh: Mesh
    answer: Answer


@dataclass(frozen=True)
class Runs:
    """A problem, and all else that its questions have in common.

    Attributes:
        problem: The checked input.
        functions: Packed, by runtime.
        updates: Optimiser steps, by runtime.
        typed: `check_vma` of JAX.
        timeout_s: The longest time in which a run makes no progress.
        preload: Modules that torch ranks begin with.
        differences: Whether gradients of the truth are compared with differences of its function.
    """

    problem: Problem
    functions: dict[str, bytes]
    updates: dict[str, Update]
    typed: bool
    timeout_s: float
    preload: tuple[str, ...]
    differences: bool = False

    def truth(self, runtime: Side, function: bytes, mesh: Mesh) -> Truth:
        """Run a function on one device, to get the right values for all other runs.

        All results are whole arrays, by name of output or by number of argument.

        Args:
            runtime: The framework that runs it.
            function: The function, pickled.
            mesh: A mesh with all axes of size 1, for a function that names axes; a mesh without
                axes for a reference function of whole arrays.

        Raises:
            StructureError: The arguments do not fit a mesh of ones, or outputs are another tree.
        """
        shardings = self._shardings_on_one_device(mesh)
        # Without `results`, this run tells which outputs there are, and draws the output gradients
        # (cotangents) that all other runs are given.
        question = self._question(runtime, function, mesh, shardings, results=None)
        answer = self._answer(runtime, question)
        output_layouts = broadcast_prefix(self.problem.outputs, answer.tree, "output")
        declared = dict(zip(answer.outputs, output_layouts, strict=True))
        outputs = _output_shardings(answer, declared, mesh)
        inputs = dict(enumerate(shardings))
        # On one device a block is the array, but for halos. Gradients have the dual shardings.
        return Truth(
            outputs=_whole_arrays(answer.outputs, outputs),
            layouts=declared,
            cotangents=_whole_arrays(answer.cotangents, outputs, are_dual=True),
            gradients=_whole_arrays(answer.gradients_if_any, inputs, are_dual=True),
            updated=_whole_arrays(answer.updated, inputs),
            source=f"{runtime} on one device" if mesh.axes else "the reference",
            mesh=mesh,
            derivatives=answer.derivatives,
            draws=answer.draws,
        )

    def _shardings_on_one_device(self, mesh: Mesh) -> tuple[Sharding, ...]:
        """Place the arguments on a mesh of one device; without axes, as arrays without layouts."""
        problem = self.problem
        if not mesh.axes:
            layouts = tuple(whole_layout(x.ndim) for x in problem.values)
            problem = replace(problem, layouts=layouts)
        try:
            return problem.shardings(mesh)
        except XshardError as error:
            raise StructureError(
                f"a layout does not fit one device: {error.reason}",
                text=error.text,
                hint="pass reference=",
            ) from None

    def run(self, runtime: Side, mesh: Mesh, truth: Truth) -> RunAnswer:
        """Run a runtime's function on the blocks of a mesh."""
        question = self._question_on_blocks(runtime, mesh, truth)
        return RunAnswer(runtime, mesh, self._answer(runtime, question))

    def seen(self, runtime: Side, mesh: Mesh, truth: Truth) -> list[Seen]:
        """Run the function again -> inputs of its redistributions, and cotangents of their results."""
        question = self._question_on_blocks(runtime, mesh, truth)
        seen: list[Seen] = self._ask(runtime, "seen", question, quiet=True)
        return seen

    def _question_on_blocks(self, runtime: Side, mesh: Mesh, truth: Truth) -> Question:
        """Ask for the outputs that the truth has, and for gradients of its cotangents."""
        results: dict[str, Result] = {}
        for i, (name, output) in enumerate(truth.outputs.items()):
            sharding = Sharding(truth.layouts[name], mesh, output.shape)
            cotangents = None
            if name in truth.cotangents:  # outputs of whole numbers have none
                cotangents = cotangents_of(truth.cotangents[name], sharding, i)
            results[name] = Result(sharding, cotangents)
        shardings = self.problem.shardings(mesh)
        return self._question(runtime, self.functions[runtime], mesh, shardings, results)

    def _question(
        self,
        runtime: Side,
        function: bytes,
        mesh: Mesh,
        shardings: tuple[Sharding, ...],
        results: dict[str, Result] | None,
    ) -> Question:
        """Describe one run of a function: its input blocks on a mesh, and what to compute.

        Args:
            runtime: The framework, which decides the optimiser.
            function: The function, pickled.
            mesh: The devices.
            shardings: The sharding of each argument.
            results: The outputs with their gradients, as the run on one device has made them. That
                run itself has None, and is the one that is compared with finite differences.
        """
        dtypes = {x.dtype.name for x in self.problem.values}
        return Question(
            function=function,
            mesh=mesh,
            arguments=self.problem.arguments,
            inputs=self.problem.inputs(shardings),
            shardings=shardings,
            results=results,
            update=self.updates.get(runtime),
            wide=not dtypes.isdisjoint(("float64", "complex128")),  # JAX keeps them if it is told
            mode="vma" if self.typed else "novma",  # whether JAX checks varying manual axes
            differences=self.differences and results is None,
        )

    def _answer(self, runtime: Side, question: Question) -> Answer:
        answers: list[Answer] = self._ask(runtime, "answers", [question])
        return answers[0]

    def _ask(self, runtime: Side, name: str, asked: Any, *, quiet: bool = False) -> Any:
        """Call a function of the bridge's kit in its process."""
        # The process stays for later questions: starting a framework takes seconds.
        process = kit_process(runtime, self.preload if runtime == "torch" else ())
        function = BACKENDS[runtime].function(f"worker.{name}")
        return process.ask(function, asked, timeout_s=self.timeout_s, quiet=quiet)


def _output_shardings(
    answer: Answer, declared: Mapping[str, Layout], mesh: Mesh
) -> dict[str, Sharding]:
    """Place the outputs of one device: under their own layouts, or as unsharded arrays."""
    shardings: dict[str, Sharding] = {}
    for name, (block,) in answer.outputs.items():
        layout = declared[name] if mesh.axes else whole_layout(block.ndim)
        shape = global_shape(layout, mesh, block.shape, str(layout))
        shardings[name] = Sharding(layout, mesh, shape)
    return shardings


def _whole_arrays(
    blocks: Mapping[Key, Devices], shardings: Mapping[Key, Sharding], *, are_dual: bool = False
) -> dict[Key, Block]:
    """Gather the blocks of every array. are_dual: they are under the dual shardings, as gradients are."""
    arrays: dict[Key, Block] = {}
    for key, devices in blocks.items():
        sharding = shardings[key]
        arrays[key] = whole(devices, sharding.dual if are_dual else sharding)
    return arrays
