"""Public architectures with random weights, each with a small batch and a loss.

Libraries are imported when a model is built; call ``vision.declare_operators()`` before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A model, and a function that returns its loss on a fixed batch.
Problem = tuple[nn.Module, Callable[[nn.Module], Tensor]]

CLASSES, IMAGES, SENTENCES, TOKENS, VOCABULARY = 10, 16, 16, 32, 1000

# Sizes of images other than 64, and options of models.
TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet50": {},
    "resnext50_32x4d": {},
    "seresnet50": {},
    "resnest14d": {},
    "res2net50_26w_4s": {},
    "densenet121": {},
    "dla34": {},
    "hrnet_w18_small": {},
    "vgg11_bn": {"size": 32},
    "inception_v3": {"size": 96},
    "mobilenetv2_100": {},
    "mobilenetv3_small_100": {},
    "mobilenetv4_conv_small": {},
    "efficientnet_b0": {},
    "tf_efficientnet_b0": {},
    "efficientnetv2_rw_t": {},
    "mnasnet_100": {},
    "ghostnet_100": {},
    "lcnet_050": {},
    "regnetx_002": {},
    "regnety_002": {},
    "nf_regnet_b0": {},
    "nfnet_l0": {},
    "repvgg_a0": {},
    "mobileone_s0": {},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "edgenext_xx_small": {},
    "fastvit_t8": {},
    "vit_tiny_patch16_224": {"img_size": 64},
    "deit3_small_patch16_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4},
    "beit_base_patch16_224": {"img_size": 64, "embed_dim": 192, "num_heads": 3, "depth": 4},
    "cait_xxs24_224": {"img_size": 64, "depth": 6},
    "xcit_nano_12_p16_224": {"img_size": 64},
    "pvt_v2_b0": {},
    "poolformer_s12": {},
    "mobilevit_xxs": {},
    "levit_128s": {"size": 224, "images": 4},
    "mixer_s32_224": {"img_size": 64},
    "gmlp_ti16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
}

TORCHVISION: dict[str, dict[str, Any]] = {
    "squeezenet1_1": {},
    "shufflenet_v2_x1_0": {},
    "googlenet": {"init_weights": False},
    "mobilenet_v3_small": {},
    "swin_t": {},
    "vit_b_32": {"image_size": 64, "hidden_dim": 192, "num_layers": 4, "num_heads": 3},
}

# Options that make the models of Transformers small, as far as they have them.
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "num_labels": CLASSES,
}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("MaskedLM", {}),
    "roberta": ("MaskedLM", {}),
    "albert": ("MaskedLM", {}),
    "distilbert": (
        "SequenceClassification",
        {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256},
    ),
    "electra": ("SequenceClassification", {}),
    "deberta-v2": ("SequenceClassification", {}),
    "gpt2": ("CausalLM", {"n_embd": 128, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("CausalLM", {}),
    "opt": ("CausalLM", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "bloom": ("CausalLM", {"n_layer": 2, "n_head": 4}),
    "llama": ("CausalLM", {}),
    "mistral": ("CausalLM", {}),
    "qwen3": ("CausalLM", {"head_dim": 32}),
    "gemma": ("CausalLM", {"head_dim": 32}),
    "phi": ("CausalLM", {}),
    "mamba": ("CausalLM", {}),
    "t5": (
        "Seq2SeqLM",
        {
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "Seq2SeqLM",
        {
            "d_model": 128,
            **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 256 for part in ("encoder", "decoder")},
        },
    ),
    "vit": ("ImageClassification", {"image_size": 64}),
    "convnextv2": (
        "ImageClassification",
        {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 64, 96]},
    ),
    "segformer": (
        "ImageClassification",
        {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 1, 1]},
    ),
}


def timm_model(name: str) -> Problem:
    options = dict(TIMM[name])
    size, images = options.pop("size", 64), options.pop("images", IMAGES)
    size = options.get("img_size", size)
    model = importlib.import_module("timm").create_model(name, num_classes=CLASSES, **options)
    return model, _classification(size, images)


def torchvision_model(name: str) -> Problem:
    options = {"num_classes": CLASSES, **TORCHVISION[name]}
    if name == "googlenet":
        options["aux_logits"] = False
    models = importlib.import_module("torchvision.models")
    if name == "vit_b_32":
        transformer = models.vision_transformer.VisionTransformer
        options["mlp_dim"] = 4 * options["hidden_dim"]
        return transformer(patch_size=16, **options), _classification(64, IMAGES)
    return getattr(models, name)(weights=None, **options), _classification(64, IMAGES)


def transformers_model(name: str) -> Problem:
    transformers = importlib.import_module("transformers")
    task, options = TRANSFORMERS[name]
    standard = transformers.AutoConfig.for_model(name)
    small = {key: value for key, value in SMALL.items() if hasattr(standard, key)}
    if "hidden_sizes" in options:
        small = {"num_labels": CLASSES}
    config = transformers.AutoConfig.for_model(name, **{**small, **options})
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    tokens = torch.randint(5, VOCABULARY, (SENTENCES, TOKENS))
    batch = {"input_ids": tokens, "labels": tokens}
    if task.endswith("Classification"):
        batch["labels"] = torch.randint(CLASSES, (SENTENCES,))
    if task == "ImageClassification":
        del batch["input_ids"]
        batch["pixel_values"] = torch.randn(SENTENCES, 3, 64, 64)
    return model, lambda model: model(**batch).loss


def _classification(size: int, images: int) -> Callable[[nn.Module], Tensor]:
    inputs, labels = torch.randn(images, 3, size, size), torch.randint(CLASSES, (images,))
    return lambda model: F.cross_entropy(model(inputs), labels)


LIBRARIES = {
    "timm": (TIMM, timm_model),
    "torchvision": (TORCHVISION, torchvision_model),
    "transformers": (TRANSFORMERS, transformers_model),
}
# By library and name.
ARCHITECTURES: dict[str, Callable[[], Problem]] = {
    f"{library}/{name}": partial(build, name)
    for library, (names, build) in LIBRARIES.items()
    for name in names
}
