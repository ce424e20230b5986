"""The cases of networks: small variants, with inputs of odd sizes wherever a network takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tests.networks.cases import Case, classes, normal, of

IMAGE = (2, 3, 65, 47)
EVEN = (2, 3, 96, 64)
"""A shape for networks that only take multiples of 32; the last plane has 3 x 2 elements."""
WINDOWS = (2, 3, 48, 40)
VOLUME = (1, 1, 33, 21, 19)


def _made(package: str, name: str, shape: Sequence[int], path: str, *args: Any, **options: Any):
    """Return the case of a network that is made by calling the object named by `path`."""
    return Case(package, name, lambda: of(path)(*args, **options), (normal(*shape),))


def _timm(name: str, shape: Sequence[int] = IMAGE, **options: Any) -> Case:
    return _made("timm", name, shape, "timm.create_model", name, num_classes=5, **options)


def _torchvision(name: str, shape: Sequence[int] = IMAGE, **options: Any) -> Case:
    options = {"num_classes": 5, **options}
    return _made("torchvision", name, shape, f"torchvision.models.{name}", **options)


def _monai(name: str, shape: Sequence[int] = VOLUME, label: str = "", **options: Any) -> Case:
    path = f"monai.networks.nets.{name}"
    return _made("monai", f"{name} {label}".strip(), shape, path, **options)


def _smp(name: str, encoder: str = "resnet18", shape: Sequence[int] = EVEN, **more: Any) -> Case:
    options = {"encoder_name": encoder, "encoder_weights": None, "classes": 3, **more}
    path = f"segmentation_models_pytorch.{name}"
    return _made("segmentation-models-pytorch", f"{name} ({encoder})", shape, path, **options)


def _pytorchcv(name: str, shape: Sequence[int] = (1, 3, 224, 224), **options: Any) -> Case:
    path = "pytorchcv.model_provider.get_model"
    return _made("pytorchcv", name, shape, path, name, num_classes=5, **options)


def _vit(name: str, module: str, shape: Sequence[int] = WINDOWS, **options: Any) -> Case:
    return _made(
        "vit-pytorch",
        f"{module}.{name}",
        shape,
        f"vit_pytorch.{module}.{name}",
        **{"num_classes": 5, **options},
    )


def _spandrel(name: str, shape: Sequence[int] = (2, 3, 19, 17), **options: Any) -> Case:
    return _made("spandrel", name, shape, f"spandrel.architectures.{name}.{name}", **options)


def _transformers(name: str, shape: Sequence[int] = IMAGE, **options: Any) -> Case:
    model = name[: name.rindex("For")]

    def build() -> nn.Module:
        config = of(f"transformers.{model}Config")(**options)
        return of(f"transformers.{name}")(config)

    return Case("transformers", name, build, (normal(*shape),))


class _AtStep(nn.Module):
    """A network of a diffusion model, at one step of time."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Any:
        return self.network(x, 3)


def _diffusers(
    name: str,
    shape: Sequence[int] = (2, 3, 32, 24),
    step: bool = False,
    loops: bool = False,
    **options: Any,
) -> Case:
    def build() -> nn.Module:
        network = of(f"diffusers.{name}")(**options)
        return _AtStep(network) if step else network

    return Case("diffusers", name, build, (normal(*shape),), loops=loops)


def _plans(name: str, spatial: int, shape: Sequence[int], **options: Any) -> Case:
    def build() -> nn.Module:
        return of(f"dynamic_network_architectures.architectures.unet.{name}")(
            input_channels=1,
            n_stages=3,
            features_per_stage=(4, 6, 8),
            conv_op=of(f"torch.nn.Conv{spatial}d"),
            kernel_sizes=3,
            strides=(1, 2, 2),
            num_classes=3,
            conv_bias=True,
            norm_op=of(f"torch.nn.InstanceNorm{spatial}d"),
            norm_op_kwargs={"affine": True},
            nonlin=nn.LeakyReLU,
            nonlin_kwargs={"inplace": True},
            deep_supervision=True,
            n_conv_per_stage_decoder=1,
            **options,
        )

    return Case("dynamic-network-architectures", f"{name} {spatial}-d", build, (normal(*shape),))


