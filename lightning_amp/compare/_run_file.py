"""The file of a run that is kept: workers write it, also on another machine. It imports nothing of Lightning."""

from __future__ import annotations

import json
from dataclasses import dataclass

from typing_extensions import final

from lightning_amp._files import write_atomically
from lightning_amp.compare._run import ArmRun

FORMAT = 2
"""Is written into each file, so that files of another format are not read."""


@final
@dataclass(frozen=True)
class RunFile:
    """The file in which a run is kept: its path or URL, and the key of the run's settings."""

    path: str
    key: str

    def write(self, run: ArmRun) -> None:
        """Keep a run. Of two writers at once, one wins, and the file is never half written.

        Raises:
            OSError: If the file cannot be written.

        """
        data = {"format": FORMAT, "key": self.key, "run": run.to_data()}
        write_atomically(self.path, lambda file: file.write(json.dumps(data, allow_nan=False)))
