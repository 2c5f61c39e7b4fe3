import pytest
import torch
import torch.nn.functional as F

from manyhands.nets import wide as wide_module
from manyhands.nets.flat import flatten
from manyhands.nets.heads import Network, PolicyValue, feature_count, initialise_orthogonal
from manyhands.nets.torsos import TORSOS, Residual, make_torso
from manyhands.nets.wide import Wide
from manyhands.types import EnvSpec, UsageError

ATARI = EnvSpec("atari", (1, 84, 84), "uint8", 4, 6)
TALL = EnvSpec("tall", (1, 104, 80), "uint8", 4, 6)
BOARD = EnvSpec("board", (1, 20, 20), "uint8", 2, 4)
VECTOR = EnvSpec("vector", (4,), "float32", 1, 2)


def network(name, spec, bf16=False):
    torso = make_torso(name, spec, ())
    return Network(torso, PolicyValue(feature_count(torso, spec), spec.actions), bf16)


@pytest.mark.parametrize(
    ("name", "spec", "parameters"),
    [
        # Counted by hand: kernels + biases of every layer, then 512 (256) features to 6 logits and a value.
        ("nature", ATARI, 8224 + 32832 + 36928 + (3136 * 512 + 512) + 513 * 7),
        ("nips", ATARI, 4112 + 8224 + (2592 * 256 + 256) + 257 * 7),
        ("nips", TALL, 4112 + 8224 + (12 * 9 * 32 * 256 + 256) + 257 * 7),  # output 12×9, as published
        ("snake", BOARD, (98 * 32 + 32) + (800 * 64 + 64) + (576 * 64 + 64) + (2 * 2 * 64 * 512 + 512) + 513 * 5),
        ("mlp", VECTOR, (4 * 64 + 64) + (64 * 64 + 64) + 65 * 3),
    ],
)
def test_parameter_counts(name, spec, parameters):
    assert sum(p.numel() for p in network(name, spec).parameters()) == parameters


def test_pixels_are_scaled_to_one():
    """The first layer on bytes equals an ordinary convolution on bytes / 255."""
    torso = make_torso("nature", ATARI, ())
    x = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    first = torso.convs[0]
    expected = torch.nn.functional.conv2d(x.float() / 255, first.weight, first.bias, stride=4)
    torch.testing.assert_close(first(x), expected, atol=1e-4, rtol=1e-4)


def test_wrong_torso_names_the_fitting_ones():
    with pytest.raises(UsageError, match="mlp"):
        make_torso("nature", VECTOR, ())
    with pytest.raises(UsageError, match="nature, nips"):
        make_torso("mlp", ATARI, ())
    with pytest.raises(UsageError, match="too deep"):
        make_torso("nature", EnvSpec("tiny", (1, 20, 20), "uint8", 1, 2), ())
    with pytest.raises(UsageError, match="one hidden layer"):
        make_torso("nips", ATARI, (64, 64))


@pytest.mark.parametrize("name", list(TORSOS))
def test_flat_vector_is_the_parameters(name):
    spec = {"mlp": VECTOR, "snake": BOARD, "cells": BOARD}.get(name, ATARI)
    net = network(name, spec)
    initialise_orthogonal(net)
    before = [p.detach().clone() for p in net.parameters()]
    x = torch.randint(0, 255, (2, *spec.obs)).to(getattr(torch, spec.dtype))
    logits, _ = net(x)
    model = flatten(net)
    for p, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, old)
    assert torch.allclose(net(x)[0], logits, atol=1e-5)

    (model.net(x)[0].square().sum() + model.net(x)[1].sum()).backward()
    norm = sum(p.grad.double().square().sum() for p in net.parameters()).sqrt()
    assert norm > 0
    torch.testing.assert_close(model.gradient.double().norm(), norm)  # the views survived backward()
    model.parameters.add_(1.0)
    for p, old in zip(net.parameters(), before, strict=True):
        assert torch.allclose(p, old + 1)
    assert sum(s.stop - s.start for s in model.named_slices().values()) == model.parameters.numel()


def test_a_replica_is_apart():
    model = flatten(network("mlp", VECTOR))
    copy = model.replica()
    assert torch.equal(copy.parameters, model.parameters)
    model.parameters.zero_()
    assert copy.parameters.abs().sum() > 0
    x = torch.randn(3, 4)
    assert copy.net(x)[0].abs().sum() > 0 and model.net(x)[0].abs().sum() == 0


def test_levels_differ_from_the_start():
    """Body, head and apple of Snake give clearly different features before any learning."""
    torso = make_torso("cells", BOARD, ())
    initialise_orthogonal(torso)
    first = torso.convs[0]
    levels = torch.stack([torch.full(BOARD.obs, v, dtype=torch.uint8) for v in (200, 230, 255)])
    features = first(levels).relu()[:, :, 0, 0]
    assert (features[0] - features[1]).abs().max() > 0.2 and (features[1] - features[2]).abs().max() > 0.2


