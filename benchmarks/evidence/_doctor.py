"""Print `doctor` for this machine and a GPT in bf16: `python -m benchmarks.evidence._doctor`, for `__main__`."""

from __future__ import annotations

import logging
import warnings

from benchmarks.evidence import _gpt
from lightning_amp import doctor


def main() -> None:
    """Examine, and print the report."""
    args = _gpt.parser(__doc__).parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    model, data = (_gpt.tiny_model, _gpt.tiny_data) if args.tiny else (_gpt.model, _gpt.data)
    kwargs = {"accelerator": args.device, "devices": 1, "max_epochs": 1}
    print(doctor(model, data, precision="bf16", trainer_kwargs=kwargs, device=args.device))


if __name__ == "__main__":
    main()
