"""The networks of the lab: their architectures, their initialisation, and KFC on each."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kfc
from kfc.lab.components import TASKS
from kfc.lab.networks import NETWORKS, NetworkError, build
from kfc.lab.networks.architectures import ResidualBlock, WithinMapNormalisation

NAMES = list(NETWORKS)


def made(name: str, *, channels: int = 3, classes: int = 10, init: str | None = None, seed=0):
    size = max(NETWORKS[name].image_sizes, default=32)
    return build(name, image=(channels, size, size), classes=classes, init=init, seed=seed)


def images_for(name: str, examples: int, channels: int = 3) -> torch.Tensor:
    size = max(NETWORKS[name].image_sizes, default=16)
    shape = (examples, channels, size, size)
    network = NETWORKS[name]
    unit = network.inits[network.default_init] == "unit"
    return torch.rand(shape) if unit else torch.randn(shape)


def parameters_of(name: str) -> int:
    return sum(parameter.numel() for parameter in made(name).parameters())


# Within-map response normalisation


def normalised_by_loops(maps: torch.Tensor, size: int, scale: float) -> torch.Tensor:
    """Return the normalised maps by the definition, pixel by pixel."""
    result = torch.empty_like(maps)
    reach = size // 2
    height, width = maps.shape[-2:]
    for row in range(height):
        for column in range(width):
            window = maps[
                ...,
                max(0, row - reach) : min(height, row + reach + 1),
                max(0, column - reach) : min(width, column + reach + 1),
            ]
            base = 1 + scale / size**2 * window.square().sum(dim=(-2, -1))
            result[..., row, column] = maps[..., row, column] * base**-0.75
    return result


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 3, 5, 8), (1, 2, 1, 1), (1, 2, 2, 1)])
@pytest.mark.parametrize(("size", "scale"), [(3, 5e-5), (5, 0.7), (1, 0.7)])
def test_within_map_normalisation_equals_its_definition(double, shape, size, scale):
    maps = 100 * torch.randn(shape)
    expected = normalised_by_loops(maps, size, scale)
    torch.testing.assert_close(WithinMapNormalisation(size, scale)(maps), expected)


def test_within_map_normalisation_has_the_papers_constants(double):
    maps = torch.full((1, 1, 3, 3), 200.0)
    centre = 200 * (1 + 5e-5 / 9 * 9 * 200**2) ** -0.75
    corner = 200 * (1 + 5e-5 / 9 * 4 * 200**2) ** -0.75
    normalised = WithinMapNormalisation()(maps)[0, 0]
    torch.testing.assert_close(normalised[1, 1].item(), centre)
    torch.testing.assert_close(normalised[0, 2].item(), corner)


def test_within_map_normalisation_does_not_mix_maps():
    maps = torch.randn(2, 2, 4, 4)
    louder = maps.clone()
    louder[:, 1] *= 1000
    normalise = WithinMapNormalisation()
    assert torch.equal(normalise(louder)[:, 0], normalise(maps)[:, 0])


def test_within_map_normalisation_differentiates_in_both_modes(double):
    maps = torch.randn(2, 2, 3, 4, requires_grad=True)
    normalise = WithinMapNormalisation(scale=0.7)
    assert torch.autograd.gradcheck(normalise, maps, check_forward_ad=True)


@pytest.mark.parametrize("size", [0, 2, -1])
def test_within_map_normalisation_needs_a_centre(size):
    with pytest.raises(ValueError, match=f"odd size, got {size}"):
        WithinMapNormalisation(size)


# The architectures


def stages(model: nn.Sequential, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output of every layer by name; inputs are copied for in-place layers."""
    result = {}
    for name, layer in model.named_children():
        images = layer(images.clone())
        result[name] = images
    return result


