"""Draw the first picture, `_static/skipped_step.png`: what `get_started.md` prints of a bad batch. Needs Chromium.

python docs/_ext/skipped_step.py
"""

from __future__ import annotations

import logging
import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1]
COLOURS = {"nan": "bold red", "Step 3 skipped": "bold yellow", r"train\.py:\d+": "cyan", "tried: works": "green"}


def printed() -> str:
    """Return what the page's two trainings with a bad batch print, without Lightning's own lines."""
    page = (DOCS / "get_started.md").read_text(encoding="utf-8").partition("## Switch the precision")[0]
    said = StringIO()
    logging.getLogger("lightning_amp.callbacks._overflow_locator").handlers[:] = [logging.StreamHandler(said)]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(said):
        path = Path(folder, "train.py")  # the report quotes its line
        path.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), encoding="utf-8")
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    return said.getvalue()[said.getvalue().index('precision="16-mixed"') :]


def main() -> None:
    """Write the picture."""
    text = Text(printed())
    for pattern, style in COLOURS.items():
        text.highlight_regex(pattern, style)
    console = Console(record=True, width=124, file=StringIO())
    console.print(text)  # with a blank line at the end
    with tempfile.TemporaryDirectory() as folder:
        svg, picture = Path(folder, "picture.svg"), DOCS / "_static" / "skipped_step.png"
        console.save_svg(str(svg), title="python train.py")
        size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text(encoding="utf-8"))
        assert size is not None
        width, height = (int(float(one)) for one in size.groups())
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1",
             "--default-background-color=00000000", f"--window-size={width},{height}", f"--screenshot={picture}",
             svg.as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
