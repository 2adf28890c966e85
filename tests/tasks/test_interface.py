"""Names, parameters, errors, curriculum and print."""

from io import StringIO
from pathlib import Path

import pytest

import tasks
from tasks.__main__ import main
from tasks.base import Task, register
from tasks.gallery import EXAMPLES, example, markdown

BAD = [
    ("nope", {}, r"^name: expected a registered task such as .*, got 'nope'$"),
    ("xorr", {}, r"^name: expected a registered task such as xor"),
    ("xor", {"colour": 1}, r"^xor: expected parameters among length, .*operands, got colour$"),
    ("xor", {"length": 0}, r"^length: expected an integer at least 2, got 0$"),
    ("xor", {"length": 64.0}, r"^length: expected an integer at least 2, got 64.0$"),
    ("xor", {"length": True}, r"^length: expected an integer at least 2, got True$"),
    ("xor", {"scoring": "loose"}, r"^scoring: expected one of dense, final, got 'loose'$"),
    ("xor", {"operands": 5}, r"^operands: expected an even number, got 5$"),
    ("xor", {"vocab_size": 9}, r"^vocab_size: expected an integer at least 10, got 9$"),
    (
        "xor",
        {"length": 20, "blocks": 9},
        r"^length: expected at least 28 for 9 blocks of 3 tokens and 1 of noise",
    ),
    ("xor", {"scoring": "final", "blocks": 2}, r"^blocks: expected an integer from 1 to 1, got 2$"),
    ("mqar", {"pairs": 40}, r"^pairs: expected an integer from 1 to 28, got 40$"),
    ("mqar", {"length": 20, "pairs": 9, "queries": 3}, r"^queries: expected an integer from 1 to 2, got 3$"),
    ("running_parity", {"min_length": 70}, r"^min_length: expected an integer from 1 to 64, got 70$"),
    ("running_parity", {"test_length": 90}, r"^test_length: expected \(shortest, longest\), got 90$"),
    (
        "running_parity",
        {"test_length": [60, 90]},
        r"^test_length\[0\]: expected an integer at least 65, got 60$",
    ),
    (
        "modular_arithmetic",
        {"length": 64},
        r"^length: expected -1 plus a multiple of 2, such as 63 or 65, got 64$",
    ),
    (
        "modular_arithmetic",
        {"operators": "+/"},
        r"^operators: expected different characters of '\+-\*', got '\+/'$",
    ),
    ("bracket_arithmetic", {"modulus": 1}, r"^modulus: expected an integer from 2 to 64, got 1$"),
    ("word_problem", {"group": "S6"}, r"^group: expected one of S3, S4, A5, S5, got 'S6'$"),
    ("stack", {"scoring": "final"}, r"^scoring: expected 'dense' for stack, got 'final'$"),
    ("memorization", {"value_ids": 7}, r"^value_ids: expected a divisor of key_ids = 256, got 7$"),
    ("memorization", {"length": 63}, r"^length: expected an even number, got 63$"),
    ("noisy_recall", {"length": 20}, r"^length: expected an integer at least 22, got 20$"),
    ("variable_tracking", {"depth": 9}, r"^variable_ids: expected an integer at least 18, got 16$"),
    ("fuzzy_recall", {"pairs": 5, "key_ids": 2}, r"^pairs: expected an integer from 1 to 4, got 5$"),
    ("mqar_release", {"vocab_size": 20}, r"^vocab_size: expected an integer at least 32, got 20$"),
]


@pytest.mark.parametrize(("name", "params", "message"), BAD)
def test_impossible_parameters_say_what_was_expected(name, params, message):
    with pytest.raises(ValueError, match=message):
        tasks.get(name, **params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "^n: expected an integer at least 1, got 0$"),
        ({"n": 3, "split": "dev"}, "^split: expected one of train, val, test, got 'dev'$"),
        ({"n": 3, "start": -1}, "^start: expected an integer at least 0, got -1$"),
        ({"n": 3, "seed": 0.5}, "^seed: expected an integer from .*, got 0.5$"),
        ({"n": 3, "seed": []}, "^seed: expected an integer or at least one, got none$"),
        ({"n": 3, "seed": [1, "2"]}, "^seed: expected an integer from .*, got '2'$"),
        ({"n": 3, "step": None}, "^step: expected an integer from .*, got None$"),
    ],
)
def test_impossible_batches_say_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        tasks.get("xor").batch(**arguments)


