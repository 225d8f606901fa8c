"""Does half precision cost accuracy on handwritten digits, and is it faster? Three seeds, a control, verdicts.

python examples/compare_digits.py               under four minutes on two cores; the page: demo_results/comparison.html
python examples/compare_digits.py --seeds 8     more seeds: finished runs are kept

It takes the module and its data from `digits.py`. Each run has its own process, which imports them. On a CPU that
computes half precision much more slowly than fp32, the transformer has one block instead of two.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from digits import Digits, DigitTransformer, slow_formats

from lightning_amp import compare_precisions

MARGINS = {"val_acc": 0.01, "val_loss": 0.03}  # one image in a hundred; 3 % of the usual loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each precision (3); fewer give no verdict")
    parser.add_argument("--width", type=int, default=64, help="width of the transformer (64)")
    parser.add_argument("--fast", action="store_true", help="one seed, one epoch, a tiny model: does it run?")
    parser.add_argument("--out", type=Path, default=Path("demo_results"), help="folder for the page and the runs")
    args = parser.parse_args()
    depth = 1 if args.fast or slow_formats() else 2
    report = compare_precisions(
        partial(DigitTransformer, 64 if args.fast else args.width, depth),
        Digits,
        precisions=["fp32", "bf16"] if args.fast else ["fp32", "bf16", "fp16"],
        trainer_kwargs={"max_epochs": 1 if args.fast else 4, "accelerator": "cpu", "logger": False},
        num_seeds=1 if args.fast else args.seeds,
        margins=MARGINS,
        dirpath=args.out / "comparison",
    )
    report.to_json(args.out / "comparison.json")
    report.to_html(args.out / "comparison.html")
    print(f"\n{report}\nThe page is {args.out}/comparison.html.")


if __name__ == "__main__":
    main()
