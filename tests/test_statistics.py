"""Statistics from forward and backward passes: when they are gathered, and the hooks."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import kfc
from kfc.curvature.options import APPROXIMATIONS
from kfc.statistics.backward import RecordedPass


def net(inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(3, 2, 2),
        nn.ReLU(inplace=inplace),
        nn.Flatten(),
        nn.Linear(18, 4),
    )


def batch(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 1, 6, 6), torch.randint(4, (size,))


def with_ones(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with a leading 1, the homogeneous coordinate."""
    return torch.cat([rows.new_ones(len(rows), 1), rows], dim=1)


def saved_layers(optimizer) -> dict:
    """Return what the state dict says about each layer."""
    return optimizer.state_dict()["curvature"]["curvature"]["layers"]


def assert_no_statistics(optimizer) -> None:
    with pytest.raises(RuntimeError, match="there are no statistics yet"):
        optimizer.step()


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def live_passes() -> int:
    return sum(isinstance(o, RecordedPass) for o in gc.get_objects())


def test_nothing_is_gathered_in_eval_mode_or_without_gradients():
    model, x, y = nn.Sequential(nn.Linear(3, 4)), torch.randn(6, 3), torch.randint(4, (6,))
    F.cross_entropy(model(x), y).backward()
    preconditioner = kfc.Preconditioner(model)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.eval()
    F.cross_entropy(model(x), y).backward()
    model.train()
    torch.func.jvp(model, (x,), (x,))
    model(10 * x)  # without a backward pass
    assert_no_statistics(preconditioner)
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()
    rows = with_ones(x)
    torch.testing.assert_close(preconditioner.factors["0"].activation, rows.T @ rows / 6)


def test_statistics_and_inverses_are_refreshed_when_due():
    model = net()
    optimizer = kfc.KFC(model, schedule=kfc.Periods(2, 3))
    changed = {"factors": [], "inverse": []}
    factors = inverse = None
    for k in range(1, 8):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        new = optimizer.factors["0"].activation.clone()
        new_inverse = saved_layers(optimizer)["0"]["inverse"]["activation"]
        if factors is None or not torch.equal(factors, new):
            changed["factors"].append(k)
        if inverse is None or not torch.equal(inverse, new_inverse):
            changed["inverse"].append(k)
        factors, inverse = new, new_inverse
    assert changed == {"factors": [1, 2, 4, 6], "inverse": [1, 3, 6]}


def test_factors_are_empty_until_the_first_step():
    model, (x, y) = net(), batch()
    optimizer = kfc.KFC(model)
    F.cross_entropy(model(x), y).backward()
    assert optimizer.factors == {}
    optimizer.step()
    assert set(optimizer.factors) == {"0", "2", "5"}


def test_in_place_activations_change_nothing():
    x, y = batch()
    results = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = net(inplace)
        for kind in ("exact", "empirical"):
            preconditioner = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher=kind))
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            preconditioner.step()
            results.append(preconditioner.factors)
            preconditioner.close()
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])


def test_the_gradients_of_the_user_are_unchanged():
    model, (x, y) = net(), batch()
    F.cross_entropy(model(x), y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    preconditioner = kfc.Preconditioner(model)
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], plain)
    preconditioner.step()
    assert set(preconditioner.factors) == {"0", "2", "5"}


def test_the_global_random_state_is_untouched_and_the_seed_decides():
    x, y = batch()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(3)
        model = net()
        optimizer = kfc.KFC(model, seed=seed)
        before = torch.get_rng_state()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert torch.equal(before, torch.get_rng_state())
        runs.append(optimizer.factors["0"].derivative)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_micro_batches_average_the_factors():
    model, (x, y) = net().double(), batch(9)
    x = x.double()
    whole = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="exact"))
    F.cross_entropy(model(x), y).backward()
    whole.step()
    whole.close()
    model.zero_grad()
    parts = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="exact"))
    for start, stop in ((0, 4), (4, 6), (6, 9)):
        loss = F.cross_entropy(model(x[start:stop]), y[start:stop], reduction="sum") / 9
        loss.backward()
    parts.step()
    torch.testing.assert_close(parts.factors, whole.factors)


