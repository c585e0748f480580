"""Device meshes as JAX and as xshard know them, and the types of values along their axes."""
