"""Statistics of a part of the batch, compared with those of the part alone."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import kfc
from ranks import run_ranks
from resuming import assert_resumes

WHOLE = kfc.Kronecker(fraction=1)


def network(*middle):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), *middle, nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3)]
    return nn.Sequential(*layers).double()


def batch(examples=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(examples, 2, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (examples,), generator=generator)


def preconditioner(model, curvature="kfc", **options):
    return kfc.Preconditioner(model, curvature=curvature, seed=0, **options)


def factors_after(model, optimizer, loss):
    loss.backward()
    optimizer.step()
    return {name: [part.clone() for part in pair] for name, pair in optimizer.factors.items()}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_factors_are_those_of_the_first_examples(reduction, scale):
    images, labels = batch()
    found = {}
    for name, count, curvature in (("part", 128, "kfc"), ("alone", 32, WHOLE)):
        model = network()
        optimizer = preconditioner(model, curvature)
        loss = F.cross_entropy(model(images[:count]), labels[:count], reduction=reduction)
        found[name] = factors_after(model, optimizer, scale * loss)
    for layer, (activation, derivative) in found["alone"].items():
        assert_close(found["part"][layer][0], activation)
        # The sum of four times as many losses has four times the curvature.
        growth = 4 if reduction == "sum" else 1
        assert_close(found["part"][layer][1], growth * derivative)


def test_weights_of_examples_count():
    images, labels = batch()
    weights = torch.linspace(0, 2, 128, dtype=torch.float64)
    found = []
    for first, curvature in ((128, "kfc"), (32, WHOLE)):
        model = network()
        optimizer = preconditioner(model, curvature)
        losses = F.cross_entropy(model(images[:first]), labels[:first], reduction="none")
        found.append(factors_after(model, optimizer, (weights[:first] * losses).sum()))
    for layer, (_, derivative) in found[1].items():
        assert_close(found[0][layer][1], 4 * derivative)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1])
def test_the_fraction_is_that_of_the_batch(fraction):
    images, labels = batch()
    model = network()
    optimizer = preconditioner(model, kfc.Kronecker(fraction=fraction))
    found = factors_after(model, optimizer, F.cross_entropy(model(images), labels))
    part = images[: int(128 * fraction)]
    rows = F.pad(F.unfold(part, 3).mT.flatten(0, 1), (1, 0), value=1.0)
    assert_close(found["0"][0], rows.mT @ rows / len(part))


def test_small_batches_are_used_as_a_whole():
    images, labels = batch(63)
    model = network()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    factors_after(model, preconditioner(model), F.cross_entropy(model(images), labels))
    assert len(calls) == 1


def test_the_first_of_several_micro_batches_suffices():
    images, labels = batch()
    model = network()
    optimizer = preconditioner(model, schedule=kfc.Periods(1, 1))
    calls = []
    model[0].register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    for start in range(0, 128, 32):
        part = slice(start, start + 32)
        (F.cross_entropy(model(images[part]), labels[part]) / 4).backward()
    optimizer.step()
    # The number of examples in a step is known from its second step on.
    calls.clear()
    for start in range(0, 128, 32):
        part = slice(start, start + 32)
        (F.cross_entropy(model(images[part]), labels[part]) / 4).backward()
    optimizer.step()
    assert calls == [32] * 5


def test_the_size_of_a_replay_counts_passes_whose_graph_was_dropped_before():
    images, labels = batch(160)
    sizes = [8] * 8 + [96]
    found = []
    for parts in ([160], sizes):
        model = network()
        optimizer = preconditioner(model)
        pairs = zip(images.split(parts), labels.split(parts), strict=True)
        losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in pairs]
        found.append(factors_after(model, optimizer, sum(losses) / 160))
    for name, pair in found[0].items():
        assert_close(found[1][name], pair)


def test_buffers_gradients_and_random_numbers_are_left_alone():
    images, labels = batch()
    after = []
    for curvature in ("kfc", WHOLE):
        model = network(nn.BatchNorm2d(4), nn.Dropout(0.3))
        optimizer = preconditioner(model, curvature)
        torch.manual_seed(1)
        F.cross_entropy(model(images), labels).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        batch_statistics = optimizer.engine.begin_step(gradients)
        assert batch_statistics is not None
        assert batch_statistics.moments
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, gradients[name])
        after.append((torch.rand(3), [b.clone() for b in model.buffers()], gradients))
    (one, buffers, gradients), (other, others, whole) = after
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(buffers, others, strict=True))
    assert all(torch.equal(gradients[name], whole[name]) for name in whole)


@pytest.mark.parametrize("kind", ["expanded", "inference"])
@pytest.mark.parametrize("optimizer_type", [kfc.KFC, kfc.KFAC])
def test_buffers_that_cannot_be_written_are_put_back(optimizer_type, kind):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()
            self.register_buffer("mask", self.changed(torch.zeros(3, dtype=torch.float64)))

        def changed(self, mask):
            with torch.inference_mode(kind == "inference"):
                return mask + 1 if kind == "inference" else (mask[:1] + 1).expand(3)

        def forward(self, images):
            outputs = self.body(images) + self.mask.clone()
            self.mask = self.changed(self.mask)
            return outputs

    images, labels = batch()
    model, ones = Masked(), torch.ones(3, dtype=torch.float64)
    optimizer = optimizer_type(model)
    for step in range(1, 4):
        if optimizer_type is kfc.KFAC:
            optimizer.step(lambda: F.cross_entropy(model(images), labels))
        else:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        assert torch.equal(model.mask, (step + 1) * ones)


class Fixed(nn.Module):
    """A network that needs its usual number of examples."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, images):
        return self.body(images.reshape(128, 2, 6, 6))


