"""The sentences of the page."""

from __future__ import annotations

TITLE = """\
# The headline table

Articles about mixed precision say how much faster well-known models train with it, and how much memory that saves.
This page puts these claims beside what `python -m benchmarks.headline` measured: whole training steps by
`Trainer.fit` on synthetic data, in strict fp32, in fp32 with TF32, with Lightning's own bf16 and fp16
(`precision="bf16-mixed"`, `"16-mixed"`), and with `AmpPrecision` in bf16, fp16 and fp8. It is about speed and memory.
What a precision does to the result of a training, such as the articles' "within 0.1 % of fp32", is not measured here:
`compare_precisions` measures it on your own model.

The first table of a device compares the usual batch of each model, eager; the tables after it have all that was run.
"""

TINY = """\
**A rehearsal: no figure of this section means anything.** It was made by `--tiny`: toy models, a few steps each. It
shows that the benchmark runs, and nothing else."""

WHY = """\
## Why what is measured should differ from the claims

- **Their fp32 had no TF32, as far as one can tell.** On NVIDIA GPUs since Ampere, fp32 products run in TF32 as soon
  as `torch.set_float32_matmul_precision("high")` is called, and convolutions run in it by default. On an H100 or H200
  that is seven times as many FLOPs per second as in strict fp32, and bf16 and fp16 are twice as many again. Against
  strict fp32 a speed-up can therefore be larger than claimed, and against TF32, which is what one would otherwise
  use, smaller.
- **The memory of weights does not halve.** With AdamW, 16 bytes per parameter stay as they are in mixed precision:
  the weight in fp32 (4), its gradient (4) and two states (8). With SGD and momentum they are 12. Only activations
  become smaller, while a copy of the weights in half precision comes on top. How much is saved depends on which of
  them there is more of: on the batch, and not on the precision alone. The table below has the part that stays.
- **75 GB in fp32 does not hold a LLaMA of 7B that trains with AdamW.** Weights, gradients and states alone are 16 x
  6.74 G bytes = 108 GB (100 GiB), in fp32 and in bf16. Going from 75 to 42 GB takes something else as well: weights
  that are themselves in half precision, a smaller optimizer, adapters, or several GPUs.
- **Another GPU is another table.** What gains is what the matrix units compute; the rest (normalisation, the
  optimizer, data) is bound by the memory's bandwidth, or by the host where the model is small."""

HOW = """\
## How it is measured

- Each run has a process of its own: some steps of warm-up, until the loss scale has settled, then about 30 timed
  steps, or as many as take 5 s. A run of which a timed step was skipped, or whose last loss is not finite, has no
  figures. The speed is the median over these steps, with the middle half behind it. A ratio
  compares one process of each arm, run one after the other, so it has no interval: two processes of the same arm can
  differ by some percent, and by more on a busy machine. `compare_precisions` with several seeds gives the interval.
- "Strict fp32" is `torch.set_float32_matmul_precision("highest")` and `torch.backends.cudnn.allow_tf32 = False`. All
  other arms have TF32 on, the mixed ones too, for what they leave in fp32. "Lightning's own" is its plugin in the
  same format, for fp8 its bf16.
- Peak memory is the allocator's (`torch.cuda.max_memory_allocated`) over the timed steps; on a CPU it is what tensors
  hold. Weights (and buffers), gradients and optimizer states are counted tensor by tensor. "Activations" is what is
  left of the peak, copies in half precision and temporary tensors included. Where the peak comes before all gradients
  are there, activations take more than this.
- MFU is the FLOPs of the model's products (three times those of a forward, nothing recomputed, attention counted in
  full) per second, over the device's peak in that format without sparsity (vendor's data sheet); "-" where that is
  not known.
- "Waits per step" is how often the host waits for the device (`torch.cuda.set_sync_debug_mode`). In GPT-2 and LLaMA
  one of them is transformers' own, which looks at the positions; it is there in all precisions.
- Images have their channels last in all precisions. Optimizers are fused. All models have random weights. The
  LLaMA-like ones are built from configurations: that of 1B has as many heads for keys as for queries, since torch has
  no fast attention in fp32 for fewer, and that of 7B checkpoints its activations, in all precisions.
  Where `torch.compile` is used, the blocks of a transformer are compiled one by one, and ResNet-50 as a whole. fp8 is
  run compiled only: eager fp8 is slower than bf16.

The articles give no batch sizes that we know of. These are ours. The usual batch, which is the first, is run in all
precisions, the others in TF32, both kinds of bf16 and our fp16."""

RUN = """\
## Run it

```bash
python -m benchmarks.headline --list                 # the plan, and how long it takes
python -m benchmarks.headline --limit-minutes 9      # as much as fits; the same command goes on where it stopped
python -m benchmarks.headline --only gpt2,llama_1b   # these models only
python -m benchmarks.headline --tiny                 # on a CPU, at toy sizes: does it run?
```

It needs a checkout, torch, lightning, torchmetrics and transformers. ResNet-50 and EfficientNet-B7 are torchvision's,
or those of transformers where torchvision is missing; fp8 needs torchao. Nothing is downloaded. The records are
in `headline.json` beside this page, one a line; `--page-only` writes the page from them. Records of another device,
or of other versions, are a section of their own. A run that does not fit into memory is a result; one that failed or
took too long is done again with `--retry`.
"""

OPTIMIZERS = {"AdamW": "AdamW, 16 bytes per parameter", "SGD": "SGD with momentum, 12 bytes per parameter"}
