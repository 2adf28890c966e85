"""What must hold for every task, over its parameter space."""

import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tasks
from tasks._random import Rng, key
from tasks._splits import SPLITS

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def ints(low, high):
    return st.integers(low, high)


def words(unit=1, lead=0, low=1, **more):
    """length, min_length and test_length of a word task, in steps of `unit`."""

    @st.composite
    def draw(d):
        shortest, steps = d(ints(low, low + 2)), d(ints(8, 12))
        longest = lead + unit * (shortest + steps)
        out = {"length": longest, "min_length": d(st.sampled_from([None, lead + unit * shortest]))}
        if d(st.booleans()):
            out["test_length"] = [longest + unit, longest + unit * d(ints(1, 9))]
        return out | {k: d(v) for k, v in more.items()}

    return draw()


def fixed(**more):
    return st.fixed_dictionaries(more)


SCORING = st.sampled_from(["dense", "final"])
OPERATORS = st.sampled_from(["+-*", "+", "-*", "+-", "*-+"])
BLOCKS = {"length": ints(24, 50), "vocab_size": ints(28, 60), "scoring": SCORING}
RECALL = {"length": ints(40, 70), "queries": ints(1, 5), "noise": ints(2, 20)}
IDS = ints(2, 20)
RELEASE = fixed(length=ints(24, 140), vocab_size=ints(32, 50))

PARAMETERS = {
    "xor": fixed(**BLOCKS, operands=st.sampled_from([2, 4, 10])),
    "parity": fixed(**BLOCKS, bits=ints(1, 6), operands=st.sampled_from([2, 4, 10])),
    "modular_add": fixed(**BLOCKS, modulus=ints(2, 16), terms=ints(1, 4)),
    "palindrome": fixed(**BLOCKS, symbols=ints(2, 6), operands=ints(2, 9)),
    "mux": fixed(**BLOCKS, channels=ints(2, 4), value_ids=ints(2, 12)),
    "mqar": fixed(
        length=ints(40, 64), pairs=ints(4, 8), queries=ints(1, 12), vocab_size=ints(30, 700), noise=ints(1, 9)
    ),
    "noisy_recall": fixed(**RECALL, pairs=ints(1, 8), key_ids=ints(8, 300), value_ids=IDS),
    "filler_recall": fixed(**RECALL, pairs=ints(1, 8), key_ids=ints(8, 300), value_ids=IDS),
    "overwrite_recall": fixed(**RECALL, keys=ints(1, 4), writes=ints(4, 10), value_ids=IDS),
    "fuzzy_recall": fixed(
        length=ints(70, 90), pairs=ints(2, 6), key_width=ints(1, 3), value_width=ints(1, 3), value_ids=IDS
    ),
    "poly_recall": fixed(
        length=ints(60, 80), keys=ints(1, 4), contexts=ints(1, 3), context_ids=ints(3, 5), value_ids=IDS
    ),
    "silence_gate": fixed(**RECALL, records=ints(1, 6), value_ids=IDS),
    "variable_tracking": fixed(**RECALL, chains=ints(1, 3), depth=ints(1, 3), value_ids=IDS),
    "induction_heads": fixed(**RECALL, specials=ints(1, 6)),
    "selective_copy": fixed(length=ints(30, 60), items=ints(1, 10), item_ids=IDS, noise=IDS),
    "compression": fixed(symbols=ints(10, 40), symbol_ids=IDS),
    "memorization": fixed(
        length=st.sampled_from([20, 64]), key_ids=st.sampled_from([4, 64, 256]), value_ids=ints(2, 4)
    ),
    "in_context_automata": fixed(length=ints(40, 70), states=ints(2, 5), inputs=ints(1, 3)),
    "running_parity": words(scoring=SCORING),
    "even_pairs": words(scoring=SCORING),
    "modular_count": words(scoring=SCORING, modulus=ints(2, 7), increments=st.sampled_from(["all", "unit"])),
    "cycle_navigation": words(scoring=SCORING, places=ints(3, 8)),
    "word_problem": words(
        scoring=SCORING,
        group=st.sampled_from(["S3", "S4", "A5", "S5"]),
        generators=st.sampled_from(["all", "swaps"]),
    ),
    "flip_flop": words(
        unit=2, low=6, scoring=SCORING, values=ints(2, 5), write=ints(1, 50), read=ints(1, 49)
    ),
    "modular_arithmetic": words(unit=2, lead=-1, scoring=SCORING, modulus=ints(2, 7), operators=OPERATORS),
    "bracket_arithmetic": words(unit=4, lead=1, scoring=SCORING, modulus=ints(2, 7), operators=OPERATORS),
    "copy": words(unit=2, lead=1, low=4, symbols=ints(2, 9), order=st.sampled_from(["same", "reverse"])),
    "stack": words(low=6, symbols=ints(2, 9)),
    **{name: RELEASE for name in tasks.names() if name.endswith("_release")},
}
# Not determined by the inputs: `solve` is the Bayes rule there.
AMBIGUOUS = {"variable_tracking_release", "silence_gate_release", "mux_release"}
EVERY = pytest.mark.parametrize("name", tasks.names())


