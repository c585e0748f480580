"""Context parallelism of models of `transformers`: `attention` in place of theirs, masks by positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.process_mesh import MeshLike, mesh_of, positions
from torch_bridge.nn.attention import attention
from torch_bridge.nn.placed import Lengths, placed_as
from torch_bridge.redistribution import redistribute
from xshard import Layout, XshardError
from xshard.contractions.attention import merged
from xshard.errors import ShapeError, api_boundary
from xshard.nn.attention import AUTO, Method

# Functions of `transformers.masking_utils` whose masks are understood here. Masks of packed sequences stem
# from position ids with gaps, which sharded sequences have too: `_documents` reads these.
_MASKS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "and_masks",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "chunked_overlay",
)
_REFUSED_OPTIONS = ("position_bias", "cache", "head_mask")


@api_boundary
def register_attention(
    layout: Layout | str,
    mesh: MeshLike,
    *,
    name: str = "xshard",
    how: Method = AUTO,
    shape: Lengths = None,
) -> None:
    """Let models of `transformers` attend over a sequence that is cut over devices.

        xt.nn.register_attention("b s/cp h k", mesh)
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="xshard")
        model(tokens, position_ids=xt.positions(...)[None])     # tokens: [batch, rows of this process]

    It registers an attention under `name`, which models choose by `attn_implementation=name`.
    The model is called with this process's block of tokens, `[batch, rows]`, and `position_ids` of the
    rows, as `positions` returns them. An `attention_mask` `[batch, rows]` marks padding. Packed documents are
    told by `documents=`, or by `position_ids` that restart at 0.

    Args:
        layout: The layout of queries, `[batch, rows, heads, width]` in any order, with `s` for rows and `h`
            for heads.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh` over the world.
        name: The name by which models choose this attention.
        how: The method, as in `attention`.
        shape: The global shape of queries, if blocks differ in size, as in `attention`.

    Raises:
        XshardError: At the call of the model, for options that attention here lacks: dropout, caches of
            keys, masks other than causal ones, windows and chunks, and biases; and for padding before the
            tokens of chunks.
        ShapeError: At the call of the model, for position ids of other rows. Each forward pass compares them:
            8 bytes from each process.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # slow: seconds

    mesh_of(mesh)  # raises for what is no mesh: models are called much later
    implementation = _Implementation(
        layout=Layout.parse(layout), mesh=mesh, name=name, how=how, shape=shape
    )
    AttentionInterface.register(name, implementation.attend)
    AttentionMaskInterface.register(name, implementation.mask)


class _Chunks(NamedTuple):
    """The mask of layers that attend in chunks: the padding, `[batch, rows]`, and the rows of a chunk."""

    padding: Tensor | None
    length: int


def _is_causal(module: Any, options: dict[str, Any]) -> bool:
    """Return whether rows see earlier rows only: as the call says, else as the module does."""
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return bool(is_causal)


@dataclass(eq=False)
class _Implementation:
    """Attention and masks with the signatures that `transformers` calls."""

    layout: Layout
    mesh: MeshLike
    name: str
    how: Method
    shape: Lengths
    # Of the last layer that asked.
    position_ids: Tensor | None = None
    documents: Tensor | None = None

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | _Chunks | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend over a sharded sequence, called by a model of `transformers` as its attention.

        Returns the outputs, `[batch, rows, heads, width]`, and None for the weights, which are not
        computed as a whole.

        Args:
            module: The module.
            query: This process's block of queries, `[batch, heads, rows, width]`.
            key: Its block of keys.
            value: Its block of values.
            attention_mask: As `mask` returns it.
            **options: Other arguments of transformers, such as `scaling` and `sliding_window`.
        """
        if isinstance(attention_mask, _Chunks):
            padding, chunk_length = attention_mask
        else:
            padding = attention_mask
            chunk_length = None
        self._check_call(query, key, padding, options)
        # From transformers' order of dims to the layout's, and back to that of a result.
        to_layout = self._dims_in_layout_order()
        to_result = [to_layout.index(dim) for dim in (0, 2, 1, 3)]  # batch, rows, heads, width
        q, k, v = [x.permute(to_layout) for x in (query, key, value)]
        self._check_padding(chunk_length, padding, q)
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            q = _tune_by_rows(module, query, self._rows_of(q)).permute(to_layout)
        is_causal = _is_causal(module, options)
        documents = self._documents_of_call(query, q, padding, is_causal, options)
        if documents is not None and to_layout.index(0) > to_layout.index(2):
            documents = documents.mT  # batch after rows, as in the layout
        sinks = options.get("s_aux")
        results = attention(
            q,
            k,
            v,
            self.layout,
            self.mesh,
            how=self.how,
            documents=documents,
            window=options.get("sliding_window"),
            chunk=chunk_length,
            scale=options.get("scaling"),
            causal=is_causal,
            softcap=options.get("softcap"),
            shape=self.shape,
            return_lse=sinks is not None,
        )
        if sinks is None:
            return results.permute(to_result), None
        outputs, lse = results
        without_sinks = outputs.permute(to_result)
        lse = lse[..., None].permute(to_result)  # [batch, rows, heads, 1]
        # Not by `sinks=`: as of any parameter, the gradient is the one by this process's rows.
        y, _ = merged(torch, (without_sinks, lse), (0, sinks[:, None]))
        return y.to(query.dtype), None

    def _documents_of_call(
        self,
        query: Tensor,
        q: Tensor,
        padding: Tensor | None,
        is_causal: bool,
        options: dict[str, Any],
    ) -> Tensor | None:
        """Return a number per row, `[batch, rows]`: rows see each other if theirs are equal. None: all do.

        Numbers are those of `documents=`, or follow from position ids that restart. Padding has -1,
        so that only padding sees it.
        """
        documents: Tensor | None = options.get("documents")
        if padding is not None:
            numbers = 0 if documents is None else documents
            return torch.where(padding.bool(), numbers, -1)
        if documents is not None or not self.layout.axes:
            return documents
        position_ids = options.get("position_ids")
        if position_ids is None or position_ids.ndim != 2:
            return None
        # Also without a causal mask: wrong ids are an error. But on one device, transformers lets
        # positions tell documents to causal masks alone, and so does this.
        documents = self._documents_of(position_ids, q, len(query))
        return documents if is_causal else None

    def _dims_in_layout_order(self) -> list[int]:
        """Return which of transformers' dims (batch, heads, rows, width) each dim of the layout is.

        "b s/cp h k" -> [0, 2, 1, 3], by which a query of transformers is permuted.
        """
        dims = {"h": 1, "s": 2, self.layout.names[-1]: 3}
        return [dims.get(name, 0) for name in self.layout.names]

    def _check_call(
        self, query: Tensor, key: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> None:
        """Refuse a call with options that attention over a sharded sequence cannot honour.

        Raises XshardError for dropout, for masks other than `[batch, rows]` and for the options in
        `_REFUSED_OPTIONS`; ShapeError if queries and keys have unequal rows, as with a cache of
        keys. Options that are None count as not given.
        """
        for option in _REFUSED_OPTIONS:
            if options.get(option) is not None:
                hint = "attention over sharded sequences lacks it"
                raise XshardError(f"{self.name!r} with {option}", hint=hint)
        if attention_mask is not None and attention_mask.ndim != 2:
            reason = f"{self.name!r} with an attention_mask of {attention_mask.ndim} dims"
            hint = "a mask of tokens, [batch, rows]; documents= of packed tokens"
            raise XshardError(reason, hint=hint)
        dropout = options.get("dropout")
        if dropout:
            hint = "attention_dropout=0.0 in the model's configuration"
            raise XshardError(f"dropout={dropout}", hint=hint)
        if query.shape[2] != key.shape[2]:
            reason = f"{query.shape[2]} rows of queries, {key.shape[2]} of keys"
            raise ShapeError(reason, hint="use_cache=False: keys of earlier calls are not here")

    def _rows_of(self, q: Tensor) -> Tensor:
        """Return the rows of the sequence that this process's block of queries has."""
        shape = placed_as(q, self.layout, self.mesh, self.shape).shape
        return positions(self.layout, self.mesh, shape=shape, dim="s", device=q.device)

    @between_graphs
    def _check_padding(self, chunk: int | None, attention_mask: Tensor | None, q: Tensor) -> None:
        """Raise XshardError on all processes if row 0 is padding: models count chunks from behind it."""
        if chunk is None or attention_mask is None or not self.layout.axes:
            return
        # Of the process that holds row 0; of the others nothing.
        first_row = attention_mask[:, self._rows_of(q) == 0]
        is_padded = (first_row == 0).any().long()
        if redistribute(is_padded, f"() | max({','.join(self.layout.axes)}) -> ()", self.mesh):
            hint = "padding behind the tokens: chunks begin at row 0"
            raise XshardError(f"{self.name!r} with chunks and padding before the tokens", hint=hint)

    @between_graphs
    def _documents_of(self, position_ids: Tensor, q: Tensor, batch_size: int) -> Tensor | None:
        """Return the documents that positions tell, `[batch, rows]`; None if there is one only."""
        # All layers of a forward pass ask; the first compares the positions of all processes.
        if position_ids is not self.position_ids:
            shape = placed_as(q, self.layout, self.mesh, self.shape).shape
            ids = position_ids.expand(batch_size, -1)
            self.documents = _documents(ids, self.layout, self.mesh, shape)
            self.position_ids = position_ids
        return self.documents

    def mask(
        self, *_: Any, mask_function: Any, attention_mask: Any = None, **options: Any
    ) -> Tensor | _Chunks | None:
        """Return the padding and chunks: `attend` knows causal masks and windows by its options."""
        function_names = list(_functions_of_mask(mask_function))
        for name in function_names:
            if name not in _MASKS:
                reason = f"{self.name!r} with a mask of {name}"
                raise XshardError(reason, hint=f"it has: {', '.join(_MASKS)}")
        self.position_ids = None  # a forward pass begins
        if "chunked_overlay" in function_names:
            return _Chunks(attention_mask, options["local_size"])
        return attention_mask


def _tune_by_rows(module: Any, query: Tensor, rows: Tensor) -> Tensor:
    """Scale queries of Llama 4, `[batch, heads, rows, width]`, by their rows in the whole sequence.

    Its layers without rotary embeddings have scaled them as if the block's first row were row 0:
    that factor is divided out.
    """
    rows_in_block = torch.arange(len(rows), device=rows.device)
    steps = torch.floor((torch.stack((rows, rows_in_block)).float() + 1) / module.floor_scale)
    factors = torch.log1p(steps) * module.attn_scale + 1
    wanted_factor, applied_factor = factors.to(torch.promote_types(query.dtype, torch.float32))
    return (query * (wanted_factor / applied_factor)[:, None]).to(query.dtype)


def _functions_of_mask(mask: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of the functions of `transformers` that made a mask, and the masks inside of it.

    A causal mask with a window -> "and_masks", "sliding_window_overlay", "causal_mask_function".
    """
    yield mask.__qualname__.partition(".")[0]
    # A mask is a closure over the masks that it combines, or over a tuple of them.
    cells = () if mask.__closure__ is None else mask.__closure__
    for cell in cells:
        contents = cell.cell_contents
        functions = contents if isinstance(contents, tuple) else (contents,)
        for function in functions:
            if callable(function):
                yield from _functions_of_mask(function)


def _documents(ids: Tensor, layout: Layout, mesh: MeshLike, shape: Sequence[int]) -> Tensor | None:
    """Return the row at which the document of each row starts, `[batch, rows]`; None: all at row 0.

    Positions count the rows of the array, or they restart at 0 with each document: 0 1 2 0 1 -> 0 0 0 3 3.
    Raises ShapeError on all processes for others, and if those of every process count its own rows.
    """
    # A wrong process must not raise alone, while others wait in attention: all compare, and all raise.
    maximum = f"| max({','.join(layout.axes)})"
    rows = positions(layout, mesh, shape=shape, dim="s", device=ids.device)
    are_other_than_rows = (ids != rows).any().long()
    if not redistribute(are_other_than_rows, f"() {maximum} -> ()", mesh):
        return None
    d = layout.dim_index("s")
    all_ids = redistribute(ids, f"one {layout.dims[d]} -> one s", mesh, shape=(len(ids), shape[d]))
    has_gap = ((all_ids.diff() != 1) & (all_ids[:, 1:] != 0)).any()
    # Without position ids, transformers counts from 0 on each process: that looks like documents that
    # start with every block.
    are_other_than_default = (ids != torch.arange(len(rows), device=ids.device)).any()
    local_answers = torch.stack((has_gap, are_other_than_default)).long()
    answers = redistribute(local_answers, f"f {maximum} -> f", mesh)  # 1 if any process has it
    any_gap, any_other_than_default = answers.tolist()
    if any_other_than_default and not any_gap:
        return rows - ids
    found = "elsewhere"  # wrong on another process
    if are_other_than_rows:
        found = f"{ids[0, :8].tolist()}... of rows {rows[:8].tolist()}"
    hint = f"position_ids=xt.positions('{layout}', mesh, shape=shape, dim='s')[None]; or documents="
    raise ShapeError(f"position_ids {found}", text=str(layout), hint=hint)
