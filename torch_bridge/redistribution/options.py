"""The options of `redistribute` as one frozen value, built once and handed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from torch_bridge.autodiff.blocks import is_dtensor
from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.process_mesh import DeviceLike, MeshLike
from xshard.cost.model import Addends, ProfileLike
from xshard.errors import MeshError
from xshard.notation.maps import Maps
from xshard.plans.plan import Plan
from xshard.signatures import Bytes, did_you_mean


class TwoMeshKeywords(TypedDict, total=False):
    """The keywords of `redistribute` for a move between two meshes, by which mypy checks calls."""

    src_mesh: MeshLike | None
    dst_mesh: MeshLike | None
    dtype: torch.dtype | None
    device: DeviceLike | None
    requires_grad: bool
    relabel: bool


class MoveKeywords(TwoMeshKeywords, total=False):
    """All keywords of `redistribute` on which the type of its result does not depend."""

    shape: Any
    profile: ProfileLike
    comm_dtype: CommDtypeLike
    addends: Addends
    bucket_bytes: Bytes
    debug: bool
    check_replicated: bool | None
    maps: Maps | None


class TwoMeshOptions(NamedTuple):
    """The options that only a move between two meshes has: `TwoMeshKeywords` with its defaults."""

    src_mesh: MeshLike | None = None
    dst_mesh: MeshLike | None = None
    dtype: torch.dtype | None = None
    device: DeviceLike | None = None
    requires_grad: bool = False
    relabel: bool = False

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> TwoMeshOptions:
        """Collect the keywords that `redistribute` has no parameter for.

        Raises TypeError for one that does not exist, as Python would, and names the nearest.
        """
        for word in keywords:
            if word not in cls._fields:
                known = ("mesh", "async_op", *MoveKeywords.__annotations__)
                hint = f"{did_you_mean(word, known)}its options are {', '.join(known)}"
                raise TypeError(f"redistribute has no option {word!r}: {hint}")
        return cls(**keywords)

    @property
    def is_given(self) -> bool:
        """Whether you passed any of them."""
        return self != TwoMeshOptions()


class Options(NamedTuple):
    """All options of `redistribute`; `layouts` and `shape` are those of one tensor, or of a tree."""

    layouts: Any
    mesh: MeshLike | None
    shape: Any
    profile: ProfileLike
    comm_dtype: CommDtypeLike
    bucket_bytes: Bytes
    async_op: bool
    debug: bool
    check_replicated: bool | None
    transfer: TwoMeshOptions

    def is_transfer(self, x: Any) -> bool:
        """Return whether moving `x` leads from one mesh to another."""
        if self.transfer.is_given or x is None:
            return True
        if type(self.layouts) is not Plan:  # layouts need two meshes to lead from one to another
            return False
        # Without a mesh, the device numbers of a plan have to be ranks: two sets of ranks.
        is_plain_block = isinstance(x, Tensor) and not is_dtensor(x)
        return bool(self.layouts.transfer) or (self.mesh is None and is_plain_block)

    def check_transfer(self) -> None:
        """Raise MeshError for options that a move between two meshes does not have."""
        if self.mesh is None and self.comm_dtype is None:
            return
        reason = (
            "mesh= and comm_dtype= are for one mesh; "
            "dtype=, device=, requires_grad= and relabel= are for two"
        )
        hint = "redistribute(x, layouts, src_mesh=..., dst_mesh=..., shape=..., dtype=...)"
        raise MeshError(reason, hint=hint)
