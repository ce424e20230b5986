"""The cases of losses and metrics: outputs of networks beside labels, of odd sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.networks.cases import Call, Case, Input, binary, classes, normal, of, one_hot, uniform

SCORES = normal(2, 3, 9, 7, 5)
INDICES = classes(3, 2, 1, 9, 7, 5)
ONE_HOT = one_hot(3, 2, 9, 7, 5)
MASK = binary(2, 1, 9, 7, 5)
PLANES = normal(2, 3, 19, 13)
LABELS = classes(3, 2, 19, 13)
IMAGES = uniform(2, 3, 37, 29), uniform(2, 3, 37, 29)
LARGE = uniform(2, 3, 181, 177), uniform(2, 3, 181, 177)


def _loss(package: str, path: str, *inputs: Input, label: str = "", **options: Any) -> Case:
    """Return the case of a loss that is a class of modules."""
    name = f"{path.rpartition('.')[2]} {label}".strip()
    return Case(package, name, lambda: of(path)(**options), inputs)


def _function(package: str, path: str, *inputs: Input, label: str = "", **options: Any) -> Case:
    """Return the case of a loss or metric that is a function."""
    name = f"{path.rpartition('.')[2]} {label}".strip()
    return Case(package, name, lambda: Call(lambda *x: of(path)(*x, **options)), inputs)


def _monai_metric(name: str, *inputs: Input, label: str = "", **options: Any) -> Case:
    """Return the case of a metric of MONAI: called batch by batch, then aggregated."""

    def build() -> nn.Module:
        def measure(*x: Tensor) -> Any:
            metric = of(f"monai.metrics.{name}")(**options)
            metric(*x)
            return metric.aggregate()

        return Call(measure)

    return Case("monai", f"{name} {label}".strip(), build, inputs)


def _torchmetrics(path: str, *inputs: Input, **options: Any) -> Case:
    """Return the case of a metric of torchmetrics: updated with two batches, then computed."""

    def build() -> nn.Module:
        def measure(*x: Tensor) -> Any:
            metric = of(f"torchmetrics.{path}")(**options).set_dtype(torch.float64)
            metric.update(*x)
            metric.update(*x)
            return metric.compute()

        return Call(measure)

    return Case("torchmetrics", path.rpartition(".")[2], build, inputs)


class _SlidingWindow(nn.Module):
    """MONAI's inference by overlapping windows, as it is used: without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.network = of("monai.networks.nets.UNet")(
            spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 6, 8), strides=(2, 2)
        )

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        infer = of("monai.inferers.sliding_window_inference")
        return infer(x, (16, 16), 2, self.network, overlap=0.25)


def _monai(name: str, *inputs: Input, label: str = "", **options: Any) -> Case:
    return _loss("monai", f"monai.losses.{name}", *inputs, label=label, **options)


def _kornia(name: str, *inputs: Input, label: str = "", **options: Any) -> Case:
    return _loss("kornia", f"kornia.losses.{name}", *inputs, label=label, **options)


def _smp(name: str, *inputs: Input, label: str = "", **options: Any) -> Case:
    path = f"segmentation_models_pytorch.losses.{name}"
    return _loss("segmentation-models-pytorch", path, *inputs, label=label, **options)


def _timm(name: str, *inputs: Input, **options: Any) -> Case:
    return _loss("timm", f"timm.loss.{name}", *inputs, **options)


def _piqa(name: str, *inputs: Input, **options: Any) -> Case:
    return _loss("piqa", f"piqa.{name}", *inputs, **options)


_INDEXED = {"to_onehot_y": True, "softmax": True}
_WEIGHTS = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.5], [1.0, 0.5, 0.0]])

