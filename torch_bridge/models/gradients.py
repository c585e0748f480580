"""Gradients of a parallel model, summed in buckets during the backward pass.

They are summed over `ShardedParameter.axes_summed_later`.
All processes send the same buckets in the same order. A parameter that a process did not use counts as zeros,
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
from torch_bridge.versions.autograd import call_after_backward, is_in_backward_pass
from xshard import XshardError, trees


@dataclass(eq=False)
class Gradient:
    """The gradient of one parameter: what `.grad` of this process means now.

    It is a sum along `axes`, or, while `share` is not None, this process's addend of one. `earlier` is then
    the sum of earlier passes, to which that of the shares is added.
    """

    parameter: Tensor
    axes: tuple[str, ...]
    share: Tensor | None = None
    earlier: Tensor | None = None

    def has_share(self) -> bool:
        """Return whether `.grad` is this process's share; forget a share that somebody else took out."""
        if self.share is not None and self.parameter.grad is not self.share:
            self.forget()
        return self.share is not None

    def forget(self) -> None:
        """Forget both the share and the sum of earlier passes."""
        self.share = None
        self.earlier = None

    def take_share(self) -> Tensor | None:
        """Return this process's share, if there is one, and take it out of `.grad`."""
        if not self.has_share():
            return None
        share = self.share
        self.share = None
        self.parameter.grad = None
        return share

    def put_aside_sum(self) -> None:
        """Keep a sum of earlier passes while `.grad` adds up this process's share of the next one."""
        if not self.has_share() and self.parameter.grad is not None:
            self.earlier = self.parameter.grad
            self.parameter.grad = None

    def add(self, total: Tensor) -> None:
        """Make `.grad` the sum of earlier passes and of this one."""
        earlier = self.parameter.grad if self.earlier is None else self.earlier
        total = total.view(self.parameter.shape)
        self.parameter.grad = total if earlier is None else earlier + total
        self.earlier = None

    def undo(self) -> None:
        """Make `.grad` the sum of earlier passes again."""
        if self.has_share() or self.earlier is not None:
            self.parameter.grad = self.earlier
        self.forget()


@torch.no_grad()
def _begin_sums(bucket: Sequence[Gradient], context: ParallelContext) -> Callable[[], None]:
    """Start the all-reduce of several gradients as one message; return a function that ends it.

    A share is what this process's backward pass has added to a gradient; its sum over processes is
    the gradient. The message is all shares, flat, then a flag per parameter, 1.0 if this process
    used it: the sum of the flags counts the processes that did. A share of shape [2, 2], and
    none of a parameter [3] -> 4 numbers, 3 zeros, 1.0, 0.0.

    Shares are taken out of `.grad`; the returned function waits, and adds the sums to `.grad`.
    """
    shares = [gradient.take_share() for gradient in bucket]
    is_used = [share is not None for share in shares]
    # A parameter without a share counts as zeros: all processes send messages of one size.
    flat_shares = []
    for gradient, share in zip(bucket, shares, strict=True):
        addend = torch.zeros_like(gradient.parameter) if share is None else share
        flat_shares.append(addend.reshape(-1))
    lengths = [len(x) for x in flat_shares]
    flags = flat_shares[0].new_tensor([float(used) for used in is_used])
    message = torch.cat([*flat_shares, flags])
    del share, shares, addend, flat_shares  # their memory is free while the bucket is on its way

    # `async_op`: the sum is only started, and the backward pass goes on meanwhile.
    pending: Any = redistribute(
        message,
        f"n | sum({','.join(bucket[0].axes)}) -> n",
        context.mesh,
        profile=context.profile,
        comm_dtype=comm_dtype_of(context.comm_dtype, message.dtype).backward,
        async_op=True,
    )

    def finish() -> None:
        """Wait for the sums, and add them to `.grad`; a parameter that no process used stays."""
        *sums, users = pending.wait().split([*lengths, len(lengths)])
        for gradient, total, n_users, used in zip(bucket, sums, users, is_used, strict=True):
            # `n_users > 0` reads a number from the device, for which the host waits: only where
            # needed.
            if used or n_users > 0:
                gradient.add(total)

    return finish


