"""Associative recall across filler."""

from dataclasses import dataclass

from tasks._recall import Recall
from tasks.base import register


@register
@dataclass(frozen=True)
class FillerRecall(Recall):
    """Key-value pairs in a row, a filler, then keys; the answer at each key is its value.

    The filler has ids of its own: no live key can stand in it. Its length is what `length` leaves over.

    >>> import tasks, torch
    >>> task = tasks.get("filler_recall", length=14, pairs=2, queries=2)  # noise 0-7, keys 8-23, values 24-39
    >>> task.solve(torch.tensor([[3, 1, 9, 30, 11, 25, 2, 6, 5, 3, 5, 4, 11, 9]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100,
               25,   30]])

    Keys of a row are distinct, values and questions are independent and uniform.

    Parameters
    ----------
    pairs: pairs to remember.
    key_ids, value_ids: how many token ids keys and values have.
    """

    name = "filler_recall"
    version = 1
    summary = "associative recall across a stretch of filler"
    packed = True
