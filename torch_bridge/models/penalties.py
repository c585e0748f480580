"""Parameters in a loss, outside of the modules that gather them: refused where gradients would be wrong.

A gradient that comes out of a module is a share, and all shares are summed over processes. That of a
penalty, and that of a factor of what is whole, is whole on each process already: autograd adds both up
before anyone sees them. So the graph of the loss is searched for such uses when a backward pass begins,
down to what modules computed.

A parameter that modules gather is a block everywhere else. What reads it there, in a loss or in the code of
another module, would take the block for the whole.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from torch_bridge.lower.executable import Executable
from torch_bridge.models.parameters import ShardedParameter
from torch_bridge.versions.autograd import (
    CAST_NODE,
    COMPILED_NODE,
    number_of_next_node,
    number_of_node,
    roots_of_backward_pass,
    saved_in_node,
    shape_of_node,
)
from xshard.errors import PlanError
from xshard.models import layout_text

if TYPE_CHECKING:
    from torch_bridge.models.hooks import ModuleHooks

REMEMBERED = 4096  # forward passes
ADDING_NODES = ("AddBackward0", "SubBackward0")

# What a node computes, its name up to "Backward", where the whole has not the sum of what blocks have.
_MEANS = ("Mean",)
_NORMS = ("LinalgVectorNorm", "Norm")
_OF_ELEMENTS = ("Max", "Min", "Std", "Var", "Logsumexp")
_OF_SUMS = ("Sqrt", "Rsqrt", "Pow", "Log", "Exp", "Reciprocal")
_NO_SUMS = frozenset((*_MEANS, *_NORMS, *_OF_ELEMENTS, *_OF_SUMS))
_MEAN_REDUCTION = 1  # of torch's losses, as `mse_loss`

HINT = (
    "add the penalty's gradient to .grad after backward(): that is a block of the whole gradient, "
)
HINT += "under all rules"
FACTOR_HINT = "use it inside of a module, or before processes put their values together: "
FACTOR_HINT += "redistribute(loss * scale, ...)"
BLOCK_HINT = (
    "read it as an attribute of its module, as self.head.weight, in the forward pass of the module "
)
BLOCK_HINT += 'that gathers it; gathers="" lets the model gather it'


class _Span(NamedTuple):
    """The numbers of the nodes of autograd that a forward pass made: first, ..., end - 1."""

    first: int
    end: int


_Call = tuple[int, nn.Module]  # the thread of a forward pass, and the module


class _VisitedNode(NamedTuple):
    """A node of a loss, and what is between it and the loss.

    Attributes:
        node: The node of autograd.
        mean_axes: The axes over which means were taken.
        reading: The name of a node that would read a block for the whole, as a norm does; "" for none.
        moved_axes: The axes over which values were put together, means among them.
        whole_axes: For a factor, those over which the values that it multiplies were put together
            before, so that they are the same on all processes; None for anything else.
        is_addend: Whether it is an addend of the loss, and no factor of one.
        meets_activations: Whether it is, or is a part of, a factor of activations, with no move in
            between.
    """

    node: Any
    mean_axes: frozenset[str] = frozenset()
    reading: str = ""
    moved_axes: frozenset[str] = frozenset()
    whole_axes: frozenset[str] | None = None
    is_addend: bool = True
    meets_activations: bool = False


class Penalties:
    """Searches losses for uses of the parameters of one model outside of modules that gather them.

    A penalty is a scalar addend of the loss that depends on parameters alone. Parameters that multiply
    activations, as in a loss that reads the weight of the last layer, vary as these do, and are summed
    as in modules: right as long as activations differ between processes. A factor of the mean over all
    processes, or of outputs that have been gathered, meets the same values on each.

    What modules computed is searched in the first pass alone, as a graph has thousands of nodes: for
    operations that read a block though modules gather the parameter.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        gatherers: Mapping[ShardedParameter, ModuleHooks],
    ) -> None:
        """Know the parameters of a model.

        Args:
            parameters: All of them.
            gatherers: The hooks of the module that gathers a parameter, for those that modules use
                gathered alone.
        """
        self.parameters = parameters
        self.gatherers = gatherers
        # Each thread numbers its nodes by itself.
        self._begun: dict[_Call, int] = {}  # the number of the first node of calls that run
        self._spans: dict[int, list[_Span]] = {}  # by thread: ascending, disjoint
        self._has_graph_of_gradients = False  # its nodes are made neither here nor there

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: no passes."""
        return {"parameters": self.parameters, "gatherers": self.gatherers}

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

    def check(self, looks_inside: bool) -> None:
        """Raise PlanError if the running backward pass has a penalty or a read that would be wrong.

        Args:
            looks_inside: Whether to search what modules computed, too, for blocks in the place of
                gathered parameters.
        """
        if not self._has_graph_of_gradients:
            roots = roots_of_backward_pass()
            by_id = {id(parameter.tensor): parameter for parameter in self.parameters}
            self._check_outside(roots, by_id)
            if looks_inside:
                self._check_inside(roots, by_id)
        self._has_graph_of_gradients = torch.is_grad_enabled()  # of backward(create_graph=True)

    def _check_outside(self, roots: Sequence[Any], by_id: Mapping[int, ShardedParameter]) -> None:
        """Raise PlanError if the loss itself, outside of modules, uses a parameter in a wrong way.

        Wrong are penalties and factors that would count more or less than once, and blocks that are
        read in the place of gathered parameters.

        Args:
            roots: The nodes of the loss.
            by_id: The parameters by the ids of their tensors.
        """
        search = _Search(self._is_inside, by_id)
        for root in roots:
            for parameter, visited in search.uses(root):
                if visited.meets_activations:
                    self._check_is_whole(parameter)
                if visited.whole_axes is None:  # no factor
                    _check_counted_once(parameter, visited.mean_axes)
                    _check_is_sum(parameter, visited.reading)
                else:
                    _check_factor(parameter, visited.whole_axes)

    def _check_inside(self, roots: Sequence[Any], by_id: Mapping[int, ShardedParameter]) -> None:
        """Raise PlanError if what modules computed reads a block in the place of a gathered parameter.

        Arguments are as for `_check_outside`.
        """
        to_visit = list(roots)
        seen = set()
        while to_visit:
            node = to_visit.pop()
            if node in seen:
                continue
            seen.add(node)
            inputs = _inputs_of(node)
            to_visit += inputs
            if _is_function(node) or node.name() == CAST_NODE or not self._is_inside(node):
                continue
            for input_node in inputs:
                leaf = getattr(_below_casts(input_node), "variable", None)
                if id(leaf) in by_id:
                    self._check_is_whole(by_id[id(leaf)])

    def _check_is_whole(self, parameter: ShardedParameter) -> None:
        """Raise PlanError for a parameter that modules have gathered, as it is a block where it is read."""
        gatherer = self.gatherers.get(parameter)
        # The check after the first pass tells of modules that nobody calls.
        if gatherer is not None and gatherer.was_called:
            reason = f"{parameter.name} is read as it is stored, this process's block, and not as "
            reason += (
                f"{gatherer.title} gathers it: in another module, in the loss, or by a reference "
            )
            reason += "from before"
            raise PlanError(reason, text=layout_text(parameter.sharding.layout), hint=BLOCK_HINT)

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
    """Finds the uses of parameters in one loss, outside of modules."""

    def __init__(
        self, is_inside: Callable[[Any], bool], parameters: Mapping[int, ShardedParameter]
    ) -> None:
        self._is_inside = is_inside
        self._parameters = parameters  # by the ids of their tensors
        self._whole_axes: dict[Any, frozenset[str] | None] = {}  # by node, see `_whole_axes_of`

    def uses(self, root: Any) -> Iterator[tuple[ShardedParameter, _VisitedNode]]:
        """Yield the parameters in penalties and factors of a loss, with what is between them and the loss."""
        to_visit = [_VisitedNode(root)]
        seen = set()
        while to_visit:
            visited = to_visit.pop()
            if visited in seen or self._is_inside(visited.node):
                continue
            seen.add(visited)
            parameter = self._parameter_of(visited.node)
            if parameter is not None:
                yield parameter, visited
            else:
                to_visit += self._below(visited)

    def _below(self, visited: _VisitedNode) -> list[_VisitedNode]:
        """Return the nodes below one, each with what is between it and the loss.

        Below a sum of scalars are addends of the loss; below any other node are factors. In
        `over_dp(y.mean()) * scale` the parameter `scale` meets a value that was put together over dp.
        """
        node = visited.node
        inputs = _inputs_of(_below_square_of_norm(node))
        reading = visited.reading or _reading(node)
        below = visited._replace(
            mean_axes=visited.mean_axes | _mean_axes(node),
            reading="" if _sums_over_processes(node) else reading,
            moved_axes=visited.moved_axes | _axes_made_whole(node),
            meets_activations=visited.meets_activations and not _is_function(node),
        )
        is_sum_of_addends = visited.is_addend and _is_sum(node)
        if is_sum_of_addends or self._depends_on_parameters_alone(node):
            return [below._replace(node=input_node) for input_node in inputs]
        # Where the loss puts values together over an axis later, a factor is one process's addend.
        met_axes = self._axes_whole_in_all(inputs) - below.moved_axes
        factors = []
        for input_node in inputs:
            is_factor = self._depends_on_parameters_alone(input_node)
            factors.append(
                below._replace(
                    node=input_node,
                    whole_axes=met_axes if is_factor else None,
                    is_addend=False,
                    meets_activations=is_factor,
                )
            )
        return factors

    def _depends_on_parameters_alone(self, node: Any) -> bool:
        """Return whether nothing but parameters of the model is below a node, outside of modules."""
        return self._whole_axes_of(node) is None

    def _axes_whole_in_all(self, nodes: Sequence[Any]) -> frozenset[str]:
        """Return the axes over which all activations among some nodes were put together."""
        axes_of_activations = []
        for node in nodes:
            axes = self._whole_axes_of(node)
            if axes is not None:
                axes_of_activations.append(axes)
        if not axes_of_activations:
            return frozenset()
        return frozenset.intersection(*axes_of_activations)

    def _whole_axes_of(self, root: Any) -> frozenset[str] | None:
        """Return the axes over which all that a node depends on was put together.

        None if that is parameters of the model alone. The mean over dp of a loss -> {dp}.
        """
        if root in self._whole_axes:
            return self._whole_axes[root]
        to_visit = [root]
        while to_visit:
            node = to_visit.pop()
            inputs = _inputs_of(node)
            undecided = [x for x in inputs if x not in self._whole_axes]
            if self._is_inside(node):  # perhaps the move of a rule for an output
                self._whole_axes[node] = _axes_made_whole(node)
            elif not inputs:
                is_parameter = self._parameter_of(node) is not None
                self._whole_axes[node] = None if is_parameter else frozenset()
            elif undecided:
                to_visit += [node, *undecided]
            elif all(map(self._depends_on_parameters_alone, inputs)):
                self._whole_axes[node] = None
            else:
                self._whole_axes[node] = self._axes_whole_in_all(inputs) | _axes_made_whole(node)
        return self._whole_axes[root]

    def _parameter_of(self, node: Any) -> ShardedParameter | None:
        """Return the parameter whose gradient a node is for, or None."""
        return self._parameters.get(id(getattr(node, "variable", None)))


def _inputs_of(node: Any) -> list[Any]:
    """Return the nodes to which a node sends gradients."""
    return [input_node for input_node, _ in node.next_functions if input_node is not None]


def _is_function(node: Any) -> bool:
    """Return whether a node is of an `autograd.Function`.

    Moves are, as those that gather, and functions of users, who may know that they get blocks.
    Operations of torch take a block for the whole.
    """
    return isinstance(node, BackwardCFunction)


def _below_casts(node: Any) -> Any:
    """Return the node of the tensor of which this one is a cast; else the node itself."""
    while node.name() == CAST_NODE:
        (node,) = _inputs_of(node)
    return node


def _is_sum(node: Any) -> bool:
    """Return whether a node adds up scalars, or changes one: penalties below it are addends of the loss."""
    is_sum = node.name() in ADDING_NODES or len(_inputs_of(node)) == 1
    return is_sum and shape_of_node(node) == ()


def _axes_made_whole(node: Any) -> frozenset[str]:
    """Return the axes over which a node puts together what processes have, if it moves a block.

    "n/dp d -> n d", "() | mean(dp) -> ()" -> {dp}. Not those of copies, as in "n/dp d -> n d | copy(dp)":
    there processes go on to compute addends of one loss.
    """
    executable = getattr(node, "executable", None)
    if not isinstance(executable, Executable):
        return frozenset()
    return frozenset(executable.plan.src.axes).difference(executable.plan.dst.axes)


def _mean_axes(node: Any) -> frozenset[str]:
    """Return the axes over which a node takes a mean, if it moves a block."""
    executable = getattr(node, "executable", None)
    if isinstance(executable, Executable):
        return frozenset(executable.plan.src.tagged("mean"))
    return frozenset()


def _sums_over_processes(node: Any) -> bool:
    """Return whether a node moves a block, and adds up what processes have."""
    executable = getattr(node, "executable", None)
    return isinstance(executable, Executable) and bool(executable.plan.src.tagged("sum"))


def _kind(node: Any) -> str:
    """Return the name of a node without its end: MeanBackward0 -> Mean."""
    return str(node.name()).partition("Backward")[0]


def _reading(node: Any) -> str:
    """Return what a node computes of a block that is not its addend of the whole: "Mean"; "" if it adds."""
    if shape_of_node(node) != () or _below_square_of_norm(node) is not node:
        return ""
    kind = _kind(node)
    shapes = [shape_of_node(input_node) for input_node in _inputs_of(node)]
    is_loss_by_mean = saved_in_node(node, "reduction") == _MEAN_REDUCTION
    if kind in _MEANS:
        # The mean of a stack of scalars, which may be sums, is a sum.
        is_stack = [_kind(x) for x in _inputs_of(node)] == ["Stack"] and len(shapes[0]) == 1
        return "" if is_stack else kind
    if kind in _NORMS:
        return "Norm"
    return kind if kind in _NO_SUMS or is_loss_by_mean else ""


def _below_square_of_norm(node: Any) -> Any:
    """Return the norm whose square a node is, which is a sum of squares; else the node itself."""
    inputs = _inputs_of(node)
    is_square = node.name() == "PowBackward0" and saved_in_node(node, "exponent") == 2
    if is_square and _kind(inputs[0]) in _NORMS:
        # `vector_norm` calls its order `ord`, `norm` calls it `p`, and its form without an order saves none.
        orders = saved_in_node(inputs[0], "ord"), saved_in_node(inputs[0], "p")
        if set(orders) <= {None, 2}:
            return inputs[0]
    return node


def _check_is_sum(parameter: ShardedParameter, reading: str) -> None:
    """Raise PlanError if a penalty takes the block of a parameter for the whole.

    On dp=4 the mean of each block of a parameter has a gradient four times too large. Sums of elements
    are right, as those of blocks add up.
    """
    layout = parameter.sharding.layout
    if not reading or parameter.sharding.mesh.size(*layout.sharding_axes) == 1:
        return
    problem = (
        f"its {reading} would be that of this process's block, where sums alone add up to the whole"
    )
    raise PlanError(_about_penalty(parameter, problem), text=layout_text(layout), hint=HINT)


def _check_counted_once(parameter: ShardedParameter, mean_axes: frozenset[str]) -> None:
    """Raise PlanError if the gradient of a penalty on a parameter would be too large, or too small.

    On dp=4 each process adds the penalty to its own loss. How often its gradient counts:

    - Parameter replicated, loss a mean over dp: each process has a quarter, and four are summed. Once.
    - Parameter replicated, loss no mean: each process has all of it, and four are summed. 4 times.
    - Parameter sharded, loss a mean: a quarter of a block's gradient, and nothing is summed. 1/4.

    Args:
        parameter: The parameter.
        mean_axes: The axes over which the loss is a mean.
    """
    mesh = parameter.sharding.mesh
    layout = parameter.sharding.layout
    repeated = [axis for axis in parameter.axes_summed_later - mean_axes if mesh.size(axis) > 1]
    divided = [axis for axis in mean_axes.intersection(layout.axes) if mesh.size(axis) > 1]
    if repeated:
        over = ",".join(sorted(repeated))
        problem = (
            f"its gradient would count {mesh.size(*repeated)} times, as it is summed over '{over}'"
        )
        raise PlanError(_about_penalty(parameter, problem), text=layout_text(layout), hint=HINT)
    if divided:
        over = ",".join(sorted(divided))
        problem = f"its gradient would count 1/{mesh.size(*divided)}, by the mean over '{over}'"
        raise PlanError(_about_penalty(parameter, problem), text=layout_text(layout), hint=HINT)


def _about_penalty(parameter: ShardedParameter, problem: str) -> str:
    """Return the reason of an error: what the loss has, and the problem with it."""
    return f"a penalty on {parameter.name} is added to the loss outside of the model: {problem}"


def _check_factor(parameter: ShardedParameter, whole_axes: frozenset[str]) -> None:
    """Raise PlanError if a parameter meets what is the same on the processes that sum its gradient.

    On dp=4, `redistribute(loss, "() | mean(dp) -> ()", mesh) * scale` has the whole gradient of `scale`
    on each process, and four of them are summed.
    """
    mesh = parameter.sharding.mesh
    repeated = [axis for axis in parameter.axes_summed_later & whole_axes if mesh.size(axis) > 1]
    if repeated:
        over = ",".join(sorted(repeated))
        reason = f"{parameter.name} is used in the loss, outside of the model, with values that were put "
        reason += f"together over '{over}': its gradient would count {mesh.size(*repeated)} times"
        raise PlanError(reason, text=layout_text(parameter.sharding.layout), hint=FACTOR_HINT)