@dataclass(eq=False)
class BackwardPass:
    """What has come in one backward pass.

    Attributes:
        n_missing: How many gradients each bucket still lacks.
        announced: Gradients that autograd is about to add to `.grad`.
        arrived: Gradients that it has added, each counted once.
        finish_sums: The functions that end the sums begun so far, of the first buckets.
    """

    n_missing: list[int]
    announced: set[Gradient] = field(default_factory=set)
    arrived: set[Gradient] = field(default_factory=set)
    finish_sums: list[Callable[[], None]] = field(default_factory=list)


class Gradients:
    """Sums gradients in every backward pass, unless `syncs` is False; then once calls `after_first`.

    There is a `BackwardPass` from the first gradient of a backward pass to its end. In between, full
    buckets are sent, always in the order of `_buckets`: a later one waits for those before it.
    """

    _pass: BackwardPass | None = None

    def __init__(
        self,
        context: ParallelContext,
        sharded: Sequence[ShardedParameter],
        bucket_bytes: int | None,
    ) -> None:
        # bucket_bytes: the most bytes of gradients in one message; None for no limit.
        self.context = context
        self.bucket_bytes = bucket_bytes
        self.syncs = True
        # Parameters whose axes have length 1 have nothing to sum over processes.
        self.sharded = [each for each in sharded if context.axes.size(*each.axes_summed_later) > 1]
        self.after_first: Callable[[], None] | None = None
        self._handles: list[Any] = []
        self._follow([parameter.tensor for parameter in self.sharded])

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        new = Gradients(self.context, (), self.bucket_bytes)
        memo[id(self)] = new
        new.sharded = copy.deepcopy(self.sharded, memo)
        # Modules of the copy may not have their parameters yet: these are the same objects as they get.
        new._follow([copy.deepcopy(parameter.tensor, memo) for parameter in self.sharded])
        return new

    @property
    def unsummed(self) -> bool:
        """Whether `.grad` of some parameter is this process's share."""
        return any(gradient.has_share() for gradient in self._gradients)

    def prepare(self) -> None:
        """Undo a backward pass that failed, and follow parameters that are new, before a forward pass."""
        if is_in_backward_pass():
            return  # a checkpoint computes the model again
        self._undo()
        parameters = [parameter.tensor for parameter in self.sharded]
        trained = [id(x) for x in parameters if x.requires_grad]
        if trained != [id(gradient.parameter) for gradient in self._gradients]:
            self._follow(parameters)

    def _undo(self) -> None:
        """Forget a backward pass that has not come to its end."""
        if self._pass is not None:
            for gradient in self._gradients:
                gradient.undo()
        self._pass = None

    def _follow(self, parameters: Sequence[Tensor]) -> None:
        """Register autograd hooks on these parameters, and assign their gradients to buckets.

        Replaces all hooks and buckets of before, and forgets a backward pass that was under way.
        Frozen parameters get no hooks.

        Args:
            parameters: The tensors that are the parameters now, one for each of `sharded`, in
                order.
        """
        for handle in self._handles:  # hooks of earlier tensors, which may be parameters no longer
            handle.remove()
        self._handles = []
        self._gradients = []
        for x, parameter in zip(parameters, self.sharded, strict=True):
            if x.requires_grad:
                # Always in the order of the mesh: buckets are for equal tuples of axes.
                axes = [
                    axis for axis in self.context.axes.axes if axis in parameter.axes_summed_later
                ]
                self._gradients.append(Gradient(x, tuple(axes)))
        for gradient in self._gradients:
            x = gradient.parameter
            before = x.register_hook(partial(self._before_share, gradient))
            after = x.register_post_accumulate_grad_hook(partial(self._after_share, gradient))
            self._handles += [before, after]
        self._buckets = self._make_buckets()
        self._bucket_of: dict[Gradient, int] = {}
        for i, bucket in enumerate(self._buckets):
            self._bucket_of.update(dict.fromkeys(bucket, i))
        self._pass = None

    def _make_buckets(self) -> list[list[Gradient]]:
        """Group gradients into buckets, one message each, in the order of a backward pass.

        Gradients of a bucket have the same axes, dtype and device, and at most `bucket_bytes`
        together. With parameters a, b, c, d and room for two: [[d, c], [b, a]].
        """
        # A backward pass comes to the parameters of the last modules first.
        last_first = self._gradients[::-1]
        keys = [(one.axes, one.parameter.dtype, one.parameter.device) for one in last_first]
        sizes = [one.parameter.nbytes for one in last_first]
        groups = trees.group_by_bytes(sizes, self.bucket_bytes, keys)
        # A bucket is sent when its last gradient is there: buckets are in the order of these.
        groups.sort(key=itemgetter(-1))
        buckets = []
        for group in groups:
            buckets.append([last_first[i] for i in group])
        return buckets

    def _new_pass(self) -> BackwardPass:
        return BackwardPass([len(bucket) for bucket in self._buckets])

    def _before_share(self, gradient: Gradient, _: Tensor) -> None:
        """Note that a share comes, before autograd adds it to `.grad`; a hook of the parameter.

        A share is this process's addend of the gradient. The sum of earlier passes is put aside
        meanwhile, so that only the share is sent.
        """
        if self._pass is None:  # the first gradient of this backward pass
            self._pass = self._new_pass()
            call_after_backward(self._end)
        self._pass.announced.add(gradient)
        gradient.put_aside_sum()

    def _after_share(self, gradient: Gradient, x: Tensor) -> None:
        """Note that a parameter has its `.grad`; send its bucket if that was the last one missing.

        autograd calls this hook after each time that it has added to `.grad`. The share is what
        this process's backward pass gives; the sum over processes comes later.

        Args:
            gradient: The gradient of the parameter.
            x: The parameter.
        """
        running = self._pass
        assert x.grad is not None
        assert running is not None
        if x.grad.requires_grad or x.grad.layout is not torch.strided:
            hint = "embedding(sparse=False), backward(create_graph=False)"
            raise XshardError(
                "a gradient of a parallel model is sparse, or has a gradient itself", hint=hint
            )
        # Autograd may have made a new tensor of two shares: `.grad` as it is now is the whole share.
        gradient.share = x.grad
        running.announced.discard(gradient)
        # Inside `no_sync` nothing is sent. A gradient that comes a second time, as in a checkpoint,
        # must not be counted twice; if its bucket has been sent already, `_sum_rest` sums the rest.
        if not self.syncs or gradient in running.arrived:
            return
        running.arrived.add(gradient)
        running.n_missing[self._bucket_of[gradient]] -= 1
        self._send_full_buckets(running)

    def _send_full_buckets(self, running: BackwardPass) -> None:
        """Begin the sums of the next buckets in order, up to the first one that is not full."""
        # In order, as other processes may fill buckets in another one: all have to send alike.
        for i in range(len(running.finish_sums), len(self._buckets)):
            if running.n_missing[i]:
                return
            running.finish_sums.append(_begin_sums(self._buckets[i], self.context))

    @torch.no_grad()
    def _end(self) -> None:
        """End the backward pass: send the buckets that are left, wait, and put the sums into `.grad`.

        Autograd calls this when it has computed all gradients. Inside `no_sync` nothing is sent.
        After the first pass that sums, `after_first` checks that replicas are equal. Raises
        XshardError if a gradient was computed and never came to `.grad`, as in
        `torch.autograd.grad`.
        """
        running = self._pass
        if running is None:
            return
        # Hooks of a parameter see its gradient also in `torch.autograd.grad`, which returns it in
        # place of adding it to `.grad`.
        if running.announced:
            self._undo()
            what = "torch.autograd.grad would give each process its share of a parameter's gradient"
            raise XshardError(what, hint="call backward(), after which .grad is the whole one")
        if self.syncs:
            self._sum_rest(running)
        self._pass = None
        if self.syncs and self.after_first is not None:
            check = self.after_first
            self.after_first = None  # before the call: the check is made once, even if it raises
            check()

    def _sum_rest(self, running: BackwardPass) -> None:
        """Send the buckets that are left, and wait; repeat while `.grad` has unsummed shares.

        A parameter may get a second share after its bucket was sent, as in a checkpoint. Another
        round of all buckets then sums these, and `_pass` is a new one for it.
        """
        while True:
            for bucket in self._buckets[len(running.finish_sums) :]:
                running.finish_sums.append(_begin_sums(bucket, self.context))
            for finish in running.finish_sums:
                finish()
            running = self._new_pass()
            self._pass = running
            if not self.unsummed:
                return
