"""The articles and papers, in Markdown."""

AMP_DOCS = "[AMP reference](https://docs.pytorch.org/docs/stable/amp.html)"
AMP_EXAMPLES = "[AMP examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html)"
AMP_RECIPE = "[AMP recipe](https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html)"
BLOG = (
    "[PyTorch's blog](https://pytorch.org/blog/what-every-user-should-know-about-mixed-precision-training-in-pytorch/)"
)
NVIDIA = "[NVIDIA's guide](https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html)"
TRANSFORMERS = "[transformers' guide](https://huggingface.co/docs/transformers/perf_train_gpu_one)"
LIGHTNING = (
    "[Lightning's older docs](https://github.com/Lightning-AI/pytorch-lightning/blob/"
    "b9b3ec5e4ffbd10cf69a03e299f0837f7091d669/docs/source/advanced/amp.rst)"
)
TORCHAO = (
    "[torchao's recipes](https://docs.pytorch.org/ao/main/api_reference/generated/"
    "torchao.float8.Float8LinearRecipeName.html)"
)
MICIKEVICIUS = "[Micikevicius 2017](https://arxiv.org/abs/1710.03740)"
KALAMKAR = "[Kalamkar 2019](https://arxiv.org/abs/1905.12322)"
ZAMIRAI = "[Zamirai 2020](https://arxiv.org/abs/2010.06192)"
GUPTA = "[Gupta 2015](https://arxiv.org/abs/1502.02551)"
QI = "[Qi 2025](https://arxiv.org/abs/2510.26788)"
QIU = "[Qiu 2025](https://arxiv.org/abs/2510.04212)"
