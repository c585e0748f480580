"""Attention over a sharded sequence, equal to attention on one device, inside `jax.shard_map`.

>>> row = jnp.arange(8.0).reshape(1, 1, 8, 1, 1)  # one block on one device
>>> means = jax.pmap(lambda v: attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", causal=True), "cp")
>>> [round(mean, 4) for mean in means(row).ravel().tolist()]
[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_bridge.calls import as_array
from jax_bridge.lower.row_tables import without_padding
from jax_bridge.mesh.context import AnyMesh, machine_here
from jax_bridge.nn.ring import DeviceAttention
from xshard import Layout
from xshard.contractions.attention import Verb
from xshard.errors import DtypeError
from xshard.nn.attention import BITS, dim_order


def _attention(
    qkv: Sequence[jax.Array], layout: Layout | str, mesh: Any, profile: Any, kernel: Any, *options: Any
) -> Any:
    layout = Layout.parse(layout)
    q, k, v = (as_array(x, str(layout)) for x in qkv)
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    call = DeviceAttention(*options, dtype=q.dtype, implementation=kernel)
    dim_order(layout, call.sequence, call.heads)
    layouts = layout, Layout.parse(call.kv_layout or layout)
    here, machine = machine_here(mesh, layouts, str(layout), profile)
    alibi = None if call.alibi is None else jnp.asarray(call.alibi)
    seed = None if call.seed is None else jnp.asarray(call.seed & BITS, jnp.uint32)
    call = replace(call, alibi=alibi, seed=seed, mesh=here, machine=machine)
    results, (_, sharding) = call.run(q, k, v, layout), call.enter(q, layout, call.shape)
    of_results = (replace(sharding, shape=(*sharding.shape[:-1], x.shape[-1])) for x in results)
    y, *lse = map(without_padding, results, of_results)
    return (y.astype(q.dtype), lse[0].squeeze(-1)) if lse else y.astype(q.dtype)


attention = Verb[jax.Array, AnyMesh](_attention).attention
