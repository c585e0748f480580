"""xshard: write a sharding down, plan the cheapest way to another, derive the gradient."""

from xshard import reference
from xshard.cost import Link, Profile, ProfileError, load_profile
from xshard.errors import (
    DtypeError,
    LinearityError,
    MeshError,
    NotationError,
    PlanError,
    ShapeError,
    XshardError,
)
from xshard.layout import Layout, parse_expression
from xshard.mesh import Mesh
from xshard.plan import Plan, Stage
from xshard.planner import plan
from xshard.replicas import ReplicaError
from xshard.sharding import Sharding
from xshard.transfer import Transfer
from xshard.transfer_plan import TransferPlan

__all__ = [
    "DtypeError",
    "Layout",
    "LinearityError",
    "Link",
    "Mesh",
    "MeshError",
    "NotationError",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "ReplicaError",
    "ShapeError",
    "Sharding",
    "Stage",
    "Transfer",
    "TransferPlan",
    "XshardError",
    "load_profile",
    "parse_expression",
    "plan",
    "reference",
]
