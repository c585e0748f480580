"""An expression and blocks -> the plan of a contraction, and the executable of this process.

Decides what is checked about the blocks, and how long dims are where nobody says. Sends nothing, though it
makes groups. It checks first what all processes have in common (expression, mesh, dtypes, given shapes), so
that all of them raise or none; then the blocks, whose shapes only their own process knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of
from torch_bridge.contractions.executable import ContractionExecutable, Lowering
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, check_device, process_mesh
from torch_bridge.planning import require_mesh
from xshard import DtypeError, Layout, MeshError, NotationError, Profile, ShapeError, dtypes, load_profile, plan
from xshard.contractions.expression import Contraction, contraction, shapes_of
from xshard.contractions.plan import ContractionPlan
from xshard.layout import Sharding
from xshard.layout.layout import check_axes
from xshard.notation.parser import Dim, text_spans
from xshard.plans.expression import check_block, whole_shape

Shapes = tuple[tuple[int, ...], ...]


class Asked(NamedTuple):
    """What a call asks for, but its blocks: the key of the plans. shapes: global, where they are given."""

    expression: str | ContractionPlan
    mesh: MeshLike | None
    shapes: Shapes | None
    profile: str | Path | Profile
    memory_limit: int | str | None
    comm_dtype: CommDtypeLike

    @property
    def contraction(self) -> Contraction:
        given = self.expression
        return given.contraction if isinstance(given, ContractionPlan) else contraction(given)


Block = tuple[tuple[int, ...], torch.dtype, torch.device]


def executable_for(asked: Asked, blocks: tuple[Block, ...]) -> ContractionExecutable:
    ...


@lru_cache(maxsize=4096)
def executable_of(
    asked: Asked, blocks: tuple[Block, ...], world: dist.ProcessGroup | None
) -> ContractionExecutable:
    """The executable for blocks of such shapes, dtypes and devices. Raises as `einsum` does.

    world: a part of the cache's key, since an `xshard.Mesh` has other processes in another world.
    """
    plan, processes = plan_of(asked, blocks)
