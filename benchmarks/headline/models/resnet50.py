"""ResNet-50 on images of 224 x 224."""

from __future__ import annotations

import torch

from benchmarks.headline.models._images import NO_FP8, images, torchvision
from benchmarks.headline.models._model import (
    Claim,
    Model,
    Size,
    Workload,
    classification_loss,
    library,
    loss_of_transformers,
)


def make(size: Size, tiny: bool) -> Workload:
    """Make the model of torchvision, else that of transformers; tiny: one block per stage."""
    found = torchvision()
    if found is None:
        return _of_transformers(size, tiny)
    resnet = found.models.resnet
    net = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1] if tiny else [3, 4, 6, 3], num_classes=1000)
    net.to(memory_format=torch.channels_last)
    return Workload(net, classification_loss, images(size, 1000), [net], f"torchvision {found.__version__}")


def _of_transformers(size: Size, tiny: bool) -> Workload:
    transformers = library("transformers")
    small = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]} if tiny else {}
    net = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000, **small))
    net.to(memory_format=torch.channels_last)
    source = f"transformers {transformers.__version__}"
    return Workload(net, loss_of_transformers, images(size, 1000), [net], source)


MODEL = Model(
    name="resnet50",
    title="ResNet-50",
    make=make,
    sizes=(Size(256, 224),),
    tiny=Size(2, 32),
    unit=("images", "pixels"),
    why_sizes="256 per GPU is common in public ImageNet recipes",
    optimizer="SGD",
    num_parameters=25_557_032,
    claim=Claim(1.6, "40 % less memory"),
    no_fp8=NO_FP8,
    compiled=("tf32", "lightning_bf16", "bf16"),
    compiled_s=60.0,
)
