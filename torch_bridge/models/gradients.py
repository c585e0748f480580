"""Gradients of a parallel model: summed in buckets while the backward pass goes on.

Decides when gradients travel, and what `.grad` is before, between and after. Each parameter brings the axes
over which its gradient is summed once, after all its uses (`Kept.later`); other sums were made where it was
gathered. All processes send the same buckets in the same order: what a process did not use counts as zeros,
and what none of them used keeps the gradient that it had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_bridge.comm_dtype import CommDtype, comm_dtype_of
from torch_bridge.mesh.process_mesh import world
from torch_bridge.models.parameters import Kept, Setting
from torch_bridge.planning import executable_of
from xshard import XshardError


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients travel together. axes: over which they are summed.

    flagged: with it travels which parameters were used, of these numbers: it is the last of its kind.
    """

    axes: tuple[str, ...]
    numbers: list[int]
    flagged: Sequence[int] = ()


class Gradients:
    """Sums the gradients of parameters in every backward pass, unless `syncs` is False.

    after_first: called once, after the first of them.
    """

    def __init__(self, setting: Setting, kept: Sequence[Kept], bucket_bytes: int) -> None:
        self.setting, self.bucket_bytes, self.syncs = setting, bucket_bytes, True
        self.kept = [each for each in kept if setting.axes.size(*each.later) > 1]
        self.after_first: Callable[[], None] | None = None
        self._attached: list[int] = []
        self._parameters: list[Tensor] = []
        self._handles: list[Any] = []
        self._buckets: list[Bucket] = []
        self._clear()

    def _clear(self) -> None:
        self._local: dict[int, Tensor] = {}  # gradients that are not yet summed, which .grad is
        self._before: dict[int, Tensor] = {}  # sums of earlier passes
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._is_queued = False
        self._coming: set[int] = set()
        self._ready: set[int] = set()
        self._waiting = [len(bucket.numbers) for bucket in self._buckets]
        self._next = 0
        self._sent: list[tuple[Bucket, list[int], Callable[[], Tensor]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        new = Gradients(self.setting, (), self.bucket_bytes)
        memo[id(self)] = new
        new.kept = copy.deepcopy(self.kept, memo)
        new.attach([copy.deepcopy(each.tensor, memo) for each in self.kept])
        return new

    @property
    def unsummed(self) -> bool:
        """Whether some gradients are this process's share, from passes inside `no_sync`."""
        return any(self._share(i) is not None for i in list(self._local))

    def _share(self, i: int) -> Tensor | None:
        """What .grad has of this process alone; None where it was summed, or is no more."""
        local = self._local.get(i)
        if local is not None and self._parameters[i].grad is not local:  # set to None, with what was before
            del self._local[i]
            self._before.pop(i, None)
            return None
        return local

    def prepare(self) -> None:
        """Before a forward pass: forget a backward pass that failed, follow parameters that are new."""
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, inside a backward pass
        if self._is_queued:
            self.forget()
        now = [each.tensor for each in self.kept]
        if [id(x) for x in now if x.requires_grad] != self._attached:
            self.attach(now)

    def forget(self) -> None:
        """Undo a backward pass that failed: .grad is what was summed before."""
        for i, gradient in self._before.items():
            self._parameters[i].grad = gradient
        self._clear()

    def attach(self, parameters: Sequence[Tensor]) -> None:
        """Follow the gradients of these tensors, one for each of `kept`."""
        for handle in self._handles:
            handle.remove()
        followed = [(x, each) for x, each in zip(parameters, self.kept, strict=True) if x.requires_grad]
        self._parameters, self._attached = [x for x, _ in followed], [id(x) for x, _ in followed]
        self._handles = []
        for i, x in enumerate(self._parameters):
            self._handles.append(x.register_hook(partial(self._arrives, i)))
            self._handles.append(x.register_post_accumulate_grad_hook(partial(self._arrived, i)))
        self._buckets = self._made([each for _, each in followed])
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.numbers}
        self._clear()

    def _made(self, kept: Sequence[Kept]) -> list[Bucket]:
        """Buckets in the order in which a backward pass fills them: the last parameters come first."""
        open_: dict[Any, Bucket] = {}
        filled: dict[Any, int] = {}
        members: dict[Any, list[int]] = {}
        done: list[Bucket] = []
        for i in reversed(range(len(kept))):
            x, axes = self._parameters[i], kept[i].later
            key = axes, x.dtype, x.device
            if key in open_ and filled[key] + x.nbytes > self.bucket_bytes:
                done.append(open_.pop(key))
            if key not in open_:
                open_[key] = Bucket(tuple(a for a in self.setting.axes.axes if a in axes), [])
                filled[key] = 0
            open_[key].numbers.append(i)
            filled[key] += x.nbytes
            members.setdefault(key, []).append(i)
        for key, bucket in open_.items():
            bucket.flagged = members[key]
        return sorted([*done, *open_.values()], key=lambda bucket: -bucket.numbers[-1])

    def _arrives(self, i: int, gradient: Tensor) -> None:
        """Before a gradient is added to .grad: what was summed before is set aside."""
        x = self._parameters[i]
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._coming.add(i)
        if self._share(i) is None and x.grad is not None:
            self._before[i], x.grad = x.grad, None

    def _arrived(self, i: int, x: Tensor) -> None:
        assert x.grad is not None
        if x.grad.requires_grad or x.grad.layout is not torch.strided:
            raise XshardError(
                "a gradient of a parallel model is sparse, or has a gradient itself",
                hint="embedding(sparse=False), backward(create_graph=False)",
            )
        self._local[i] = x.grad
        self._coming.discard(i)
        if not self.syncs or i in self._ready:
            return
        self._ready.add(i)
        self._waiting[self._bucket_of[i]] -= 1
        while self._next < len(self._buckets) and not self._waiting[self._next]:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Begin to sum the next bucket."""
        bucket = self._buckets[self._next]
        self._next += 1
        used, parts = [], []
        for i in bucket.numbers:
            x, share = self._parameters[i], self._share(i)
            if share is None:
                parts.append(torch.zeros(x.numel(), dtype=x.dtype, device=x.device))
                continue
            used.append(i)
            parts.append(share.reshape(-1))
            del self._local[i]
            x.grad = None
        if bucket.flagged:
            sent = {i for _, numbers, _ in self._sent for i in numbers} | set(used)
            parts.append(parts[0].new_tensor([float(i in sent) for i in bucket.flagged]))
        flat = torch.cat(parts)
        axes = ",".join(bucket.axes)
        travels = comm_dtype_of(self.setting.comm_dtype, flat.dtype).backward
        executable = executable_of(
            f"n | sum({axes}) -> n",
            self.setting.mesh,
            tuple(flat.shape),
            flat.dtype,
            flat.device,
            None,
            self.setting.profile,
            CommDtype(travels, travels),
            world(),
        )
        self._sent.append((bucket, used, executable.begin(flat)))

    @torch.no_grad()
    def _end(self) -> None:
        """At the end of the backward pass: send what is left, wait, and put the sums into .grad."""
        if self._coming:
            self.forget()
            raise XshardError(
                "torch.autograd.grad would give each process its share of a parameter's gradient",
                hint="call backward(), after which .grad is the whole one",
            )
        if not self.syncs:
            self._begin_pass()
            return
        while True:
            while self._next < len(self._buckets):
                self._send()
            self._receive()
            self._begin_pass()
            if not self._local:  # a parameter may get a second share after its bucket has left
                break
        if self.after_first is not None:
            check, self.after_first = self.after_first, None
            check()

    def _receive(self) -> None:
        absent: list[tuple[int, Tensor]] = []
        n_used: dict[int, Tensor] = {}
        for bucket, used, arrive in self._sent:
            sizes = [self._parameters[i].numel() for i in bucket.numbers]
            *sums, flags = arrive().split([*sizes, len(bucket.flagged)])
            n_used.update(zip(bucket.flagged, flags, strict=True))
            for i, total in zip(bucket.numbers, sums, strict=True):
                if i in used:
                    self._put(i, total)
                else:
                    absent.append((i, total))
        for i, total in absent:
            if n_used[i] > 0:
                self._put(i, total)

    def _put(self, i: int, total: Tensor) -> None:
        x = self._parameters[i]
        before = self._before.pop(i, x.grad)
        total = total.view(x.shape)
        x.grad = total if before is None else before + total


@contextmanager
def paused(gradients: Gradients) -> Iterator[None]:
    """Backward passes inside leave each process its share; the next one outside sums all of them."""
    before, gradients.syncs = gradients.syncs, False
    try:
        yield
    finally:
        gradients.syncs = before