def test_a_model_that_cannot_be_cut_gives_statistics_of_whole_batches():
    images, labels = batch()
    model, plain = Fixed(), network()
    optimizer = preconditioner(model)
    with pytest.warns(UserWarning, match="first 32 of 128 examples failed"):
        found = factors_after(model, optimizer, F.cross_entropy(model(images), labels))
    whole = preconditioner(plain, WHOLE)
    expected = factors_after(plain, whole, F.cross_entropy(plain(images), labels))
    for name, pair in expected.items():
        assert_close(found[f"body.{name}"], pair)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factors_after(model, optimizer, F.cross_entropy(model(images), labels))


class Sometimes(nn.Module):
    """A network with a layer that runs only if it is told to."""

    def __init__(self):
        super().__init__()
        self.body, self.extra = network(), nn.Linear(3, 3).double()

    def forward(self, images, more=False):
        out = self.body(images)
        return self.extra(out) if more else out


def test_a_layer_that_runs_later_gets_its_statistics_in_its_first_step():
    images, labels = batch()
    model = Sometimes()
    optimizer = preconditioner(model, schedule=kfc.Periods(100, 100))
    for more in (False, True, False):
        model.zero_grad()
        F.cross_entropy(model(images, more), labels).backward()
        optimizer.step()
        assert ("extra" in optimizer.factors) == (more or "extra" in optimizer.factors)
    assert "extra" in optimizer.factors


@pytest.mark.parametrize("others", [1, 2])
def test_a_layer_of_a_later_micro_batch_gets_its_statistics(others):
    images, labels = batch()
    model = Sometimes()
    optimizer = preconditioner(model)
    for _ in range(others):
        F.cross_entropy(model(images), labels).backward()
    F.cross_entropy(model(images, more=True), labels).backward()
    optimizer.step()
    assert "extra" in optimizer.factors


class Experts(nn.Module):
    """A network with two heads, the second of which sees only some of the examples."""

    def __init__(self):
        super().__init__()
        self.body = network()
        self.experts = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(2))

    def forward(self, images, routes):
        hidden = self.body(images)
        outputs = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(routes == number)
            outputs = outputs.index_add(0, rows, expert(hidden[rows]))
        return outputs


