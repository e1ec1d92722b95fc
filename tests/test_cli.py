"""The command line without training: help, exit codes, errors in one line, the light verbs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ltconvert import __version__, recipes
from ltconvert.cli import app
from ltconvert.cli_session import explain, run
from ltconvert.errors import UserError

VERBS = ("distill", "select-layers", "plan", "eval", "generate", "inspect", "doctor")


def error_line(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 2) -> str:
    """Run a call that must fail with `code` and one line on stderr; that line."""
    assert run(app, arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("verb", ["", *VERBS, "recipes", "recipes show"])
def test_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, [*verb.split(), "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_shared_flags_are_on_every_verb(verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    shared = {"--device", "--precision", "--kernel", "--json", "--verbose", "-v", "--debug"}
    assert shared <= options


def test_help_loads_nothing_heavy() -> None:
    """What makes a start slow is not there after `ltconvert --help`."""
    code = (
        "import sys\nfrom ltconvert.cli import app\nfrom ltconvert.cli_session import run\n"
        "assert run(app, ['distill', '--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_installed_command() -> None:
    command = Path(sys.executable).with_name("ltconvert")
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"ltconvert {__version__}")
    done = subprocess.run([command, "inspect", "no/such/thing/x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["distil"], "Did you mean 'distill'?"),
        (["distill"], "Missing option '--teacher'; see --help"),
        (["distill", "--techer", "x"], "--techer"),
        (["doctor", "--kernel", "cuda"], "--kernel"),
        (["doctor", "--device", "tpu"], "--device tpu: expected auto, cpu, cuda or cuda:N"),
        (["doctor", "--device", "mps"], "--device mps: expected auto, cpu, cuda or cuda:N"),
        (["doctor", "--kernel", "triton"], "--kernel triton: "),
        (["generate", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["eval"], "eval needs --teacher, --student or both"),
        (["distill", "--teacher", "x", "--recipe", "hybrid2"], "did you mean hybrid25?"),
        (["distill", "--teacher", "x", "--budget", "tiny"], "unknown budget 'tiny'"),
        (["plan", "--teacher", "x", "--set", "align.lt=1"], "did you mean align.lr?"),
        (["inspect", "nothing"], "no teacher 'nothing'"),
        (["inspect", "nothing", "--hold", "depths"], "--match; add --match"),
        (["inspect", __file__], "is a file, but no .gguf file"),
        (["recipes", "check", "hybrid25", "x.yaml"], "recipe x.yaml: no such file"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert expected in error_line(capsys, arguments)


@pytest.mark.parametrize("words", [[], ["recipes"], ["bench"]], ids=str)
def test_no_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert error_line(capsys, words) == "error: no command given; see --help\n"


def test_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "use --device cpu" in error_line(capsys, ["doctor", "--device", "cuda"])


def test_errors_with_json_are_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["inspect", "nothing", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 2
    assert "nothing" in document["error"]


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (UserError("line one\n  line two"), 2, "line one line two"),
        (KeyError("x"), 1, "KeyError: 'x'"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 2, "a.txt: No such file"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (ConnectionError("OfflineModeIsEnabled: no hub"), 2, "no hub"),
        (MemoryError(), 2, "out of memory: lower micro_batch_rows"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "out of memory"),
        (RuntimeError("shape mismatch"), 1, "RuntimeError: shape mismatch"),
    ],
)
def test_every_exception_has_a_line_and_a_code(error: Exception, code: int, expected: str) -> None:
    line, found = explain(error)
    assert found == code
    assert expected in line
    assert "\n" not in line


def _fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def raising(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("ltconvert.cli_doctor.examine", raising)


def test_our_own_faults_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail(monkeypatch, ZeroDivisionError("division by zero"))
    line = error_line(capsys, ["doctor"], code=1)
    assert "division by zero" in line
    assert "rerun with --debug for the traceback" in line
    assert run(app, ["doctor", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("message", ["", "stopped; the same command goes on"])
def test_ctrl_c_exits_130(
    message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail(monkeypatch, KeyboardInterrupt(message))
    line = error_line(capsys, ["doctor"], code=130)
    assert (message or "interrupted") in line


def test_sigterm_ends_as_ctrl_c(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "ltconvert.cli_doctor.examine", lambda _: signal.raise_signal(signal.SIGTERM)
    )
    assert "interrupted" in error_line(capsys, ["doctor"], code=130)
    assert signal.getsignal(signal.SIGTERM) == before


def test_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(app, ["recipes", "list"]) == 0
    assert "hybrid25" in capsys.readouterr().out
    assert run(app, ["recipes", "list", "--json"]) == 0
    assert "hybrid25" in json.loads(capsys.readouterr().out)["recipes"]
    call = ["recipes", "show", "hybrid25", "--budget", "demo", "--data", "d", "--set", "seed=7"]
    assert run(app, call) == 0
    shown = capsys.readouterr().out
    path = tmp_path / "mine.yaml"
    path.write_text(shown, encoding="utf-8")
    assert "seed: 7" in shown
    assert "source: d" in shown
    assert run(app, ["recipes", "check", str(path), "window"]) == 0
    assert f"{path}: ok" in capsys.readouterr().out
    idle = ["recipes", "check", "window", "--set", "student.pool_skip=true"]
    assert run(app, idle) == 0
    assert "student.pool_skip" in capsys.readouterr().out  # which acts in a Dreamer alone
    assert run(app, ["recipes", "check", "window", "--set", "logits.lt=1"]) == 2
    assert "did you mean logits.lr?" in capsys.readouterr().err
    path.write_text("sed: 7\nlogits: {lt: 1}\n", encoding="utf-8")
    assert run(app, ["recipes", "check", str(path), "window", "windo"]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("window: ok") and shown.err.splitlines() == [
        f"error: recipe {path}: unknown key sed; did you mean seed?",
        f"error: recipe {path}: unknown key logits.lt; did you mean logits.lr?",
        "error: unknown recipe 'windo'; did you mean window?; known: "
        + f"{', '.join(recipes.names())}, or the path of a YAML file",
    ]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["doctor", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert {"python", "torch", "device", "memory", "precision", "kernel delta_rule"} <= set(found)
    assert found["model hub"]["value"] == "offline by HF_HUB_OFFLINE"
    for finding in document["findings"]:
        assert finding["state"] == "ok" or finding["remedy"], finding
    assert run(app, ["doctor"]) == 0
    assert "precision" in capsys.readouterr().out
