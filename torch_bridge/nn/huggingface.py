"""Context parallelism of models of `transformers`: `attention` in place of theirs, masks by positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bridge.mesh.process_mesh import MeshLike, positions
from torch_bridge.nn.attention import attention
from torch_bridge.nn.placed import Lengths, placed_as
from torch_bridge.redistribution import redistribute
from xshard import Layout, XshardError
from xshard.errors import ShapeError
from xshard.nn.attention import AUTO

# Parts of masks, by the functions of `transformers.masking_utils` that make them. Masks of packed sequences
# stem from position ids with gaps, which sharded sequences have too: `_check_positions` checks these.
_MASKS = [
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "and_masks",
]
_MASKS += ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]
_REFUSED = ("s_aux", "position_bias", "cache", "head_mask")


def register_attention(
    layout: Layout | str,
    mesh: MeshLike,
    *,
    name: str = "xshard",
    how: str = AUTO,
    shape: Lengths = None,
) -> None:
    """Make `attn_implementation=name` of a model of `transformers` attention over a sharded sequence.

    The model is called with this process's block of tokens, `[batch, rows]`, and `position_ids` of the
    rows, as `positions` returns them. An `attention_mask` `[batch, rows]` marks padding, `documents=` the
    documents of packed tokens.
    layout: layout of queries, `[batch, rows, heads, width]` in any order, with `s` for rows and `h` for
    heads. Other options are as in `attention`.

    Raises XshardError, at the call of the model, for options that attention here lacks: dropout, caches of
    keys, masks other than causal ones and windows, and biases; ShapeError for position ids of other
    rows, which are compared at the first call with a shape.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # slow: seconds

    layout = Layout.parse(layout)
    checked = set[tuple[int, ...]]()
    roles = {"h": 1, "s": 2, layout.names[-1]: 3}
    order = [roles.get(dim, 0) for dim in layout.names]  # dims of theirs: batch, heads, rows, width

    def computed(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        documents, position_ids = (options.get(name) for name in ("documents", "position_ids"))
        if refused := [option for option in _REFUSED if options.get(option) is not None]:
            raise XshardError(
                f"{name!r} with {refused[0]}", hint="attention over sharded sequences lacks it"
            )
        if attention_mask is not None and attention_mask.ndim != 2:
            what = f"{name!r} with an attention_mask of {attention_mask.ndim} dims"
            raise XshardError(
                what, hint="a mask of tokens, [batch, rows]; documents= of packed tokens"
            )
        if dropout := options.get("dropout"):
            raise XshardError(
                f"dropout={dropout}", hint="attention_dropout=0.0 in the model's configuration"
            )
        if query.shape[2] != key.shape[2]:
            what = f"{query.shape[2]} rows of queries, {key.shape[2]} of keys"
            raise ShapeError(what, hint="use_cache=False: keys of earlier calls are not here")
        q, k, v = (x.permute(order) for x in (query, key, value))
        if attention_mask is not None:  # padding sees padding: documents of their own
            documents = (
                attention_mask.long() if documents is None else documents.where(attention_mask, -1)
            )
        elif documents is None and position_ids is not None and not torch.compiler.is_compiling():
            whole = placed_as(q, layout, mesh, shape).shape
            if whole not in checked and position_ids.ndim == 2 and layout.axes:
                _check_positions(position_ids, layout, mesh, whole)
                checked.add(whole)
        if documents is not None and order.index(0) > order.index(2):
            documents = documents.mT
        is_causal = options.get("is_causal")
        own = getattr(module, "is_causal", True)
        y = attention(
            q, k, v, layout, mesh, how=how, documents=documents, window=options.get("sliding_window"),
            scale=options.get("scaling"), causal=own if is_causal is None else is_causal,
            softcap=options.get("softcap"), shape=shape,
        )  # fmt: skip
        return y.permute([order.index(dim) for dim in (0, 2, 1, 3)]), None

    def padding(
        *_: Any, mask_function: Any, attention_mask: Any = None, **__: Any
    ) -> Tensor | None:
        for part in _parts(mask_function):
            if part not in _MASKS:
                raise XshardError(
                    f"{name!r} with a mask of {part}", hint=f"it has: {', '.join(_MASKS)}"
                )
        return attention_mask

    AttentionInterface.register(name, computed)
    AttentionMaskInterface.register(name, padding)


def _parts(mask: Callable[..., Any]) -> Iterator[str]:
    """The names of the functions that made a mask, and the masks that it is made of."""
    yield mask.__qualname__.partition(".")[0]
    for cell in mask.__closure__ or ():
        contents = cell.cell_contents
        for part in contents if isinstance(contents, tuple) else (contents,):
            if callable(part):
                yield from _parts(part)


def _check_positions(ids: Tensor, layout: Layout, mesh: MeshLike, shape: Sequence[int]) -> None:
    """Raise ShapeError on all processes if position ids `[batch or 1, rows]` of one are not of its rows."""
    rows = positions(layout, mesh, shape=shape, dim="s", device=ids.device)
    wrong = (ids != rows).any().long()
    if redistribute(wrong, f"() | max({','.join(layout.axes)}) -> ()", mesh):
        what = f"{ids[0, :8].tolist()}... of rows {rows[:8].tolist()}" if wrong else "elsewhere"
        hint = f"position_ids=xt.positions('{layout}', mesh, shape=shape, dim='s')[None]; or documents="
        raise ShapeError(f"position_ids {what}", text=str(layout), hint=hint)
