"""Tasks in print: the list, examples with their answers explained, and the page docs/tasks.md."""

import inspect
from typing import TYPE_CHECKING, Any

from tasks.base import IGNORE, Task, family, get, names

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

# Small enough to read; everything else as by default.
EXAMPLES: dict[str, dict[str, Any]] = {
    "bracket_arithmetic": {"length": 21},
    "compression": {"symbols": 8},
    "copy": {"length": 17},
    "cycle_navigation": {"length": 16},
    "even_pairs": {"length": 16},
    "filler_recall": {"length": 24, "pairs": 4, "queries": 2},
    "flip_flop": {"length": 24},
    "fuzzy_recall": {"length": 28, "pairs": 3, "queries": 2},
    "in_context_automata": {"length": 30, "states": 3, "inputs": 2},
    "induction_heads": {"length": 20},
    "memorization": {"length": 16},
    "modular_add": {"length": 24},
    "modular_arithmetic": {"length": 15},
    "modular_count": {"length": 16},
    "mqar": {"length": 24, "pairs": 4},
    "mux": {"length": 24},
    "noisy_recall": {"length": 24, "pairs": 4, "queries": 2},
    "overwrite_recall": {"length": 24, "keys": 2, "writes": 5, "queries": 2},
    "palindrome": {"length": 24},
    "parity": {"length": 24},
    "poly_recall": {"length": 30, "keys": 2, "queries": 2},
    "running_parity": {"length": 16},
    "selective_copy": {"length": 24, "items": 4},
    "silence_gate": {"length": 24, "records": 3, "queries": 2},
    "stack": {"length": 20},
    "variable_tracking": {"length": 30, "chains": 2, "depth": 2, "queries": 2},
    "word_problem": {"length": 12},
    "xor": {"length": 24},
}
COLOURS = ("bright_black", "cyan", "yellow", "green", "magenta", "blue", "red")


def example(name: str, **params: Any) -> Task:
    """The task with parameters small enough to print, unless others are given."""
    return get(name, **({} if params else EXAMPLES.get(name, {})) | params)


def explain(task: Task, inputs: Any, targets: Any, labels: dict[str, Any]) -> list[str]:
    """One line per scored position of a row: where, what is read there, the answer, and the slice labels."""
    lines = []
    for t, target in enumerate(targets.tolist()):
        if target == IGNORE:
            continue
        facts = [f"{k} {int(v[t])}" for k, v in labels.items() if k != "position"]
        source = ""
        if "distance" in labels and task.spell(target) == task.spell(
            int(inputs[t - int(labels["distance"][t])])
        ):
            source = f", read at {t - int(labels['distance'][t])}"
        lines.append(
            f"at {t:>3}  {task.spell(int(inputs[t]))} → {task.spell(target)}"
            + (f"   ({', '.join(facts)}{source})" if facts else "")
        )
    return lines


def describe() -> "Table":
    """All tasks, one line each: a rich table."""
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("task", style="cyan", no_wrap=True)
    table.add_column("what is asked")
    for column in ("T", "vocabulary", "chance", "majority", "ceiling"):
        table.add_column(column, justify="right")
    for name in names():
        task = get(name)
        numbers = (f"{x:.3f}" for x in (task.chance, task.majority, task.ceiling))
        table.add_row(name, task.summary, str(task.length), str(task.vocab_size), *numbers)
    return table


def render(name: str, n: int = 3, **params: Any) -> "Group":
    """n examples of a task with its ranges in colour and the answers explained: a rich group.

    Without parameters the examples are small ones. Raises ValueError for a name or parameter that is unknown.
    """
    from rich.console import Group
    from rich.text import Text

    task = example(name, **params)
    colour = {role: COLOURS[i % len(COLOURS)] for i, role in enumerate(reversed(task.vocabulary))}
    colour |= {"noise": "bright_black"} if "noise" in colour else {}
    cls = family(name)
    parts: list[Text] = [Text(f"{task!r}\n", style="bold"), Text(inspect.cleandoc(cls.__doc__ or "") + "\n")]
    legend = Text("ids: ")
    for role, ids in task.vocabulary.items():
        legend.append(f"{role} {ids.start}-{ids.stop - 1}  ", style=colour[role])
    parts.append(legend)
    parts.append(
        Text(
            f"chance {task.chance:.3f}, majority {task.majority:.3f}, ceiling {task.ceiling:.3f}; ▸ = answer"
        )
    )
    batch = task.batch(n)
    slices = batch.slices
    for i, (inputs, targets) in enumerate(zip(*batch, strict=True)):
        line = Text(f"\n{i}  ")
        for token, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            role = next(r for r, ids in task.vocabulary.items() if token in ids)
            line.append(task.spell(token), style=colour[role])
            if target != IGNORE:
                line.append(f"▸{task.spell(target)}", style="bold reverse")
            line.append(" ")
        parts.append(line)
        for explanation in explain(task, inputs, targets, {k: v[i] for k, v in slices.items()})[:8]:
            parts.append(Text(f"   {explanation}", style="dim"))
    return Group(*parts)


