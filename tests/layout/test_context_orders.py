"""The orders of context parallelism in other systems, each copied from that system's index formula.

docs/context_parallel.md names the layout for each of them, and these tests prove it. A formula gives the rows
of a sequence that a rank holds, in local order.
"""

import numpy as np
import pytest

import xshard as xs
from xshard.layout.runs import Run, merge_adjacent

SIZES = [1, 2, 3, 4, 8]


def positions(text, mesh, length):
    """The rows of every device under the layout."""
    layout = xs.Layout.parse(text)
    return [
        layout.positions(mesh, (length,), "s", device).tolist() for device in range(mesh.n_devices)
    ]


def ring_flash_attention(rows, rank, n):
    """zhuzilin/ring-flash-attention, EasyContext: `chunk(2n)`, then the rank's chunk from either end."""
    chunks = np.split(rows, 2 * n)
    return np.concatenate([chunks[rank], chunks[2 * n - rank - 1]])


def megatron(rows, rank, n):
    """Megatron-LM get_batch_on_this_cp_rank: a view of 2n chunks and an index_select."""
    return rows.reshape(2 * n, -1)[[rank, 2 * n - rank - 1]].ravel()


def transformer_engine_thd(rows, rank, n, ends=None):
    """TransformerEngine thd_partition_indices_kernel: the row of every local token in turn."""
    ends = [0, len(rows)] if ends is None else ends
    starts = [end // n for end in ends]
    found = []
    for token in range(len(rows) // n):
        document = np.searchsorted(starts, token, side="right") - 1
        length = starts[document + 1] - starts[document]
        index = token - starts[document]
        offset = rank if index < length // 2 else 2 * (n - 1) - rank
        found.append(index + starts[document] * n + length // 2 * offset)
    return rows[found]


def transformer_engine_jax(rows, rank, n):
    """TransformerEngine's reorder_causal_load_balancing in JAX, MaxText's reorder_sequence: pairs of chunks.

    This is the order of their code; their docstrings show another.
    """
    chunks = rows.reshape(2 * n, -1)
    pairs = np.stack([chunks[[r, 2 * n - 1 - r]] for r in range(n)])
    return pairs.reshape(n, -1)[rank]


def transformer_engine_jax_from_zigzag(stored, n):
    """Its inverse, to_contiguous=True: every second chunk going up, then the others going down."""
    chunks = stored.reshape(2 * n, -1)
    return chunks[[*range(0, 2 * n, 2), *range(2 * n - 1, 0, -2)]].ravel()


def hyena(rows, rank, n):
    """savanna, NeMo, nvSubquadratic: chunks by zz[2k] = k, zz[2k + 1] = 2n - 1 - k, then contiguous parts."""
    order = [k // 2 if k % 2 == 0 else 2 * n - 1 - k // 2 for k in range(2 * n)]
    return np.split(rows.reshape(2 * n, -1)[order].ravel(), n)[rank]


def torch_head_tail(rows, rank, n):
    """torch's _HeadTailLoadBalancer: every head followed by its tail, then contiguous parts."""
    chunks = rows.reshape(2 * n, -1)
    head = np.arange(n)
    paired = np.stack([chunks[head], chunks[2 * n - 1 - head]], axis=1)
    return np.split(paired.ravel(), n)[rank]


def torch_per_document(lengths, n):
    """torch's _PerDocumentHeadTailLoadBalancer: of each document head and tail of every rank, then parts."""
    found = []
    start = 0
    for length in lengths:
        chunk = length // (2 * n)
        for rank in range(n):
            end = start + chunk * (2 * n - rank)
            found += [
                *range(start + chunk * rank, start + chunk * (rank + 1)),
                *range(end - chunk, end),
            ]
        start += length
    return [part.tolist() for part in np.split(np.array(found), n)]


ZIGZAGS = [ring_flash_attention, megatron, transformer_engine_thd, transformer_engine_jax, hyena]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("formula", [*ZIGZAGS, torch_head_tail])
def test_zigzag_is_the_order_of_many_systems(formula, n):
    rows = np.arange(6 * n)
    expected = [formula(rows, rank, n).tolist() for rank in range(n)]
    assert positions("s/zigzag(cp)", xs.Mesh(cp=n), len(rows)) == expected


@pytest.mark.parametrize("n", [2, 4, 8])
def test_its_inverse_puts_a_gathered_zigzag_in_order(n):
    stored = np.concatenate(positions("s/zigzag(cp)", xs.Mesh(cp=n), 4 * n))
    assert transformer_engine_jax_from_zigzag(stored, n).tolist() == list(range(4 * n))


DOCUMENTS = [(4, 8, 4), (8, 24, 16), (16,)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_zigzag_of_every_document_is_transformer_engines_thd(lengths, n):
    ends = np.cumsum([0, *lengths])
    rows = np.arange(sum(lengths))
    text = f"s/zigzag(cp,{','.join(map(str, lengths))})"
    found = positions(text, xs.Mesh(cp=n), len(rows))
    assert found == [transformer_engine_thd(rows, rank, n, ends).tolist() for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_zigzag_of_every_document_is_ring_flash_attentions_varlen(lengths, n):
    ends = np.cumsum([0, *lengths])
    rows = np.arange(sum(lengths))
    text = f"s/zigzag(cp,{','.join(map(str, lengths))})"
    found = positions(text, xs.Mesh(cp=n), len(rows))
    documents = np.split(rows, ends[1:-1])  # varlen of ring-flash-attention: each document in turn
    each = [[ring_flash_attention(d, rank, n) for d in documents] for rank in range(n)]
    assert found == [np.concatenate(rank).tolist() for rank in each]


def test_torchs_per_document_order_is_no_zigzag():
    """It is document-major: parts are cut without regard to ranks, and work is not balanced."""
    lengths = [4, 8, 4]
    n = 2
    expected = torch_per_document(lengths, n)
    assert expected[0] == [0, 3, 1, 2, 4, 5, 10, 11]
    assert expected != positions("s/zigzag(cp,4,8,4)", xs.Mesh(cp=n), 16)


def test_torchs_per_document_order_is_written_in_intervals():
    n = 2
    expected = torch_per_document([4, 8, 4], n)
    runs = [merge_adjacent(Run(row, 1) for row in rank) for rank in expected]
    runs = [[(run.start, run.start + run.length) for run in some] for some in runs]
    parts = ",".join(str([end for run in some for end in run]) for some in runs)
    assert positions(f"s/intervals(cp,{parts})", xs.Mesh(cp=n), 16) == expected


@pytest.mark.parametrize("n", SIZES)
def test_cyclic_is_striped_attention(n):
    rows = np.arange(6 * n)
    found = positions("s/cyclic(cp)", xs.Mesh(cp=n), len(rows))
    # ring-flash-attention's stripe: stack(split(n), dim).transpose, and the rank's row
    assert found == np.stack(np.split(rows, 6)).T.tolist()


@pytest.mark.parametrize("n", SIZES)
def test_cyclic_of_stripes_is_fpdt(n):
    rows = np.arange(6 * n)
    for stripe in (1, 2, 3):
        # TransformerEngine JAX Striped with its stripe size: reshape, swap, reshape
        striped = rows.reshape(-1, n, stripe).swapaxes(0, 1).reshape(n, -1).tolist()
        assert positions(f"s/cyclic(cp,{stripe})", xs.Mesh(cp=n), len(rows)) == striped
        # DeepSpeed FPDT: chunk c of the sequence to rank c mod n
        chunks = np.split(rows, len(rows) // stripe)
        assert striped == [np.concatenate(chunks[rank::n]).tolist() for rank in range(n)]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (4, 1), (2, 3), (1, 4)])
def test_yunchang_cuts_twice(ring, ulysses):
    """Ulysses is the inner axis of its ranks: devices of one Ulysses group are adjacent."""
    n = ring * ulysses
    mesh = xs.Mesh(ring=ring, ulysses=ulysses)
    rows = np.arange(6 * n)
    strip = rows.reshape(-1, ring).T.ravel()  # "strip": the whole sequence by stripes of the ring
    assert positions("s/cyclic(ring)/ulysses", mesh, len(rows)) == [
        p.tolist() for p in np.split(strip, n)
    ]
    halves = [np.split(ring_flash_attention(rows, rank, ring), ulysses) for rank in range(ring)]
    zigzag = [part.tolist() for some in halves for part in some]
    assert positions("s/zigzag(ring)/ulysses", mesh, len(rows)) == zigzag
    assert (zigzag == positions("s/zigzag(ring,ulysses)", mesh, len(rows))) == (ulysses == 1)
    basic = [p.tolist() for p in np.split(rows, n)]
    assert positions("s/(ring,ulysses)", mesh, len(rows)) == basic


@pytest.mark.parametrize(
    ("text", "balance"),
    [("s/cp", 1.75), ("s/zigzag(cp)", 1.0), ("s/cyclic(cp)", 1.0), ("s/cyclic(cp,64)", 1.047)],
)
def test_the_busiest_of_four_devices_against_the_mean(text, balance):
    work = [
        sum(row + 1 for row in rows) for rows in positions(text, xs.Mesh(cp=4), 4096)
    ]  # keys attended to
    assert max(work) / np.mean(work) == pytest.approx(balance, rel=0.001)
    assert (min(work) == max(work)) == ("zigzag" in text)


def test_segments_are_cut_one_by_one():
    """Rows of q, k and v in one weight: every device has its part of each, as three weights cut alone."""
    layout = xs.Layout("o/block(tp,8,4,4) i")
    mesh = xs.Mesh(tp=2)
    sharding = xs.Sharding(layout, mesh, (16, 3))
    rows = [xs.layout.runs.row_numbers(sharding.owned(0, device)).tolist() for device in range(2)]
    alone = [np.array_split(part, 2) for part in np.split(np.arange(16), [8, 12])]
    assert rows == [[row for part in alone for row in part[device].tolist()] for device in range(2)]
    assert str(layout) == "o/block(tp,8,4,4) i" and xs.Layout("o/block(tp,16)") != xs.Layout("o/tp")
    whole = [
        xs.Sharding(text, mesh, (16,)) for text in ("o/block(tp,16)", "o/tp", "o/block(tp,8,8)")
    ]
    assert whole[0].means_the_same_as(whole[1]) and not whole[2].means_the_same_as(whole[1])
    with pytest.raises(xs.errors.ShapeError, match=r"'block\(tp,8,4\)' adds up to 12 rows, not 16"):
        xs.Sharding("o/block(tp,8,4)", mesh, (16,))
