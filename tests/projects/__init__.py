"""Small projects as other people write them, each run in fp32, with `AmpPrecision` and with Lightning's own plugin.

To add one, write a function in any file of `families/` that returns a `Setup`; its docstring is its line in the table:

    @project("recurrent")
    def gru_cell() -> Setup:
        "A GRU cell in a Python loop."
        return Setup(Sequence(), DataLoader(...), trainer={"gradient_clip_val": 1.0})

It is called once per arm, after `seed_everything(0)`, and must return new objects each time. Keep it to 3 to 8
optimizer steps of a tiny model, and import optional packages inside it (`needs=("peft",)`: without it, it is skipped).
`make projects PROJECTS_ARGS="-k gru_cell"` runs it; `judge.py` says what is compared.
"""

from projects.registry import Project, Setup, all_projects, project

__all__ = ["Project", "Setup", "all_projects", "project"]
