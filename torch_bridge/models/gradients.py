"""Gradients of a parallel model, summed in buckets during the backward pass; a pass that fails changes none.

They are summed over `ShardedParameter.axes_summed_later`.
All processes send the same buckets in the same order. A parameter that a process did not use counts as zeros,
and a parameter that no process used keeps the gradient that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.precision import parameter_dtypes
from torch_bridge.redistribution import redistribute
from torch_bridge.versions.autograd import (
    call_after_backward,
    is_in_backward_pass,
    writes_to,
)
from xshard import XshardError, trees


@dataclass(eq=False)
class Gradient:
    """The gradient of one parameter, and what the parameter's `.grad` on this process is now.

    A share is what backward passes add on this process; the sum of the shares of all processes along
    `axes` is the gradient of these passes.

        between passes   is_share   .grad
        SUMMED           False      the sum of all passes, or None
        SHARE            True       the share of the passes inside `no_sync`

    Between passes `.grad` is yours: what you put there is a sum or a share, as before, and None drops all
    passes. In a backward pass the gradient is open: `.grad` is what this pass adds, and what it was comes
    back if the pass fails.

    Attributes:
        name: The name of the parameter.
        parameter: The parameter.
        axes: The axes over which its shares are summed; without any, what a pass adds is the sum.
        mesh: The mesh that has these axes.
        is_share: Whether `.grad` was a share at the end of the last pass.
        reduce_dtype: The dtype in which shares are summed.
        earlier_sum: Beside a share: the sum of the passes before those inside `no_sync`.
    """

    name: str
    parameter: Tensor
    axes: tuple[str, ...]
    mesh: MeshLike
    reduce_dtype: torch.dtype
    is_share: bool = False
    earlier_sum: Tensor | None = None
    _share: Tensor | None = None  # what `.grad` was when it became a share beside an earlier sum,
    _writes: int = 0  # and the writes to it then
    # In a pass:
    _is_open: bool = False
    _grad_before: Tensor | None = None  # what `.grad` was
    _unsent: Tensor | None = None  # the share of earlier passes, until a message takes it
    _sum: Tensor | None = None  # the sum of all passes that have been summed

    def has_share(self) -> bool:
        """Return whether `.grad` is a share: SHARE, unless you have dropped it."""
        if self.is_share and not self._is_open and self.parameter.grad is None:
            self.is_share = False
            self.earlier_sum = None
        return self.is_share

    def open(self) -> None:
        """Make room in `.grad` for what a pass adds. Nothing changes if the gradient is open."""
        if self._is_open:
            return
        self._sum = self._grad_before = self.parameter.grad
        if self.has_share():
            self._check_unchanged()
            self._unsent = self._grad_before
            self._sum = self.earlier_sum
        self.parameter.grad = None
        self._is_open = True

    def _check_unchanged(self) -> None:
        """Raise XshardError if you have changed a share that is not all of the gradient so far."""
        share = self.parameter.grad
        if self.earlier_sum is None or share is None:
            return
        if share is not self._share or writes_to(share) != self._writes:
            if not torch.any(share):  # `zero_grad()` drops all passes
                self.earlier_sum = None
                return
            reason = f"the gradient of {self.name} was changed between passes inside no_sync, "
            reason += "but is the sum of earlier passes and a share"
            hint = (
                "change gradients after a pass outside of no_sync, or before the first one inside"
            )
            raise XshardError(reason, hint=hint)

    def take_share(self) -> Tensor | None:
        """Return what no message has taken yet, of this pass and earlier ones; None without a share."""
        self.open()
        share = self.parameter.grad
        self.parameter.grad = None
        if self._unsent is not None:
            share = self._unsent if share is None else self._unsent + share
            self._unsent = None
        return share

    def add_sum(self, new_sum: Tensor) -> None:
        """Add the sum of all processes' shares, as a message brings it, to that of earlier passes."""
        new_sum = new_sum.view(self.parameter.shape)
        self._sum = new_sum if self._sum is None else self._sum + new_sum

    def close_summed(self) -> None:
        """End a pass whose shares have been summed: open -> SUMMED."""
        self.parameter.grad = self._sum
        self.is_share = False
        self.earlier_sum = None
        self._forget_pass()

    def close_unsummed(self) -> None:
        """End a pass in which nothing was summed over processes: open -> SHARE.

        Without axes there is nothing to sum: open -> SUMMED.
        """
        if not self._is_open:
            return
        share = self.parameter.grad
        if share is None:
            self.undo()
            return
        # What earlier passes have added up in `.grad`: shares, or without axes the sum.
        added_up = self._unsent if self.axes else self._sum
        if added_up is not None and share.requires_grad:  # of backward(create_graph=True)
            with torch.enable_grad():
                share = added_up + share
        elif added_up is not None:
            # In place, as autograd adds: `.grad` stays the same tensor.
            share = added_up.add_(share)
        self.parameter.grad = share
        if self.axes:
            self.is_share = True
            self.earlier_sum = self._sum
            self._share = share
            self._writes = writes_to(share)
        self._forget_pass()

    def undo(self) -> None:
        """End a pass that has failed: `.grad` is what it was before the pass."""
        if self._is_open:
            self.parameter.grad = self._grad_before
            self._forget_pass()

    def _forget_pass(self) -> None:
        self._is_open = False
        self._grad_before = self._unsent = self._sum = None


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
    stored_on = message.device
    # `async_op`: the sum is only started, and the backward pass goes on meanwhile.
    pending: Any = redistribute(
        context.in_use(message),
        f"n | sum({','.join(bucket[0].axes)}) -> n",
        bucket[0].mesh,
        profile=context.profile,
        comm_dtype=bucket[0].reduce_dtype,
        async_op=True,
    )

    def finish() -> None:
        """Wait for the sums, and put them into `.grad`."""
        lengths = [gradient.parameter.numel() for gradient in bucket]
        # The sums of the flags: how many processes have used each parameter.
        *sums, n_users = pending.wait().to(stored_on).split([*lengths, len(bucket)])
        for i, gradient in enumerate(bucket):
            # A parameter that no process has used keeps its gradient. `n_users[i] > 0` makes the
            # host wait for the device, so that it comes second.
            if has_share[i] or n_users[i] > 0:
                gradient.add_sum(sums[i])

    return finish