LOSSES: tuple[Case, ...] = (
    # MONAI
    _monai("DiceLoss", SCORES, INDICES, label="to_onehot_y", **_INDEXED),
    _monai("DiceLoss", SCORES, ONE_HOT, label="sigmoid", sigmoid=True, squared_pred=True),
    _monai("DiceCELoss", SCORES, INDICES, label="to_onehot_y", **_INDEXED),
    _monai("DiceFocalLoss", SCORES, INDICES, label="to_onehot_y", **_INDEXED),
    _monai("FocalLoss", SCORES, INDICES, label="to_onehot_y", to_onehot_y=True),
    _monai("TverskyLoss", SCORES, INDICES, label="to_onehot_y", **_INDEXED),
    _monai("GeneralizedDiceLoss", SCORES, INDICES, label="to_onehot_y", **_INDEXED),
    _monai("GeneralizedDiceFocalLoss", SCORES, INDICES, label="to_onehot_y", **_INDEXED),
    _monai("GeneralizedWassersteinDiceLoss", SCORES, INDICES, dist_matrix=_WEIGHTS),
    _monai("MaskedDiceLoss", SCORES, ONE_HOT, MASK, sigmoid=True),
    _monai("SoftclDiceLoss", ONE_HOT, uniform(2, 3, 9, 7, 5)),
    _monai("AsymmetricUnifiedFocalLoss", uniform(2, 2, 19, 13), one_hot(2, 2, 19, 13)),
    _monai("SSIMLoss", *IMAGES, spatial_dims=2),
    _monai(
        "LocalNormalizedCrossCorrelationLoss", uniform(1, 1, 17, 13, 11), uniform(1, 1, 17, 13, 11)
    ),
    _monai("GlobalMutualInformationLoss", uniform(2, 1, 19, 13), uniform(2, 1, 19, 13)),
    _monai("BendingEnergyLoss", normal(2, 3, 9, 7, 6)),
    _monai("DiffusionLoss", normal(2, 3, 9, 7, 6)),
    _monai("HausdorffDTLoss", SCORES, INDICES, **_INDEXED),
    _monai("JukeboxLoss", *IMAGES, spatial_dims=2),
    _monai("NACLLoss", PLANES, LABELS, classes=3, dim=2),
    Case(
        "monai",
        "DeepSupervisionLoss of DiceCELoss",
        lambda: Call(
            lambda fine, coarse, y: of("monai.losses.DeepSupervisionLoss")(
                of("monai.losses.DiceCELoss")(**_INDEXED)
            )([fine, coarse], y)
        ),
        (normal(2, 3, 16, 8, 8), normal(2, 3, 8, 4, 4), binary(2, 1, 16, 8, 8)),
    ),
    _monai_metric("DiceMetric", ONE_HOT, ONE_HOT),
    _monai_metric(
        "DiceMetric",
        one_hot(3, 2, 11, 7, 5),
        classes(3, 2, 1, 11, 7, 5),
        label="of indices",
        num_classes=3,
    ),
    _monai_metric("MeanIoU", ONE_HOT, one_hot(3, 2, 9, 7, 5)),
    _monai_metric("GeneralizedDiceScore", ONE_HOT, ONE_HOT),
    _monai_metric("HausdorffDistanceMetric", ONE_HOT, ONE_HOT, percentile=95),
    _monai_metric("SurfaceDistanceMetric", ONE_HOT, ONE_HOT),
    _monai_metric("ConfusionMatrixMetric", ONE_HOT, ONE_HOT),
    _monai_metric("MAEMetric", *IMAGES),
    _monai_metric("PSNRMetric", *IMAGES, max_val=1.0),
    _monai_metric("SSIMMetric", *IMAGES, spatial_dims=2),
    Case("monai", "sliding_window_inference", _SlidingWindow, (normal(1, 1, 37, 29),)),
    # kornia
    _kornia("SSIMLoss", *IMAGES, window_size=5),
    _kornia("MS_SSIMLoss", *IMAGES),
    _kornia("PSNRLoss", *IMAGES, max_val=1.0),
    _kornia("TotalVariation", IMAGES[0]),
    _kornia("CharbonnierLoss", *IMAGES, reduction="mean"),
    _kornia("WelschLoss", *IMAGES, reduction="mean"),
    _kornia("InverseDepthSmoothnessLoss", uniform(2, 1, 19, 13), uniform(2, 3, 19, 13)),
    _kornia("DiceLoss", PLANES, LABELS),
    _kornia("TverskyLoss", PLANES, LABELS, alpha=0.4, beta=0.6),
    _kornia("FocalLoss", PLANES, LABELS, alpha=0.5, reduction="mean"),
    _kornia("LovaszSoftmaxLoss", PLANES, LABELS),
    _kornia("LovaszHingeLoss", normal(2, 1, 19, 13), classes(2, 2, 19, 13)),
    _kornia("HausdorffERLoss", PLANES, classes(3, 2, 1, 19, 13)),
    _function(
        "kornia", "kornia.losses.js_div_loss_2d", uniform(2, 3, 19, 13), uniform(2, 3, 19, 13)
    ),
    _function("kornia", "kornia.metrics.ssim", *IMAGES, window_size=5),
    _function("kornia", "kornia.metrics.mean_iou", LABELS, LABELS, num_classes=3),
    # timm
    _timm("BinaryCrossEntropy", normal(7, 5), classes(5, 7)),
    _timm("LabelSmoothingCrossEntropy", normal(7, 5), classes(5, 7)),
    _timm("SoftTargetCrossEntropy", normal(7, 5), uniform(7, 5)),
    _timm("JsdCrossEntropy", normal(9, 5), classes(5, 9)),
    _timm("AsymmetricLossMultiLabel", normal(7, 5), binary(7, 5)),
    _function("timm", "timm.utils.accuracy", normal(7, 5), classes(5, 7), topk=(1, 3)),
    # segmentation_models_pytorch
    _smp("DiceLoss", PLANES, LABELS, mode="multiclass"),
    _smp("JaccardLoss", PLANES, LABELS, mode="multiclass"),
    _smp("TverskyLoss", PLANES, LABELS, mode="multiclass"),
    _smp("FocalLoss", PLANES, LABELS, mode="multiclass"),
    _smp("SoftCrossEntropyLoss", PLANES, LABELS, smooth_factor=0.1),
    _smp("SoftBCEWithLogitsLoss", PLANES, binary(2, 3, 19, 13)),
    _smp("MCCLoss", normal(2, 1, 19, 13), binary(2, 1, 19, 13)),
    _function(
        "segmentation-models-pytorch",
        "segmentation_models_pytorch.metrics.get_stats",
        LABELS,
        LABELS,
        mode="multiclass",
        num_classes=3,
    ),
    # torchmetrics
    _torchmetrics("MeanSquaredError", *IMAGES),
    _torchmetrics("MeanAbsoluteError", *IMAGES),
    _torchmetrics("CosineSimilarity", normal(7, 5), normal(7, 5)),
    _torchmetrics("MeanMetric", IMAGES[0]),
    _torchmetrics("classification.MulticlassAccuracy", PLANES, LABELS, num_classes=3),
    _torchmetrics("classification.MulticlassJaccardIndex", PLANES, LABELS, num_classes=3),
    _torchmetrics("classification.MulticlassF1Score", PLANES, LABELS, num_classes=3),
    _torchmetrics("classification.MulticlassConfusionMatrix", PLANES, LABELS, num_classes=3),
    _torchmetrics("classification.MulticlassAUROC", PLANES, LABELS, num_classes=3, thresholds=5),
    _torchmetrics(
        "segmentation.MeanIoU", one_hot(3, 2, 19, 13), LABELS, num_classes=3, input_format="mixed"
    ),
    _torchmetrics("segmentation.DiceScore", ONE_HOT, ONE_HOT, num_classes=3),
    _torchmetrics("image.PeakSignalNoiseRatio", *IMAGES, data_range=1.0),
    _torchmetrics("image.StructuralSimilarityIndexMeasure", *IMAGES, data_range=1.0),
    _torchmetrics("image.TotalVariation", IMAGES[0]),
    _torchmetrics("image.UniversalImageQualityIndex", *IMAGES),
    _torchmetrics("image.SpectralAngleMapper", *IMAGES),
    _torchmetrics("PearsonCorrCoef", normal(31), normal(31)),
    _torchmetrics("R2Score", normal(31), normal(31)),
    # piqa and pytorch-msssim
    _piqa("SSIM", *IMAGES),
    _piqa("MS_SSIM", *LARGE),
    _piqa("PSNR", *IMAGES),
    _piqa("TV", IMAGES[0]),
    _piqa("MDSI", *IMAGES),
    _piqa("HaarPSI", *IMAGES),
    _piqa("GMSD", *IMAGES),
    _piqa("FSIM", *IMAGES),
    _piqa("VSI", uniform(2, 3, 37, 37), uniform(2, 3, 37, 37)),
    _loss("pytorch-msssim", "pytorch_msssim.SSIM", *IMAGES, data_range=1.0),
    _loss("pytorch-msssim", "pytorch_msssim.MS_SSIM", *LARGE, data_range=1.0),
    # neuraloperator
    Case(
        "neuraloperator",
        "H1Loss",
        lambda: Call(lambda x, y: of("neuralop.losses.H1Loss")(d=2)(x, y)),
        (normal(2, 1, 19, 13), normal(2, 1, 19, 13)),
    ),
    Case(
        "neuraloperator",
        "LpLoss",
        lambda: Call(lambda x, y: of("neuralop.losses.LpLoss")(d=2)(x, y)),
        (normal(2, 1, 19, 13), normal(2, 1, 19, 13)),
    ),
)
