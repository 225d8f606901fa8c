"""EfficientNet-B7 on images of 600 x 600, the size that it was made for."""

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
    """Make the model of torchvision, else that of transformers; tiny: B0 or smaller."""
    found = torchvision()
    if found is None:
        return _of_transformers(size, tiny)
    net = (found.models.efficientnet_b0 if tiny else found.models.efficientnet_b7)(num_classes=1000)
    net.to(memory_format=torch.channels_last)
    return Workload(net, classification_loss, images(size, 1000), (), f"torchvision {found.__version__}")


def _of_transformers(size: Size, tiny: bool) -> Workload:
    transformers = library("transformers")
    small = {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640} if tiny else {}
    config = transformers.EfficientNetConfig(num_labels=1000, image_size=size.length, **small)
    net = transformers.EfficientNetForImageClassification(config)
    net.to(memory_format=torch.channels_last)
    source = f"transformers {transformers.__version__}"
    return Workload(net, loss_of_transformers, images(size, 1000), (), source)


MODEL = Model(
    name="efficientnet_b7",
    title="EfficientNet-B7",
    make=make,
    sizes=(Size(16, 600),),
    tiny=Size(2, 32),
    unit=("images", "pixels"),
    why_sizes="there is no common batch size; it is small because the images are large",
    optimizer="SGD",
    num_parameters=66_347_960,
    claim=Claim(1.7, "42 % less memory"),
    no_fp8=NO_FP8,
    eager_s=25.0,
)
