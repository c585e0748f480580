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
    """The gradient of one parameter, and what the parameter's `.grad` on this process is now.

    A share is what one backward pass on this process adds; the sum of the shares of all processes along
    `axes` is the gradient of that pass. In a backward pass, a gradient goes through these states:

        state       .grad               share     earlier
        SUMMED      sum of all passes   None      None       begin and end; the sum may be None
        PUT ASIDE   None                None      the sum    autograd is about to add a share
        SHARE       the share           .grad     the sum    complete, or waits for more of the pass
        SENT        None                None      the sum    the share is in a message

    `no_sync` leaves the state at SHARE, to which the next pass adds.
    """

    parameter: Tensor
    axes: tuple[str, ...]
    share: Tensor | None = None
    earlier: Tensor | None = None

    def has_share(self) -> bool:
        """Return whether the state is SHARE; after `zero_grad()` or the like it is SUMMED again."""
        if self.share is not None and self.parameter.grad is not self.share:
            self.forget()
        return self.share is not None

    def forget(self) -> None:
        """Take `.grad` as it is for the sum of all passes: any state -> SUMMED."""
        self.share = None
        self.earlier = None

    def take_share(self) -> Tensor | None:
        """Return the share for a message: SHARE -> SENT; None, and nothing changes, without a share."""
        if not self.has_share():
            return None
        share = self.share
        self.share = None
        self.parameter.grad = None
        return share

    def put_aside_sum(self) -> None:
        """Make room in `.grad` for a share: SUMMED -> PUT ASIDE; a share stays, and more is added to it."""
        if not self.has_share() and self.parameter.grad is not None:
            self.earlier = self.parameter.grad
            self.parameter.grad = None

    def add_sum(self, total: Tensor) -> None:
        """Add the sum of all processes' shares to that of earlier passes: SENT -> SUMMED."""
        # A parameter that only other processes have used is still SUMMED: its sum is in `.grad`.
        earlier = self.parameter.grad if self.earlier is None else self.earlier
        total = total.view(self.parameter.shape)
        self.parameter.grad = total if earlier is None else earlier + total
        self.earlier = None

    def undo(self) -> None:
        """Bring the sum of earlier passes back, without the share: any state -> SUMMED."""
        if self.has_share() or self.earlier is not None:
            self.parameter.grad = self.earlier
        self.forget()


def _take_message(bucket: Sequence[Gradient]) -> tuple[Tensor, list[bool]]:
    """Take this process's gradients of a bucket out of `.grad`, and join them to one flat message.

    After the gradients comes a flag for each: 1.0, or 0.0 for a parameter that this process has not
    used. A gradient [[1, 2], [3, 4]], and none for a parameter of shape [3], give the message
    1 2 3 4, 0 0 0, 1 0. Returns the message, and the flags as bools.
    """
    shares = [gradient.take_share() for gradient in bucket]
    has_share = [share is not None for share in shares]
    addends = []
    for gradient, share in zip(bucket, shares, strict=True):
        # Zeros for a missing share: all processes send messages of one size.
        addend = torch.zeros_like(gradient.parameter) if share is None else share
        addends.append(addend.reshape(-1))
    flags = addends[0].new_tensor([float(flag) for flag in has_share])
    return torch.cat([*addends, flags]), has_share


@torch.no_grad()
def _begin_sums(bucket: Sequence[Gradient], context: ParallelContext) -> Callable[[], None]:
    """Start the all-reduce of a bucket of gradients; return a function that waits for its end.

    `.grad` of these parameters is taken away now. The returned function puts the sum over processes
    there, added to the sum of earlier backward passes.
    """
    message, has_share = _take_message(bucket)
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
        """Wait for the sums, and put them into `.grad`."""
        lengths = [gradient.parameter.numel() for gradient in bucket]
        # The sums of the flags: how many processes have used each parameter.
        *sums, users = pending.wait().split([*lengths, len(bucket)])
        for gradient, total, n_users, is_used in zip(bucket, sums, users, has_share, strict=True):
            # A parameter that no process has used keeps its gradient. `n_users > 0` makes the host
            # wait for the device, so that it comes second.
            if is_used or n_users > 0:
                gradient.add_sum(total)

    return finish


