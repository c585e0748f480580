"""Penalties on parameters, added to a loss outside of the model: refused where they would be miscounted.

A gradient that comes out of a module is a share, and all shares are summed over processes. That of a
penalty is whole on each process already: autograd adds both up before anyone sees them. So the graph
of the loss is searched for penalties when a backward pass begins, down to what modules computed.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_bridge.lower.executable import Executable
from torch_bridge.models.parameters import ShardedParameter
from torch_bridge.versions.autograd import (
    COMPILED_NODE,
    number_of_next_node,
    number_of_node,
    roots_of_backward_pass,
    shape_of_node,
)
from xshard.errors import PlanError
from xshard.models import layout_text

REMEMBERED = 4096  # forward passes
ADDING_NODES = ("AddBackward0", "SubBackward0")
HINT = (
    "add the penalty's gradient to .grad after backward(): that is a block of the whole gradient, "
)
HINT += "under all rules"


class _Span(NamedTuple):
    """The numbers of the nodes of autograd that a forward pass made: first, ..., end - 1."""

    first: int
    end: int


_Call = tuple[int, nn.Module]  # the thread of a forward pass, and the module


class _VisitedNode(NamedTuple):
    """A node of a loss, and the axes over which means were taken between it and the loss."""

    node: Any
    mean_axes: frozenset[str]


class Penalties:
    """Searches losses for penalties on the parameters of one model.

    A penalty is a scalar addend of the loss that depends on parameters alone, and is made outside of
    forward passes. Parameters that multiply activations there, as in a loss that reads the weight of
    the last layer, vary as these do, and are summed as in modules.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = parameters
        # Each thread numbers its nodes by itself.
        self._begun: dict[_Call, int] = {}  # the number of the first node of calls that run
        self._spans: dict[int, list[_Span]] = {}  # by thread: ascending, disjoint
        self._has_graph_of_gradients = False  # its nodes are made neither here nor there

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: no passes."""
        return {"parameters": self.parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # as for a new one

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Note that a module's forward pass begins; a hook."""
        if not torch.compiler.is_compiling():
            self._begun[threading.get_ident(), module] = number_of_next_node()

    def after_forward(self, module: nn.Module, args: Any, result: Any) -> None:
        """Note which nodes a forward pass has made; a hook that is always called."""
        if torch.compiler.is_compiling():
            return
        thread = threading.get_ident()
        if (thread, module) not in self._begun:
            return
        span = _Span(self._begun.pop((thread, module)), number_of_next_node())
        if span.first == span.end:
            return
        spans = self._spans.setdefault(thread, [])
        # Passes of inner modules are parts of this one.
        while spans and spans[-1].first >= span.first:
            spans.pop()
        spans.append(span)
        del spans[:-REMEMBERED]

    def check(self) -> None:
        """Raise PlanError if the running backward pass has a penalty that would be miscounted."""
        if not self._has_graph_of_gradients:
            self._search()
        self._has_graph_of_gradients = torch.is_grad_enabled()  # of backward(create_graph=True)

    def _search(self) -> None:
        """Raise PlanError as `check` does."""
        by_id = {id(parameter.tensor): parameter for parameter in self.parameters}
        search = _Search(self._is_inside, by_id)
        for root in roots_of_backward_pass():
            for parameter, mean_axes in search.penalised(root):
                _check_count(parameter, mean_axes)

    def _is_inside(self, node: Any) -> bool:
        """Return whether a forward pass of the model made a node, or may have."""
        if node.name().startswith(COMPILED_NODE):
            return True
        number = number_of_node(node)
        return any(_is_in(spans, number) for spans in self._spans.values())


def _is_in(spans: list[_Span], node_number: int) -> bool:
    """Return whether a node with this number was made by a pass of a thread, or may have been."""
    i = bisect_right(spans, node_number, key=lambda span: span.first) - 1
    if i < 0:  # older than all that is remembered
        return len(spans) == REMEMBERED
    return node_number < spans[i].end


