"""What the torch tests share: ranks that start clean, and comparisons with the reference."""

from __future__ import annotations

import doctest
import functools
import importlib
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.testing._internal.distributed import multi_threaded_pg as threaded

import torch_bridge as xt
import xshard as xs
from torch_bridge.models.parallel import parallel_of
from xshard import reference

# Ranks are forked from a server that has only imported modules: pytest's own process may have run JAX or a
# backward pass before, after which it cannot be forked safely.
multiprocessing.set_forkserver_preload(["tests.torch_bridge.preloaded"])


# Since 2.13 gloo exchanges lists, and DTensor flattens cut dims.
RECENT = torch.__version__ >= "2.13"


def on_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 600) -> list[Any]:
    """Return the results of `function(*args)` on `n` ranks; a failed assertion in any is raised here.

    The error has the rank, its traceback and the values of the assertion (see `preloaded`).

    timeout_s: guards against a hang, far above what any test takes.
    """
    __tracebackhide__ = True  # pytest's report goes from the test's line to the rank's traceback
    try:
        return xt.testing.run_ranks(
            n, function, *args, timeout_s=timeout_s, start_method="forkserver"
        )
    except xt.testing.RankError as error:
        raise error.with_traceback(None) from None


def in_ranks(n: int, launch: Callable[..., Any] = on_ranks) -> Callable[..., Callable[..., None]]:
    """The test, run on `n` ranks; `launch=on_threads`: on threads."""

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def there(**arguments: object) -> None:
            launch(n, _run_here, test.__module__, test.__name__, arguments)

        there.here = test  # type: ignore[attr-defined]
        return there

    return decorated


def _run_here(module: str, name: str, arguments: dict[str, object]) -> None:
    getattr(importlib.import_module(module), name).here(**arguments)


def on_threads(n: int, function: Callable[..., Any], *args: Any) -> None:
    """Call `function(*args)` on `n` ranks that are threads of one process, in torch's threaded process group.

    They share the planner's caches, so this takes a part of what `on_ranks` takes. A failed assertion in any
    of them is raised here. They have no messages from one to another, and no dispatch mode sees what is sent.
    """
    on_ranks(1, _on_threads, n, function, args)


