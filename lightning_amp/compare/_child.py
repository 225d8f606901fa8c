"""The script that the process of an arm runs: `python _child.py HEADER`.

It is run by its path, and imports only the standard library until `sys.path` is set. So this package need not be
installed. `python _child.py --serve HEADER` imports what all runs need, and forks a process for each header that it is
sent.
"""

import json
import os
import sys
import time

if __name__ == "__main__":
    started = time.time()
    with open(sys.argv[-1], encoding="utf-8") as file:
        header = json.load(file)
    sys.path[:] = header["path"]
    parent = os.getppid()
    if sys.argv[1] == "--serve":
        from lightning_amp.compare._fork_server import serve

        header, started = serve(parent)  # returns in a fork only
    # ask the kernel to end this process at once when its parent ends; on other systems the arm ends at its next batch
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        if header["cores"]:
            os.sched_setaffinity(0, header["cores"])

    from lightning_amp.compare._worker import main

    main(header, started)