def test_micro_batches_of_different_map_sizes():
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    inputs = [torch.randn(2, 1, 5), torch.randn(3, 1, 8)]
    preconditioner = kfc.Preconditioner(model)
    for x in inputs:
        F.cross_entropy(model(x), torch.randint(2, (len(x),))).backward()
    preconditioner.step()
    rows = [x.unfold(2, 2, 1).reshape(-1, 2) for x in inputs]
    rows = torch.cat([torch.cat([torch.ones(len(r), 1), r], 1) for r in rows])
    torch.testing.assert_close(preconditioner.factors["0"].activation, rows.T @ rows / 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("classes", [3, 10])
@pytest.mark.parametrize("scale", [1.0, 10.0, 30.0])
def test_the_loss_of_confident_predictions_fits(scale, classes, dtype):
    """Rounding is more than what is left of the derivative where predictions are certain."""
    for right in (False, True):
        model = nn.Linear(5, classes, dtype=dtype)
        x = scale * torch.randn(8, 5, dtype=dtype)
        with torch.no_grad():
            model.weight.mul_(5)
            y = model(x).argmax(1) if right else torch.randint(classes, (8,))
        preconditioner = kfc.Preconditioner(model, strict=True)
        F.cross_entropy(model(x), y).backward()
        assert "Categorical" in preconditioner.describe()


def test_empirical_factors_use_the_targets_of_the_data():
    model, (x, y) = nn.Sequential(nn.Linear(3, 4)), (torch.randn(5, 3), torch.randint(4, (5,)))
    preconditioner = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="empirical"))
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()
    derivatives = F.one_hot(y, 4) - model(x).detach().softmax(1)
    expected = derivatives.T @ derivatives / 5
    torch.testing.assert_close(preconditioner.factors["0"].derivative, expected)


def test_empirical_scale_over_locations():
    """The derivatives are those that sampled targets would give if they equalled the data."""
    model = nn.Sequential(nn.Conv1d(2, 3, 1))
    x, y = torch.randn(4, 2, 5), torch.randint(3, (4, 5))
    preconditioner = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="empirical"))
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()
    derivatives = F.one_hot(y, 3) - model(x).detach().softmax(1).transpose(1, 2)
    rows = derivatives.reshape(-1, 3) / 5**0.5
    torch.testing.assert_close(preconditioner.factors["0"].derivative, rows.T @ rows / 20)


@pytest.mark.parametrize("kind", ["sampled", "empirical"])
def test_no_recorded_pass_outlives_its_step(kind):
    model = net()
    optimizer = kfc.KFC(
        model, curvature=kfc.Kronecker(fisher=kind), schedule=kfc.Periods(statistics=1)
    )
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    gc.collect()
    assert live_passes() == 0


@pytest.mark.parametrize("curvature", APPROXIMATIONS)
def test_no_activation_outlives_its_step(curvature):
    """Even if the loss does: autograd frees its activations, and so must the hooks."""
    twice, norm = nn.Linear(5, 5), nn.LayerNorm(5)
    model = nn.Sequential(nn.Linear(4, 5), norm, twice, nn.Tanh(), twice, nn.Linear(5, 3))
    optimizer = kfc.KFC(
        model,
        curvature=APPROXIMATIONS[curvature](fisher="empirical"),
        schedule=kfc.Periods(statistics=1),
        clip=None,
    )
    losses, activations = [], []
    for layer in model[1:]:
        layer.register_forward_pre_hook(
            lambda _, args: activations.append(StorageWeakRef(args[0].untyped_storage()))
        )
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,))))
        losses[-1].backward()
        # Derivatives of a layer that is called twice are kept until the step.
        assert activations[0].expired()
        optimizer.step()
        assert all(activation.expired() for activation in activations)


