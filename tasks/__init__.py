"""What is asked of a model: generators with oracles, disjoint splits and stated ceilings.

>>> import tasks
>>> task = tasks.get("xor", length=64)
>>> batch = task.batch(32, seed=0, step=0, split="train")
>>> bool((task.solve(batch.inputs) == batch.targets).all())
True
"""

from tasks import (  # noqa: F401  (each registers its family)
    bracket_arithmetic,
    compression,
    copy,
    cycle_navigation,
    even_pairs,
    filler_recall,
    flip_flop,
    fuzzy_recall,
    in_context_automata,
    induction_heads,
    memorization,
    modular_add,
    modular_arithmetic,
    modular_count,
    mqar,
    mux,
    noisy_recall,
    overwrite_recall,
    palindrome,
    parity,
    poly_recall,
    release_logic,
    release_recall,
    running_parity,
    selective_copy,
    silence_gate,
    stack,
    variable_tracking,
    word_problem,
    xor,
)
from tasks.base import IGNORE, Batch, Task, family, get, names, register
from tasks.curriculum import Curriculum
from tasks.gallery import describe, render
from tasks.metrics import (
    accuracy,
    by_slice,
    chance_corrected,
    exact_prefix,
    exact_rows,
    predictions,
    scores,
)

__all__ = [
    "IGNORE",
    "Batch",
    "Curriculum",
    "Task",
    "accuracy",
    "by_slice",
    "chance_corrected",
    "describe",
    "exact_prefix",
    "exact_rows",
    "family",
    "get",
    "names",
    "predictions",
    "register",
    "render",
    "scores",
]