def _row(task: Task, inputs: Any, targets: Any) -> str:
    words = []
    for token, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        words.append(task.spell(token) + ("" if target == IGNORE else f"▸{task.spell(target)}"))
    return " ".join(words)


def markdown() -> str:
    """The text of docs/tasks.md."""
    out = [
        "# Tasks",
        "",
        "Written by `python -m tasks`. In the examples, `x▸y` reads: at token x the answer y is asked; a dot "
        "is noise. Chance is a guess among the possible answers, majority the best answer that ignores the "
        "inputs, the ceiling the best answer that reads them. Ceilings below 1 belong to the public "
        "release's own variants (`*_release`).",
        "",
        "**Rows.** Row i of `task.batch(n, seed, step, split)` is a pure function of the parameters, the "
        "task's version, the split, the seed, the step and i: on any device, in any process, for any n. "
        "Targets are token ids, -100 where nothing is asked.",
        "",
        "**Splits.** Some tokens of every sequence are its check digits (noise where there is noise). They "
        "and a hash of all other tokens decide its split. A sequence so has one split, whoever makes it, and "
        "`task.split_of(inputs)` reads it back. Val and test are a sixteenth of all sequences each, or "
        "somewhat less where the digits do not divide by 16. With `test_length`, test words are longer than "
        "training words. Word lengths with fewer than 1,024 words are training only; a task with fewer than "
        "1,024 sequences is refused.",
        "",
        "**Lengths.** Where lengths are mixed, a row is padded on the right with PAD and a PAD is never "
        "scored; `tasks.scores(output, batch)` gives accuracy by length, position, distance and so on.",
        "",
        "| task | what is asked | T | vocabulary | chance | majority | ceiling | version |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names():
        task = get(name)
        numbers = " | ".join(f"{x:.3f}" for x in (task.chance, task.majority, task.ceiling))
        size = f"{task.length} | {task.vocab_size}"
        out.append(f"| [`{name}`](#{name}) | {task.summary} | {size} | {numbers} | {task.version} |")
    for name in names():
        task = example(name)
        doc = inspect.cleandoc(type(task).__doc__ or "")
        prose, _, rest = doc.partition(">>> ")
        # What follows the worked example, which doctest runs: the first line after its output's blank line.
        after = rest.partition("\n\n")[2]
        out += ["", f"## {name}", "", prose.strip(), ""]
        if after.strip():
            head, _, parameters = after.partition("Parameters\n----------")
            out += [head.strip(), ""] if head.strip() else []
            if parameters:
                out += [f"* {line.strip()}" for line in _joined(parameters)] + [""]
        defaults = ", ".join(f"{k}={v!r}" for k, v in get(name).params.items())
        out += [f"Defaults: `{defaults}`.", ""]
        roles = ", ".join(f"{r} {ids.start}-{ids.stop - 1}" for r, ids in task.vocabulary.items())
        shown = ", ".join(f"{k}={v!r}" for k, v in EXAMPLES.get(name, {}).items())
        out += [f"Three rows{' with ' + shown if shown else ''} (ids: {roles}):", "", "```text"]
        out += [_row(task, x, y) for x, y in zip(*task.batch(3), strict=True)]
        out += ["```"]
    return "\n".join(out) + "\n"


def _joined(parameters: str) -> list[str]:
    """Parameter entries, continuation lines appended."""
    entries: list[str] = []
    for line in parameters.strip().splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        elif line.strip():
            entries.append(line)
    return entries
