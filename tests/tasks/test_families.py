"""Answers against what a person would compute: plain Python, from the printed form of a row."""

from itertools import pairwise

import pytest
import torch

import tasks

N = 300


def spelled(task, split="train", n=N):
    """Per row: names of the tokens, and {position: name of the answer}."""
    for inputs, targets in zip(*task.batch(n, split=split), strict=True):
        asked = {t: task.spell(y) for t, y in enumerate(targets.tolist()) if y != tasks.IGNORE}
        yield [task.spell(x) for x in inputs.tolist()], asked


@pytest.mark.parametrize("scoring", ["dense", "final"])
def test_bracket_arithmetic_is_what_python_evaluates(scoring):
    task = tasks.get("bracket_arithmetic", length=41, min_length=9, modulus=7, scoring=scoring)
    for words, asked in spelled(task):
        text = "".join(w for w in words if w != "PAD")
        assert asked[len(text) - 1] == str(eval(text) % 7)
        assert len(asked) == (1 if scoring == "final" else text.count(")"))
        for t, answer in asked.items():
            depth, start = 0, t
            while depth or start == t:  # back to the bracket that this one closes
                depth += {")": 1, "(": -1}.get(text[start], 0)
                start -= 1
            assert answer == str(eval(text[start + 1 : t + 1]) % 7)


def test_bracket_slices_count_operators_and_depth():
    batch = tasks.get("bracket_arithmetic", length=21, min_length=9).batch(100)
    task, labels = batch.task, batch.slices
    for row in range(100):
        words = [task.spell(x) for x in batch.inputs[row].tolist()]
        open_ = []
        for t, word in enumerate(words):
            if word == "(":
                open_.append(t)
            elif word == ")":
                assert int(labels["depth"][row, t]) == len(open_)
                inside = words[open_.pop() : t]
                assert int(labels["operators"][row, t]) == sum(w in "+-*" for w in inside)


def test_bracket_trees_are_uniform():
    task = tasks.get("bracket_arithmetic", length=17)
    shapes = {}
    for words, _ in spelled(task, n=20_000):
        shape = "".join("n" if w.isdigit() else "o" if w in "+-*" else w for w in words)
        shapes[shape] = shapes.get(shape, 0) + 1
    assert len(shapes) == 14  # the Catalan number of 4 operators
    assert max(abs(c - 20_000 / 14) for c in shapes.values()) < 5 * (20_000 / 14) ** 0.5


def test_modular_arithmetic_is_what_python_evaluates():
    for words, asked in spelled(tasks.get("modular_arithmetic", length=31, min_length=5)):
        text = "".join(w for w in words if w != "PAD")
        assert asked == {t: str(eval(text[: t + 1]) % 5) for t in range(0, len(text), 2)}


@pytest.mark.parametrize("group", ["S3", "S4", "A5", "S5"])
@pytest.mark.parametrize("generators", ["all", "swaps"])
def test_word_problem_moves_points(group, generators):
    if (group, generators) == ("A5", "swaps"):
        with pytest.raises(ValueError, match="generators: expected 'all' for A5"):
            tasks.get("word_problem", group=group, generators=generators)
        return
    task = tasks.get("word_problem", group=group, generators=generators, length=12)
    assert task.states == {"S3": 6, "S4": 24, "A5": 60, "S5": 120}[group]
    if generators == "swaps":
        assert task.symbols == {"S3": 4, "S4": 7, "S5": 11}[group]
    for words, asked in spelled(task, n=50):
        where = list(range(int(group[1])))  # where[i]: the place of point i
        for t, permutation in enumerate(words):
            where = [int(permutation[place]) for place in where]
            assert asked[t] == "=" + "".join(map(str, where))


def test_counters_and_walks():
    for words, asked in spelled(tasks.get("modular_count", modulus=4, length=12)):
        assert list(asked.values()) == [f"={sum(int(w[1:]) for w in words[: t + 1]) % 4}" for t in range(12)]
    step = {"STAY": 0, "RIGHT": 1, "LEFT": -1}
    for words, asked in spelled(tasks.get("cycle_navigation", places=6, length=12)):
        assert list(asked.values()) == [f"@{sum(step[w] for w in words[: t + 1]) % 6}" for t in range(12)]
    for words, asked in spelled(tasks.get("even_pairs", length=12)):
        pairs = [sum(a != b for a, b in pairwise(words[: t + 1])) for t in range(12)]
        assert list(asked.values()) == ["ODD" if p % 2 else "EVEN" for p in pairs]
    for words, asked in spelled(tasks.get("running_parity", length=12)):
        ones = [words[: t + 1].count("1") for t in range(12)]
        assert list(asked.values()) == ["ODD" if n % 2 else "EVEN" for n in ones]


