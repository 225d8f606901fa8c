"""The sentences of the page."""

from __future__ import annotations

TITLE = """\
# The headline table

Articles about mixed precision claim how much faster well-known models train with it, and how much memory it saves.
This page compares these claims with the results of `python -m benchmarks.headline`. It measures speed
and memory of whole training steps by `Trainer.fit` on synthetic data. The arms are strict fp32, fp32 with TF32,
Lightning's own bf16 and fp16 (`precision="bf16-mixed"`, `"16-mixed"`), and `AmpPrecision` in bf16, fp16 and fp8.
"""

TINY = """\
**A rehearsal: no figure of this section means anything.** It was made by `--tiny`: toy models, a few steps each. It
shows that the benchmark runs, and nothing else."""

WHY = """\
## Reasons for differences from the claims

- **The claims probably compare with fp32 without TF32.** On NVIDIA GPUs since Ampere, convolutions run in TF32 by
  default. fp32 matrix products run in TF32 after `torch.set_float32_matmul_precision("high")`. On an H100 or H200
  TF32 has seven times the peak FLOPs of strict fp32, and bf16 and fp16 have twice the peak of TF32. A
  speed-up over strict fp32 can therefore be larger than claimed, and a speed-up over TF32, the usual setting, smaller.
- **The memory of weights does not halve.** With AdamW, mixed precision keeps 16 bytes per parameter: the weight in
  fp32 (4), its gradient (4) and two states (8). With SGD and momentum it keeps 12 bytes. Only activations
  become smaller, and autocast adds a copy of the weights in half precision. The saved memory therefore depends on the
  batch, and not on the precision alone. The table below shows the memory that
  is the same in every precision.
- **75 GB are not enough to train a LLaMA of 7B with AdamW in fp32.** Weights, gradients and states alone are 16 x
  6.74 G bytes = 108 GB (100 GiB), in fp32 and in bf16. A reduction from 75 to 42 GB needs more than
  mixed precision: weights in half precision, a smaller optimizer, adapters, or several GPUs.
- **Every GPU differs.** Only matrix units become faster. The rest (normalisation, the optimizer, data) is limited by
  memory bandwidth, or by the host if the model is small."""

HOW = """\
## Method of measurement

- Each run has its own process. It warms up until the loss scale has settled, and then times about 30 steps, or as many
  as take 5 s. A run has no figures if a timed step was skipped, or if the last loss is not finite. The speed is the
  median over the timed steps, followed by the middle half. A ratio compares one process of each arm, run one after the
  other, so it has no interval. A run that does not fit into memory is recorded too.
- "Strict fp32" is `torch.set_float32_matmul_precision("highest")` and `torch.backends.cudnn.allow_tf32 = False`. All
  other arms use TF32, also for the fp32 parts of mixed precision. "Lightning's own" is Lightning's plugin in the same
  format; fp8 is compared with its bf16.
- Peak memory covers the timed steps. The allocator counts it (`torch.cuda.max_memory_allocated`); on a CPU it is the
  size of all tensors. Weights (and buffers), gradients and optimizer states are counted tensor by tensor.
  "Activations" is the rest of the peak, including copies in half precision and temporary tensors. If the peak comes
  before all gradients exist, the true size of the activations is larger.
- MFU is the FLOPs of the model's matrix products per second, divided by the device's peak in that format. A step counts
  three times the FLOPs of a forward, with full attention and without recomputation. The peak is the value without
  sparsity in the vendor's data sheet; "-" means that it is not known.
- "Waits per step" is how often the host waits for the device (`torch.cuda.set_sync_debug_mode`). In GPT-2 and LLaMA,
  transformers itself waits once in each precision, to read the positions.
- Images have their channels last in all precisions. Optimizers are fused. All models have random weights. The
  LLaMA-like models are built from configurations. The 1B model has as many heads for keys as for queries, since torch
  has no fast fp32 attention for fewer. The 7B model checkpoints its activations in all precisions. With `torch.compile`
  the blocks of a transformer are compiled one by one, and ResNet-50 as a whole. fp8 runs only compiled, because
  without compilation it is slower than bf16.

The articles give no batch sizes, so this benchmark chose its own. The first batch of each model runs in all precisions,
the others in TF32, in bf16 with Lightning's plugin and with `AmpPrecision`, and in fp16 with `AmpPrecision`."""

RUN = """\
## Run the benchmark

```bash
python -m benchmarks.headline --list                 # the plan, and how long it takes
python -m benchmarks.headline --limit-minutes 9      # as much as fits; call it again to continue
python -m benchmarks.headline --only gpt2,llama_1b   # these models only
python -m benchmarks.headline --tiny                 # a quick trial on a CPU, with toy sizes
```

It needs a checkout, torch, lightning, torchmetrics and transformers. ResNet-50 and EfficientNet-B7 come from
torchvision, or from transformers if torchvision is missing. fp8 needs torchao. Nothing is downloaded. The records
are in `headline.json` beside this page, one per line; `--page-only` writes the page from them, with the method of
measurement. `--retry` repeats runs that failed or took too long.
"""

OPTIMIZERS = {"AdamW": "AdamW, 16 bytes per parameter", "SGD": "SGD with momentum, 12 bytes per parameter"}