@pytest.mark.parametrize(
    ("name", "bf16"), [("nature", False), ("nips", False), ("snake", False), ("cells", False), ("nature", True)]
)
def test_known_convolutions_give_the_same_gradient(name, bf16):
    """Recorded in small batches while acting, then used for one backward pass over all of them."""
    model = flatten(network(name, ATARI, bf16))
    obs = torch.randint(0, 256, (12, 4, 84, 84), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)

    def gradient(**options):
        model.gradient.zero_()
        logits, value = model.net(obs, **options)
        (logits.square().sum() + value.exp().sum()).backward()
        return model.gradient.clone()

    kept = []
    with torch.inference_mode():
        for part in obs.split(4):
            kept.append([])
            model.net(part, results=kept[-1])
    known = [torch.cat(results) for results in zip(*kept, strict=True)]
    found, expected = gradient(known=known), gradient()
    assert (found - expected).norm() < (1e-2 if bf16 else 1e-5) * expected.norm()
    assert gradient(known=[torch.zeros_like(x) for x in known]).abs().sum() < gradient().abs().sum()  # known is really used


def test_ba3c_has_the_published_size():
    spec = EnvSpec("colour", (3, 84, 84), "uint8", 4, 6)
    for hidden, published in ((256, 538_119), (128, 332_295), (64, 229_383), (32, 177_927), (16, 152_199)):
        torso = make_torso("ba3c", spec, (hidden,))
        net = Network(torso, PolicyValue(feature_count(torso, spec), 6))
        assert sum(p.numel() for p in net.parameters()) == published
    obs = torch.randint(0, 255, (3, 12, 84, 84), dtype=torch.uint8)
    assert net(obs)[0].shape == (3, 6)


@pytest.fixture(params=["mkl", "onednn"])
def library(request, monkeypatch):
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(wide_module, "ONEDNN", request.param == "onednn")


@pytest.mark.parametrize("samples", [0, 1, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wide_layer_is_a_linear_one(library, samples, dtype):
    wide = Wide(20, 7, dtype=dtype)
    plain = torch.nn.Linear(20, 7, dtype=dtype)
    plain.load_state_dict(wide.state_dict())
    x, other = torch.randn(samples, 20, requires_grad=True, dtype=dtype), torch.randn(samples, 20, dtype=dtype)
    found = []
    for layer in (wide, plain):
        model = flatten(layer)
        model.gradient.fill_(9.0)  # of an earlier update
        x.grad = None
        with model.new_gradient():
            (layer(x).square().sum() + layer(other).sum()).backward()  # two uses are added
        found.append((layer(x).detach(), x.grad.clone(), model.gradient.clone()))
    torch.testing.assert_close(found[0], found[1])


def test_a_wide_layer_computes_in_the_precision_of_its_input(library):
    wide, plain = Wide(20, 7), torch.nn.Linear(20, 7)
    plain.load_state_dict(wide.state_dict())
    model, x = flatten(wide), torch.randn(9, 20)
    with model.new_gradient():
        y = wide(x.bfloat16())
        (y.float().square().sum() + wide(x.bfloat16()).float().sum()).backward()
    (plain(x).square().sum() + plain(x).sum()).backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(wide.weight.grad, plain.weight.grad, rtol=0.05, atol=0.2)


def test_layers_that_share_a_matrix_add_their_gradients():
    net = torch.nn.Sequential(Wide(6, 6), Wide(6, 6))
    net[1].weight = net[0].weight
    model, x = flatten(net), torch.randn(5, 6)
    twice = F.linear(F.linear(x, net[0].weight, net[0].bias), net[0].weight, net[1].bias)
    (expected,) = torch.autograd.grad(twice.square().sum(), net[0].weight)
    with model.new_gradient():
        net(x).square().sum().backward()
    torch.testing.assert_close(net[0].weight.grad, expected)


def test_a_gradient_that_does_not_reach_a_layer_is_zero():
    layer = Wide(3, 2)
    model = flatten(layer)
    model.gradient.fill_(9.0)
    with model.new_gradient():
        layer.bias.sum().backward()
    assert model.gradient.tolist() == [0.0] * 6 + [1.0, 1.0]


def test_impala_has_the_published_layers():
    """Espeholt et al. 2018, figure 3: 15 convolutions in three sections, which leave 11×11 of 84×84."""
    net = network("impala", ATARI)
    convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [16] * 5 + [32] * 10 and {m.kernel_size for m in convolutions} == {(3, 3)}
    assert net.torso.hidden.weight.shape == (256, 32 * 11 * 11)
    assert sum(p.numel() for p in net.torso.parameters()) == 1_089_232


def test_a_residual_block_by_hand():
    block = Residual(1)
    with torch.no_grad():
        for convolution, weight, bias in ((block.first, 2.0, -1.0), (block.second, 3.0, 0.5)):
            convolution.weight.zero_()
            convolution.weight[0, 0, 1, 1] = weight  # each pixel by itself
            convolution.bias.fill_(bias)
    x = torch.tensor([[[[-4.0, 0.25], [1.0, 2.0]]]])
    # x + 3 relu(2 relu(x) - 1) + 0.5
    assert block(x).tolist() == [[[[-3.5, 0.75], [4.5, 11.5]]]]