def _fourier() -> nn.Module:
    network = of("neuralop.models.FNO")(
        n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2
    )
    # By default it multiplies by opt_einsum, which takes tensors of other modules for numpy's.
    of("tensorly.plugins.use_default_einsum")()
    return network


_SMALL = {"channels": (4, 6, 8), "strides": (2, 2)}
_TOKENS = {"dim": 24, "depth": 2, "heads": 2, "mlp_dim": 32}
_LEVELS = {"channels": (8, 8, 16), "num_res_blocks": 1, "norm_num_groups": 4}

NETWORKS: tuple[Case, ...] = (
    # timm: convolutions
    _timm("resnet10t"),
    _timm("skresnet18"),
    _timm("resnest14d"),
    _timm("tf_efficientnet_b0"),
    _timm("mobilenetv3_small_050"),
    _timm("convnextv2_atto"),
    _timm("regnety_002"),
    _timm("ghostnet_050", drop_rate=0.0),
    _timm("repvgg_a0"),
    _timm("nf_regnet_b0"),
    _timm("hrnet_w18_small", EVEN),
    _timm("repvit_m0_9"),
    _timm("inception_next_atto"),
    _timm("mambaout_femto"),
    _timm("fastvit_t8"),
    # timm: attention and mixers
    _timm("edgenext_xx_small"),
    _timm("mobilevit_xxs", (2, 3, 64, 96)),
    _timm("poolformer_s12"),
    _timm("efficientformerv2_s0", (2, 3, 64, 64), img_size=64),
    _timm("vit_tiny_patch16_224", WINDOWS, img_size=(48, 40), patch_size=8, depth=2),
    _timm("pit_ti_224", (2, 3, 64, 64), img_size=64, depth=(1, 1, 1)),
    _timm("levit_128s", (2, 3, 64, 64), img_size=64),
    _timm("xcit_nano_12_p16_224", (2, 3, 48, 48), img_size=48, depth=2),
    _made(
        "timm",
        "MlpMixer",
        (2, 3, 48, 48),
        "timm.models.mlp_mixer.MlpMixer",
        num_classes=5,
        img_size=48,
        patch_size=8,
        num_blocks=2,
        embed_dim=48,
    ),
    _timm("gmlp_ti16_224", (2, 3, 48, 48), img_size=48),
    _timm(
        "swin_tiny_patch4_window7_224",
        (2, 3, 56, 56),
        img_size=56,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
    ),
    _timm(
        "swinv2_tiny_window8_256",
        (2, 3, 64, 64),
        img_size=64,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
    ),
    _timm("pvt_v2_b0", (2, 3, 64, 96)),
    _made(
        "timm",
        "ConvMixer",
        (2, 3, 65, 47),
        "timm.models.convmixer.ConvMixer",
        num_classes=5,
        dim=32,
        depth=3,
    ),
    _timm("botnet26t_256", (2, 3, 64, 64), img_size=64),
    _timm("sequencer2d_s", (2, 3, 28, 28), img_size=28, layers=(1, 1, 1, 1), embed_dims=(16,) * 4),
    # torchvision
    _torchvision("resnet18"),
    _torchvision("mobilenet_v2", dropout=0.0),
    _torchvision("mobilenet_v3_small"),
    _torchvision("shufflenet_v2_x0_5"),
    _torchvision("squeezenet1_1"),
    _torchvision("densenet121"),
    _torchvision("googlenet", (2, 3, 97, 65), init_weights=False, aux_logits=False),
    _torchvision("regnet_y_400mf"),
    _made(
        "torchvision",
        "SwinTransformer",
        (2, 3, 57, 45),
        "torchvision.models.SwinTransformer",
        patch_size=[4, 4],
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[7, 7],
        stochastic_depth_prob=0.0,
        num_classes=5,
    ),
    _made(
        "torchvision",
        "VisionTransformer",
        (2, 3, 48, 48),
        "torchvision.models.VisionTransformer",
        image_size=48,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=24,
        mlp_dim=32,
        num_classes=5,
    ),
    _made(
        "torchvision",
        "MaxVit",
        (2, 3, 64, 64),
        "torchvision.models.MaxVit",
        input_size=(64, 64),
        stem_channels=8,
        partition_size=4,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.0,
        num_classes=5,
    ),
    _torchvision("segmentation.deeplabv3_mobilenet_v3_large", weights=None, weights_backbone=None),
    _torchvision("video.mc3_18", (1, 3, 9, 33, 31)),
    # MONAI
    _monai(
        "UNet",
        (1, 1, 32, 20, 20),
        "3-d",
        spatial_dims=3,
        in_channels=1,
        out_channels=3,
        num_res_units=2,
        **_SMALL,
    ),
    _monai("UNet", (2, 1, 36, 44), "2-d", spatial_dims=2, in_channels=1, out_channels=3, **_SMALL),
    _monai("BasicUNet", (1, 1, 33, 21, 19), in_channels=1, features=(4, 4, 6, 6, 8, 4)),
    _monai(
        "AttentionUnet", (1, 1, 32, 20, 20), spatial_dims=3, in_channels=1, out_channels=2, **_SMALL
    ),
    _monai(
        "SegResNet", (1, 1, 24, 24, 16), init_filters=8, blocks_down=(1, 1, 2), blocks_up=(1, 1)
    ),
    _monai("SegResNetDS", (1, 1, 24, 24, 16), init_filters=4, blocks_down=(1, 1, 2)),
    _monai(
        "DynUNet",
        (1, 1, 32, 20, 20),
        spatial_dims=3,
        in_channels=1,
        out_channels=3,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=(4, 6, 8),
        res_block=True,
        deep_supervision=True,
    ),
    _monai("VNet", (1, 1, 32, 48), "2-d", spatial_dims=2, dropout_dim=2),
    _monai(
        "UNETR",
        (1, 1, 48, 32, 32),
        in_channels=1,
        out_channels=2,
        img_size=(48, 32, 32),
        feature_size=4,
        hidden_size=24,
        mlp_dim=32,
        num_heads=2,
    ),
    _monai("SwinUNETR", (1, 1, 64, 32, 32), in_channels=1, out_channels=2, feature_size=12),
    _monai("HighResNet", (1, 1, 17, 13, 11), out_channels=2),
    _monai(
        "MedNeXt",
        (1, 1, 32, 16, 16),
        init_filters=4,
        blocks_down=(1,) * 4,
        blocks_bottleneck=1,
        blocks_up=(1,) * 4,
    ),
    _monai(
        "FlexibleUNet",
        (2, 3, 64, 96),
        in_channels=3,
        out_channels=2,
        backbone="resnet18",
        decoder_channels=(16, 12, 8, 6, 4),
    ),
    _monai(
        "DenseNet",
        (1, 1, 33, 33, 35),
        spatial_dims=3,
        in_channels=1,
        out_channels=3,
        init_features=8,
        growth_rate=4,
        block_config=(2, 2, 2),
    ),
    _monai("resnet10", (1, 1, 33, 21, 19), n_input_channels=1, num_classes=3, widen_factor=0.25),
    _monai(
        "AutoEncoder",
        (2, 1, 32, 20),
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(4, 6, 8),
        strides=(2, 2, 1),
    ),
    _monai("Regressor", (2, 1, 33, 21), in_shape=(1, 33, 21), out_shape=(2,), **_SMALL),
    _monai("PatchDiscriminator", (2, 1, 65, 49), spatial_dims=2, channels=4, in_channels=1),
    _monai(
        "RegUNet", (1, 2, 32, 16, 16), spatial_dims=3, in_channels=2, num_channel_initial=4, depth=2
    ),
    _monai(
        "LocalNet",
        (1, 2, 32, 16, 16),
        spatial_dims=3,
        in_channels=2,
        num_channel_initial=4,
        extract_levels=(0, 1, 2),
    ),
    _monai(
        "ViT",
        (1, 1, 32, 16, 24),
        in_channels=1,
        img_size=(32, 16, 24),
        patch_size=8,
        hidden_size=24,
        mlp_dim=32,
        num_layers=2,
        num_heads=2,
        classification=True,
    ),
    _monai("restormer.Restormer", (1, 3, 40, 48), dim=8, num_refinement_blocks=1),
    Case(
        "monai",
        "DiffusionModelUNet",
        lambda: of("monai.networks.nets.DiffusionModelUNet")(
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            num_head_channels=8,
            attention_levels=(False, False, True),
            **_LEVELS,
        ),
        (normal(2, 1, 24, 20), classes(100, 2)),
    ),
    # segmentation_models_pytorch
    _smp("Unet"),
    _smp("UnetPlusPlus", decoder_channels=(32, 24, 16, 12, 8)),
    _smp("FPN"),
    _smp("Linknet", "mobilenet_v2"),
    _smp("PSPNet"),
    _smp("PAN", shape=(2, 3, 128, 160)),
    _smp("MAnet", decoder_channels=(32, 24, 16, 12, 8)),
    _smp("DeepLabV3Plus", "mobilenet_v2"),
    _smp("Segformer"),
    # pytorchcv
    _pytorchcv("seresnet10", (2, 3, 224, 224)),
    _pytorchcv("mobilenet_wd4"),
    _pytorchcv("shufflenet_g3_wd4"),
    _pytorchcv("igcv3_wd4"),
    _pytorchcv("darknet_tiny"),
    _pytorchcv("peleenet"),
    _pytorchcv("bam_resnet18", (2, 3, 224, 224)),
    # vit-pytorch
    _vit("ViT", "vit", image_size=(48, 40), patch_size=8, dim_head=12, **_TOKENS),
    _vit("SimpleViT", "simple_vit", image_size=(48, 40), patch_size=8, dim_head=12, **_TOKENS),
    _vit(
        "ViT",
        "vit_3d",
        (1, 3, 12, 24, 20),
        image_size=(24, 20),
        image_patch_size=4,
        frames=12,
        frame_patch_size=4,
        dim_head=12,
        **_TOKENS,
    ),
    _vit(
        "CCT",
        "cct",
        (2, 3, 48, 40),
        img_size=(48, 40),
        embedding_dim=24,
        num_layers=2,
        num_heads=2,
        mlp_ratio=1.0,
        attention_dropout=0.0,
        stochastic_depth_rate=0.0,
    ),
    _vit("CvT", "cvt", (2, 3, 65, 47), s1_emb_dim=8, s2_emb_dim=12, s3_emb_dim=16, s3_depth=2),
    _vit(
        "XCiT",
        "xcit",
        image_size=48,
        patch_size=8,
        cls_depth=1,
        dim_head=12,
        shape=(2, 3, 48, 48),
        **_TOKENS,
    ),
    _vit(
        "MobileViT",
        "mobile_vit",
        (1, 3, 128, 64),
        image_size=(128, 64),
        dims=[24, 32, 40],
        channels=[4, 8, 8, 8, 8, 8, 12, 12, 16, 16, 24],
        depths=(1, 1, 1),
    ),
    _vit(
        "TwinsSVT",
        "twins_svt",
        (2, 3, 64, 64),
        s1_emb_dim=8,
        s2_emb_dim=8,
        s3_emb_dim=12,
        s4_emb_dim=16,
        s1_local_patch_size=4,
        s2_local_patch_size=4,
        s3_local_patch_size=2,
        s4_local_patch_size=1,
        s1_global_k=2,
        s2_global_k=2,
        s3_global_k=2,
        s4_global_k=2,
        s3_depth=1,
        s4_depth=1,
    ),
    _vit(
        "MaxViT",
        "max_vit",
        (2, 3, 56, 56),
        dim=8,
        depth=(1, 1),
        dim_head=4,
        dim_conv_stem=8,
        window_size=7,
        dropout=0.0,
    ),
    # diffusers
    _diffusers(
        "UNet2DModel",
        step=True,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    _diffusers(
        "AutoencoderKL",
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    _diffusers(
        "AutoencoderTiny", encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4
    ),
    _diffusers("VQModel", block_out_channels=(8,), norm_num_groups=4, num_vq_embeddings=16),
    *(
        _diffusers(
            name,
            (1, 3, 5, 32, 24),
            loops=True,
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[True],
        )
        for name in ("AutoencoderKLWan", "AutoencoderKLQwenImage")
    ),
    *(
        _diffusers(
            name,
            (1, 3, 5, 32, width),
            block_out_channels=(8, 8, 16, 16),
            norm_num_groups=4,
            layers_per_block=1,
        )
        for name, width in (("AutoencoderKLCogVideoX", 48), ("AutoencoderKLHunyuanVideo", 32))
    ),
    # transformers
    _transformers(
        "ResNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 16, 24],
        depths=[1, 1, 1],
        layer_type="basic",
    ),
    _transformers(
        "RegNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=4,
    ),
    _transformers(
        "ConvNextForImageClassification", hidden_sizes=[8, 12, 16], depths=[1, 1, 1], num_stages=3
    ),
    _transformers("MobileNetV2ForImageClassification", depth_multiplier=0.35),
    _transformers(
        "SegformerForSemanticSegmentation",
        (2, 3, 65, 47),
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
    ),
    _transformers(
        "SwinForImageClassification",
        (2, 3, 113, 90),
        image_size=(113, 90),
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 4],
        drop_path_rate=0.0,
    ),
    _transformers(
        "ViTForImageClassification",
        (2, 3, 48, 40),
        image_size=(48, 40),
        patch_size=8,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
    ),
    _transformers(
        "PoolFormerForImageClassification",
        (2, 3, 65, 47),
        hidden_sizes=[8, 12, 16, 24],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.0,
    ),
    _transformers(
        "PvtV2ForImageClassification",
        (2, 3, 65, 47),
        hidden_sizes=[8, 16, 20, 32],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.0,
    ),
    # spandrel: super-resolution and restoration
    _spandrel("Compact", num_feat=8, num_conv=3),
    _spandrel("ESRGAN", num_filters=8, num_blocks=2),
    _spandrel("RCAN", n_resgroups=2, n_resblocks=2, n_feats=8, reduction=4),
    _spandrel("NAFNet", width=8, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1]),
    _spandrel("SPAN", num_in_ch=3, num_out_ch=3, feature_channels=8),
    _spandrel("DRUNet", (2, 1, 40, 24), nc=[4, 6, 8, 12], nb=1),
    _spandrel("DnCNN", (2, 1, 33, 27), nc=8, nb=5),
    _spandrel("SAFMN", (2, 3, 32, 24), dim=8, n_blocks=2),
    _spandrel(
        "SwinIR",
        (2, 3, 23, 17),
        img_size=24,
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        upscale=2,
        upsampler="pixelshuffle",
        drop_path_rate=0.0,
    ),
    _spandrel("PLKSR", dim=8, n_blocks=2, kernel_size=7),
    # the others
    _plans("PlainConvUNet", 3, (1, 1, 32, 20, 16), n_conv_per_stage=1),
    _plans("ResidualEncoderUNet", 2, (2, 1, 36, 44), n_blocks_per_stage=1),
    _made(
        "unet",
        "UNet2D",
        (2, 1, 48, 40),
        "unet.UNet2D",
        num_encoding_blocks=3,
        out_channels_first_layer=4,
        padding=1,
        normalization="batch",
    ),
    _made(
        "unet",
        "UNet3D residual, PReLU",
        (1, 1, 24, 20, 16),
        "unet.UNet3D",
        num_encoding_blocks=3,
        out_channels_first_layer=4,
        padding=1,
        residual=True,
        activation="PReLU",
        upsampling_type="linear",
    ),
    # Its spectral layers compute in complex64, whatever their input.
    Case("neuraloperator", "FNO", _fourier, (normal(2, 1, 33, 21),), tolerance=1e-5),
    _made("kornia", "HardNet", (3, 1, 32, 32), "kornia.feature.HardNet", pretrained=False),
    _made("kornia", "DexiNed", (1, 3, 64, 48), "kornia.models.dexined.DexiNed", pretrained=False),
)