@pytest.mark.usefixtures("double")
def test_two_backward_passes_through_one_forward():
    """A linear layer called once counts them as two draws; a normalisation layer adds them up.

    The sum of the losses is one loss, with terms of twice the weight.
    """
    x, targets = torch.randn(6, 4), torch.randint(3, (2, 6))
    found = {}
    for which in ("first", "second", "sum", "one after the other"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
        optimizer = kfc.KFC(model, curvature=kfc.Diagonal(fisher="empirical"), clip=None)
        outputs = model(x)
        first, second = (F.cross_entropy(outputs, labels) for labels in targets)
        if which == "one after the other":
            first.backward(retain_graph=True)
            second.backward()
        elif which == "sum":
            with pytest.warns(UserWarning, match="targets are mixtures"):
                (first + second).backward()
        else:
            {"first": first, "second": second}[which].backward()
        optimizer.step()
        found[which] = {n: layer["running"][0] for n, layer in saved_layers(optimizer).items()}
    both = found["one after the other"]
    torch.testing.assert_close(both["1"], found["first"]["1"] + found["second"]["1"])
    torch.testing.assert_close(both["0"], 2 * found["sum"]["0"])


@pytest.mark.parametrize("kind", ["exact", "empirical"])
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum"])
def test_accumulated_micro_batches_have_the_factors_of_the_whole_batch(kind, reduction):
    model, (x, y) = net().double(), batch(9)
    x = x.double()

    def loss(part):
        value = F.cross_entropy(model(x[part]), y[part], reduction="sum")
        return value if reduction == "sum" else value / 9

    found = []
    for parts in ([slice(0, 9)], [slice(0, 4), slice(4, 6), slice(6, 9)]):
        likelihood = kfc.Categorical(reduction)
        preconditioner = kfc.Preconditioner(
            model, curvature=kfc.Kronecker(fisher=kind), likelihood=likelihood
        )
        model.zero_grad()
        for part in parts:
            loss(part).backward()
        preconditioner.step()
        preconditioner.close()
        found.append(preconditioner.factors)
    torch.testing.assert_close(*found)


def test_a_call_whose_output_is_not_used_does_not_count():
    class Wasteful(nn.Module):
        def __init__(self, waste):
            super().__init__()
            self.layer, self.waste = nn.Linear(3, 2), waste

        def forward(self, x):
            if self.waste:
                self.layer(x)
            return self.layer(x)

    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    found = []
    for waste in (False, True):
        torch.manual_seed(0)
        model = Wasteful(waste)
        preconditioner = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="exact"))
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
        found.append(preconditioner.factors["layer"])
    torch.testing.assert_close(*found)


def test_estimates_use_only_the_given_batches():
    model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    optimizer = kfc.KFC(model)
    # A backward pass that no step followed.
    F.cross_entropy(model(100 * torch.randn(8, 4)), y).backward()
    optimizer.estimate_factors([(x, y)], lambda out, batch: F.cross_entropy(out, batch[1]))
    rows = torch.cat([torch.ones(8, 1), x], dim=1)
    torch.testing.assert_close(optimizer.factors[""].activation, rows.T @ rows / 8)


def test_inverses_age_from_the_step_after_an_estimate():
    model = nn.Linear(4, 3)
    optimizer = kfc.KFC(model, schedule=kfc.Periods(100, 100))
    ages = []
    for k in range(6):
        if k == 3:
            optimizer.estimate_factors([torch.randn(8, 4)])
            ages.append(optimizer.diagnostics["staleness"])
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        optimizer.step()
        ages.append(optimizer.diagnostics["staleness"])
    assert ages == [0, 1, 2, None, 0, 1, 2]


def test_estimates_restore_replaced_buffers_and_accept_streams():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return super().forward(x)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.randn(4), 0) for _ in range(6)])

    model = nn.Sequential(Counting(), nn.Linear(3, 3))
    seen = []
    loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
    optimizer = kfc.KFC(model, likelihood="categorical")
    optimizer.estimate_factors(loader, progress=lambda *now: seen.append(now))
    assert seen == [(1, None), (2, None), (3, None)]
    assert model[0].count == 0