def _on_threads(n: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    store = dist.HashStore()
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        dist.init_process_group("threaded", rank=number, world_size=n, store=store)
        try:
            function(*args)
        except BaseException as error:
            error.add_note(f"on thread {number} of {n}")
            failures.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # ends the others, with a SystemExit
        finally:
            dist.destroy_process_group()

    c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        ranks = [threading.Thread(target=rank, args=(number,)) for number in range(n)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    finally:
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)
    for failure in failures:
        if not isinstance(failure, SystemExit):
            raise failure


class SharedRanks:
    """Tests of one module that share one launch of ranks, and are reported one by one.

        on_four = SharedRanks(4)

        @on_four
        def test_rows_are_cut() -> None: ...   # each rank runs it

    The first of them to run launches ranks that run all, in the order of the file. If one fails, new
    ranks run those behind it: nothing that follows a failure is taken for another one.
    """

    def __init__(self, n: int, launch: Callable[..., Any] = on_ranks) -> None:
        self.n = n
        self.launch = launch
        self.waiting: list[str] = []
        self.failures: dict[str, Exception] = {}

    def __call__(self, test: Callable[[], None]) -> Callable[[], None]:
        name = test.__name__
        self.waiting.append(name)

        @functools.wraps(test)
        def reported() -> None:
            __tracebackhide__ = True
            while name in self.waiting:
                self._run_waiting(test.__module__)
            if name in self.failures:
                raise self.failures[name]

        reported.here = test  # type: ignore[attr-defined]
        return reported

    def _run_waiting(self, module: str) -> None:
        """Run the tests that wait, up to the first that fails."""
        __tracebackhide__ = True
        try:
            self.launch(self.n, _run_in_turn, module, tuple(self.waiting))
        except xt.testing.RankError as error:
            failed = re.search(r"^ *in shared test (\w+)$", str(error), re.MULTILINE)
            # Ranks that are killed name no test; then the failure may be that of any.
            blamed = [failed[1]] if failed else self.waiting
            self.failures |= dict.fromkeys(blamed, error)
            self.waiting = self.waiting[self.waiting.index(blamed[-1]) + 1 :]
        else:
            self.waiting = []


def _run_in_turn(module: str, names: Sequence[str]) -> None:
    for name in names:
        try:
            _run_here(module, name, {})
        except Exception as error:
            error.add_note(f"in shared test {name}")
            raise


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a process that is forked from the clean server, and may fork ranks itself."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def torchrun(n: int, function: Callable[..., Any], *args: Any, max_restarts: int = 0) -> list[Any]:
    """What `torchrun --standalone --nproc-per-node n` does, with ranks that are forked: their results."""
    return list(apart(_torchrun, n, max_restarts, function, args).values())


def _torchrun(
    n: int, max_restarts: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> dict[int, Any]:
    # Else the store keeps the addresses of ranks that have ended (pytorch issue 167288).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n,
        run_id="tests",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        start_method="fork",
        monitor_interval=0.1,
    )
    found: dict[int, Any] = elastic_launch(config, record(function))(*args)
    return found


def failed_examples(modules: Sequence[str]) -> dict[str, str]:
    """Modules whose docstrings have no examples, or failing ones -> the result."""
    found: dict[str, str] = apart(_failed_examples, list(modules))
    return found


def _failed_examples(modules: Sequence[str]) -> dict[str, str]:
    found = {name: doctest.testmod(importlib.import_module(name)) for name in modules}
    return {
        name: str(result) for name, result in found.items() if result.failed or not result.attempted
    }


def for_each(expressions: Sequence[str], function: Callable[[str], None]) -> None:
    """Call `function` on every expression; a failure names the one it belongs to."""
    for expression in expressions:
        try:
            function(expression)
        except Exception as error:
            error.add_note(f"in '{expression}'")
            raise


def block_of(
    x: np.ndarray, layout: str, mesh: xs.Mesh, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The block of this rank, which is its device number on `mesh`. layout: or an expression that has it."""
    return torch.from_numpy(reference.scatter(x, layout.split(" ->")[0], mesh)[dist.get_rank()]).to(
        dtype
    )


def numbers(*shape: int) -> np.ndarray:
    """1, 2, 3, ... in an array of `shape`."""
    return np.arange(1.0, 1 + np.prod(shape)).reshape(shape)


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """The class and the text of the error that `function` raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def check_error(function: Callable[[], Any], kind: str, *words: str) -> str:
    """The text of the error that `function` raises, which is to be of a class and to have all these words."""
    found, text = error_of(function)
    assert found == kind and all(part in text for part in words), (found, text)
    return text


def derivatives(
    move: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | float = 1.0
) -> list[Tensor]:
    """What `move` makes of `x`, its derivatives of two orders in both modes, and all that under vmap."""

    def loss(v: Tensor) -> Tensor:
        return (weight * move(v) ** 3).sum()

    leaf = x.clone().requires_grad_()
    batch = torch.stack([x, 2 * x])
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    # Paired with what is legal beside it: a function of addends alone has no one gradient.
    (second,) = torch.autograd.grad((first * x).sum(), leaf)
    mapped = [torch.func.vmap(f)(batch) for f in (move, torch.func.grad(loss))]
    return [
        move(x),
        first,
        second,
        torch.func.grad(loss)(x),
        *torch.func.jvp(move, (x,), (x,)),
        *mapped,
    ]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether both have one dtype, one shape and the same bits, of dtypes too that torch cannot compare."""
    own = [x.clone(memory_format=torch.contiguous_format) for x in (found, expected)]
    raw = [x.view(-1).view(torch.uint8) for x in own]
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and torch.equal(*raw)


def assert_refused(
    *cases: tuple[Callable[[], Any], str], is_alike: bool = True, is_whole: bool = False
) -> None:
    """Each call raises `Class: message`, ... for what the text leaves out, and its end unless it is whole.

    is_alike: the same on all ranks.
    """
    matches = re.fullmatch if is_whole else re.match
    said = [": ".join(error_of(call)) for call, _ in cases]
    for text, (_, words) in zip(said, cases, strict=True):
        assert matches(".*".join(map(re.escape, words.split("..."))), text, re.DOTALL), text
    if dist.is_initialized():
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, said)
        assert not is_alike or all(each == said for each in everywhere), everywhere


def still_connected() -> bool:
    """Whether the world answers: nothing that was sent before is left half done."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() == dist.get_world_size()


def block_of_each(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, by the names of a parallel model's parameters -> this process's blocks."""
    state = parallel_of(model)
    named = [(each, name) for each in state.parameters for name in each.names if name in values]
    return {name: each.block_of(values[name], state.context) for each, name in named}
