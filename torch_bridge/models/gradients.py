"""Gradients of a parallel model, summed over `ShardedParameter.later` in buckets during the backward pass.
All processes send the same buckets in the same order: a parameter that a process did not use counts as zeros,
and a parameter that no process used keeps the gradient that it had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torch_bridge.comm_dtype import comm_dtype_of
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.redistribution import redistribute
from xshard import XshardError, trees


@dataclass(eq=False)
class Gradient:
    """The gradient of one parameter: `.grad` is a sum along `axes`, or `share`, and `earlier` was the sum."""

    parameter: Tensor
    axes: tuple[str, ...]
    share: Tensor | None = None
    earlier: Tensor | None = None

    def has_share(self) -> bool:
        """Return whether `.grad` is this process's share; forget a share that somebody else took out."""
        if self.share is not None and self.parameter.grad is not self.share:
            self.share = self.earlier = None
        return self.share is not None

    def take_share(self) -> Tensor | None:
        """Return this process's share, if there is one, which `.grad` no longer is."""
        share = self.share if self.has_share() else None
        if share is not None:
            self.share = self.parameter.grad = None
        return share

    def add(self, total: Tensor) -> None:
        """Make `.grad` the sum of earlier passes and of this one."""
        earlier = self.parameter.grad if self.earlier is None else self.earlier
        total = total.view(self.parameter.shape)
        self.parameter.grad = total if earlier is None else earlier + total
        self.earlier = None


@torch.no_grad()
def _begin_sums(bucket: Sequence[Gradient], context: ParallelContext) -> Callable[[], None]:
    """Begin to sum shares over their axes, with a flag each -> a function that adds the sums to `.grad`."""
    shares = [gradient.take_share() for gradient in bucket]
    used = [float(share is not None) for share in shares]
    pairs = zip(bucket, shares, strict=True)
    parts = [
        (torch.zeros_like(each.parameter) if x is None else x).reshape(-1) for each, x in pairs
    ]
    lengths = [*map(len, parts), len(parts)]
    flat = torch.cat([*parts, parts[0].new_tensor(used)])
    del shares, pairs, parts  # while the bucket is on its way
    travels = comm_dtype_of(context.comm_dtype, flat.dtype).backward
    options: Any = {"profile": context.profile, "comm_dtype": travels, "async_op": True}
    pending: Any = redistribute(
        flat, f"n | sum({','.join(bucket[0].axes)}) -> n", context.mesh, **options
    )

    def end() -> None:
        *sums, n_used = pending.wait().split(lengths)
        for gradient, total, n, is_used in zip(bucket, sums, n_used, used, strict=True):
            if is_used or n > 0:
                gradient.add(total)

    return end


@dataclass(eq=False)
class BackwardPass:
    """One backward pass. waiting: number of gradients that each bucket lacks. coming, ready: gradients that
    autograd will add, or has added, to `.grad`. sent: functions that end the sums begun so far.
    """

    waiting: list[int]
    coming: set[Gradient] = field(default_factory=set)
    ready: set[Gradient] = field(default_factory=set)
    sent: list[Callable[[], None]] = field(default_factory=list)


