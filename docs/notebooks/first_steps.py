# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # First steps, as a notebook
#
# A layout is text that says which device holds what. Here it is drawn, moved and differentiated, with numpy
# alone.

# %%
import numpy as np

import xshard as xs

mesh = xs.Mesh(dp=2, cp=2)
xs.show("b/dp s/cp c", mesh, (4, 8, 3))

# %% [markdown]
# The batch `b` is cut over `dp`, the sequence `s` over `cp`. A layout that does not name an axis holds
# replicas along it.

# %%
layout = xs.Layout.parse("b s/zigzag(cp) c")
layout

# %% [markdown]
# An arrow is a move. The plan is found without data. Each picture is a layout on the way, and the lines
# between two of them are messages.

# %%
plan = xs.plan("b/dp s/zigzag(cp) c -> b/dp s c/cp", mesh, shape=(4, 8, 4))
plan

# %% [markdown]
# `xs.reference` runs any plan on virtual devices. `scatter` cuts an array into blocks, `gather` puts them
# together.

# %%
whole = np.arange(4 * 8 * 4).reshape(4, 8, 4)
blocks = xs.reference.scatter(whole, plan.src, mesh)
moved = xs.reference.run(plan, blocks)
assert (xs.reference.gather(moved, plan.dst, mesh, whole.shape) == whole).all()
[block.shape for block in blocks], [block.shape for block in moved]

# %% [markdown]
# ## The gradient is a plan too
#
# Every layout has a dual, the layout of its cotangent. Copies that are used apart have gradients that add
# up, so the dual of `copy` is `sum`.

# %%
gather = xs.plan("n/dp d -> n d | copy(dp)", xs.Mesh(dp=4), shape=(8, 2))
gather.backward

# %% [markdown]
# That it is right is a dot product in whole numbers: `<A x, y> = <x, A* y>`.

# %%
rng = np.random.default_rng(0)
x = [rng.integers(-9, 9, gather.source.local_shape(device)) for device in range(4)]
y = [rng.integers(-9, 9, gather.target.local_shape(device)) for device in range(4)]
forward = sum((a * b).sum() for a, b in zip(xs.reference.run(gather, x), y, strict=True))
backward = sum((a * b).sum() for a, b in zip(x, xs.reference.run(gather.backward, y), strict=True))
assert forward == backward
forward, backward

# %% [markdown]
# ## A mistake
#
# Errors mark the place in the text, before anything is sent.

# %%
try:
    xs.plan("b s/cq c -> b s c", mesh, shape=(4, 8, 4))
except xs.errors.NotationError as error:
    print(error)

# %% [markdown]
# Next: [halos](halos.py), then [a model](model.py). Or ten lines for [the usual jobs](../recipes/index.md).
