"""Splits are disjoint: exhaustively where a space can be enumerated, by construction elsewhere."""

from itertools import product

import pytest
import torch

import tasks
from tasks._random import Rng
from tasks._splits import SPLITS, CheckDigits, digits_needed

# Tasks whose input sequences are all words over an alphabet, and small enough to write them all down.
SMALL = [
    ("running_parity", {"length": 10}, 10, (1, 2)),
    ("even_pairs", {"length": 11}, 11, (1, 2)),
    ("modular_count", {"length": 7, "modulus": 3}, 7, (1, 2, 3)),
    ("cycle_navigation", {"length": 7}, 7, (1, 2, 3)),
    ("word_problem", {"length": 4}, 4, tuple(range(1, 7))),
]


@pytest.mark.parametrize(("name", "params", "length", "alphabet"), SMALL)
def test_every_word_of_a_small_space_has_one_split_and_is_reached_in_no_other(name, params, length, alphabet):
    task = tasks.get(name, **params)
    words = torch.tensor(list(product(alphabet, repeat=length)))
    assert len(words) == task.sequences
    owner = task.split_of(words)
    for number, split in enumerate(SPLITS):
        own = {tuple(w) for w in words[owner == number].tolist()}
        assert len(own) == task._digits.ranks(split)[1] * len(words) // task._digits.ring
        drawn = {tuple(w) for w in task.batch(40 * len(own), split=split).inputs.tolist()}
        assert drawn == own, "all of the split's words, and nothing else"


def test_short_words_are_training_only_and_the_rest_is_divided():
    task = tasks.get("running_parity", length=12, min_length=3)
    train, val, test = ({tuple(w) for w in task.batch(30_000, split=s).inputs.tolist()} for s in SPLITS)
    assert not train & (val | test)
    assert not val & test
    assert {sum(t > 0 for t in w) for w in train} == set(range(3, 13))
    assert {sum(t > 0 for t in w) for w in val | test} == {10, 11, 12}
    assert len([w for w in train if sum(t > 0 for t in w) == 3]) == 8


def test_test_words_are_longer_where_a_test_length_is_given():
    task = tasks.get("running_parity", length=12, min_length=3, test_length=[13, 20])
    assert (task.width("train"), task.width("val"), task.width("test")) == (12, 12, 20)
    lengths = (task.batch(2000, split="test").inputs > 0).sum(1)
    assert set(lengths.tolist()) == set(range(13, 21))
    assert (task.split_of(task.batch(2000, split="test").inputs) == 2).all()
    train, val = (task.batch(5000, split=s).inputs for s in ("train", "val"))
    assert not {tuple(w) for w in train.tolist()} & {tuple(w) for w in val.tolist()}


def test_training_rows_kept_from_earlier_stay_disjoint_from_test_rows_made_now():
    task = tasks.get("modular_count", length=8, modulus=3)
    kept = {tuple(w) for seed in range(5) for w in task.batch(2000, seed=seed).inputs.tolist()}
    fresh = {tuple(w) for step in range(5) for w in task.batch(500, 9, step, "test").inputs.tolist()}
    assert not kept & fresh


def test_a_space_too_small_raises_with_its_count():
    with pytest.raises(ValueError, match=r"running_parity: expected .* 1024 sequences.* gives 512$"):
        tasks.get("running_parity", length=9)
    with pytest.raises(ValueError, match=r"gives 625$"):
        tasks.get("copy", length=9, symbols=5)


@pytest.mark.parametrize(("base", "count"), [(2, 4), (3, 3), (4, 2), (15, 2), (16, 1), (1000, 1)])
def test_digits_needed(base, count):
    assert digits_needed(base) == count


@pytest.mark.parametrize(("columns", "base"), [((0, 3), 5), ((2,), 29), ((1, 2, 4, 5), 2)])
def test_digits_split_uniformly_given_the_rest(columns, base):
    """All digits beside one rest: the splits take exactly their shares; over rests, a digit is uniform."""
    digits = CheckDigits(columns, 3, base)
    combos = torch.tensor(list(product(range(3, 3 + base), repeat=len(columns))))
    rest = Rng(1, 1).below(50, 8).expand(len(combos), 8).clone()
    rest[:, list(columns)] = combos
    share = digits.split_of(rest).bincount(minlength=3).tolist()
    assert share == [digits.ranks(s)[1] for s in SPLITS]
    assert sum(share) == digits.ring
    assert share[1] == share[2] == max(1, digits.ring // 16)

    rng = Rng(2, 30_000)
    rows = rng.below(50, 8)
    assigned = digits.assign_(rows.clone(), "test", rng)
    assert (digits.split_of(assigned) == 2).all()
    others = [c for c in range(8) if c not in columns]
    assert torch.equal(assigned[:, others], rows[:, others])
    for column in columns:
        freq = (assigned[:, column] - 3).bincount(minlength=base) / len(rows)
        assert float((freq - 1 / base).abs().max()) < 5 * (1 / base / len(rows)) ** 0.5


def test_held_out_labels_are_balanced_although_digits_are_content():
    """The digits of running_parity are bits; the parity of test words is still a fair coin everywhere."""
    task = tasks.get("running_parity", length=24)
    odd = (task.batch(40_000, split="test").targets == 4).double().mean(0)
    assert float((odd - 0.5).abs().max()) < 5 * 0.5 / 40_000**0.5


def test_a_changed_token_may_change_the_split_whichever_it_is():
    """The hash reads every column: no column is free of influence on the split."""
    task = tasks.get("xor", length=24, vocab_size=40)
    inputs = task.batch(3000).inputs
    for column in range(inputs.shape[1]):
        other = inputs.clone()
        other[:, column] = (other[:, column] + 1) % 40
        assert (task.split_of(other) != 0).any()
