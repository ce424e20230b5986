"""The mesh-tangling networks against the published table, by count and by shape."""

import pytest
import torch
from torch import nn

from examples.mesh_tangling.network import (
    NETWORKS,
    mesh_tangling_1k,
    mesh_tangling_2k,
    mesh_unet,
)

# Added up by hand from the table: input channels x filters x kernel area, block by block.
WEIGHTS_1K = (
    57_600 + 294_912 + 3 * 589_824  # 18 -> 128 (5x5), 128 -> 256, 256 -> 256
    + 884_736 + 4 * 1_327_104  # 256 -> 384, 384 -> 384
    + 1_769_472 + 4 * 2_359_296  # 384 -> 512, 512 -> 512
    + 1_769_472 + 4 * 1_327_104  # 512 -> 384, 384 -> 384
    + 5 * 1_327_104  # 384 -> 384
    + 442_368 + 4 * 147_456  # 384 -> 128, 128 -> 128
    + 131_072  # 128 -> 32 * 32
)  # fmt: skip
assert WEIGHTS_1K == 34_398_464
WEIGHTS_2K = (
    57_600 + 2 * 147_456  # 18 -> 128 (5x5), 128 -> 128
    + 294_912 + 2 * 589_824  # 128 -> 256, 256 -> 256
    + 3 * 589_824  # 256 -> 256
    + 884_736 + 2 * 1_327_104  # 256 -> 384, 384 -> 384
    + 3 * 1_327_104  # 384 -> 384
    + 442_368 + 2 * 147_456  # 384 -> 128, 128 -> 128
    + 524_288  # 128 -> 64 * 64
)  # fmt: skip
assert WEIGHTS_2K == 12_378_368


def convolutions(model):
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


@pytest.mark.parametrize(
    ("build", "layers", "weights", "stride"),
    [(mesh_tangling_1k, 31, WEIGHTS_1K, 32), (mesh_tangling_2k, 19, WEIGHTS_2K, 64)],
)
def test_the_network_has_the_published_number_of_layers_and_weights(build, layers, weights, stride):
    model = build()
    assert len(convolutions(model)) == layers
    assert sum(layer.weight.numel() for layer in convolutions(model)) == weights
    assert all(layer.bias is None for layer in convolutions(model))
    assert model.total_stride == stride
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == layers - 1
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-5, 0.1)}


def test_a_block_is_convolution_then_relu_then_batch_norm():
    opening = mesh_tangling_2k(width=1 / 128).blocks[0]
    assert [type(layer) for layer in opening] == 3 * [nn.Conv2d, nn.ReLU, nn.BatchNorm2d]
    windows = [(layer.kernel_size, layer.stride, layer.padding) for layer in opening[::3]]
    assert windows == [((5, 5), (2, 2), (2, 2))] + 2 * [((3, 3), (1, 1), (1, 1))]


@pytest.mark.parametrize(
    ("build", "sides"),
    [
        (mesh_tangling_1k, [512, 256, 128, 64, 32, 32]),
        (mesh_tangling_2k, [512, 256, 128, 64, 32, 16]),
    ],
)
def test_every_block_leaves_the_published_size(build, sides):
    model = build(width=1 / 128).eval()
    x = torch.zeros(1, 18, 1024, 1024)
    with torch.no_grad():
        for block, side in zip(model.blocks, sides, strict=True):
            x = block(x)
            assert x.shape[2:] == (side, side)


def test_a_mesh_that_does_not_fit_is_an_error_with_the_way_out():
    message = "100 x 128 .* multiples of its total stride 64; the nearest is 128 x 128"
    with pytest.raises(ValueError, match=message):
        mesh_tangling_2k(width=1 / 128)(torch.zeros(1, 18, 100, 128))


@pytest.mark.parametrize("build", [mesh_tangling_1k, mesh_tangling_2k])
def test_size_scales_the_strides_and_keeps_the_convolutions(build):
    published = build(width=1 / 64)
    strides = [build(width=1 / 64, size=size).total_stride for size in (16, 64, 96, 128, 512, 1024)]
    assert strides == [1, 2, 2, 4, 16, 32]
    assert build(width=1 / 64, size=4096).total_stride == published.total_stride
    small = build(width=1 / 64, size=128)
    assert len(convolutions(small)) == len(convolutions(published))
    with torch.no_grad():
        assert small.blocks(torch.zeros(1, 18, 128, 128)).shape[2:] == (32, 32)
        assert small(torch.randn(2, 18, 128, 128)).shape == (2, 1, 128, 128)


def test_the_u_net_takes_any_mesh_of_multiples_of_its_stride():
    model = mesh_unet()
    assert sum(p.numel() for p in model.parameters()) == 484_897
    assert NETWORKS["unet"](1.0, 4096).total_stride == 8
    with torch.no_grad():
        found = model(torch.randn(2, 18, 24, 40))
    assert found.shape == (2, 1, 24, 40) and ((found > 0) & (found < 1)).all()
    with pytest.raises(ValueError, match="multiples of its total stride 8; the nearest is 16 x 24"):
        model(torch.zeros(1, 18, 20, 24))
    with pytest.raises(ValueError, match="width=0 must be positive"):
        mesh_unet(0)


def test_width_scales_every_block_and_leaves_the_head_its_patch():
    half = mesh_tangling_2k(width=0.5)
    assert [layer.out_channels for layer in convolutions(half)] == (
        [64] * 3 + [128] * 6 + [192] * 6 + [64] * 3 + [4096]
    )
    assert {layer.out_channels for layer in convolutions(mesh_tangling_1k(width=1e-9))} == {1, 1024}
    with pytest.raises(ValueError, match="width=0 must be positive"):
        mesh_tangling_1k(width=0)