def test_flip_flop_and_stack():
    for words, asked in spelled(tasks.get("flip_flop", length=40, min_length=12)):
        cell, expected = None, {}
        for t in range(0, len(words), 2):
            cell = words[t + 1] if words[t] == "WRITE" else cell
            expected |= {t + 1: cell} if words[t] == "READ" else {}
        assert asked == expected
    for words, asked in spelled(tasks.get("stack", length=40, min_length=12)):
        stack, expected = [], {}
        for t, word in enumerate(words):
            if word == "POP":
                expected[t] = stack.pop()
            elif word != "PAD":
                stack.append(word)
        assert asked == expected


@pytest.mark.parametrize("order", ["same", "reverse"])
def test_copy(order):
    for words, asked in spelled(tasks.get("copy", length=31, min_length=11, order=order)):
        n = words.index("GO")
        said = words[:n] if order == "same" else words[:n][::-1]
        assert asked == dict(zip(range(n + 1, 2 * n + 1), said, strict=True))


def test_selective_copy_and_compression():
    for words, asked in spelled(tasks.get("selective_copy")):
        go = words.index("GO")
        items = [w for w in words[:go] if w != "·"]
        assert asked == {go + 1 + i: item for i, item in enumerate(items)}
    for words, asked in spelled(tasks.get("compression", symbols=12)):
        assert asked == {t: words[int(words[t][1:])] for t in range(13, 25)}


def test_marked_blocks():
    rules = {
        "xor": lambda ops, ids: "YES" if (ids[0] + ids[1]) % 2 else "NO",
        "parity": lambda ops, ids: "YES" if sum(ids) % 2 else "NO",
        "modular_add": lambda ops, ids: str(sum(map(int, ops)) % 8),
        "palindrome": lambda ops, ids: "YES" if ops == ops[::-1] else "NO",
        "mux": lambda ops, ids: ops[1 + int(ops[0][2:])],
    }
    for name, rule in rules.items():
        for scoring in ("dense", "final"):
            task = tasks.get(name, scoring=scoring)
            for words, asked in spelled(task, n=60):
                answers = []
                for t, word in enumerate(words):
                    if word == "MARK":
                        ops = words[t - task.block_width : t]
                        ids = [int(w[1:]) for w in ops] if name in ("xor", "parity") else []
                        answers.append((t if scoring == "dense" else len(words) - 1, rule(ops, ids)))
                assert asked == dict(answers)
                assert len(answers) == (7 if scoring == "dense" else 1)


@pytest.mark.parametrize("symbols", [2, 4, 5, 6])
def test_what_is_no_palindrome_differs_in_one_pair_drawn_at_random(symbols):
    task = tasks.get("palindrome", symbols=symbols, length=80)
    pairs = symbols // 2
    where, operands = [0] * pairs, [0] * 8
    for words, asked in spelled(task, n=400):
        for t, answer in asked.items():
            block = words[t - symbols : t]
            unequal = [j for j in range(pairs) if block[j] != block[-1 - j]]
            assert len(unequal) == (answer == "NO")
            for j in unequal:
                where[j] += 1
            for word in block:
                operands[int(word[1:])] += 1
    for counts in (where, operands):
        mean = sum(counts) / len(counts)
        assert max(abs(c - mean) for c in counts) < 6 * mean**0.5


