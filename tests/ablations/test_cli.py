import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ablations
from ablations import runner
from ablations.cli import app
from prism import verify

CHECKOUT = Path(ablations.__file__).resolve().parent.parent


def prism(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["verify"], ["ablate"], ["report"], ["probe"], ["bench"], ["tasks"]]
)
def test_every_command_has_help(command):
    result = prism(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_of_probe_names_every_measure():
    import probes

    shown = prism("probe", "--help").output
    assert not [name for name in probes.MEASURES if name.replace("_", "-") not in shown]


def test_help_does_not_wait_for_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom ablations.cli import app\n"
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, check=True, timeout=60)


def test_ablate_then_report_then_probe(grid_file, tmp_path):
    out = tmp_path / "run"
    result = prism("ablate", grid_file, "--out", out, "--save-models")
    assert result.exit_code == 0, result.output
    assert "PRISM" in result.output
    assert "What was found" in result.output
    assert "scan backend that ran: chunked" in result.output
    assert (out / "figures" / "learning_curves.png").stat().st_size > 5000
    (out / "report.md").unlink()
    result = prism("report", out, "--no-figures")
    assert result.exit_code == 0, result.output
    assert "![accuracy](figures/accuracy.png)" in (out / "report.md").read_text()
    result = prism("probe", out, "--measure", "residual-decay", "--sequences", "2")
    assert result.exit_code == 0, result.output
    assert (out / "figures" / "residual_decay_xor.png").stat().st_size > 5000


def test_probe_takes_any_saved_model(tmp_path):
    from prism import PrismConfig, PrismModel

    config = PrismConfig.preset("gdn", vocab_size=32, d_model=8, n_layers=1)
    PrismModel(config, seed=0).save_pretrained(tmp_path)
    for arguments, words in (
        ((), "task: expected --task 'NAME key=value ...' and no --arm with a saved model"),
        (("--task", "mqar"), "task: expected at most the model's 32 token ids, got 64"),
        (("--task", "xor", "--measure", "gain-fidelity"), "measure: gain_fidelity reads 'gain', which"),
    ):
        result = prism("probe", tmp_path, *arguments)
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
    result = prism("probe", tmp_path, "--task", "xor length=16", "--sequences", "2")
    assert result.exit_code == 0, result.output
    drawn = sorted(path.name for path in (tmp_path / "figures").glob("*.png"))
    assert drawn == ["state_rank_xor.png", "update_rank_xor.png"]  # no refinement, no residual


def test_terminal_and_files_tell_of_the_same_cells(grid_file, tmp_path):
    out = tmp_path / "run"
    prism("ablate", grid_file, "--out", out)
    grid_file.write_text(grid_file.read_text().replace('"seeds": [0, 1]', '"seeds": [0]'))
    result = prism("ablate", grid_file, "--out", out)
    assert result.exit_code == 0, result.output
    assert "of 2" in result.output
    assert "of 2" in (out / "report.md").read_text()
    assert "of 1" not in result.output


def test_ablate_from_flags(tmp_path):
    result = prism(
        "ablate", "--task", "xor length=16", "--arm", "gdn d_model=8 n_layers=1", "--seeds", "1",
        "--steps", "2",
        "--batch-size", "2", "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "[n = 1]" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablate", "--task", "xor", "--arm", "gdn d_modell=8"], "d_modell"),
        (["ablate", "--task", "nonsense", "--arm", "gdn"], "expected a registered task"),
        (["ablate"], "--task: expected at least one"),
        (["report", "/nowhere"], "no finished cell"),
        (["probe", "/nowhere"], "no finished cell"),
        (["tasks", "show", "nonsense"], "expected a registered task"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = prism(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_ctrl_c_is_exit_code_130_and_says_how_to_go_on(grid_file, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    result = prism("ablate", grid_file, "--out", tmp_path)
    assert result.exit_code == 130
    assert "Finished cells are kept" in result.output


@pytest.mark.parametrize(
    ("comparisons", "code", "message"),
    [
        ([("output", 1e-12, ""), ("state", 1e-11, "")], 0, "2 comparisons passed"),
        ([("output", 1e-12, ""), ("gradient of k", 0.25, "")], 1, "gradient of k is off by 0.25"),
        ([("output", float("inf"), "")], 1, "output is off by inf"),
        ([("output", float("nan"), "")], 1, "output is off by nan"),
        ([("output", 0.0, ""), ("all", float("nan"), "fla is not installed")], 0, "1 skipped"),
        ([("all", float("nan"), "fla is not installed")], 1, "nothing was compared"),
        ([], 1, "nothing was compared"),
    ],
)
def test_verify_names_what_fails_and_exits_with_1(comparisons, code, message, monkeypatch):
    made = [
        verify.Comparison("L = 0 is GDN", tensor, error, 1e-10, "chunked", note)
        for tensor, error, note in comparisons
    ]
    monkeypatch.setattr(verify, "run", lambda device: made)
    result = prism("verify")
    assert result.exit_code == code
    assert message in result.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_verify_passes_on_a_gpu_and_names_the_kernel():
    result = prism("verify", "--device", "cuda")
    assert result.exit_code == 0, result.output
    assert "0 failed" in result.output
    assert "backends that ran: recurrent, chunked, triton" in " ".join(result.output.split())


def test_tasks_are_listed():
    result = prism("tasks")
    assert result.exit_code == 0
    assert "mqar" in result.output
    assert "xor" in result.output


def test_bench_runs_scripts_and_counts_failures(tmp_path, capfd):
    from ablations.benchmarks import run_benchmarks

    (tmp_path / "bench_good.py").write_text("import sys; print('args', sys.argv[1:])")
    (tmp_path / "bench_bad.py").write_text("raise SystemExit(3)")
    assert run_benchmarks(folder=tmp_path) == 1
    assert run_benchmarks("good", ["--device", "cuda"], folder=tmp_path) == 0
    assert "args ['--device', 'cuda']" in capfd.readouterr().out
    with pytest.raises(ValueError, match="name: expected one of bad, good, got 'better'"):
        run_benchmarks("better", folder=tmp_path)
    with pytest.raises(ValueError, match="arguments: expected the name of a benchmark before --x"):
        run_benchmarks(None, ["--x"], folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="part of a checkout, not of the installed package"):
        run_benchmarks(folder=tmp_path / "nowhere")


def test_bench_skips_what_needs_a_gpu_and_says_so_unless_asked_by_name(tmp_path, capfd, monkeypatch):
    from ablations import benchmarks

    (tmp_path / "bench_kernel.py").write_text("NEEDS_GPU = True\nraise SystemExit(3)")
    monkeypatch.setattr(benchmarks, "_gpu", lambda: False)
    assert benchmarks.run_benchmarks(folder=tmp_path) == 0
    assert "skipped: it needs a CUDA GPU" in capfd.readouterr().out
    assert benchmarks.run_benchmarks("kernel", folder=tmp_path) == 1
    monkeypatch.setattr(benchmarks, "_gpu", lambda: True)
    assert benchmarks.run_benchmarks(folder=tmp_path) == 1


def test_other_peoples_packages_are_named(tmp_path):
    """`prism` and `tasks` are names of other distributions too."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import ablations"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert "ImportError: ablations needs prism-lab's own package 'tasks'" in result.stderr
    assert str(tmp_path / "tasks") in result.stderr
