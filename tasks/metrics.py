"""How right a model's answers are."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.base import IGNORE, Batch, Task


def predictions(output: Tensor) -> Int[Tensor, "... T"]:
    """Token ids from logits [..., T, vocabulary] (floating) or from predictions [..., T] (integers)."""
    return output.argmax(-1) if output.is_floating_point() else output


def accuracy(output: Tensor, targets: Int[Tensor, "n T"]) -> Float[Tensor, "..."]:
    """Share of the scored positions that are right; leading axes of output beyond [n, T] (ensemble
    members) stay.
    """
    scored = targets != IGNORE
    return ((predictions(output) == targets) & scored).sum((-2, -1)) / scored.sum()


def chance_corrected(value: Any, task: Task) -> Any:
    """(accuracy - chance) / (ceiling - chance): 0 for guessing, 1 for the best possible."""
    return (value - task.chance) / (task.ceiling - task.chance)


def exact_prefix(output: Tensor, targets: Int[Tensor, "n T"]) -> Float[Tensor, "..."]:
    """Mean share of a row's scored positions that come before its first mistake (1.0: no mistake).

    Rows in which nothing is scored (a word without a READ or a POP) do not count.
    """
    scored = targets != IGNORE
    wrong = (predictions(output) != targets) & scored
    right_so_far = (wrong.long().cumsum(-1) == 0) & scored
    asked = scored.sum(-1)
    return (right_so_far.sum(-1) / asked.clamp(min=1)).sum(-1) / (asked > 0).sum(-1)


def exact_rows(output: Tensor, targets: Int[Tensor, "n T"]) -> Float[Tensor, "..."]:
    """Share of rows without a mistake, among rows in which something is scored."""
    scored = targets != IGNORE
    wrong = (predictions(output) != targets) & scored
    return 1 - wrong.any(-1).sum(-1) / scored.any(-1).sum(-1)


def by_slice(output: Tensor, batch: Batch) -> dict[str, dict[int, tuple[float, int]]]:
    """For each slice and each of its values: (accuracy, number of scored positions)."""
    scored = batch.targets != IGNORE
    right = (predictions(output) == batch.targets)[scored].double()
    result: dict[str, dict[int, tuple[float, int]]] = {}
    for name, label in batch.slices.items():
        values, group = label[scored].unique(return_inverse=True)
        count = torch.zeros(len(values), dtype=torch.double, device=right.device)
        total, count = (
            count.clone().index_add_(0, group, right),
            count.index_add_(0, group, torch.ones_like(right)),
        )
        result[name] = {
            int(v): (float(s / c), int(c))
            for v, s, c in zip(values, total, count, strict=True)
            if int(v) >= 0
        }
    return result


def scores(output: Tensor, batch: Batch) -> dict[str, Any]:
    """Everything about one model's answers to a batch.

    output: logits [n, T, vocabulary] or predicted tokens [n, T]. Returns accuracy, chance_corrected,
        exact_prefix, exact_rows, n (scored positions) and slices (`by_slice`).
    """
    value = float(accuracy(output, batch.targets))
    return {
        "accuracy": value,
        "chance_corrected": chance_corrected(value, batch.task),
        "exact_prefix": float(exact_prefix(output, batch.targets)),
        "exact_rows": float(exact_rows(output, batch.targets)),
        "n": int((batch.targets != IGNORE).sum()),
        "slices": by_slice(output, batch),
    }
