"""Every sharding decision of the example: torch and JAX read the same strings.

One mesh axis, `cp`, cuts the sequence. b: batch, s: sequence, h: heads, e: width of a head, c: channels.
"""

from xshard import Mesh
from xshard.nn.windows import Frame, ShardedDim, interval_frame
from xshard.notation.parser import Dim, Shard

MESH = Mesh(cp=4)
ZIGZAG = "s/zigzag(cp)"
CONTIGUOUS = "s/cp"

# Every device uses the weights on tokens of its own: each has a copy, and the copies' gradients add up.
WEIGHT = "... -> ... | copy(cp)"
LOSS = "() | mean(cp) -> ()"

# One filter per channel and row of the sequence. Devices convolve channels of their own.
FILTERS = "c s -> c/balanced(cp) s"


def tokens(cut: str) -> str:
    """Tokens, and the tokens to be predicted."""
    return f"b {cut}"


def gather(cut: str) -> str:
    """Keys or values of a device's rows -> of all rows, a copy for each device's own queries."""
    return f"b {cut} h e -> b s h e | copy(cp)"


def to_channels(cut: str) -> str:
    """All channels of some rows -> all rows of some channels."""
    return f"b {cut} c -> b s c/balanced(cp)"


def to_rows(cut: str) -> str:
    return f"b s c/balanced(cp) -> b {cut} c"


def heads(n_heads: int, n_kv_heads: int, n_devices: int) -> Frame:
    """How the heads of queries are cut, and which heads of keys and values a device reads for its share.

    Groups of queries share a head of keys and values. If a group lies on two devices, both get that head,
    and their gradients are added. Any numbers will do: some devices may have one head fewer.

    >>> shared = heads(6, 2, 4)
    >>> str(shared.result), str(shared.source)
    ('h/balanced(cp)', 'h/balanced(cp):halo([0,1,1,1],[0,0,0,0],none)')
    """
    group = n_heads // n_kv_heads
    cut = Dim("h", (Shard(("cp",), "balanced"),))
    kv_heads = ShardedDim(cut, n_kv_heads, (n_devices,))
    return interval_frame(kv_heads, n_heads, lambda a, b: (a // group, (b - 1) // group + 1))


def to_heads(cut: str, dim: Dim) -> str:
    """All heads of some rows -> all rows of some heads."""
    return f"b {cut} h e -> b s {dim} e"


def from_heads(cut: str, dim: Dim) -> str:
    return f"b s {dim} e -> b {cut} h e"
