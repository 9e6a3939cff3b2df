"""Options of the optimizers and of their value objects: bad values, and options without effect."""

import dataclasses
import inspect
import math

import pytest
import torch
from torch import nn

import kfc
from kfc.lab.optimizers import OPTIMIZERS
from kfc.lab.options import flat, options_of
from reference import fitting_loss

CONSTRUCTORS = (kfc.KFC, kfc.KFAC, kfc.Preconditioner, kfc.WhitenedAdam)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("lr", "fast"),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("weight_decay", -1.0),
        ("weight_decay", math.inf),
        ("lr", 1e300),
        ("weight_decay", 1e39),
        ("damping", -1e-3),
        ("damping", math.nan),
        ("clip", 0.0),
        ("clip", math.inf),
        ("clip", True),
        ("clip", "tight"),
        ("averaging_timescale", 0.0),
        ("averaging_timescale", math.nan),
        ("fallback_lr", -1.0),
        ("seed", 1.5),
        ("likelihood", "poisson"),
        ("curvature", "shampoo"),
    ],
)
def test_hyper_parameters_out_of_range(option, value):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=option):
        kfc.KFC(model, **{option: value})
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        (kfc.KFC, "schedule", 10),
        (kfc.KFC, "schedule", None),
        (kfc.KFC, "parallel", True),
        (kfc.KFAC, "schedule", kfc.Budget()),
        (kfc.KFAC, "adaptation", 0.1),
        (kfc.Preconditioner, "schedule", (10, 20)),
        (kfc.Preconditioner, "parallel", "auto"),
        (kfc.WhitenedAdam, "schedule", 50),
        (kfc.WhitenedAdam, "parallel", "auto"),
    ],
)
def test_options_of_the_wrong_type(method, option, value):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=f"{option} must be .*kfc"):
        method(model, **{option: value})
    assert not model._forward_hooks


@pytest.mark.parametrize("clip", [0.0, math.inf, "tight"])
def test_bad_clips_of_kfac(clip):
    with pytest.raises(ValueError, match="clip must be a finite number"):
        kfc.KFAC(nn.Linear(2, 2), clip=clip)


def test_kfac_takes_a_number_as_clip():
    message = r"clip must be a number or None for KFAC.* loss_bound is that of kfc\.Adaptation"
    with pytest.raises(TypeError, match=message):
        kfc.KFAC(nn.Linear(2, 2), clip=kfc.FisherClip())


# Value objects


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("limit", 0.0),
        ("limit", math.inf),
        ("limit", "0.3"),
        ("loss_bound", 0.0),
        ("loss_bound", math.nan),
        ("fraction", 0.0),
        ("fraction", 1.5),
        ("fraction", math.nan),
        ("period", 0),
        ("period", True),
        ("period", 2.5),
    ],
)
def test_bad_values_of_the_clip(option, value):
    with pytest.raises(ValueError, match=f"the clip's {option} must be"):
        kfc.FisherClip(**{option: value})


CURVATURES = (kfc.Kronecker, kfc.SUA, kfc.PRONG, kfc.EKFAC, kfc.Diagonal, kfc.Whitening)
BAD_VALUES = {
    "fisher": ["true", None],
    "factor_decay": [1.0, -0.5],
    "inverse": ["qr", None],
    "max_factor_size": [0, 2.5],
    "inverse_error": [0, 1, "small"],
    "fraction": [0, 1.5, "half"],
    "block_size": [0, True],
    "gather_in_eval": [1, "always"],
}


@pytest.mark.parametrize(
    ("curvature", "option", "value"),
    [
        (curvature, field.name, value)
        for curvature in CURVATURES
        for field in dataclasses.fields(curvature)
        if field.init
        for value in BAD_VALUES[field.name]
    ],
)
def test_bad_values_of_the_curvature(curvature, option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        curvature(**{option: value})


@pytest.mark.parametrize("method", [kfc.KFC, kfc.KFAC, kfc.Preconditioner])
def test_only_whitened_adam_takes_a_whitening(method):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"an option of kfc\.WhitenedAdam only"):
        method(model, curvature=kfc.Whitening())
    with pytest.raises(TypeError, match=r"whitening must be kfc\.Whitening, got Kronecker"):
        kfc.WhitenedAdam(model, whitening=kfc.Kronecker())
    assert not model._forward_hooks


