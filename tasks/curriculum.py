"""Harder as the loss falls: an option, nothing uses it unless asked to."""

import math
from typing import Any

from tasks.base import Task, get, require_int


class Curriculum:
    """A ladder of parameters of one task; one rung up whenever a loss falls below a bound.

    >>> import tasks
    >>> ladder = tasks.Curriculum("mqar", [{"pairs": 2}, {"pairs": 4}], below=0.1, length=64)
    >>> ladder.task.pairs, ladder.update(0.5), ladder.update(0.05), ladder.task.pairs
    (2, False, True, 4)

    Results belong to `final`, the hardest rung, whatever rung the training is on.

    Parameters
    ----------
    name: the task.
    rungs: parameters of each rung, easiest first.
    below: the loss (or any number that falls) under which the next rung begins.
    shared: parameters that all rungs have in common.

    Raises ValueError where a rung is impossible, where rungs differ in vocabulary (one model must read them
    all), and where `below` is not a finite number.
    """

    def __init__(self, name: str, rungs: list[dict[str, Any]], below: float, **shared: Any):
        if not rungs:
            raise ValueError("rungs: expected at least one, got none")
        if not isinstance(below, int | float) or not math.isfinite(below):
            raise ValueError(f"below: expected a finite number, got {below!r}")
        self.tasks: list[Task] = [get(name, **shared | rung) for rung in rungs]
        sizes = [task.vocab_size for task in self.tasks]
        if len(set(sizes)) > 1:
            raise ValueError(f"rungs: expected one vocabulary size for all, got {sizes}")
        self.below, self._rung = below, 0

    @property
    def rung(self) -> int:
        """Where the training is, from 0. Set it to resume."""
        return self._rung

    @rung.setter
    def rung(self, value: int) -> None:
        require_int("rung", value, 0, len(self.tasks) - 1)
        self._rung = value

    @property
    def task(self) -> Task:
        """The task to train on now."""
        return self.tasks[self._rung]

    @property
    def final(self) -> Task:
        """The hardest rung."""
        return self.tasks[-1]

    def update(self, loss: float) -> bool:
        """Tell the loss of a step; True where that began a new rung. NaN never does."""
        if loss < self.below and self._rung + 1 < len(self.tasks):
            self._rung += 1
            return True
        return False
