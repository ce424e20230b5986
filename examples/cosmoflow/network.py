"""The CosmoFlow networks in both published forms, plain `torch.nn` modules.

Mathuriya et al., SC 2018, with average pooling; Oyama et al., IEEE TPDS 2021, with maximum pooling
and fewer weights behind the convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

CHANNELS = 4
PARAMETERS = 4
BOTTOM = 4
"""The side of volumes behind all blocks."""


@dataclass(frozen=True)
class Form:
    """One of the published forms: the filters of the first block, which double in each next one;
    the pool after each block; and the outputs of the linear layers before the last.
    """

    first: int
    last: int
    average: bool
    head: tuple[int, ...]


FORMS = {
    "average": Form(first=16, last=256, average=True, head=(2048, 256)),
    "maximum": Form(first=32, last=512, average=False, head=(128, 64)),
}


class CosmoFlowNet(nn.Module):
    """Estimates the parameters of a universe from its density.

    Input (samples, 4, W, W, W), output (samples, 4): each parameter's place in its range, -1 to 1.

    Args:
        form: the form of the network.
        size: W, a power of two from 8; log2(W) - 2 blocks halve it to 4. The sides (D, H, W) of
            a part of such a volume, the longest of them whole, give the network for that part.
        width: multiplies the filters of every block and the outputs of the head.
        batch_norm: whether a batch norm follows each convolution, which then has no bias.
    """

    def __init__(
        self,
        form: Form,
        size: int | Sequence[int],
        width: float = 1.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.sides = (size,) * 3 if isinstance(size, int) else tuple(size)
        longest = max(self.sides)
        if longest < 2 * BOTTOM or longest & (longest - 1):
            raise ValueError(
                f"volumes of {longest}^3 do not fit the networks; their sides are powers of two, "
                f"from {2 * BOTTOM}"
            )
        if not width > 0:
            raise ValueError(f"width={width} must be positive; 1.0 is the published network")
        layers: list[nn.Module] = []
        channels = CHANNELS
        halvings = (longest // BOTTOM).bit_length() - 1
        for place in range(halvings):
            filters = max(1, round(width * min(form.first * 2**place, form.last)))
            layers.append(nn.Conv3d(channels, filters, 3, padding=1, bias=not batch_norm))
            layers += [nn.BatchNorm3d(filters)] if batch_norm else []
            layers.append(nn.LeakyReLU(0.3))
            layers.append(nn.AvgPool3d(3, 2, 1) if form.average else nn.MaxPool3d(2))
            channels = filters
        self.blocks = nn.Sequential(*layers)
        left = prod(-(-n // 2**halvings) for n in self.sides)
        self.head = _head(channels * left, [max(1, round(width * n)) for n in form.head])

    def forward(self, density: Tensor) -> Tensor:
        """Map normalised densities (samples, 4, W, W, W) to parameters (samples, 4)."""
        if tuple(density.shape[2:]) != self.sides:
            raise ValueError(
                f"expected volumes of {self.sides}, not {tuple(density.shape[2:])}; make a "
                "network of their size"
            )
        parameters: Tensor = self.head(self.blocks(density).flatten(1))
        return parameters


def _head(inputs: int, outputs: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for count in outputs:
        layers += [nn.Linear(inputs, count), nn.LeakyReLU(0.3)]
        inputs = count
    return nn.Sequential(*layers, nn.Linear(inputs, PARAMETERS))