def recall_rule(name, words, key, t):
    """The answer to the question whose last token is at t, by looking through the row."""
    body = words[:t]
    if name == "poly_recall":
        hits = [i for i in range(len(body) - 2) if body[i : i + 2] == [words[t - 1], key]]
        return body[hits[0] + 2]
    if name == "silence_gate":
        hit = next(i for i in range(len(body) - 2) if body[i] in ("ON", "OFF") and body[i + 1] == key)
        return body[hit + 2] if body[hit] == "ON" else "NULL"
    if name == "variable_tracking":
        while key[0] == "x":
            key = next(body[i + 2] for i in range(len(body) - 2) if body[i] == key and body[i + 1] == "IS")
        return key
    writes = [i for i in range(len(body) - 1) if body[i] == key and body[i + 1][0] == "v"]
    return body[(writes[-1] if name == "overwrite_recall" else writes[0]) + 1]


@pytest.mark.parametrize(
    "name",
    [
        "mqar",
        "noisy_recall",
        "filler_recall",
        "overwrite_recall",
        "poly_recall",
        "silence_gate",
        "variable_tracking",
    ],
)
def test_recall(name):
    for words, asked in spelled(tasks.get(name)):
        assert asked == {t: recall_rule(name, words, words[t], t) for t in asked}


def test_fuzzy_recall_needs_the_whole_key():
    task = tasks.get("fuzzy_recall", key_ids=3, pairs=6, key_width=2, value_width=2)
    shared = 0
    for words, asked in spelled(task):
        tail = len(words) - 12
        for q in range(tail, len(words), 3):
            key = words[q : q + 2]
            hits = [i for i in range(tail) if words[i : i + 2] == key and words[i + 2][0] == "v"]
            assert len(hits) == 1
            assert [asked[q + 1], asked[q + 2]] == words[hits[0] + 2 : hits[0] + 4]
            shared += sum(words[i] == key[0] and words[i + 1] != key[1] for i in range(tail))
    assert shared > N, "keys share tokens"


def test_filler_holds_no_live_key_and_lies_between():
    for words, asked in spelled(tasks.get("filler_recall", length=64, pairs=4, queries=2)):
        first = next(t for t, w in enumerate(words) if w != "·")
        last = first + 8
        assert all(w != "·" for w in words[first:last])
        assert words[last:62] == ["·"] * (62 - last)
        assert set(asked) == {62, 63}


def test_overwrites_happen_and_every_key_is_written():
    task = tasks.get("overwrite_recall")
    batch = task.batch(500)
    times = batch.slices["writes"][batch.targets != -100]
    assert int(times.min()) == 1
    assert float(times.double().mean()) == pytest.approx(3, abs=0.1)


def test_variable_tracking_hops_are_equally_likely():
    batch = tasks.get("variable_tracking", depth=4).batch(4000)
    share = batch.slices["hops"][batch.targets != -100].bincount()[1:] / (4 * 4000)
    assert float((share - 0.25).abs().max()) < 0.02


def test_memorization_is_one_dictionary_for_all_seeds_and_splits():
    task, seen = tasks.get("memorization"), {}
    for split in ("train", "val", "test"):
        for words, asked in spelled(task, split):
            for t, value in asked.items():
                assert seen.setdefault(words[t - 1], value) == value
    assert len(seen) == 256
    counts = [list(seen.values()).count(f"v{i}") for i in range(16)]
    assert counts == [16] * 16
    other = tasks.get("memorization", dictionary=1)
    inputs = task.batch(20).inputs
    assert not torch.equal(task.solve(inputs), other.solve(inputs))


def test_in_context_automata_ask_only_what_the_row_determines():
    for words, asked in spelled(tasks.get("in_context_automata", length=41)):
        seen = {}
        for t in range(2, 41, 2):
            move = (words[t - 1], words[t]) if words[t][0] == "i" else None
            if move is None:
                continue
            after = words[t + 1]
            assert (t in asked) == (move in seen)
            assert seen.setdefault(move, after) == after
            assert asked.get(t, after) == after


def test_induction_heads():
    for words, asked in spelled(tasks.get("induction_heads", specials=3, queries=3)):
        for t, answer in asked.items():
            assert words[words.index(words[t]) + 1] == answer


def test_distance_points_at_the_token_that_answers():
    for name in ("mqar", "noisy_recall", "overwrite_recall", "fuzzy_recall", "poly_recall", "selective_copy"):
        batch = tasks.get(name).batch(100)
        rows, columns = (batch.targets != -100).nonzero(as_tuple=True)
        source = columns - batch.slices["distance"][rows, columns]
        assert torch.equal(batch.inputs[rows, source], batch.targets[rows, columns])