def test_cuda_convnet_has_the_papers_stages():
    shapes = {
        name: tuple(output.shape[1:])
        for name, output in stages(made("cuda-convnet"), torch.randn(2, 3, 32, 32)).items()
    }
    assert shapes == {
        "conv1": (32, 32, 32),
        "pool1": (32, 16, 16),
        "relu1": (32, 16, 16),
        "rnorm1": (32, 16, 16),
        "conv2": (32, 16, 16),
        "relu2": (32, 16, 16),
        "pool2": (32, 8, 8),
        "rnorm2": (32, 8, 8),
        "conv3": (64, 8, 8),
        "relu3": (64, 8, 8),
        "pool3": (64, 4, 4),
        "flatten": (1024,),
        "fc10": (10,),
    }


def test_cuda_convnet_averages_over_the_pixels_that_exist():
    outputs = stages(made("cuda-convnet"), 60 * torch.randn(2, 3, 32, 32))
    before, after = outputs["relu2"], outputs["pool2"]
    torch.testing.assert_close(after[..., 0, 0], before[..., :3, :3].mean(dim=(-2, -1)))
    torch.testing.assert_close(after[..., 7, 7], before[..., 14:, 14:].mean(dim=(-2, -1)))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("cuda-convnet", "max avg avg"),
        ("cuda-convnet-bn", "max avg avg"),
        ("cuda-convnet-avg", "avg avg avg"),
        ("cuda-convnet-max", "max max max"),
    ],
)
def test_variants_differ_only_in_their_pooling(name, kinds):
    model = made(name)
    types = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}
    for layer, kind in enumerate(kinds.split(), start=1):
        assert isinstance(model.get_submodule(f"pool{layer}"), types[kind])
    names = [n for n, _ in model.named_children() if not n.startswith("norm")]
    assert names == [n for n, _ in made("cuda-convnet").named_children()]


def test_batch_normalised_variant_normalises_every_convolution():
    order = [name for name, _ in made("cuda-convnet-bn").named_children()]
    for layer in (1, 2, 3):
        assert order[order.index(f"conv{layer}") + 1] == f"norm{layer}"
    assert made("cuda-convnet-bn").conv1.bias is None


def test_svhn_convnet_has_dropout_at_every_stage():
    model = made("svhn-convnet")
    kept = [1 - layer.p for layer in model if isinstance(layer, nn.Dropout)]
    assert kept == pytest.approx([0.9, 0.75, 0.75, 0.5, 0.5, 0.5])
    assert isinstance(model[0], nn.Dropout)
    pooled = [
        tuple(output.shape[1:])
        for layer, output in zip(
            model, stages(model, torch.randn(1, 3, 32, 32)).values(), strict=True
        )
        if isinstance(layer, nn.MaxPool2d)
    ]
    assert pooled == [(96, 16, 16), (128, 8, 8), (256, 4, 4)]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("cuda-convnet", 32 * 76 + 32 * 801 + 64 * 801 + 10 * 1025),
        ("cuda-convnet-bn", 32 * 75 + 32 * 800 + 64 * 800 + 10 * 1025 + 2 * (32 + 32 + 64)),
        ("svhn-convnet", 96 * 76 + 128 * 2401 + 256 * 3201 + 2048 * (4097 + 2049) + 10 * 2049),
        ("resnet20", 269_722),  # as published: 0.27 million
        ("digits", 16 * 28 + 32 * 145 + 10 * 129),
    ],
)
def test_parameter_counts(name, count):
    assert parameters_of(name) == count


