"""One program carries the state of one sequence and value head on chip from its first token to its last."""

from __future__ import annotations

import triton


@triton.jit
def forward_kernel(x):
    pass
