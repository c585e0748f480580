"""The order in which a compiled function starts collectives, waits for them and multiplies.

Each graph of a function is traced once and lowered once for every choice of passes, down to inductor's
schedule. No kernel is written, nothing runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._inductor import comms, ir, utils
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch.distributed import _symmetric_memory
from torch.utils import _runtime_estimation

# Of an H100, for passes that ask how long something takes.
TFLOPS = 989.0
GIGABYTES_PER_S = 3350.0

Passes = Mapping[str, Any]  # options of `torch._inductor.config`
PRODUCT = "product"
WAIT = "wait"


class Event(NamedTuple):
    """What a compiled function does next.

    kind: PRODUCT, WAIT, or the name of a collective's operator. buffer: what a collective fills, and what is
    waited for.
    """

    kind: str
    buffer: str = ""


class _Lowered(BaseException):
    """Ends a compilation that has what it was made for; no `Exception`, which compilers replace."""


def schedules(
    function: Callable[..., Any], *arguments: Any, choices: Mapping[str, Passes]
) -> dict[tuple[str, str], list[Event]]:
    """Return the events of the forward and the backward graph, by the name of passes and by direction."""
    found = {}

    def lower(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        direction = "backward" if options.get("is_backward") else "forward"
        for name, passes in choices.items():
            with inductor_config.patch({**passes, "force_disable_caches": True}):
                found[name, direction] = _scheduled(copy.deepcopy(graph), inputs, options)
        return _stop

    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=lower)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        _as_on_gpus(),
    ):
        try:
            compiled(*arguments)
        except _Lowered:
            return found
    raise AssertionError("the function has no graph")


def _stop(*arguments: Any) -> None:
    raise _Lowered


@contextmanager
def _as_on_gpus() -> Iterator[None]:
    """Let passes take any group for one of NCCL with symmetric memory, and any device for an H100."""
    with (
        mock.patch.object(_runtime_estimation, "get_device_tflops", return_value=TFLOPS),
        mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", return_value=GIGABYTES_PER_S),
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        _symmetric_memory._test_mode(),
    ):
        yield


def _scheduled(graph: torch.fx.GraphModule, inputs: Any, options: Any) -> list[Event]:
    """Lower a graph, and return the events of its schedule."""
    events: list[Event] = []

    def read_schedule(lowering: GraphLowering) -> None:
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        for scheduled in lowering.scheduler.nodes:
            for node in scheduled.get_nodes():
                events.extend(_events(node.node))
        raise _Lowered

    with mock.patch.object(GraphLowering, "compile_to_module", read_schedule):
        try:
            compile_fx_inner(graph, inputs, **options)
        except _Lowered:
            return events
    raise AssertionError("the graph has no schedule")


def _events(node: Any) -> Iterator[Event]:
    """Yield the event of a node of inductor's, if it is one."""
    if utils.is_wait(node):
        yield Event(WAIT, node.inputs[0].get_name())
    elif utils.is_collective(node):
        yield Event(node.op_overload.name().split("::")[1].split(".")[0], node.get_name())
    elif isinstance(node, ir.FallbackKernel) and "symm_mem::" in node.op_overload.name():
        yield Event(node.op_overload.name().split("::")[1].split(".")[0])
    elif comms.is_gemm_like(node):
        yield Event(PRODUCT)
