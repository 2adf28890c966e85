"""Associative recall with noise between the pairs."""

from dataclasses import dataclass

from tasks._recall import Recall
from tasks.base import register


@register
@dataclass(frozen=True)
class NoisyRecall(Recall):
    """Key-value pairs scattered in noise, then keys; the answer at each key is its value (after MAD).

    >>> import tasks, torch
    >>> task = tasks.get("noisy_recall", length=14, pairs=2, queries=2)  # noise 0-7, keys 8-23, values 24-39
    >>> task.solve(torch.tensor([[3, 1, 4, 9, 30, 2, 6, 5, 11, 25, 3, 5, 11, 9]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100,
               25,   30]])

    Keys of a row are distinct, values and questions are independent and uniform.

    Parameters
    ----------
    pairs: pairs to remember.
    key_ids, value_ids: how many token ids keys and values have.
    """

    name = "noisy_recall"
    version = 1
    summary = "associative recall with noise between the pairs"