def test_resnet20_has_twenty_layers_and_shortcuts_without_parameters():
    for name in ("resnet20", "resnet20-nobn"):
        weighted = [m for m in made(name).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        assert len(weighted) == 20
    block = ResidualBlock(2, 4, stride=2, normalised=True)
    maps = torch.randn(1, 2, 6, 6)
    shortcut = block.shortcut(maps)
    assert torch.equal(shortcut[:, :2], maps[:, :, ::2, ::2])
    assert torch.equal(shortcut[:, 2:], torch.zeros(1, 2, 3, 3))


def test_resnet_without_normalisation_starts_every_branch_at_zero():
    model = made("resnet20-nobn")
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    block = model.blocks[1]
    maps = torch.rand(2, 16, 8, 8)
    assert torch.equal(block(maps), maps)
    assert any(p.abs().sum() > 0 for p in made("resnet20").blocks[1].conv2.parameters())


@given(
    st.sampled_from(["cuda-convnet", "cuda-convnet-bn", "resnet20", "resnet20-nobn", "digits"]),
    st.integers(1, 4),
    st.integers(2, 12),
    st.integers(1, 3),
)
def test_channels_classes_and_examples_vary(name, channels, classes, examples):
    model = made(name, channels=channels, classes=classes).eval()
    assert model(images_for(name, examples, channels)).shape == (examples, classes)


# Initialisation


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("cuda-convnet")])
def test_paper_initialisation_has_the_published_deviations(name):
    model = made(name, init="cuda-convnet")
    for layer, std in {"conv1": 1e-4, "conv2": 0.01, "conv3": 0.01, "fc10": 0.01}.items():
        weight = model.get_submodule(layer).weight
        assert weight.std().item() == pytest.approx(std, rel=0.05)
        assert abs(weight.mean().item()) < 0.1 * std
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    assert biases
    assert all(torch.equal(bias, torch.zeros_like(bias)) for bias in biases)


@pytest.mark.parametrize("name", ["autoencoder", "digits-autoencoder"])
def test_glorot_initialisation(name):
    for layer in (m for m in made(name).modules() if isinstance(m, nn.Linear)):
        expected = (2 / sum(layer.weight.shape)) ** 0.5
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.12)
        assert not layer.bias.any()


@pytest.mark.parametrize("name", [name for name in NAMES if "kaiming" in NETWORKS[name].inits])
def test_kaiming_initialisation(name):
    model = made(name, init="kaiming")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    zero = [m.conv2 for m in model.modules() if isinstance(m, ResidualBlock) and not m.normalised]
    for layer in layers:
        expected = (2 / layer.weight[0].numel()) ** 0.5
        expected *= 0.1 if layer is layers[-1] else 1
        expected *= 0 if layer in zero else 1
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.12)
        assert layer.bias is None or not layer.bias.any()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert torch.equal(layer.weight, torch.ones_like(layer.weight))
            assert not layer.bias.any()


def test_the_first_initialisation_is_the_default():
    for name in ("cuda-convnet", "digits"):
        named = made(name, init=next(iter(NETWORKS[name].inits))).state_dict()
        for key, value in made(name).state_dict().items():
            assert torch.equal(value, named[key])