@pytest.mark.parametrize("schedule", [kfc.Periods, kfc.Budget])
@pytest.mark.parametrize("option", ["statistics", "inverse"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True, "often"])
def test_bad_periods(schedule, option, value):
    with pytest.raises(ValueError, match=f"{option} must be a whole number of at least 1"):
        schedule(**{option: value})


@pytest.mark.parametrize("overhead", [0, -1, math.nan, "much", None])
def test_bad_budgets(overhead):
    with pytest.raises(ValueError, match="overhead must be a finite number, above 0"):
        kfc.Budget(overhead)


@pytest.mark.parametrize(("limit", "pace"), [(0, 25), (10, 0), (2.5, 25)])
def test_bad_stretches(limit, pace):
    with pytest.raises(ValueError, match="Stretch"):
        kfc.Stretch(limit, pace)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("group", "ranks"),
        ("group", 3),
        ("placement", "everywhere"),
        ("max_staleness", -1),
        ("max_staleness", 1.5),
        ("consistency_period", 0),
        ("consistency_period", True),
    ],
)
def test_bad_values_of_parallel(option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        kfc.Parallel(**{"asynchronous": True, option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", "fast"),
        ("momentum", 1.0),
        ("momentum", -0.5),
        ("model_damping", -1.0),
        ("factor_damping", math.nan),
        ("initial_model_damping", 0.0),
        ("model_damping_period", 0),
        ("model_damping_decrease", 1.0),
        ("model_damping_decrease", 0.0),
        ("factor_damping_period", 2.5),
        ("factor_damping_factor", 1.5),
    ],
)
def test_bad_values_of_the_adaptation(option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        kfc.Adaptation(**{option: value})


# Options without effect


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": 2}, "max_staleness .*no effect without asynchronous=True"),
        ({"deterministic": True}, "deterministic .*no effect without asynchronous=True"),
        ({"group": None, "placement": "shared"}, "placement .*no effect with group=None"),
        ({"group": None, "consistency_period": 5}, "consistency_period .*no effect with group"),
    ],
)
def test_parallel_refuses_options_without_effect(options, message):
    with pytest.raises(ValueError, match=message):
        kfc.Parallel(**options)


@pytest.mark.parametrize(
    ("fixed", "option", "value"),
    [
        ("model_damping", "model_damping_decrease", 0.5),
        ("model_damping", "initial_model_damping", 0.5),
        ("factor_damping", "factor_damping_period", 3),
        ("factor_damping", "factor_damping_factor", 0.5),
    ],
)
def test_adaptation_refuses_options_without_effect(fixed, option, value):
    with pytest.raises(ValueError, match=f"{option} has no effect with a fixed {fixed}"):
        kfc.Adaptation(**{fixed: 0.1, option: value})


def test_the_period_of_measurements_has_an_effect_unless_everything_is_fixed():
    kfc.Adaptation(model_damping=0.1, model_damping_period=3)  # α and μ are still chosen
    kfc.Adaptation(model_damping=0.1, model_damping_period=3, lr=0.1)  # μ is
    with pytest.raises(ValueError, match="model_damping_period has no effect with a fixed"):
        kfc.Adaptation(model_damping=0.1, model_damping_period=3, lr=0.1, momentum=0.5)


@pytest.mark.parametrize("method", [kfc.KFC, kfc.KFAC, kfc.Preconditioner])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_seed_has_no_effect_if_no_targets_are_sampled(method, fisher):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"seed has no effect with fisher='{fisher}'"):
        method(model, seed=0, curvature=kfc.Kronecker(fisher=fisher))
    assert not model._forward_hooks


def test_the_overhead_of_a_budget_has_no_effect_with_fixed_periods():
    message = r"no effect with two fixed periods; pass schedule=kfc.Periods\(5, 10\)"
    with pytest.raises(ValueError, match=message):
        kfc.Budget(0.25, statistics=5, inverse=10)


def test_a_likelihood_has_no_effect_without_loss_bound_and_rotation():
    model = nn.Linear(2, 2)
    options = {"likelihood": "categorical", "loss_bound": None, "rotation_period": None}
    with pytest.raises(ValueError, match="likelihood has no effect without a loss_bound and"):
        kfc.WhitenedAdam(model, **options)
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (kfc.EKFAC, "inverse"),
        (kfc.Diagonal, "inverse"),
        (kfc.Diagonal, "max_factor_size"),
        (kfc.Whitening, "fisher"),
        (kfc.Kronecker, "overhead"),
    ],
)
def test_options_that_an_object_does_not_have(make, option):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        make(**{option: "factored"})