def draw_task(data, name):
    params = data.draw(PARAMETERS[name])
    try:
        return tasks.get(name, **params)
    except ValueError:
        assume(False)


def longer(name):
    """Parameters of another length, in the steps that the family takes."""
    other = {"compression": {"symbols": 42}, "flip_flop": {"length": 86}, "memorization": {"length": 86}}
    return other.get(name, {"length": 85})


def test_every_task_has_a_parameter_space():
    assert sorted(PARAMETERS) == tasks.names()


@EVERY
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_oracle_splits_and_ranges(name, data):
    task = draw_task(data, name)
    ids = [i for role in task.vocabulary.values() for i in role]
    assert sorted(ids) == list(range(task.vocab_size)), "roles are disjoint and cover the vocabulary"
    for number, split in enumerate(SPLITS):
        inputs, targets = batch = task.batch(97, seed=data.draw(ints(-5, 5)), step=3, split=split)
        assert inputs.shape == targets.shape == (97, task.width(split))
        assert inputs.dtype == targets.dtype == torch.int64
        assert set(inputs.unique().tolist()) <= set(range(task.vocab_size))
        scored = targets != tasks.IGNORE
        assert scored.any()
        assert set(targets[scored].unique().tolist()) <= set(range(task.vocab_size))
        answers = task.solve(inputs)
        assert ((answers != tasks.IGNORE) == scored).all()
        if name not in AMBIGUOUS:
            assert (answers == targets).all()
        assert (task.split_of(inputs) == number).all()
        for label in batch.slices.values():
            assert label.shape == targets.shape
            assert label.dtype == torch.int64
            assert torch.equal(label >= 0, scored)
            assert (label[~scored] == -1).all()


@EVERY
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_row_depends_on_its_number_only(name, data):
    task = draw_task(data, name)
    whole = task.batch(40, seed=1, step=2, split="val")
    for start, n in [(17, 23), (39, 1), (0, 5)]:
        part = task.batch(n, seed=1, step=2, split="val", start=start)
        assert torch.equal(part.inputs, whole.inputs[start : start + n])
        assert torch.equal(part.targets, whole.targets[start : start + n])
    other = [task.batch(40, 1, 3, "val"), task.batch(40, 2, 2, "val"), task.batch(40, 1, 2, "train")]
    assert not any(torch.equal(whole.inputs, o.inputs) for o in other if o.inputs.shape == whole.inputs.shape)
    assert len(whole.inputs.unique(dim=0)) > 1


@EVERY
def test_large_batches_are_made_in_blocks_of_the_same_rows(name, monkeypatch):
    task = tasks.get(name)
    whole = task.batch(50, seed=5)
    monkeypatch.setattr("tasks.base._BLOCK_TOKENS", 7 * task.width())
    blocks = task.batch(50, seed=5)
    assert torch.equal(whole.inputs, blocks.inputs)
    assert torch.equal(whole.targets, blocks.targets)


@EVERY
def test_several_seeds_give_the_rows_of_each(name):
    task, seeds = tasks.get(name, **longer(name)), [3, -1, 2**40]
    alone = [task.batch(5, seed=seed, step=2, split="val", start=4) for seed in seeds]
    together = task.batch(5, seed=seeds, step=2, split="val", start=4)
    assert torch.equal(together.inputs, torch.cat([batch.inputs for batch in alone]))
    # A GPU makes all of them in one pass, which no row may notice.
    keys = [key(task.name, task.version, "val", seed, 2) for seed in seeds]
    inputs, targets = task._rows(Rng(keys, 5, 4), "val")
    assert torch.equal(inputs, together.inputs)
    assert torch.equal(targets, together.targets)


@EVERY
def test_no_global_generator_is_read_or_touched(name):
    task = tasks.get(name)
    torch.manual_seed(1)
    first = task.batch(20)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = task.batch(20)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.targets, second.targets)


def digest(name):
    task = tasks.get(name)
    h = hashlib.sha256()
    for split in SPLITS:
        for x in task.batch(64, seed=3, step=4, split=split):
            h.update(x.numpy().astype("<i8").tobytes())
    return h.hexdigest()


@EVERY
def test_distribution_has_not_changed_under_the_same_version(name):
    """After a wanted change: raise the task's version, then `python tests/tasks/test_every_task.py`."""
    task = tasks.get(name)
    assert GOLDEN[name]["version"] == task.version, "the version changed: write the golden file again"
    assert GOLDEN[name]["sha256"] == digest(name), "rows changed: raise the task's version"


def test_other_processes_and_threads_make_the_same_rows():
    names = [n for n in tasks.names() if not n.endswith("_release")]
    code = (
        "import sys; sys.path[:0] = ['.', 'tests/tasks']\n"
        "from test_every_task import digest\n"
        f"print(*[digest(n) for n in {names!r}])"
    )
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "PATH": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    with ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(digest, names))
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    assert ours == out.split() == [GOLDEN[n]["sha256"] for n in names]


