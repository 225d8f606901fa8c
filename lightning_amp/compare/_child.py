"""The script that the process of an arm runs: `python _child.py HEADER`.

It is run by its path, and imports only the standard library until `sys.path` is set. So this package need not be
installed.
"""

import json
import sys
import time

if __name__ == "__main__":
    started = time.time()
    with open(sys.argv[1], encoding="utf-8") as file:
        header = json.load(file)
    sys.path[:] = header["path"]
    # ask the kernel to end this process at once when its parent ends; on other systems the arm ends at its next batch
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL

    from lightning_amp.compare._worker import main

    main(header, started)