def test_the_suite_is_complete():
    paper = [
        "mqar",
        "poly_recall",
        "variable_tracking",
        "xor",
        "parity",
        "modular_add",
        "palindrome",
        "silence_gate",
        "mux",
    ]
    tracking = [
        "running_parity",
        "modular_count",
        "word_problem",
        "modular_arithmetic",
        "bracket_arithmetic",
        "even_pairs",
        "cycle_navigation",
        "flip_flop",
    ]
    recall = [
        "overwrite_recall",
        "filler_recall",
        "fuzzy_recall",
        "selective_copy",
        "induction_heads",
        "stack",
        "copy",
        "in_context_automata",
        "noisy_recall",
        "compression",
        "memorization",
    ]
    released = [f"{name}_release" for name in paper]
    assert tasks.names() == sorted(paper + released + tracking + recall)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="name: expected a new task name, got 'xor' twice"):
        register(type("Again", (Task,), {"name": "xor"}))


def test_curriculum_climbs_and_resumes():
    ladder = tasks.Curriculum("mqar", [{"pairs": k} for k in (2, 4, 8)], below=0.5, length=64)
    assert [ladder.update(x) for x in (0.5, float("nan"), 0.4, 0.9)] == [False, False, True, False]
    assert ladder.rung == 1
    assert ladder.task == tasks.get("mqar", pairs=4, length=64)
    assert ladder.final == tasks.get("mqar", pairs=8, length=64)
    assert [ladder.update(0.1) for _ in range(3)] == [True, False, False]
    ladder.rung = 0
    assert ladder.task.params["pairs"] == 2
    with pytest.raises(ValueError, match=r"^rung: expected an integer from 0 to 2, got 3$"):
        ladder.rung = 3


def test_curriculum_refuses_what_one_model_could_not_read():
    with pytest.raises(ValueError, match=r"^rungs: expected one vocabulary size for all, got \[25, 33\]$"):
        tasks.Curriculum("compression", [{"symbols": 8}, {"symbols": 16}], below=0.1)
    with pytest.raises(ValueError, match=r"^rungs: expected at least one, got none$"):
        tasks.Curriculum("mqar", [], below=0.1)
    with pytest.raises(ValueError, match=r"^below: expected a finite number, got nan$"):
        tasks.Curriculum("mqar", [{}], below=float("nan"))


def rendered(renderable):
    from rich.console import Console

    console = Console(width=200, file=StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_the_list_names_every_task():
    text = rendered(tasks.describe())
    assert all(name in text for name in tasks.names())


@pytest.mark.parametrize("name", tasks.names())
def test_examples_show_tokens_answers_and_ranges(name):
    text = rendered(tasks.render(name, n=2))
    task = example(name)
    batch = task.batch(2)
    answers = [task.spell(y) for y in batch.targets[0].tolist() if y != tasks.IGNORE]
    assert all(f"▸{a}" in text for a in answers)
    assert all(f"{role} {ids.start}-{ids.stop - 1}" in text for role, ids in task.vocabulary.items())
    assert f"→ {answers[0]}" in text


def test_render_takes_parameters_and_refuses_unknown_names():
    assert "length=48" in rendered(tasks.render("xor", n=1, length=48))
    with pytest.raises(ValueError, match="expected a registered task"):
        tasks.render("nope")


def test_the_page_is_up_to_date_and_complete(tmp_path, capsys):
    page = Path(__file__).parents[2] / "docs" / "tasks.md"
    assert main(["--check"], page) == 0, "docs/tasks.md is out of date: python -m tasks"
    assert set(EXAMPLES) <= set(tasks.names())
    new = tmp_path / "docs" / "tasks.md"
    assert main(["--check"], new) == 1
    assert main([], new) == 0
    assert capsys.readouterr().out.strip() == str(new)
    assert new.read_text(encoding="utf-8") == markdown() == page.read_text(encoding="utf-8")