def test_evaluation_in_another_thread_is_ignored():
    class Slow(nn.Linear):
        pause = None

        def forward(self, x):
            out = super().forward(x)
            if self.pause:
                self.pause()
            return out

    model = nn.Sequential(nn.Linear(3, 3), Slow(3, 2), nn.Linear(2, 2))
    optimizer = kfc.KFC(model)

    def evaluate():
        def run():
            model[1].pause = None
            with torch.no_grad():
                model(torch.randn(2, 3))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    model[1].pause = evaluate
    F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    assert set(optimizer.factors) == {"0", "1", "2"}
    assert optimizer.engine.curvature.layers["0"].state.running[0][0, 0, 0] == 1  # of one pass


def test_an_empirical_forward_without_a_backward_is_ignored():
    model, (x, y) = net(), batch()
    preconditioner = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="empirical"))
    model(torch.randn(3, 1, 6, 6))  # without a backward pass
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()
    other = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="empirical"))
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    other.step()
    torch.testing.assert_close(preconditioner.factors, other.factors)


def test_checkpointing_without_reentrance_works():
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    inner, (x, y) = net(), batch()
    plain = kfc.Preconditioner(inner, curvature=kfc.Kronecker(fisher="exact"))
    F.cross_entropy(inner(x), y).backward()
    plain.step()
    plain.close()
    inner.zero_grad()
    model = Checkpointed(inner)
    preconditioner = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="exact"))
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()
    for name, factors in plain.factors.items():
        torch.testing.assert_close(preconditioner.factors[f"inner.{name}"], factors)


def test_reentrant_checkpointing_is_refused():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=True)

    model = Checkpointed()
    preconditioner = kfc.Preconditioner(model)
    with pytest.raises(RuntimeError, match=r"inner.*use_reentrant=False"):
        model(torch.randn(4, 3))
    assert_no_statistics(preconditioner)


def test_a_part_that_runs_without_gradients_is_not_trained():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            with torch.no_grad():
                features = self.body(x)
            return self.head(features)

    model = Headed()
    optimizer = kfc.KFC(model)
    before = model.body.weight.detach().clone()
    F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    assert set(optimizer.factors) == {"head"}
    assert torch.equal(model.body.weight, before)


@pytest.mark.parametrize("during_statistics", [False, True])
def test_copies_and_pickles_of_the_model_are_inert(during_statistics):
    model, (x, y) = net(), batch()
    estimate = kfc.Preconditioner(model, likelihood="categorical")
    estimate.estimate_factors([x])
    estimate.close()
    expected = estimate.factors["0"].activation
    optimizer = kfc.KFC(model)
    if during_statistics:
        F.cross_entropy(model(x), y).backward()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies.append(torch.load(buffer, weights_only=False))
    for other in copies:
        torch.testing.assert_close(other(x), model.eval()(x))
        model.train()
        F.cross_entropy(other(100 * x), y).backward()
        again = kfc.KFC(other)
        F.cross_entropy(other(x), y).backward()
        again.step()
    if during_statistics:
        optimizer.step()
        torch.testing.assert_close(optimizer.factors["0"].activation, expected)
    else:
        assert_no_statistics(optimizer)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_close_and_garbage_collection_remove_every_hook():
    model, (x, y) = net(), batch()
    optimizer = kfc.KFC(model)
    assert count_hooks(model) > 0
    optimizer.close()
    assert count_hooks(model) == 0
    optimizer.close()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()

    optimizer = kfc.KFC(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    del optimizer
    gc.collect()
    assert count_hooks(model) == 0


def test_an_error_in_the_forward_pass_leaves_nothing_behind():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.fail = nn.Linear(3, 2), True

        def forward(self, x):
            out = self.layer(x)
            if self.fail:
                raise ArithmeticError("on purpose")
            return out

    model = Fails()
    preconditioner = kfc.Preconditioner(model)
    with pytest.raises(ArithmeticError):
        model(torch.randn(4, 3))
    gc.collect()
    assert not live_passes()
    model.fail = False
    x = torch.randn(4, 3)
    F.cross_entropy(model(x), torch.randint(2, (4,))).backward()
    preconditioner.step()
    rows = torch.cat([torch.ones(4, 1), x], dim=1)
    torch.testing.assert_close(preconditioner.factors["layer"].activation, rows.T @ rows / 4)


def test_a_layer_gets_statistics_when_it_first_runs():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.late, self.use = nn.Linear(3, 3), nn.Linear(3, 3), False

        def forward(self, x):
            x = self.first(x)
            return self.late(x.tanh()) if self.use else x

    model = Later()
    optimizer = kfc.KFC(model, schedule=kfc.Periods(100, 100))
    for k in range(4):
        model.use = k == 2
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(6, 3)), torch.randint(3, (6,))).backward()
        optimizer.step()
        assert ("late" in optimizer.factors) == (k >= 2)


