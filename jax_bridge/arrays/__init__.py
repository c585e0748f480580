"""Functions on global `jax.Array`s: reshard, place, einsum, and shard_map with layouts."""
