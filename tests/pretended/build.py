"""Compile the pretended device for the torch that is installed: `python tests/pretended/build.py [cuda] [pretended]`.

The compiled modules lie in `$LIGHTNING_AMP_TEST_CACHE`, by default in `~/.cache/lightning_amp_tests`, under a name that
changes with the source, with torch and with Python. Half a minute of CPU time for each of the two; nothing if it is
there. Without a compiler, or with a torch whose headers are different, it prints one line, and the tests are skipped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
KINDS = ("cuda", "pretended")


def compiled(kind: str, torch_version: str) -> Path:
    """Return the path of the compiled device of this kind, whether or not it exists yet."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_amp_tests"
    key = hashlib.sha256(SOURCE.read_bytes())
    for part in (torch_version, sys.version, sysconfig.get_platform()):
        key.update(part.encode())
    folder = Path(os.environ.get("LIGHTNING_AMP_TEST_CACHE") or default)
    return folder / key.hexdigest()[:16] / f"pretended_{kind}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(kind: str) -> str:
    """Compile one of the two, if that has not been done.

    Returns:
        Why it could not be done, in one line; empty if it lies there now.

    """
    import torch
    from torch.utils.cpp_extension import include_paths

    target = compiled(kind, torch.__version__)
    if target.exists():
        return ""
    if torch.backends.cuda.is_built():
        return "this torch was built for CUDA; the device needs one that was built for the CPU only"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return f"there is no C++ compiler ({os.environ.get('CXX', 'g++')})"
    target.parent.mkdir(parents=True, exist_ok=True)
    libraries = Path(torch.__file__).parent / "lib"
    paths = [*include_paths(), sysconfig.get_path("include")]
    flags = ["-shared", "-fPIC", "-O0", "-std=c++20", "-w", f"-DTORCH_EXTENSION_NAME=pretended_{kind}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += ["-DPRETEND_CUDA"] if kind == "cuda" else []
    linked = [f"-L{libraries}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    command = [compiler, *flags, *(f"-isystem{path}" for path in paths), str(SOURCE), *linked]
    # moved into place when complete, so that no process loads half a file
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
            return f"torch {torch.__version__} does not compile it: {first.strip()[:300]}"
        made.replace(target)
    return ""


if __name__ == "__main__":
    for wanted in sys.argv[1:] or KINDS:
        if wanted not in KINDS:
            sys.exit(f"{wanted!r} is no device to pretend; legal are {', '.join(KINDS)}")
        if reason := build(wanted):
            print(f"No pretended device, its tests are skipped: {reason}.")
