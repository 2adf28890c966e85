"""What a task is: a frozen set of parameters, a generator of batches, and an oracle that answers from the
inputs alone.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange, key
from tasks._splits import SPLITS, CheckDigits

Labels = Mapping[str, tuple[str, ...]]

IGNORE = -100
MIN_SEQUENCES = 1024
_BLOCK_TOKENS = 1 << 16
_PASS_TOKENS = 1 << 24


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one split. Unpacks as `inputs, targets = batch`.

    inputs [n, T] and targets [n, T] are int64; a target of -100 is not scored. Everywhere else it is the
    token that the model must predict at that position, having read the inputs up to and including it.
    """

    inputs: Int[Tensor, "n T"]
    targets: Int[Tensor, "n T"]
    task: "Task"
    split: str

    @property
    def slices(self) -> dict[str, Tensor]:
        """Labels [n, T], int64, aligned with targets (position, length, distance ...; -1 where it means
        nothing).
        """
        return self.task.slices(self.inputs, self.targets)

    def to(self, device: torch.device | str) -> "Batch":
        return dataclasses.replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.inputs, self.targets))

    def __len__(self) -> int:
        return self.inputs.shape[0]


class Task:
    """Base of all families. A family is a frozen dataclass whose fields are its parameters.

    It sets `name`, `version` (raised whenever its distribution changes) and `summary`, has `length` and
    `vocab_size` as fields or properties, and implements `_rows`, `solve`, `split_of`, `chance` and
    `vocabulary`.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    summary: ClassVar[str]
    length: int
    vocab_size: int

    # --- what a family implements ---

    def _rows(self, rng: Rng, split: str) -> tuple[Int[Tensor, "n T"], Int[Tensor, "n T"]]:
        """Inputs and targets of rng.n rows of the split."""
        raise NotImplementedError

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """The targets, found from the inputs alone and by another algorithm than the generator's."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> dict[str, range]:
        """Token ids by role; the ranges are disjoint and cover 0 .. vocab_size-1."""
        raise NotImplementedError

    @property
    def labels(self) -> Labels:
        """What to call the tokens of a role, in order; others are named after their role."""
        return {}

    @property
    def _digits(self) -> CheckDigits:
        """The tokens that decide the split of a sequence."""
        raise NotImplementedError

    def _digit_columns(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n c"] | None:
        """Where each row's digits stand, read from the row, if that is not the same for all rows."""
        return None

    @property
    def chance(self) -> float:
        """Expected accuracy of a guess drawn uniformly from the possible answers."""
        raise NotImplementedError

    @property
    def majority(self) -> float:
        """Expected accuracy of the best answer that ignores the inputs: chance where answers are balanced.

        Of the distribution; the test split of a small space is a sample of it and may differ.
        """
        return self.chance

    @property
    def ceiling(self) -> float:
        """Expected accuracy of the best possible answer given the inputs."""
        return 1.0

    @property
    def sequences(self) -> int:
        """How many different input sequences there are (a lower bound where the docstring says so)."""
        raise NotImplementedError

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """Labels aligned with targets by which accuracy can be read."""
        position = arange(inputs.shape[1], inputs.device).expand_as(inputs)
        return {"position": position.where(targets != IGNORE, -1)}

    # --- what every family has ---

    def batch(
        self,
        n: int,
        seed: int | Sequence[int] = 0,
        step: int = 0,
        split: str = "train",
        device: torch.device | str = "cpu",
        start: int = 0,
    ) -> Batch:
        """Rows start .. start+n-1 of (seed, step, split); of several seeds, n rows of each in turn.

        A row is a pure function of (parameters, version, split, seed, step, its number): the same on
        every device, in every process and for every n; no global generator is read or touched. On a GPU
        nothing waits for the device.
        """
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
        require_int("n", n, 1)
        require_int("start", start, 0)
        seeds = list(seed) if isinstance(seed, Sequence) and not isinstance(seed, str) else [seed]
        if not seeds:
            raise ValueError("seed: expected an integer or at least one, got none")
        for argument, value in (*(("seed", one) for one in seeds), ("step", step)):
            require_int(argument, value, -(2**63), 2**63 - 1)
        device = torch.device(device)
        keys = [key(self.name, self.version, split, one, step) for one in seeds]
        if device.type == "cpu":
            # Blocks of rows that stay in the cache are several times as fast as one large pass.
            rows = max(1, _BLOCK_TOKENS // self.width(split))
            rngs = [Rng(k, min(rows, n - i), start + i, device) for k in keys for i in range(0, n, rows)]
        else:
            # A pass is a hundred small kernels whatever its size, so it takes as many seeds as memory bears.
            some = max(1, _PASS_TOKENS // (n * self.width(split)))
            rngs = [Rng(keys[i : i + some], n, start, device) for i in range(0, len(keys), some)]
        parts = [self._rows(rng, split) for rng in rngs]
        inputs, targets = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
        return Batch(inputs, targets, self, split)

    def split_of(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n"]:
        """The split that each sequence belongs to, read from the sequence: 0 train, 1 val, 2 test."""
        return self._digits.split_of(inputs, self._digit_columns(inputs))

    def _assign_(
        self, inputs: Int[Tensor, "n T"], split: str, rng: Rng, where: Tensor | None = None
    ) -> Int[Tensor, "n T"]:
        return self._digits.assign_(inputs, split, rng, where, self._digit_columns(inputs))

    def spell(self, token: int) -> str:
        """What to call a token in print; noise is a dot."""
        for role, ids in self.vocabulary.items():
            if token in ids:
                names = ("PAD",) if role == "pad" else self.labels.get(role, ())
                i = token - ids.start
                return names[i] if i < len(names) else "·" if role == "noise" else f"{role[0]}{i}"
        return str(token)

    def width(self, split: str = "train") -> int:
        """T of the split's batches."""
        return self.length

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, ready for JSON: `tasks.get(task.name, **task.params) == task`."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    def _require_sequences(self) -> None:
        if self.sequences < MIN_SEQUENCES:
            raise ValueError(
                f"{self.name}: expected parameters with at least {MIN_SEQUENCES} sequences, so that "
                f"train, val and test can be disjoint; {self.params} gives {self.sequences}"
            )


_registry: dict[str, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def register(cls: T) -> T:
    """Make a family known under its name."""
    if cls.name in _registry:
        raise ValueError(f"name: expected a new task name, got {cls.name!r} twice")
    _registry[cls.name] = cls
    return cls


def names() -> list[str]:
    """All registered tasks."""
    return sorted(_registry)


def family(name: str) -> type[Task]:
    """The class registered under a name."""
    import difflib

    if name not in _registry:
        close = difflib.get_close_matches(name, names(), n=3) or names()
        raise ValueError(f"name: expected a registered task such as {', '.join(close)}, got {name!r}")
    return _registry[name]


def get(name: str, **params: Any) -> Task:
    """A task by name. Unknown or impossible parameters raise ValueError."""
    cls = family(name)
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ValueError(f"{name}: expected parameters among {', '.join(known)}, got {', '.join(unknown)}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in params.items()})


def require_int(argument: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless value is an integer in [low, high]."""
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= low
        and (high is None or value <= high)
    ):
        return
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    raise ValueError(f"{argument}: expected an integer {bounds}, got {value!r}")


def require_choice(argument: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{argument}: expected one of {', '.join(choices)}, got {value!r}")
