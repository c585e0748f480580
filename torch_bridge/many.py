"""`redistribute_many`: several redistributions whose messages travel together.

Decides which expression and shape each tensor has, and which tensors may share collectives. Which of them
do is decided in `lower.buckets`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from torch_bridge.autodiff.function import Redistribute
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.lower.buckets import BucketedExecutable
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.planning import executable_for
from torch_bridge.redistribution import redistribute
from xshard import PlanError, Profile, XshardError
from xshard.plans.expression import Expression

K = TypeVar("K", bound=Hashable)


@overload
def redistribute_many(
    tensors: Mapping[K, Tensor],
    expressions: Expression | Mapping[K, Expression],
    mesh: MeshLike,
    *,
    shapes: Mapping[K, Sequence[int]] | None = None,
    profile: str | Path | Profile = "h100",
    comm_dtype: CommDtypeLike = None,
    bucket_bytes: int | None = None,
) -> dict[K, Tensor]: ...


@overload
def redistribute_many(
    tensors: Sequence[Tensor],
    expressions: Expression | Sequence[Expression],
    mesh: MeshLike,
    *,
    shapes: Sequence[Sequence[int] | None] | None = None,
    profile: str | Path | Profile = "h100",
    comm_dtype: CommDtypeLike = None,
    bucket_bytes: int | None = None,
) -> list[Tensor]: ...


def redistribute_many(
    tensors: Any,
    expressions: Any,
    mesh: MeshLike,
    *,
    shapes: Any = None,
    profile: str | Path | Profile = "h100",
    comm_dtype: CommDtypeLike = None,
    bucket_bytes: int | None = None,
) -> Any:
    """`redistribute` of every tensor of a list, or of a dict such as a state dict, with fewer collectives.

    Tensors of one dtype whose plans have the same collectives over the same processes share each of
    them, forward and backward; every result and gradient equals that of `redistribute` alone.

    expressions: one for all, or one for each, in a list or by key. shapes: the global shapes, likewise, where
    blocks differ in size. bucket_bytes: about how many bytes a device sends together; the default is all
    of them, which needs memory for a second copy. profile, comm_dtype: as in `redistribute`.

    Raises as `redistribute` does, before anything is sent, with a note that names the tensor; PlanError
    where tensors and expressions differ in number or keys.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def gather():
    ...     model = {"w": torch.ones(2, 3), "b": torch.ones(1)}
    ...     moved = xt.redistribute_many(model, {"w": "n d/tp -> n d", "b": "n/tp -> n"}, Mesh(tp=2))
    ...     return {name: tuple(x.shape) for name, x in moved.items()}
    >>> xt.run_ranks(2, gather)[0]
    {'w': (2, 6), 'b': (2,)}
    """
    if torch.compiler.is_dynamo_compiling():
        from torch_bridge import compiled  # slow: it imports torch._dynamo, half a second

        options = {
            "shapes": shapes,
            "profile": profile,
            "comm_dtype": comm_dtype,
            "bucket_bytes": bucket_bytes,
        }
        return compiled.eagerly(redistribute_many, tensors, expressions, mesh, **options)
    keys = list(tensors) if isinstance(tensors, Mapping) else list(range(len(tensors)))
    texts = _by_key("expressions", expressions, tensors, keys)
    lengths = dict.fromkeys(keys) if shapes is None else _by_key("shapes", shapes, tensors, keys)
    executables = {}
    for key in keys:
        try:
            executables[key] = executable_for(
                tensors[key], texts[key], mesh, lengths[key], profile, comm_dtype
            )
        except XshardError as error:
            error.add_note(f"tensor {key!r}")
            raise
    found: dict[Any, Tensor] = {}
    records = torch.is_grad_enabled()
    linear = [key for key in keys if executables[key].is_linear]
    for differentiated in (False, True):
        # Tensors without a gradient are apart: nothing is sent back for them.
        some = [key for key in linear if (records and tensors[key].requires_grad) == differentiated]
        if some:
            joint = BucketedExecutable(tuple(executables[key] for key in some), bucket_bytes)
            found.update(zip(some, Redistribute.apply(joint, *(tensors[key] for key in some)), strict=True))
    for key in keys:
        if key not in found:  # a max or min: its gradient is not a plan
            found[key] = redistribute(
                tensors[key], texts[key], mesh, shape=lengths[key], profile=profile, comm_dtype=comm_dtype
            )
    ordered = {key: found[key] for key in keys}
    return ordered if isinstance(tensors, Mapping) else list(ordered.values())


def _by_key(what: str, given: Any, tensors: Any, keys: list[Any]) -> dict[Any, Any]:
    """One value for all tensors, or one for each, as a dict by the tensors' keys."""
    if isinstance(tensors, Mapping) and isinstance(given, Mapping):
        odd = [key for key in (*keys, *given) if (key in given) != (key in tensors)]
        if odd:
            raise PlanError(f"tensors and {what} differ at {odd[0]!r}", hint="the same keys in both")
        return {key: given[key] for key in keys}
    if isinstance(given, list) or what == "shapes":
        if isinstance(tensors, Mapping) or len(given) != len(keys):
            raise PlanError(
                f"{len(given)} {what} for {len(keys)} tensors", hint="one for each, in a list or by key"
            )
        return dict(enumerate(given))
    return dict.fromkeys(keys, given)
