"""The script of a run's process: `python _child.py FOLDER`; the folder holds the run in `spec.pickle`.

It is run by its path, and imports only the standard library until `sys.path` is set. So this package need not be
installed. `python _child.py --serve PATH KIND` imports what all runs need, and forks a process for each folder
it reads.
"""

import gc
import importlib
import json
import os
import pickle
import sys
import time


def follow_parent() -> None:
    """Ask the kernel of Linux to end this process at once when its parent ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def serve() -> str:
    """Fork a process for each folder, one after the other, and write its number and its exit status.

    Returns:
        In a fork: its folder. In the server it does not return.

    """
    sys.path[:] = json.loads(sys.argv[2])
    from lightning_amp._compat._names import use

    use(sys.argv[3])  # pyright: ignore[reportArgumentType] # the parent's kind of Lightning
    # an optimizer imports `torch._dynamo` in its first step
    for name in ("lightning_amp.compare._train", "torch._dynamo", "cloudpickle"):
        importlib.import_module(name)
    gc.freeze()  # otherwise the garbage collection of a fork would copy all this memory
    for line in iter(sys.stdin.buffer.readline, b""):
        pid = os.fork()
        if not pid:
            os.setsid()
            return os.fsdecode(line.rstrip(b"\n"))
        os.write(1, b"%d\n" % pid)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    raise SystemExit


if __name__ == "__main__":
    follow_parent()
    folder = serve() if sys.argv[1] == "--serve" else sys.argv[1]
    started = time.time()
    follow_parent()
    sys.argv[1:] = [folder]  # Lightning starts other ranks with these arguments
    with open(f"{folder}/spec.pickle", "rb") as file:
        header = pickle.load(file)
    for number, path in enumerate((os.devnull, header["log"], header["log"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.path[:] = header["path"]
    if header["cores"]:
        os.sched_setaffinity(0, header["cores"])
    from lightning_amp._compat._names import use

    use(header["kind"])
    from lightning_amp.compare._train import main

    main(folder, header, started)
