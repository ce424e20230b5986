"""A torch.nn layer that changes the layout of a tensor."""

from __future__ import annotations

from torch import Tensor, nn

from distconv.geometry.layout import Layout
from distconv.tensor.dist_tensor import DistTensor


class Redistribute(nn.Module):
    """Redistribute the input to `layout`; return plain tensors unchanged. Collective.

    Parameters
    ----------
    layout: the layout of the output, with the tensor dimensions by name.

    Examples
    --------
    >>> from distconv import layers
    >>> grid = dc.ProcessGrid(height=2)
    >>> whole_samples = layers.Redistribute(dc.Layout(sample="height"))
    >>> model = dc.parallelize(nn.Sequential(nn.Conv2d(1, 4, 3), whole_samples, nn.Flatten()), grid)
    >>> y = model(dc.distribute_tensor(torch.ones(2, 1, 8, 8), grid))
    >>> y.grid_layout, tuple(y.to_local().shape)
    (Layout(sample='height'), (1, 144))
    """

    def __init__(self, layout: Layout):
        super().__init__()
        if not isinstance(layout, Layout):
            raise TypeError(
                f"Redistribute: layout={layout!r} is not a Layout; write "
                "Layout(channel='height'), for example"
            )
        self.layout = layout

    def forward(self, input: Tensor) -> Tensor:
        return input.redistribute(self.layout) if isinstance(input, DistTensor) else input

    def extra_repr(self) -> str:
        return repr(self.layout)
