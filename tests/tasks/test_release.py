"""The release's variants: the Bayes rule against enumeration, and the ceilings against simulation."""

from itertools import combinations, product

import pytest

import tasks
from tasks.release_logic import ambiguous_ceiling


def enumerated_posterior(row, vocab_size, low=10):
    """variable_tracking_release, written out: every triple of places and every choice of variables."""
    A, places, query = vocab_size - low, len(row) - 10, row[-1]
    weights = dict.fromkeys(range(low, vocab_size), 0.0)
    for at in combinations(range(places), 3):
        for which in product(range(3), repeat=3):
            names = {}
            # The same variable is the same token, different variables are different tokens.
            if any(names.setdefault(w, row[i]) != row[i] for w, i in zip(which, at, strict=True)):
                continue
            if len(set(names.values())) < len(names) or query not in names.values():
                continue
            likelihood = 1.0
            for j in range(len(names)):
                likelihood /= A - j
            likelihood *= float(A) ** 3 / len(names) / 27
            last = max(j for j, i in enumerate(at) if row[i] == query)
            hidden = last < 2 and at[last + 1] == at[last] + 1
            for token in range(low, vocab_size) if hidden else [row[at[last] + 1]]:
                weights[token] += likelihood / (A if hidden else 1)
    total = sum(weights.values())
    return [weights.get(v, 0.0) / total for v in range(vocab_size)]


def test_variable_tracking_posterior_is_the_enumerated_one():
    task = tasks.get("variable_tracking_release", length=24)
    inputs = task.batch(25).inputs
    inputs[20:, :14] = inputs[20:, :14] % 3 + 10  # rows where names repeat a great deal
    inputs[20:, -1] = 11
    inputs[20:, 5] = 11
    got = task.posterior(inputs).double()
    got /= got.sum(1, keepdim=True)
    for row, posterior in zip(inputs.tolist(), got.tolist(), strict=True):
        assert posterior == pytest.approx(enumerated_posterior(row, 32), abs=1e-12)


@pytest.mark.parametrize("name", [n for n in tasks.names() if n.endswith("_release")])
def test_the_ceiling_is_the_accuracy_of_the_bayes_rule(name):
    task, n = tasks.get(name), 60_000
    batch = task.batch(n, seed=11)
    accuracy = float(tasks.accuracy(task.solve(batch.inputs), batch.targets))
    assert (
        abs(accuracy - task.ceiling)
        <= 4 * (task.ceiling * (1 - task.ceiling) / n) ** 0.5 + 4 * task.ceiling_error
    )
    certainty = task.certainty(batch.inputs)
    assert abs(float(certainty.mean()) - accuracy) <= 4 * float((certainty - certainty**2).mean() / n) ** 0.5
    assert ((batch.targets != -100).sum(1) == 1).all()
    assert (batch.targets[:, -1] != -100).all()


def test_certainty_is_calibrated():
    """Among rows with posterior p the rule is right p of the time."""
    task = tasks.get("variable_tracking_release")
    batch = task.batch(60_000, seed=12)
    right = (task.solve(batch.inputs) == batch.targets)[:, -1].double()
    certainty = task.certainty(batch.inputs)
    for low in (0.2, 0.4, 0.6, 0.8):
        bin_ = (certainty >= low) & (certainty < low + 0.2 + 1e-9)
        n = int(bin_.sum())
        assert n > 1000, "every part of the range is there"
        assert abs(float(right[bin_].mean() - certainty[bin_].mean())) < 4 * 0.5 / n**0.5


def test_exact_ceiling_against_counting_look_alikes():
    for name in ("silence_gate_release", "mux_release"):
        for length in (40, 128):
            task = tasks.get(name, length=length)
            certainty = task.certainty(task.batch(60_000, seed=3).inputs)
            error = float(certainty.std()) / 60_000**0.5
            assert abs(float(certainty.mean()) - task.ceiling) < 4 * error
            assert task.ceiling_error == 0


def test_exact_ceiling_of_cases_known_by_hand():
    assert ambiguous_ceiling(50, 3, 0.0, (0.5, 0.5)) == pytest.approx(1)
    # One answer only: always right. Two places of width 1, a look-alike in the other with probability p:
    # wrong half of the times that the two answers differ.
    assert ambiguous_ceiling(50, 3, 0.01, (1.0,)) == pytest.approx(1)
    assert ambiguous_ceiling(2, 1, 0.3, (0.5, 0.5)) == pytest.approx(0.7 + 0.3 * 0.75)


def test_first_occurrence_look_up_is_not_enough_for_mqar():
    batch = tasks.get("mqar_release").batch(40_000)
    key = batch.inputs[:, -1:]
    first = (batch.inputs[:, :-2] == key).long().argmax(1, keepdim=True)
    accuracy = float((batch.inputs.gather(1, first + 1)[:, 0] == batch.targets[:, -1]).double().mean())
    assert 0.97 < accuracy < 0.985


def test_release_ranges_overlap_as_described():
    """Noise uses the ids of triggers and operands: that is what the variants are kept for."""
    inputs = tasks.get("silence_gate_release").batch(200).inputs
    assert set(inputs.unique().tolist()) == set(range(32))
    assert float(((inputs == 1) | (inputs == 2)).sum(1).double().mean()) > 5