@pytest.mark.parametrize("name", NAMES)
def test_weights_depend_only_on_the_seed(name):
    before = torch.get_rng_state()
    first = made(name, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again, other = made(name, seed=3).state_dict(), made(name, seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_describes_its_networks(name):
    network = NETWORKS[name]
    parameters = dict(made(name).named_parameters())
    assert set(network.weight_costs) <= set(parameters)
    assert not any(key.endswith("bias") for key in network.weight_costs)
    assert set(network.inits.values()) <= {"centred", "normalised", "unit"}
    assert network.task in TASKS


def test_weight_costs_are_the_papers():
    costs = {"conv1": 0.004, "conv2": 0.004, "conv3": 0.004, "fc10": 1.0}
    expected = {f"{layer}.weight": cost for layer, cost in costs.items()}
    for name in ("cuda-convnet", "cuda-convnet-avg", "cuda-convnet-max"):
        assert NETWORKS[name].weight_costs == expected
    assert NETWORKS["cuda-convnet-bn"].weight_costs == {}


def test_autoencoders_narrow_to_a_linear_code():
    model = made("autoencoder", channels=1)
    widths = [m.out_features for m in model if isinstance(m, nn.Linear)]
    assert widths == [1000, 500, 250, 30, 250, 500, 1000, 784]
    code = next(i for i, m in enumerate(model) if getattr(m, "out_features", 0) == 30)
    assert isinstance(model[code + 1], nn.Linear)
    assert sum(isinstance(m, nn.Tanh) for m in model) == 6
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 1, 28, 28)


# With KFC


@pytest.mark.parametrize("name", NAMES)
def test_kfc_trains_every_parameter_of_every_network(name):
    """The clip uses forward mode; wide factors are diagonal, to save time."""
    model = made(name)
    start = {key: value.detach().clone() for key, value in model.named_parameters()}
    task = TASKS[NETWORKS[name].task]
    optimizer = kfc.KFC(
        model, lr=1e-3, curvature=kfc.Kronecker(max_factor_size=300), likelihood=task.likelihood
    )
    assert "plain gradient" not in optimizer.describe()
    images, labels = images_for(name, 8), torch.arange(8)
    for _ in range(2):  # weights that start at zero pass no gradient in the first step
        optimizer.zero_grad()
        task.loss(model(images), images, labels).backward()
        optimizer.step()
    assert optimizer.diagnostics["fisher_norm"] > 0
    for key, value in model.named_parameters():
        assert torch.isfinite(value).all(), key
        assert not torch.equal(value, start[key]), key


# Networks of users


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes modules into the current directory, until the test ends."""
    monkeypatch.chdir(tmp_path)
    written = []

    def write(module: str, text: str) -> None:
        (tmp_path / f"{module}.py").write_text(text)
        written.append(module)

    yield write
    for module in written:
        sys.modules.pop(module, None)


def build_own(name: str, init: str | None = None, seed: int = 0) -> nn.Module:
    return build(name, image=(1, 5, 7), classes=3, init=init, seed=seed)


def test_a_network_from_a_module_of_the_user(own):
    own("my_sizes", "WIDTH = 4\n")
    own("my_nets", "import torch\ndef net():\n    import my_sizes\n"
        "    return torch.nn.Linear(my_sizes.WIDTH, 2)\n")  # fmt: skip
    path, state = list(sys.path), torch.get_rng_state()
    model = build_own("my_nets:net", seed=5)
    assert isinstance(model, nn.Linear)
    assert torch.equal(model.weight, build_own("my_nets:net", seed=5).weight)
    assert not torch.equal(model.weight, build_own("my_nets:net", seed=6).weight)
    assert sys.path == path
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_from_a_class_of_an_installed_package():
    assert isinstance(build_own("torch.nn:Identity"), nn.Identity)


KNOWN = "one of cuda-convnet, .*, digits, .*, or module:function"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent_module:net", "ModuleNotFoundError: No module named 'absent_module'.*run from"),
        ("my_broken:net", "'my_broken:net' could not be imported .ZeroDivisionError: division by"),
        ("my_typo:net", "'my_typo:net' could not be imported .SyntaxError"),
        ("my_other:absent", "could not be imported .AttributeError: .* no attribute 'absent'"),
        ("my_other:NUMBER", "failed when called without arguments .TypeError: 'int' object is not"),
        ("my_other:needy", "failed when called without arguments .TypeError: .*'width'"),
        ("my_other:number", "my_other:number returned int, not a torch.nn.Module; let it return"),
        ("my_other:", "failed when called without arguments .TypeError: 'module' object is not"),
        (":net", "':net' could not be imported .ValueError: invalid format: ':net'"),
    ],
)
def test_own_networks_that_cannot_be_built(own, name, message):
    own("my_broken", "1 / 0\n")
    own("my_typo", "def net(:\n")
    own("my_other", "NUMBER = 3\ndef number(): return 3\ndef needy(width): ...\n")
    path = list(sys.path)
    with pytest.raises(NetworkError, match=f"(?s){message}.*{KNOWN}"):
        build_own(name)
    assert sys.path == path


def test_own_networks_take_no_initialisation(own):
    with pytest.raises(NetworkError, match=f"'kaiming' is for .*leave it out; .*{KNOWN}"):
        build_own("my_nets:net", init="kaiming")


def test_errors_name_the_problem_and_the_choices():
    with pytest.raises(NetworkError, match=f"net must be {KNOWN} for your own; got 'lenet'"):
        build_own("lenet")
    for size in ((28, 28), (32, 28)):
        with pytest.raises(NetworkError, match=f"32x32 pixels, .*{size[0]}x{size[1]}; .*{KNOWN}"):
            build("cuda-convnet", image=(3, *size), classes=10, init=None, seed=0)
    with pytest.raises(NetworkError, match="init of digits must be one of kaiming; got 'cuda-c"):
        made("digits", init="cuda-convnet")