# What `Gradients` reads of a parameter to see that it is another one than before.
_facts_of = attrgetter("requires_grad", "dtype", "device")


@dataclass(eq=False)
class BackwardPass:
    """What one backward pass has done so far.

    Attributes:
        missing: Gradients whose share has not come; inside `no_sync` none is taken out.
        computed: Gradients whose share autograd has computed, and not yet added to `.grad`.
        finish_sums: The functions that end the sums begun so far, one for each bucket, in order.
        undo: Functions that undo what the pass has changed elsewhere, if it fails; the last one first.
    """

    missing: set[Gradient]
    computed: set[Gradient] = field(default_factory=set)
    finish_sums: list[Callable[[], None]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)


class Gradients:
    """Sums gradients over processes in every backward pass, while `syncs` is True.

    There is a `BackwardPass` from the first gradient of a backward pass to its end, and None otherwise.
    In between, full buckets are sent, always in the order of `_buckets`: a later one waits for those before
    it. A pass that fails, by any exception, changes nothing. `before_pass` is called first in each pass, and
    `after_first` once, after the first pass that sums.
    """

    # A new copy follows no parameters yet: `prepare` does, before the first forward pass.
    _pass: BackwardPass | None = None
    _followed: Sequence[Hashable] = ()
    _gradients: Sequence[Gradient] = ()
    _buckets: Sequence[list[Gradient]] = ()
    _handles: Sequence[Any] = ()

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
        self.sharded = sharded
        self.before_pass: Callable[[], None] | None = None
        self.after_first: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: no hooks, which stay with the tensors of the original."""
        copied = ("context", "bucket_bytes", "syncs", "sharded", "before_pass", "after_first")
        return {name: getattr(self, name) for name in copied}

    @property
    def has_unsummed(self) -> bool:
        """Whether `.grad` of some parameter is this process's share."""
        return any(gradient.has_share() for gradient in self._gradients)

    @property
    def is_following(self) -> bool:
        """Whether `prepare` has been called: gradients of a new copy are not summed before."""
        return bool(self._followed)

    def prepare(self) -> None:
        """Get ready for a forward pass: follow parameters that are new, converted or frozen."""
        if is_in_backward_pass():
            return  # a checkpoint computes the model again
        parameters = [parameter.tensor for parameter in self.sharded]
        followed = [(id(x), *_facts_of(x)) for x in parameters]
        if followed != self._followed:
            self._follow(parameters)
            self._followed = followed

    def begin_pass(self) -> BackwardPass:
        """Return the running backward pass; the first call in it makes autograd call `_end`."""
        if self._pass is None:
            if self.before_pass is not None:
                self.before_pass()
            self._pass = BackwardPass(missing=set(self._gradients))
            call_after_backward(self._end, if_failed=partial(self._undo, self._pass))
        return self._pass

    def note_pass(self, _: Tensor) -> None:
        """Begin the running backward pass; a hook of tensors that the model returns."""
        self.begin_pass()

    def _undo(self, backward_pass: BackwardPass) -> None:
        """Make all gradients what they were before a backward pass that has not come to its end."""
        if self._pass is not backward_pass:
            return  # it has
        for gradient in self._gradients:
            gradient.undo()
        for undo in reversed(backward_pass.undo):
            undo()
        self._pass = None

    def _follow(self, parameters: Sequence[Tensor]) -> None:
        """Register autograd hooks on these parameters, which sum their gradients over processes.

        Each one that is trained gets a `Gradient` and two hooks; hooks on earlier tensors go. Makes
        the buckets, too.

        Args:
            parameters: The tensors that are the parameters now, one for each of `sharded`, in
                order.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        gradient_by_id = {id(gradient.parameter): gradient for gradient in self._gradients}
        gradients = []
        for x, parameter in zip(parameters, self.sharded, strict=True):
            axes = parameter.axes_in_buckets
            if parameter.sharding.mesh.size(*axes) == 1:
                axes = ()
            if not axes and not x.is_leaf:
                continue  # of `torch.func.functional_call`; the gradient goes on to what it is made of
            gradient = gradient_by_id.get(id(x))
            if x.requires_grad:
                if gradient is None:
                    travels = parameter_dtypes(
                        parameter.precision, self.context.comm_dtype, x.dtype
                    )
                    mesh = self.context.mesh_of(parameter.sharding)
                    gradient = Gradient(
                        name=parameter.name,
                        parameter=x,
                        axes=axes,
                        mesh=mesh,
                        reduce_dtype=travels.backward,
                    )
                self._register_hooks(gradient)
            elif gradient is None or not gradient.has_share():
                continue  # frozen; a share that it has is still summed
            gradients.append(gradient)
        self._gradients = gradients
        self._buckets = self._make_buckets()

    def _register_hooks(self, gradient: Gradient) -> None:
        """Register the hooks of one gradient. Raises XshardError if its parameter was computed."""
        x = gradient.parameter
        if gradient.axes and not x.is_leaf:
            reason = f"{gradient.name} was computed, as for torch.func.functional_call: "
            reason += "its gradient would be each process's share"
            raise XshardError(reason, hint="pass a leaf, as x.detach().requires_grad_()")
        handles = [x.register_hook(partial(self._before_share, gradient))]
        if gradient.axes:
            after_share = partial(self._after_share, gradient)
            handles.append(x.register_post_accumulate_grad_hook(after_share))
        self._handles = (*self._handles, *handles)

    def _make_buckets(self) -> list[list[Gradient]]:
        """Group gradients into buckets, one message each, in the order of a backward pass.

        Gradients of a bucket have the same mesh, axes, dtypes and device, and at most `bucket_bytes`
        together. With parameters a, b, c, d and room for two: [[d, c], [b, a]].
        """
        # A backward pass comes to the parameters of the last modules first.
        last_first = [gradient for gradient in self._gradients[::-1] if gradient.axes]
        sizes = [gradient.parameter.nbytes for gradient in last_first]
        keys = []
        for gradient in last_first:
            x = gradient.parameter
            keys.append((gradient.mesh, gradient.axes, x.dtype, gradient.reduce_dtype, x.device))
        groups = trees.group_by_bytes(sizes, self.bucket_bytes, keys)  # indices in `last_first`
        # A bucket is sent when its last gradient is there: buckets are in the order of these.
        groups.sort(key=itemgetter(-1))
        buckets = []
        for group in groups:
            buckets.append([last_first[i] for i in group])
        return buckets

    def _before_share(self, gradient: Gradient, _: Tensor) -> None:
        """Make room in `.grad` for what a backward pass adds; a hook, before autograd adds it."""
        backward_pass = self.begin_pass()
        if gradient.axes:
            backward_pass.computed.add(gradient)
        gradient.open()

    def _after_share(self, gradient: Gradient, x: Tensor) -> None:
        """Note that this process's share of a gradient is in `.grad`, and send the full buckets.

        A share is what this process adds to the sum over processes. A hook of parameter `x`, after
        autograd has added to `.grad`. It may run twice for a parameter, as with activation
        checkpoints: if the bucket has been sent in between, `_sum_remaining` sums the second share at
        the end of the backward pass.
        """
        backward_pass = self._pass
        assert backward_pass is not None
        if x.grad is None:  # frozen after the forward pass: autograd has added nothing
            backward_pass.computed.discard(gradient)
            return
        if x.grad.requires_grad or x.grad.layout is not torch.strided:
            hint = "embedding(sparse=False), backward(create_graph=False)"
            raise XshardError(
                "a gradient of a parallel model is sparse, or has a gradient itself", hint=hint
            )
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
            self._undo(backward_pass)
            reason = (
                "torch.autograd.grad would give each process its share of a parameter's gradient"
            )
            raise XshardError(reason, hint="call backward(), after which .grad is the whole one")
        if self.syncs:
            self._sum_remaining(backward_pass.finish_sums)
        for gradient in self._gradients:
            if self.syncs and gradient.axes:
                gradient.close_summed()
            else:
                gradient.close_unsummed()
        self._pass = None
        if self.syncs and self.after_first is not None:
            check = self.after_first
            self.after_first = None  # before the call: the check is made once, even if it raises
            check()

    def _sum_remaining(self, finish_sums: list[Callable[[], None]]) -> None:
        """Send the buckets that have not been sent, and wait for the sums of all.

        Afterwards every gradient knows its sum over processes. A bucket is sent even if this process
        has no gradient in it, since others may have: all processes send the same messages.

        Args:
            finish_sums: For each bucket sent so far, in order, the function that waits for its
                sums.
        """
        buckets_to_send = self._buckets[len(finish_sums) :]
        while True:
            for bucket in buckets_to_send:
                finish_sums.append(_begin_sums(bucket, self.context))
            for finish in finish_sums:
                finish()
            if not self._has_late_share():
                return
            # Late shares may be in other buckets on other processes: each sends all buckets again.
            # Whether any share was late each process finds alone: it follows from the model's code,
            # which is the same on all.
            buckets_to_send = self._buckets
            finish_sums = []

    def _has_late_share(self) -> bool:
        """Return whether a share came to `.grad` after its bucket was sent, as in `_after_share`.

        The message of a bucket takes all shares out of `.grad`: what is there now came later.
        """
        summed = [gradient for bucket in self._buckets for gradient in bucket]
        return any(gradient.parameter.grad is not None for gradient in summed)