class _Search:
    """Finds the parameters in the penalties of one loss."""

    def __init__(
        self, is_inside: Callable[[Any], bool], parameters: dict[int, ShardedParameter]
    ) -> None:
        self._is_inside = is_inside
        self._parameters = parameters  # by the ids of their tensors
        self._has_only_parameters: dict[
            Any, bool
        ] = {}  # by node: whether it depends on parameters alone

    def penalised(self, root: Any) -> Iterator[tuple[ShardedParameter, frozenset[str]]]:
        """Yield the parameters in the penalties of a loss, with the axes over which means are taken."""
        to_visit = [_VisitedNode(root, frozenset())]
        seen = set()
        while to_visit:
            visited = to_visit.pop()
            if visited in seen or self._is_inside(visited.node):
                continue
            seen.add(visited)
            parameter = self._parameter_of(visited.node)
            if parameter is not None:
                yield parameter, visited.mean_axes
            elif self._is_searched(visited.node):
                mean_axes = visited.mean_axes | _mean_axes(visited.node)
                to_visit += [_VisitedNode(node, mean_axes) for node in _inputs_of(visited.node)]

    def _is_searched(self, node: Any) -> bool:
        """Return whether penalties below a node would be addends of the loss."""
        if self._depends_on_parameters_alone(node):
            return True
        is_sum = node.name() in ADDING_NODES or len(_inputs_of(node)) == 1
        return is_sum and shape_of_node(node) == ()

    def _depends_on_parameters_alone(self, root: Any) -> bool:
        """Return whether nothing but parameters of the model is below a node, outside of modules."""
        to_visit = [root]
        while to_visit:
            node = to_visit.pop()
            inputs = _inputs_of(node)
            undecided = [
                input_node for input_node in inputs if input_node not in self._has_only_parameters
            ]
            if self._is_inside(node):
                self._has_only_parameters[node] = False
            elif not inputs:
                self._has_only_parameters[node] = self._parameter_of(node) is not None
            elif undecided:
                to_visit += [node, *undecided]
            else:
                self._has_only_parameters[node] = all(
                    self._has_only_parameters[input_node] for input_node in inputs
                )
        return self._has_only_parameters[root]

    def _parameter_of(self, node: Any) -> ShardedParameter | None:
        """Return the parameter whose gradient a node is for, or None."""
        return self._parameters.get(id(getattr(node, "variable", None)))


def _inputs_of(node: Any) -> list[Any]:
    """Return the nodes to which a node sends gradients."""
    return [input_node for input_node, _ in node.next_functions if input_node is not None]


def _mean_axes(node: Any) -> frozenset[str]:
    """Return the axes over which a node takes a mean, if it moves a block."""
    executable = getattr(node, "executable", None)
    if isinstance(executable, Executable):
        return frozenset(executable.plan.src.tagged("mean"))
    return frozenset()


def _check_count(parameter: ShardedParameter, mean_axes: frozenset[str]) -> None:
    """Raise PlanError if the gradient of a penalty on a parameter would be too large, or too small.

    The mean over dp=4 of a loss with a penalty has a quarter of it from each process. Of a replicated
    parameter, four quarters are summed; a process with a block alone has one quarter of its gradient.
    """
    mesh = parameter.sharding.mesh
    layout = parameter.sharding.layout
    repeated = [axis for axis in parameter.axes_summed_later - mean_axes if mesh.size(axis) > 1]
    divided = [axis for axis in mean_axes.intersection(layout.axes) if mesh.size(axis) > 1]
    reason = f"a penalty on {parameter.name} is added to the loss outside of the model: "
    if repeated:
        over = ",".join(sorted(repeated))
        reason += (
            f"its gradient would count {mesh.size(*repeated)} times, as it is summed over '{over}'"
        )
        raise PlanError(reason, text=layout_text(layout), hint=HINT)
    if divided:
        over = ",".join(sorted(divided))
        reason += f"its gradient would count 1/{mesh.size(*divided)}, by the mean over '{over}'"
        raise PlanError(reason, text=layout_text(layout), hint=HINT)
