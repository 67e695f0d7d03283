"""Many devices: what one rank knows, and how the others learn it (chapters 23 to 25).

`run` starts a function in several processes of this machine. The rest are functions of the
tensor of one rank, to be called by every rank of a group. The names below are sorted by
chapter.
"""

from attnlib.parallel.checkpoints import claim_folder, load_checkpoint, save_checkpoint
from attnlib.parallel.collectives import (
    Traffic,
    add_up,
    agree,
    all_gather,
    all_reduce,
    all_to_all,
    post_shift,
    rank_gradients,
    reduce_scatter,
    replicate,
    shift,
)
from attnlib.parallel.heads import HeadAttention, head_attention
from attnlib.parallel.places import shard_positions
from attnlib.parallel.processes import RankError, run
from attnlib.parallel.ring import RingAttention, ring_attention
from attnlib.parallel.shard import (
    SplitColumns,
    SplitRows,
    clip_gradients,
    share_copies,
    split_layers,
    token_mean,
)

__all__ = [
    # Chapter 23: many processes
    "run",
    "RankError",
    "agree",
    "Traffic",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "post_shift",
    "shift",
    "replicate",
    "add_up",
    "all_reduce",
    "rank_gradients",
    # Chapter 24: ring attention
    "RingAttention",
    "ring_attention",
    "shard_positions",
    # Chapter 25: heads, layers, copies
    "head_attention",
    "HeadAttention",
    "SplitColumns",
    "SplitRows",
    "split_layers",
    "share_copies",
    "token_mean",
    "clip_gradients",
    "save_checkpoint",
    "load_checkpoint",
    "claim_folder",
]