def test_a_layer_that_runs_for_later_examples_only_gets_its_statistics():
    images, labels = batch()
    routes = (torch.arange(128) >= 100).long()
    found = []
    for curvature in ("kfc", WHOLE):
        model = Experts()
        optimizer = preconditioner(model, curvature)
        loss = F.cross_entropy(model(images, routes), labels)
        found.append(factors_after(model, optimizer, loss))
    (activation, derivative), (expected, _) = (each["experts.1"] for each in found)
    assert_close(activation, expected)
    assert derivative.trace() > 0
    part = F.pad(model.body(images[:32]), (1, 0), value=1.0)
    assert_close(found[0]["experts.0"][0], part.mT @ part / 32)


def trained_with_experts_on_ranks(rank):
    torch.manual_seed(0)
    model = Experts()
    wrapper = DistributedDataParallel(model)
    optimizer = kfc.KFC(wrapper, lr=0.01, seed=0)
    # The second head sees no examples of rank 1, and late ones of rank 0.
    images, labels = batch(128, seed=rank)
    routes = (torch.arange(128) >= 100 + 28 * rank).long()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(wrapper(images, routes), labels).backward()
        optimizer.step()
    parameters = [p.detach().clone() for p in model.parameters()]
    return parameters, optimizer.factors["experts.1"].activation.clone()


def test_ranks_agree_on_layers_that_run_for_later_examples_only():
    first, second = run_ranks(trained_with_experts_on_ranks, 2, timeout=120)
    assert torch.equal(first[1], second[1])
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def test_half_precision_is_that_of_the_forward_pass():
    images, labels = (part.float() if part.is_floating_point() else part for part in batch())
    model = network().float()
    dtypes = []
    model[0].register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    optimizer = preconditioner(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    found = factors_after(model, optimizer, loss)
    assert dtypes == [torch.bfloat16] * 2
    assert all(part.dtype == torch.float32 for pair in found.values() for part in pair)


@pytest.mark.parametrize("curvature", ["kfc", "sua", "prong", "ekfac", "diagonal"])
def test_a_run_resumes_bit_for_bit(curvature):
    def new():
        model = network(nn.BatchNorm2d(4))
        return model, kfc.KFC(model, seed=0, curvature=curvature, schedule=kfc.Periods(2, 3))

    def train(model, optimizer, seeds):
        for seed in seeds:
            images, labels = batch(seed=seed)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    assert_resumes(new, train, range(4), range(4, 9))


def trained_on_ranks(rank, size):
    model = network(nn.BatchNorm2d(4))
    wrapper = DistributedDataParallel(model)
    optimizer = kfc.KFC(wrapper, seed=0, schedule=kfc.Periods(2, 2))
    for seed in range(5):
        images, labels = batch(seed=seed)
        # Batches of different sizes, on either side of the limit for a part
        where = slice(0, 90) if rank == 0 else slice(90, 128)
        optimizer.zero_grad()
        F.cross_entropy(wrapper(images[where]), labels[where]).backward()
        optimizer.step()
    parameters = [p.detach().clone() for p in model.parameters()]
    return parameters, optimizer.factors["0"].derivative.clone()


def test_ranks_with_different_batches_stay_equal():
    first, second = run_ranks(trained_on_ranks, 2, 2, timeout=120)
    assert torch.equal(first[1], second[1])
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


@pytest.mark.parametrize("curvature", [kfc.Kronecker(fisher="exact"), kfc.Kronecker(fraction=1)])
def test_exact_targets_and_a_fraction_of_one_use_the_whole_batch(curvature):
    images, labels = batch()
    model = network()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    optimizer = (
        preconditioner(model, curvature)
        if curvature.fisher == "sampled"
        else (kfc.Preconditioner(model, curvature=curvature))
    )
    factors_after(model, optimizer, F.cross_entropy(model(images), labels))
    assert len(calls) == 1


def test_wide_layers_with_few_locations_get_more_examples():
    model = nn.Sequential(nn.Flatten(), nn.Linear(1600, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    images = torch.randn(256, 1600, dtype=torch.float64)
    labels = torch.randint(3, (256,))
    sizes = []
    model[1].register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    optimizer = preconditioner(model)
    factors_after(model, optimizer, F.cross_entropy(model(images), labels))
    assert sizes == [256, 101]  # a sixteenth of 1,601 inputs
