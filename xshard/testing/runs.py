"""The runs of a comparison: one device first, which is the truth, then every mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from xshard import reference
from xshard.errors import XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.lengths import global_shape
from xshard.runtimes.backends import BACKENDS, kit_process
from xshard.steps.base import Block
from xshard.testing.moves import Seen
from xshard.testing.pickling import packed
from xshard.testing.problem import Problem, cotangents_of, whole_layout
from xshard.testing.question import Answer, Derivatives, Devices, Question, Result, Update
from xshard.testing.trees import StructureError, Tree, leaves

Side = Literal["torch", "jax"]
Function = Callable[..., Any]
SIDES: tuple[Side, Side] = ("torch", "jax")


@dataclass(frozen=True)
class Truth:
    """The right values: whole arrays by name of output and number of argument, and their source."""

    outputs: dict[str, Block]
    layouts: dict[str, Layout]
    cotangents: dict[str, Block]
    gradients: dict[int, Block]
    updated: dict[int, Block]
    source: str
    mesh: Mesh
    derivatives: Derivatives


class RunAnswer(NamedTuple):
    """An answer, and where it is from."""

    runtime: Side
    mesh: Mesh
    answer: Answer


@dataclass(frozen=True)
class Runs:
    """A problem, and what all its questions have in common. typed: `check_vma` of JAX."""

    problem: Problem
    functions: dict[str, bytes]
    updates: dict[str, Update]
    typed: bool
    timeout_s: float
    preload: tuple[str, ...]
    differences: bool = False

    def truth(self, runtime: Side, function: bytes, mesh: Mesh) -> Truth:
        """Results of a function on one device, for unsharded arrays or for blocks on a mesh of ones."""
        problem = self.problem
        is_whole = not mesh.axes
        layouts = [whole_layout(x.ndim) for x in problem.values] if is_whole else list(problem.layouts)
        try:
            shardings = tuple(
                Sharding(s, mesh, x.shape) for s, x in zip(layouts, problem.values, strict=True)
            )
        except XshardError as error:
            raise StructureError(
                f"a layout does not fit one device: {error.reason}", text=error.text, hint="pass reference="
            ) from None
        question = self._question(runtime, function, mesh, shardings, None)
        answer = self._answer(runtime, question)
        declared = problem.output_layouts(answer.tree, tuple(answer.outputs))
        outputs = {}
        for name, (block,) in answer.outputs.items():
            layout = whole_layout(block.ndim) if is_whole else declared[name]
            outputs[name] = Sharding(layout, mesh, global_shape(layout, mesh, block.shape, str(layout)))
        return Truth(
            {name: whole(blocks, outputs[name]) for name, blocks in answer.outputs.items()},
            declared,
            {name: whole(blocks, dual(outputs[name])) for name, blocks in answer.cotangents.items()},
            {i: whole(blocks, dual(shardings[i])) for i, blocks in (answer.gradients or {}).items()},
            {i: whole(blocks, shardings[i]) for i, blocks in answer.updated.items()},
            "the reference" if is_whole else f"{runtime} on one device",
            mesh,
            answer.derivatives,
        )

    def run(self, runtime: Side, mesh: Mesh, truth: Truth) -> RunAnswer:
        """Results of a runtime's function on the blocks of a mesh."""
        question = self._on_blocks(runtime, mesh, truth)
        return RunAnswer(runtime, mesh, self._answer(runtime, question))

    def seen(self, runtime: Side, mesh: Mesh, truth: Truth) -> list[Seen]:
        """The inputs of the redistributions of such a run, and the cotangents of their results."""
        seen: list[Seen] = self._ask(runtime, "seen", self._on_blocks(runtime, mesh, truth), quiet=True)
        return seen

    def _on_blocks(self, runtime: Side, mesh: Mesh, truth: Truth) -> Question:
        results = {}
        for i, (name, output) in enumerate(truth.outputs.items()):
            sharding = Sharding(truth.layouts[name], mesh, output.shape)
            cotangent = truth.cotangents.get(name)
            blocks = None if cotangent is None else cotangents_of(cotangent, sharding, i)
            results[name] = Result(sharding, blocks)
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
        return Question(
            function,
            mesh,
            self.problem.arguments,
            self.problem.inputs(shardings),
            shardings,
            results,
            self.updates.get(runtime),
            wide=any(x.dtype.name in ("float64", "complex128") for x in self.problem.values),
            mode="vma" if self.typed else "novma",
            differences=self.differences and results is None,
        )

    def _answer(self, runtime: Side, question: Question) -> Answer:
        answers: list[Answer] = self._ask(runtime, "answers", [question])
        return answers[0]

    def _ask(self, runtime: Side, name: str, asked: Any, *, quiet: bool = False) -> Any:
        """Call a function of the bridge's kit in its process."""
        process = kit_process(runtime, self.preload if runtime == "torch" else ())
        function = BACKENDS[runtime].function(f"worker.{name}")
        return process.ask(function, asked, timeout_s=self.timeout_s, quiet=quiet)


def mesh_of_ones(meshes: Sequence[Mesh]) -> Mesh:
    """One device, with the axes of all these meshes."""
    return Mesh({axis: 1 for mesh in meshes for axis in mesh.axes})


def whole(blocks: Devices, sharding: Sharding) -> Block:
    """The array that blocks stand for."""
    return reference.gather(blocks, sharding.layout, sharding.mesh, sharding.shape)


def dual(sharding: Sharding) -> Sharding:
    """The sharding of an array's cotangents."""
    return sharding.with_layout(sharding.layout.dual)


def updates_of(
    problem: Problem,
    args: Sequence[Tree],
    parameters: Sequence[int],
    optimisers: tuple[Function, Function] | None,
) -> dict[str, Update]:
    """The optimiser step of each runtime. Raises StructureError for parameters that cannot have one."""
    if bool(parameters) != (optimisers is not None):
        raise StructureError(
            "parameters= and optimisers= belong together",
            hint="as in parameters=[1], optimisers=(torch_factory, jax_update)",
        )
    if optimisers is None:
        return {}
    numbers: list[int] = []
    for position in parameters:
        if not 0 <= position < len(args):
            raise StructureError(f"no argument {position} of {len(args)}", hint="counted from 0")
        numbers += leaves(problem.arguments[position]).values()
    for i in numbers:
        layout = problem.layouts[i]
        if layout.dual != layout:
            raise StructureError(
                f"{problem.names[i]} has gradients under '{layout.dual}', which no optimiser can add up",
                text=str(layout),
                hint="no tags and no overlaps: the function itself redistributes to copies",
            )
    return {
        runtime: Update(packed(function), tuple(parameters), tuple(numbers))
        for runtime, function in zip(SIDES, optimisers, strict=True)
    }
