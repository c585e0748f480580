"""Joint attention of a whole text and a sharded image, as in Flux and SD3: four attentions, merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

from xshard.contractions.attention import merged
from xshard.errors import api_boundary
from xshard.layout import Layout
from xshard.nn.attention import AUTO, GATHER, REDUCE, Method
from xshard.notation.parser import Dim
from xshard.ops import A, M
from xshard.signatures import Count


@dataclass(frozen=True)
class JointVerb(Generic[A, M]):
    """A function of `nn` in both bridges.

    attention: that of the bridge. xp: its array functions, `torch` or `jax.numpy`. cast: (array, dtype) ->
    the array in that dtype.
    """

    attention: Callable[..., Any]
    xp: Any
    cast: Callable[[A, Any], A]

    @api_boundary
    def joint_attention(  # noqa: PLR0913  public, six arrays and the options that make sense of attention's
        self,
        q: A,
        k: A,
        v: A,
        layout: Layout | str,
        mesh: M | None = None,
        *,
        text_q: A,
        text_k: A,
        text_v: A,
        how: Method = AUTO,
        causal: bool = False,
        scale: float | None = None,
        shape: Sequence[int | None] | None = None,
        kv_heads: Count | None = None,
    ) -> tuple[A, A]:
        """Attend over an image that is sharded and a text that all devices hold, in one softmax over both.

            y, y_text = joint_attention(q, k, v, "b s/cp h k", mesh, text_q=tq, text_k=tk, text_v=tv)
            # [b, s/cp, h, k], as q; and [b, t, h, k], as tq

        All processes of the mesh call it. The text is any sequence that stands before a sharded one; its
        blocks are equal along the axes that shard rows of the image, and so are its gradients. It is not
        moved: the image's rows read its keys where they are, and each device computes what the text's rows
        get from its own part of the image; these results are added up. Derivatives are those of
        `attention` with `return_lse=True`.

        Args:
            q: This device's block of the image's queries, with the dims of `layout`.
            k: This device's block of the image's keys.
            v: This device's block of the image's values.
            layout: The layout of the image, with `s` for rows and `h` for heads; the width of heads is last.
            mesh: The mesh; in JAX, by default the context's.
            text_q: Queries of the text: all rows, the other dims as in `layout`.
            text_k: Keys of the text.
            text_v: Values of the text.
            how: The method for image rows that read image keys, as in `attention`.
            causal: A row sees no later row; the text is before the image.
            scale: The factor of products, by default `width ** -0.5`.
            shape: The global shape of `q`, if blocks differ in size.
            kv_heads: The global number of heads of keys, if blocks differ in size.

        Returns:
            The block of the image's result, under `layout`, and the result of all rows of the text.

        Raises:
            XshardError: As in `attention`.
        """
        image_layout = Layout.parse(layout)
        row_dim = image_layout.dim_index("s")
        text_dims = list(image_layout.dims)
        text_dims[row_dim] = Dim("text")
        text_layout = replace(image_layout, dims=tuple(text_dims))
        if shape is None:
            shape = [None] * len(text_dims)  # they follow from the blocks
        text_shape = list(shape)
        text_shape[row_dim] = None

        attend = partial(
            self.attention,
            mesh=mesh,
            causal=causal,
            scale=scale,
            kv_heads=kv_heads,
            return_lse=True,
        )
        of_image = partial(attend, q, layout=image_layout, shape=shape)
        of_text = partial(attend, text_q, layout=text_layout, shape=text_shape, sequence="text")
        by_image = {"k": k, "v": v, "kv_layout": image_layout}
        by_text = {"k": text_k, "v": text_v, "kv_layout": text_layout, "how": GATHER}
        # Causal masks follow from positions: the image's first row stands behind the text's last.
        n_rows = text_k.shape[row_dim]  # type: ignore[attr-defined]  # an array
        # First what sends nothing, and raises if a text is wrong.
        text_by_text = of_text(**by_text)
        image_by_text = of_image(**by_text, offset=n_rows)
        image_by_image = of_image(**by_image, how=how)
        text_by_image = of_text(**by_image, how=REDUCE, offset=-n_rows, kv_length=shape[row_dim])
        y = self._merge(image_by_text, image_by_image)
        return y, self._merge(text_by_text, text_by_image)

    def _merge(self, *parts: tuple[Any, Any]) -> A:
        """Merge attention over some keys with that over others: pairs of a result and its log-sum-exps."""
        y, _ = merged(self.xp, *[(y, log_sum[..., None]) for y, log_sum in parts])
        return self.cast(y, parts[0][0].dtype)
