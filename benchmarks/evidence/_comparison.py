"""fp32, bf16 and fp16 over three seeds: `python -m benchmarks.evidence._comparison --html FILE`, for `__main__`."""

from __future__ import annotations

from pathlib import Path

from benchmarks._machine import installed
from benchmarks.evidence import _gpt
from lightning_amp import compare_precisions


def main() -> None:
    """Compare, print the report, and write it as a page."""
    parser = _gpt.parser(__doc__)
    parser.add_argument("--html", type=Path, required=True)
    args = parser.parse_args()
    # Verdicts over seeds need scipy, which a machine may lack.
    num_seeds = 1 if args.tiny or not installed("scipy") else 3
    report = compare_precisions(
        _gpt.tiny_model if args.tiny else _gpt.model,
        _gpt.tiny_data if args.tiny else _gpt.data,
        ("fp32", "bf16", "fp16"),
        trainer_kwargs={
            "accelerator": args.device, "devices": 1, "max_epochs": 1, "gradient_clip_val": 1.0, "logger": False,
        },
        num_seeds=num_seeds,
        margins={"val_loss": 0.02},
    )  # fmt: skip
    report.to_html(args.html)
    if not args.tiny and num_seeds == 1:
        print("One seed only: verdicts over three need scipy, which is not installed.\n")
    print(f"[The whole report]({args.html.name})\n\n{report.to_markdown()}")


if __name__ == "__main__":
    main()