@dataclass(eq=False)
class BackwardPass:
    """What one backward pass has done so far.

    Attributes:
        missing: Gradients whose share has not come; inside `no_sync` none is taken out.
        computed: Gradients whose share autograd has computed, and not yet added to `.grad`.
        finish_sums: The functions that end the sums begun so far, one for each bucket, in order.
    """

    missing: set[Gradient]
    computed: set[Gradient] = field(default_factory=set)
    finish_sums: list[Callable[[], None]] = field(default_factory=list)


class Gradients:
    """Sums gradients over processes in every backward pass, while `syncs` is True.

    There is a `BackwardPass` from the first gradient of a backward pass to its end, and None otherwise.
    In between, full buckets are sent, always in the order of `_buckets`: a later one waits for those before
    it. After the first pass that sums, `after_first` is called once.
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
        self.sharded = [
            parameter
            for parameter in sharded
            if context.axes.size(*parameter.axes_summed_later) > 1
        ]
        self.after_first: Callable[[], None] | None = None
        self._handles: list[Any] = []
        self._register_hooks_on([parameter.tensor for parameter in self.sharded])

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        new = Gradients(self.context, (), self.bucket_bytes)
        memo[id(self)] = new
        new.sharded = copy.deepcopy(self.sharded, memo)
        # Modules of the copy may not have their parameters yet: these are the same objects as they get.
        new._register_hooks_on(
            [copy.deepcopy(parameter.tensor, memo) for parameter in self.sharded]
        )
        return new

    @property
    def unsummed(self) -> bool:
        """Whether `.grad` of some parameter is this process's share."""
        return any(gradient.has_share() for gradient in self._gradients)

    def prepare(self) -> None:
        """Get ready for a forward pass: undo a backward pass that failed, and follow new parameters."""
        if is_in_backward_pass():
            return  # a checkpoint computes the model again
        self._undo()
        parameters = [parameter.tensor for parameter in self.sharded]
        trained = [id(x) for x in parameters if x.requires_grad]
        if trained != [id(gradient.parameter) for gradient in self._gradients]:
            self._register_hooks_on(parameters)

    def _undo(self) -> None:
        """Make all gradients the sums of earlier passes, if a backward pass has not come to its end."""
        if self._pass is not None:
            for gradient in self._gradients:
                gradient.undo()
        self._pass = None

    def _register_hooks_on(self, parameters: Sequence[Tensor]) -> None:
        """Register autograd hooks on these parameters, which sum their gradients over processes.

        Each one that is trained gets a `Gradient` and two hooks; hooks on earlier tensors go. Makes
        the buckets, too. No backward pass is under way afterwards.

        Args:
            parameters: The tensors that are the parameters now, one for each of `sharded`, in
                order.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._gradients = []
        mesh_axes = self.context.axes.axes
        for x, parameter in zip(parameters, self.sharded, strict=True):
            if not x.requires_grad:
                continue
            # In the order of the mesh: a bucket is for equal tuples of axes.
            axes = tuple(axis for axis in mesh_axes if axis in parameter.axes_summed_later)
            gradient = Gradient(x, axes)
            before = x.register_hook(partial(self._before_share, gradient))
            after = x.register_post_accumulate_grad_hook(partial(self._after_share, gradient))
            self._handles += [before, after]
            self._gradients.append(gradient)
        self._buckets = self._make_buckets()
        self._pass = None

    def _make_buckets(self) -> list[list[Gradient]]:
        """Group gradients into buckets, one message each, in the order of a backward pass.

        Gradients of a bucket have the same axes, dtype and device, and at most `bucket_bytes`
        together. With parameters a, b, c, d and room for two: [[d, c], [b, a]].
        """
        # A backward pass comes to the parameters of the last modules first.
        last_first = self._gradients[::-1]
        sizes = [gradient.parameter.nbytes for gradient in last_first]
        kinds = [(g.axes, g.parameter.dtype, g.parameter.device) for g in last_first]
        groups = trees.group_by_bytes(sizes, self.bucket_bytes, kinds)  # numbers in `last_first`
        # A bucket is sent when its last gradient is there: buckets are in the order of these.
        groups.sort(key=itemgetter(-1))
        buckets = []
        for group in groups:
            buckets.append([last_first[i] for i in group])
        return buckets

    def _before_share(self, gradient: Gradient, _: Tensor) -> None:
        """Make room in `.grad` for what a backward pass adds; a hook, before autograd adds it.

        The first call in a backward pass begins the `BackwardPass`, and asks autograd to call `_end`.
        """
        if self._pass is None:
            self._pass = BackwardPass(missing=set(self._gradients))
            call_after_backward(self._end)
        self._pass.computed.add(gradient)
        gradient.put_aside_sum()

    def _after_share(self, gradient: Gradient, x: Tensor) -> None:
        """Note that this process's share of a gradient is in `.grad`, and send the full buckets.

        A share is what this process adds to the sum over processes. A hook of parameter `x`, after
        autograd has added to `.grad`. It may run twice for a parameter, as with activation
        checkpoints: if the bucket has been sent in between, `_sum_remaining` sums the second share at
        the end of the backward pass.
        """
        backward_pass = self._pass
        assert x.grad is not None
        assert backward_pass is not None
        if x.grad.requires_grad or x.grad.layout is not torch.strided:
            hint = "embedding(sparse=False), backward(create_graph=False)"
            raise XshardError(
                "a gradient of a parallel model is sparse, or has a gradient itself", hint=hint
            )
        # If there was a share already, autograd may have put the sum of both into a new tensor.
        gradient.share = x.grad
        backward_pass.computed.discard(gradient)
        if self.syncs:
            backward_pass.missing.discard(gradient)
            self._send_full_buckets(backward_pass)

    def _send_full_buckets(self, backward_pass: BackwardPass) -> None:
        """Send the next buckets in order, up to the first one that still misses a gradient.

        Processes may fill buckets in another order, but all have to send them in the same one.
        """
        for bucket in self._buckets[len(backward_pass.finish_sums) :]:
            # Hot, and quick: the last gradient of a bucket is asked first, and comes last.
            if not backward_pass.missing.isdisjoint(reversed(bucket)):
                return
            backward_pass.finish_sums.append(_begin_sums(bucket, self.context))

    @torch.no_grad()
    def _end(self) -> None:
        """Sum what is left at the end of a backward pass, so that each `.grad` is a whole gradient.

        Autograd calls this when it has computed all gradients. Inside `no_sync` (`syncs` is False)
        nothing is summed over processes: `.grad` stays this process's own. After the first pass that sums,
        `after_first` checks that replicas are equal. Raises XshardError, and undoes the pass, if a
        gradient was computed and never came to `.grad`, as in `torch.autograd.grad`.
        """
        backward_pass = self._pass
        if backward_pass is None:
            return  # undone meanwhile
        # All should be in `.grad` by now.
        if backward_pass.computed:
            self._undo()
            what = "torch.autograd.grad would give each process its share of a parameter's gradient"
            raise XshardError(what, hint="call backward(), after which .grad is the whole one")
        if self.syncs:
            self._sum_remaining(backward_pass.finish_sums)
        self._pass = None
        if self.syncs and self.after_first is not None:
            check = self.after_first
            self.after_first = None  # before the call: the check is made once, even if it raises
            check()

    def _sum_remaining(self, finish_sums: list[Callable[[], None]]) -> None:
        """Send the buckets that have not been sent, and wait for the sums of all.

        Afterwards every `.grad` is a sum over processes.

        finish_sums: for each bucket sent so far, in order, the function that waits for its sums; it
        grows here. A bucket is sent even if this process has no gradient in it: others may have.
        """
        while True:
            # One function per bucket sent: its length says which bucket is next.
            for bucket in self._buckets[len(finish_sums) :]:
                finish_sums.append(_begin_sums(bucket, self.context))
            for finish in finish_sums:
                finish()
            if not self.unsummed:
                return
            # Some gradients came after their bucket was sent: all buckets are sent once more.
            finish_sums = []
