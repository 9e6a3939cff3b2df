"""Layers without curvature: excluded by name, or for want of statistics."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.proj = nn.Linear(6, 6)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.proj(F.scaled_dot_product_attention(query, key, value))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


QKV = {f"blocks.{i}.qkv.{role}" for i in range(2) for role in ("weight", "bias")}


def backward(model, optimizer, examples: int = 8):
    x, y = torch.randn(examples, 4, 6), torch.randint(3, (examples,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def described(optimizer, word: str) -> set[str]:
    """Return the parameters whose line of ``describe()`` contains a word."""
    lines = optimizer.describe().splitlines()
    return {line.split()[0] for line in lines if word in line}


# Excluded by name


def test_layers_excluded_by_a_pattern_of_modules_follow_the_plain_gradient():
    model = Transformer()
    optimizer = kfc.KFC(
        model,
        lr=0.1,
        momentum=0.0,
        clip=None,
        fallback_lr=0.5,
        groups=[
            {"prefix": "*.bias", "weight_decay": 0.0},
            {"prefix": "*.qkv", "treatment": "plain"},
            {"prefix": "head", "lr": 0.2},
        ],
    )
    assert described(optimizer, "plain gradient") == QKV
    assert described(optimizer, "groups[1] excludes it") == QKV
    backward(model, optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name in QKV:
            torch.testing.assert_close(parameter, before[name] - 0.5 * parameter.grad)
    assert set(optimizer.factors) == {"blocks.0.proj", "blocks.1.proj", "head"}
    by_name = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert by_name["head.weight"]["lr"] == 0.2
    assert by_name["blocks.0.qkv.weight"]["plain_gradient"]


def test_an_override_sets_the_rate_of_the_layers_that_it_excludes():
    groups = [{"prefix": "*.qkv", "treatment": "plain", "lr": 0.7}]
    optimizer = kfc.KFC(Transformer(), fallback_lr=0.5, groups=groups)
    by_name = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    assert {by_name[name] for name in QKV} == {0.7}


@pytest.mark.parametrize("kind", [kfc.KFAC, kfc.WhitenedAdam])
def test_every_optimizer_with_groups_excludes_layers(kind):
    model = Transformer()
    optimizer = kind(model, groups=[{"prefix": "*.qkv", "treatment": "plain"}])
    word = "Adam" if kind is kfc.WhitenedAdam else "plain gradient"
    assert described(optimizer, "groups[0] excludes it") == QKV
    assert described(optimizer, word) >= QKV
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if kind is kfc.KFAC:
        x, y = torch.randn(8, 4, 6), torch.randint(3, (8,))
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    else:
        backward(model, optimizer)
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert set(optimizer.activation_factors) == {"blocks.0.proj", "blocks.1.proj", "head"}


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([{"prefix": "head", "treatment": "none"}], r"groups\[0\]: treatment must be one of"),
        ([{"prefix": "*.bias", "treatment": "plain"}], "has that of its weight; use the prefix"),
        ([{"prefix": "*.conv", "treatment": "plain"}], r"\['\*\.conv'\] match no parameter"),
        ([{"prefix": "*.qkv", "treatment": "plain", "damping": 0.1}], "damping, which has no"),
        ([{"treatment": "plain"}], 'must be a dict with a "prefix"'),
    ],
)
def test_bad_treatments_are_refused_and_leave_no_hooks(groups, match):
    model = Transformer()
    with pytest.raises(ValueError, match=match):
        kfc.KFC(model, groups=groups)
    assert not any(m._forward_hooks for m in model.modules())