# The command line


def flat_defaults(method) -> dict[str, object]:
    """Return the defaults of a constructor, and those of its value objects, by name."""
    found = {name: p.default for name, p in inspect.signature(method).parameters.items()}
    clip = found.get("clip")
    if isinstance(clip, kfc.FisherClip):
        found |= {"clip": clip.limit, "loss_bound": clip.loss_bound}
    if "betas" in found:
        found |= dict(zip(("beta1", "beta2"), found["betas"], strict=True))
    if "adaptation" in found:
        found |= vars(found["adaptation"])
    if "whitening" in found:
        found |= vars(found["whitening"])
    if found.get("curvature") == "kfc":
        found |= {"factor_decay": kfc.Kronecker.factor_decay}
    return {**found, "periods": found["schedule"]}


@pytest.mark.parametrize(
    ("method", "name", "least"),
    [
        (kfc.KFC, "kfc", {"lr", "momentum", "damping", "clip", "loss_bound", "factor_decay"}),
        (kfc.KFAC, "kfac", {"lr", "model_damping_period", "max_lr", "clip", "loss_bound"}),
        (kfc.WhitenedAdam, "whitened-adam", {"lr", "beta1", "beta2", "damping", "factor_decay"}),
    ],
)
def test_the_command_line_has_the_same_defaults(method, name, least):
    own, expected = OPTIMIZERS[name](), flat_defaults(method)
    values = {**flat(own), "lr": own.lr, "periods": own.periods}
    compared = values.keys() & expected.keys()
    assert compared >= {*least, "periods"}
    found = {name: values[name] for name in compared}
    # On the command line, 0 is no limit.
    assert found == {name: expected[name] for name in compared} | (
        {"clip": 0.0} if method is kfc.KFAC else {}
    )


def test_the_command_line_shows_the_default_periods():
    helps = {name: option.help for name, option in options_of(OPTIMIZERS["kfc"]).items()}
    for name, default in (("statistics_period", 10), ("inverse_period", 20)):
        assert f"rising to {default} for kfc" in helps[name]


# Shape


@pytest.mark.parametrize("method", CONSTRUCTORS)
def test_constructors_have_at_most_16_arguments(method):
    assert len(inspect.signature(method).parameters) <= 16


@pytest.mark.parametrize("method", CONSTRUCTORS)
def test_only_the_model_and_the_learning_rate_are_positional(method):
    kinds = inspect.signature(method).parameters
    positional = {n for n, p in kinds.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY}
    assert positional <= {"model", "lr"}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (kfc.FisherClip, "limit"),
        (kfc.Periods, "inverse"),
        (kfc.Budget, "overhead"),
        (kfc.Parallel, "placement"),
        (kfc.Adaptation, "lr"),
        (kfc.Kronecker, "fisher"),
        (kfc.SUA, "fisher"),
        (kfc.PRONG, "fisher"),
        (kfc.EKFAC, "fisher"),
        (kfc.Diagonal, "fisher"),
    ],
)
def test_value_objects_do_not_change(make, field):
    value = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, 0.5)
    assert value == make()


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"clip": 0.01}, {"clip": kfc.FisherClip(0.01)}),
        ({"curvature": "kfc"}, {"curvature": kfc.Kronecker()}),
        ({"curvature": "sua"}, {"curvature": kfc.SUA()}),
        ({"curvature": "prong"}, {"curvature": kfc.PRONG()}),
        ({"curvature": "ekfac"}, {"curvature": kfc.EKFAC()}),
        ({"curvature": "diagonal"}, {"curvature": kfc.Diagonal()}),
        ({}, {"schedule": kfc.Periods(kfc.Stretch(10), kfc.Stretch(20), overhead=0.2)}),
        ({}, {"clip": kfc.FisherClip(0.3, fraction=0.25, period=None)}),
        ({}, {"parallel": kfc.Parallel()}),
    ],
)
def test_a_shorthand_is_its_value_object(short, long):
    results = []
    for options in (short, long):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = kfc.KFC(model, seed=1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            fitting_loss(model(torch.randn(8, 4))).backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