class Gradients:
    """Sums gradients in every backward pass, unless `syncs` is False; then once calls `after_first`."""

    _pass: BackwardPass | None = None

    def __init__(
        self,
        context: ParallelContext,
        sharded: Sequence[ShardedParameter],
        bucket_bytes: int | None,
    ) -> None:
        self.context = context
        self.bucket_bytes = bucket_bytes
        self.syncs = True
        self.sharded = [each for each in sharded if context.axes.size(*each.later) > 1]
        self.after_first: Callable[[], None] | None = None
        self._handles: list[Any] = []
        self._attach([each.tensor for each in self.sharded])

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        new = Gradients(self.context, (), self.bucket_bytes)
        memo[id(self)] = new
        new.sharded = copy.deepcopy(self.sharded, memo)
        new._attach([copy.deepcopy(each.tensor, memo) for each in self.sharded])
        return new

    @property
    def unsummed(self) -> bool:
        return any(gradient.has_share() for gradient in self._all)

    def prepare(self) -> None:
        """Before a forward pass: undo a backward pass that failed, and follow parameters that are new."""
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, inside a backward pass
        self._undo()
        parameters = [each.tensor for each in self.sharded]
        if [id(x) for x in parameters if x.requires_grad] != [
            id(each.parameter) for each in self._all
        ]:
            self._attach(parameters)

    def _undo(self) -> None:
        for each in self._all if self._pass is not None else ():
            if each.has_share() or each.earlier is not None:
                each.parameter.grad = each.earlier  # the sum of earlier passes
            each.share = each.earlier = None
        self._pass = None

    def _attach(self, parameters: Sequence[Tensor]) -> None:
        """Follow the gradients of these tensors, one for each of `sharded`."""
        for handle in self._handles:
            handle.remove()
        rows = zip(parameters, self.sharded, strict=True)
        trained = [(x, each.later) for x, each in rows if x.requires_grad]
        order = self.context.axes.axes
        self._all = [
            Gradient(x, tuple(axis for axis in order if axis in later)) for x, later in trained
        ]
        self._handles = [x.parameter.register_hook(partial(self._arrives, x)) for x in self._all]
        for each in self._all:
            arrived = partial(self._arrived, each)
            self._handles.append(each.parameter.register_post_accumulate_grad_hook(arrived))
        last_first = self._all[::-1]  # as a backward pass fills the buckets
        keys = [(each.axes, each.parameter.dtype, each.parameter.device) for each in last_first]
        members = trees.groups(
            [each.parameter.nbytes for each in last_first], self.bucket_bytes, keys
        )
        self._buckets = [
            [last_first[i] for i in group] for group in sorted(members, key=itemgetter(-1))
        ]
        self._bucket_of = {each: i for i, bucket in enumerate(self._buckets) for each in bucket}
        self._pass = None

    def _arrives(self, gradient: Gradient, _: Tensor) -> None:
        """Before a share is added to `.grad`."""
        if self._pass is None:
            self._pass = BackwardPass([*map(len, self._buckets)])
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._pass.coming.add(gradient)
        if (
            not gradient.has_share() and gradient.parameter.grad is not None
        ):  # a sum, or an earlier share
            gradient.earlier = gradient.parameter.grad
            gradient.parameter.grad = None

    def _arrived(self, gradient: Gradient, x: Tensor) -> None:
        """After a share has been added to `.grad`: send the buckets that are full."""
        assert x.grad is not None and self._pass is not None
        if x.grad.requires_grad or x.grad.layout is not torch.strided:
            hint = "embedding(sparse=False), backward(create_graph=False)"
            raise XshardError(
                "a gradient of a parallel model is sparse, or has a gradient itself", hint=hint
            )
        gradient.share = x.grad
        now = self._pass
        now.coming.discard(gradient)
        if not self.syncs or gradient in now.ready:
            return
        now.ready.add(gradient)
        now.waiting[self._bucket_of[gradient]] -= 1
        while len(now.sent) < len(self._buckets) and not now.waiting[len(now.sent)]:
            now.sent.append(_begin_sums(self._buckets[len(now.sent)], self.context))

    @torch.no_grad()
    def _end(self) -> None:
        """At the end of the backward pass: send the other buckets, wait, and put the sums into `.grad`."""
        if (now := self._pass) is None:
            return
        if now.coming:
            self._undo()
            what = "torch.autograd.grad would give each process its share of a parameter's gradient"
            raise XshardError(what, hint="call backward(), after which .grad is the whole one")
        while self.syncs:
            now.sent += [
                _begin_sums(bucket, self.context) for bucket in self._buckets[len(now.sent) :]
            ]
            for end in now.sent:
                end()
            now = self._pass = BackwardPass([*map(len, self._buckets)])
            if not self.unsummed:  # a parameter may get a second share after its bucket has left
                break
        self._pass = None
        if self.syncs and self.after_first is not None:
            check = self.after_first
            self.after_first = None
            check()