def test_unfrozen_parameters_get_statistics_immediately():
    model, (x, y) = net(), batch()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = kfc.KFC(model, schedule=kfc.Periods(50, 50))
    frozen = model[0].weight.detach().clone()
    for k in range(3):
        if k == 2:
            model.requires_grad_(True)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, frozen) == (k < 2)
        assert optimizer.factors["2"].activation.shape[0] == (12 if k < 2 else 13)
    assert "0" in optimizer.factors


def test_a_layer_outside_the_model_forward_loses_its_curvature():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.aside = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.main(x)

    model = Aside()
    optimizer = kfc.KFC(model)
    x, y = torch.randn(4, 3), torch.randint(2, (4,))
    (F.cross_entropy(model(x), y) + F.cross_entropy(model.aside(x), y)).backward()
    with pytest.warns(UserWarning, match=r"'aside' has a gradient, but no statistics"):
        optimizer.step()
    assert set(optimizer.factors) == {"main"}


def test_auxiliary_outputs_can_be_stacked_as_locations():
    class Aux(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.aux = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.main(x), self.aux(x)

    model = Aux()
    optimizer = kfc.KFC(model, likelihood="categorical", output=lambda out: torch.stack(out, dim=2))
    main, aux = model(torch.randn(4, 3))
    labels = torch.randint(2, (4,))
    with pytest.warns(UserWarning, match="with respect to the output is unknown"):
        (F.cross_entropy(main, labels) + F.cross_entropy(aux, labels)).backward()
    optimizer.step()
    assert set(optimizer.factors) == {"main", "aux"}


def test_scripted_and_replicated_models_are_refused():
    with pytest.raises(ValueError, match="ScriptModule"):
        kfc.KFC(torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2)))
    with pytest.raises(ValueError, match="DataParallel"):
        kfc.KFC(nn.DataParallel(net()))


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_in_place_activations_after_a_linear_layer_with_several_leading_dimensions(fisher):
    """Its output is a view, whose own edge the activation replaces."""
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(inplace), nn.Linear(6, 6), nn.Flatten(), nn.Linear(30, 3)
        )
        optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fisher=fisher))
        x, y = torch.randn(8, 5, 4), torch.randint(3, (8,))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append([f.derivative for f in optimizer.factors.values()])
    assert len(found[1]) == 3
    torch.testing.assert_close(*found)


def test_batch_norm_whose_mode_changes_before_the_backward_pass():
    found = []
    for changes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fisher="empirical"), clip=None)
        loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,)))
        if changes:
            model.eval()
        loss.backward()
        optimizer.step()
        found.append(optimizer.blocks["1"])
    torch.testing.assert_close(*found)


def test_an_input_of_a_normalisation_layer_changed_in_place_is_an_error():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)

        def inside(self, x):
            hidden = self.first(x)
            result = self.norm(hidden)
            with torch.no_grad():
                hidden.zero_()
            return result

        def forward(self, x):
            return self.last(checkpoint(self.inside, x, use_reentrant=False))

    model = Model()
    optimizer = kfc.KFC(model)
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,)))
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    assert optimizer.factors == {}
