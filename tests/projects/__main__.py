"""Write the page of the results that `make projects` has left in a folder: `python -m projects FOLDER PAGE`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from projects.registry import all_projects
from projects.table import page, summary

if __name__ == "__main__":
    folder, out = map(Path, sys.argv[1:])
    found = [path for name in all_projects() if (path := folder / f"{name}.pickle").exists()]
    results = [pickle.loads(path.read_bytes()) for path in found]
    out.write_text(page(results), encoding="utf-8")
    print(f"{summary(results)}\n{out} has the table.")
