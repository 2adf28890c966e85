"""Accuracy, chance correction, exact prefixes, slices."""

import pytest
import torch

import tasks

TARGETS = torch.tensor([[-100, 3, 4, 4], [-100, 4, 4, 3]])
GUESSES = torch.tensor([[9, 3, 3, 4], [9, 4, 4, 3]])


def test_only_scored_positions_count():
    assert float(tasks.accuracy(GUESSES, TARGETS)) == pytest.approx(5 / 6)
    assert float(tasks.exact_prefix(GUESSES, TARGETS)) == pytest.approx((1 / 3 + 1) / 2)
    assert float(tasks.exact_rows(GUESSES, TARGETS)) == 0.5


def test_rows_in_which_nothing_is_scored_do_not_count():
    silent = torch.full((3, 4), -100)
    targets, guesses = torch.cat([TARGETS, silent]), torch.cat([GUESSES, silent + 109])
    assert float(tasks.accuracy(guesses, targets)) == pytest.approx(5 / 6)
    assert float(tasks.exact_prefix(guesses, targets)) == pytest.approx((1 / 3 + 1) / 2)
    assert float(tasks.exact_rows(guesses, targets)) == 0.5


@pytest.mark.parametrize(
    ("name", "params"), [("flip_flop", {"min_length": 14}), ("stack", {"min_length": 6})]
)
def test_the_oracle_makes_no_mistake_in_words_without_a_question(name, params):
    task = tasks.get(name, length=24, **params)
    inputs, targets = task.batch(300)
    assert ((targets != -100).sum(1) == 0).any()
    got = tasks.scores(task.solve(inputs), task.batch(300))
    assert (got["accuracy"], got["exact_prefix"], got["exact_rows"]) == (1, 1, 1)


def test_logits_are_taken_by_their_largest():
    logits = torch.nn.functional.one_hot(GUESSES, 10).float()
    assert torch.equal(tasks.predictions(logits), GUESSES)
    assert tasks.accuracy(logits, TARGETS) == tasks.accuracy(GUESSES, TARGETS)


def test_members_of_an_ensemble_keep_their_axis():
    members = torch.stack([GUESSES, TARGETS.clamp(0), torch.zeros_like(TARGETS)])
    assert tasks.accuracy(members, TARGETS).tolist() == pytest.approx([5 / 6, 1, 0])
    assert tasks.exact_prefix(members, TARGETS).tolist() == pytest.approx([2 / 3, 1, 0])
    assert tasks.exact_rows(members, TARGETS).tolist() == [0.5, 1, 0]


def test_chance_corrected_is_0_at_chance_and_1_at_the_ceiling():
    for name in ("xor", "silence_gate_release"):
        task = tasks.get(name)
        assert tasks.chance_corrected(task.chance, task) == 0
        assert tasks.chance_corrected(task.ceiling, task) == pytest.approx(1)


def test_mixed_lengths_give_accuracy_by_length():
    task = tasks.get("running_parity", length=12, min_length=10)
    batch = task.batch(600)
    n = (batch.inputs != 0).sum(1, keepdim=True)
    guess = torch.where(n == 11, 3, batch.targets)  # always EVEN on the words of 11 bits
    got = tasks.scores(guess, batch)
    by_length = got["slices"]["length"]
    assert sorted(by_length) == [10, 11, 12]
    assert by_length[10][0] == by_length[12][0] == 1
    assert 0.4 < by_length[11][0] < 0.6
    assert sum(count for _, count in by_length.values()) == got["n"] == int((batch.targets != -100).sum())
    assert got["accuracy"] == pytest.approx(sum(a * c for a, c in by_length.values()) / got["n"])
    assert got["chance_corrected"] == pytest.approx(2 * got["accuracy"] - 1)


def test_scores_of_the_oracle_and_of_a_fool():
    batch = tasks.get("mqar").batch(50, split="test")
    right = tasks.scores(batch.task.solve(batch.inputs), batch)
    assert (right["accuracy"], right["exact_prefix"], right["exact_rows"]) == (1, 1, 1)
    wrong = tasks.scores(torch.zeros_like(batch.targets), batch)
    assert (wrong["accuracy"], wrong["exact_prefix"], wrong["exact_rows"]) == (0, 0, 0)
    assert {a for a, _ in wrong["slices"]["pair"].values()} == {0.0}


def test_batch_unpacks_and_moves():
    batch = tasks.get("xor").batch(5)
    inputs, targets = batch
    assert inputs is batch.inputs
    assert targets is batch.targets
    assert len(batch) == 5
    assert torch.equal(batch.to("cpu").inputs, inputs)