@EVERY
def test_parameters_make_the_same_task_again(name):
    task = tasks.get(name)
    again = tasks.get(name, **json.loads(json.dumps(task.params)))
    assert again == task
    assert (hash(again), repr(again)) == (hash(task), repr(task))
    assert tasks.get(name, **task.params | longer(name)) != task
    assert eval(repr(task), {type(task).__name__: type(task)}) == task


@EVERY
def test_answers_are_balanced_as_documented(name):
    """One scored position per row, so that rows are independent: frequencies within 5 standard errors."""
    task = tasks.get(name)
    n = 20_000
    _, targets = task.batch(n, split="test")
    scored = targets != tasks.IGNORE
    has = scored.any(1)
    turn = (torch.arange(n) * 7919) % scored.sum(1).clamp(min=1)
    chosen = (scored.cumsum(1) - 1 == turn[:, None]) & scored
    answers = targets[chosen]
    assert len(answers) == int(has.sum())
    share = answers.bincount(minlength=task.vocab_size) / len(answers)
    error = (task.majority * (1 - task.majority) / len(answers)) ** 0.5
    assert float(share.max()) <= task.majority + 5 * error
    assert float(share.max()) >= task.majority - 3 * error
    if task.majority == pytest.approx(task.chance):
        used = share[share > 0]
        assert len(used) == round(1 / task.chance)
        assert float((used - task.chance).abs().max()) <= 5 * error


UNBALANCED = [
    ("modular_count", {"increments": "unit", "length": 16, "min_length": 4, "test_length": [17, 20]}),
    ("cycle_navigation", {"length": 14, "min_length": 12, "scoring": "final", "places": 9}),
    ("cycle_navigation", {"length": 16, "places": 7}),
    ("even_pairs", {"length": 12}),
    ("word_problem", {"length": 6, "generators": "swaps", "group": "S3", "test_length": [7, 12]}),
    ("modular_arithmetic", {"length": 15, "min_length": 11, "operators": "*-", "modulus": 6}),
    ("modular_arithmetic", {"length": 19, "min_length": 15, "scoring": "final", "modulus": 4}),
    ("bracket_arithmetic", {"length": 29, "min_length": 21, "modulus": 6}),
    ("bracket_arithmetic", {"length": 37, "min_length": 29, "scoring": "final", "operators": "*"}),
    ("silence_gate", {"value_ids": 2}),
]


@pytest.mark.parametrize(("name", "params"), UNBALANCED)
def test_majority_is_exact_where_answers_are_not_balanced(name, params):
    task, n = tasks.get(name, **params), 60_000
    targets = task.batch(n, split="test").targets
    answers = targets[targets != tasks.IGNORE]
    share = float(answers.bincount().max() / len(answers))
    assert task.majority > task.chance
    # Positions of a row are not independent: the error of as many rows, not of as many positions.
    assert abs(share - task.majority) < 3 * (task.majority * (1 - task.majority) / n) ** 0.5


@EVERY
def test_documentation(name):
    cls = tasks.family(name)
    assert ">>> " in (cls.__doc__ or ""), "a worked example"
    assert cls.summary
    assert cls.version >= 1
    task = tasks.get(name)
    assert 0 < task.chance <= task.majority + 1e-12 < task.ceiling <= 1
    assert (task.ceiling < 1) == (name in AMBIGUOUS)
    assert len({task.spell(i) for i in range(task.vocab_size) if task.spell(i) != "·"}) > 1


@EVERY
def test_lengths_change_on_one_class_without_a_trace(name):
    """A second length after the first works, and the first still gives the same rows."""
    first = tasks.get(name)
    rows = first.batch(8)
    second = tasks.get(name, **longer(name))
    inputs, targets = second.batch(8)
    assert inputs.shape[1] == second.length != first.length
    if name not in AMBIGUOUS:
        assert torch.equal(second.solve(inputs), targets)
    assert torch.equal(first.batch(8).inputs, rows.inputs)


@pytest.mark.gpu
@EVERY
def test_gpu_makes_the_same_integers(name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    task = tasks.get(name)
    for split in SPLITS:
        ours, theirs = task.batch(300, split=split), task.batch(300, split=split, device="cuda")
        assert theirs.inputs.is_cuda
        assert torch.equal(ours.inputs, theirs.inputs.cpu())
        assert torch.equal(ours.targets, theirs.targets.cpu())
        assert torch.equal(task.solve(theirs.inputs).cpu(), task.solve(ours.inputs))
    ours, theirs = (task.batch(70, seed=[0, 5, 9], device=device) for device in ("cpu", "cuda"))
    assert torch.equal(ours.inputs, theirs.inputs.cpu())
    assert torch.equal(ours.targets, theirs.targets.cpu())


if __name__ == "__main__":
    golden = {n: {"version": tasks.get(n).version, "sha256": digest(n)} for n in tasks.names()}
    Path(__file__).with_name("golden.json").write_text(json.dumps(golden, indent=1) + "\n")
