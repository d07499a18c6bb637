"""Small random models that see several things in a picture, saved with their processors as their users have them."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessor,
    ResNetConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    YolosConfig,
    YolosForObjectDetection,
    YolosImageProcessor,
)

LABELS = {0: "cat", 1: "remote control", 2: "café"}


def save_detr(folder: Path, **padding: object) -> None:
    """Write a DETR of 7 queries, whose processor keeps the shape of pictures; `padding` is what it says of that."""
    torch.manual_seed(0)
    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 24, 32, 48], depths=[1] * 4, layer_type="basic", out_features=["stage4"]
    )
    config = DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        use_pretrained_backbone=False,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        # Wide enough that queries differ, as those of a trained one do.
        init_std=0.4,
        num_queries=7,
        id2label=LABELS,
    )
    DetrForObjectDetection(config).save_pretrained(folder)
    DetrImageProcessor(size={"shortest_edge": 48, "longest_edge": 80}, **padding).save_pretrained(folder)


def save_padded_detr(folder: Path) -> None:
    """Write a DETR whose processor pads all pictures to one size."""
    save_detr(folder, pad_size={"height": 80, "width": 88})


def save_yolos_of_one_size(folder: Path) -> None:
    """Write a YOLOS whose processor gives pictures one size."""
    save_yolos(folder, height=48, width=64)


def save_crowded_yolos(folder: Path) -> None:
    """Write one that sees something with nearly each of its hundred queries, no two as sure of it."""
    save_yolos(folder, queries=100, height=48, width=64)


def save_yolos(folder: Path, queries: int = 6, **size: int) -> None:
    """Write a YOLOS of 6 queries, whose processor keeps the shape of pictures unless a size is given."""
    torch.manual_seed(0)
    config = YolosConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=[48, 64],
        patch_size=8,
        num_detection_tokens=queries,
        initializer_range=0.3,
        id2label=LABELS,
    )
    model = YolosForObjectDetection(config)
    torch.nn.init.normal_(model.vit.embeddings.detection_tokens)
    model.save_pretrained(folder)
    YolosImageProcessor(size=size or {"shortest_edge": 64, "longest_edge": 160}).save_pretrained(folder)


def save_segformer(folder: Path) -> None:
    """Write a SegFormer of 5 labels, whose processor gives pictures one size."""
    torch.manual_seed(0)
    config = SegformerConfig(
        hidden_sizes=[8, 16, 24, 32],
        depths=[1] * 4,
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
        # Wide enough that places differ, as those of a trained one do.
        initializer_range=0.4,
        id2label={**LABELS, 3: "wall", 4: "sky"},
    )
    SegformerForSemanticSegmentation(config).save_pretrained(folder)
    # Its own class wants torchvision in the newest transformers for Python 3.10; BEiT's does the same to a picture.
    processor = {
        "image_processor_type": f"{'Segformer' if sys.version_info >= (3, 11) else 'Beit'}ImageProcessor",
        "size": {"height": 64, "width": 96},
        "do_resize": True,
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_reduce_labels": False,
        "do_normalize": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


# Task → what writes a model for it.
PICTURE_MODELS: Mapping[str, Callable[[Path], None]] = {
    "object-detection": save_detr,
    "image-segmentation": save_segformer,
}
