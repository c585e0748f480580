# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Halos, as a notebook
#
# A blur over rows that are cut over four devices, first wrong, then right, then with its gradient.

# %%
import numpy as np

import xshard as xs
from xshard.layout.block_rows import output_dim

mesh, n = xs.Mesh(sp=4), 16
image = np.zeros((n, 3), int)
image[7:9] = 9  # two bright rows, on both sides of a cut


def blur(rows):
    """Three rows in, one out."""
    return rows[:-2] + rows[1:-1] + rows[2:]


expected = blur(np.pad(image, ((1, 1), (0, 0))))

# %% [markdown]
# Every device on its own rows, with zeros beside them: the seam shows.

# %%
alone = [blur(np.pad(b, ((1, 1), (0, 0)))) for b in xs.reference.scatter(image, "h/sp w", mesh)]
seam = xs.reference.gather(alone, "h/sp w", mesh, image.shape)
assert (seam != expected).any()
print("right:", *expected[:, 0])
print("alone:", *seam[:, 0])

# %% [markdown]
# `halo(1,1)` widens every block by a row on either side. Hatched blocks are held by another device too.

# %%
xs.show("h/sp:halo(1,1) w", mesh, (n, 3))

# %% [markdown]
# The move into it sends one message to each neighbour, and nothing else.

# %%
exchange = xs.plan("h/sp w -> h/sp:halo(1,1) w", mesh, shape=(n, 3), dtype="int64")
exchange

# %%
wide = xs.reference.run(exchange, xs.reference.scatter(image, exchange.src, mesh))
found = xs.reference.gather([blur(block) for block in wide], "h/sp w", mesh, image.shape)
assert (found == expected).all()
print("halo: ", *found[:, 0])

# %% [markdown]
# ## Backward
#
# A row that two devices hold gets two gradients. The dual of a halo is a `fold`: what stands in the
# neighbours' rows goes home and is added.

# %%
exchange.backward

# %%
ones = [np.ones(exchange.target.local_shape(device), int) for device in range(4)]
home = xs.reference.gather(xs.reference.run(exchange.backward, ones), "h/sp w", mesh, image.shape)
assert home[:, 0].tolist() == [1, 1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 1]
home[:, 0]

# %% [markdown]
# ## With a stride
#
# With stride 2 the devices need other rows before than after. A window is the interval that the outputs
# read.

# %%
strided = "h/sp:window(k=3,s=2,p=1)"
xs.show(strided, mesh, (n,))
output_dim(xs.Layout.parse(strided).dims[0], n, (4,))

# %% [markdown]
# In torch and JAX: [see my neighbours' rows](../recipes/halo.md); whole networks: [layers on cut
# arrays](../layers.md). Next: [a model](model.py).
