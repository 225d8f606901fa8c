"""Find the lines of the package that name a device type, and report which of them ran on the pretended devices.

`make test-device` calls it twice. `lines.py start FOLDER` writes settings with which each test process records the
lines that it runs. `lines.py report FOLDER` prints the lines that never ran, each with its reason from `REASONS`. It
fails if a line has no reason, or if the line of a reason ran or no longer exists.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from pretended import build

PACKAGE = Path(__file__).parents[2] / "lightning_amp"
TYPES = {"cpu", "cuda", "gpu", "mps", "xpu", "hpu", "npu", "xla", "tpu"}
MODULES = {"cuda", "mps", "xpu", "accelerator"}

REASONS: dict[str, str] = {
    "if not (": "a weight that is shared between its uses, which only a CPU does",
    "has_devices = torch.accelerator.current_accelerator(check_available=True) is not None": "the command, slow tests",
    'elif device.type == "cuda" and not any(_modules.is_compiled(part) for m in modules for part in m.modules()):': (
        "fp8, which the pretended device lacks"
    ),
    'return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))': "ROCm",
}
"""Lines that do not run on a pretended device: the line as it stands, and the reason."""


def device_lines(source: str) -> Iterator[int]:
    """Yield the line numbers at which a statement that names a device type begins."""
    tree = ast.parse(source)
    for statement in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):
        if any(_names_a_device(node) for node in _own_nodes(statement)):
            yield statement.lineno


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement's own expressions, without the expressions of inner statements, docstrings and annotations."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return
    stack: list[ast.AST] = [
        node
        for name, value in ast.iter_fields(statement)
        if name != "annotation"
        for node in (value if isinstance(value, list) else [value])
        if isinstance(node, ast.AST) and not isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case))
    ]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))


def _names_a_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.partition(":")[0] in TYPES
    if isinstance(node, ast.Attribute):
        is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        return node.attr in {"get_device_module", "is_cuda"} or (is_torch and node.attr in MODULES)
    return False


def start(folder: Path) -> None:
    """Write coverage's settings: it traces only the files that name a device, which costs little."""
    named = [path for path in PACKAGE.rglob("*.py") if any(device_lines(path.read_text(encoding="utf-8")))]
    settings = ["[run]", "parallel = true", f"data_file = {folder / 'ran'}", "include =", *(f"    {p}" for p in named)]
    (folder / "settings").write_text("\n".join(settings) + "\n", encoding="utf-8")


def report(folder: Path) -> int:
    """Print the lines that never ran; return how many have no reason, or a reason that does not hold."""
    import coverage
    import torch

    if not all(build.compiled(kind, torch.__version__).exists() for kind in build.KINDS):
        print("There is no pretended device, so it was not looked at which lines of the package run on one.")
        return 0
    measured = coverage.Coverage(config_file=str(folder / "settings"))
    measured.combine([str(folder)], keep=True)
    data = measured.get_data()
    reasons, ran, wrong = dict(REASONS), 0, 0
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        text = source.splitlines()
        executed = set(data.lines(str(path)) or ())
        for number in sorted(set(device_lines(source))):
            if number in executed:
                ran += 1
                continue
            line = text[number - 1].strip()
            reason = reasons.pop(line, "")
            wrong += not reason
            where = f"{path.relative_to(PACKAGE.parent)}:{number}"
            print(f"{'left out' if reason else 'NEVER RAN'}: {where}: {line}" + (f"  ({reason})" if reason else ""))
    for line in reasons:
        print(f"STALE REASON, it ran or is gone: {line}")
    print(f"{ran} lines of the package that name a device type ran on the pretended devices.")
    return wrong + len(reasons)


if __name__ == "__main__":
    {"start": start, "report": lambda folder: sys.exit(bool(report(folder)))}[sys.argv[1]](Path(sys.argv[2]).resolve())
