"""Record the timeline of a few training steps: `mpiexec -n 2 python -m examples.timeline FILE`."""

import torch
from torch import nn

import distconv as dc
from distconv.tools.command_line import RankParser


def main(file: str) -> None:
    """Train a small network on samples cut in two or more, and write the timeline of its steps."""
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1)
    layers: list[nn.Module] = [nn.Conv2d(4, 16, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = dc.parallelize(nn.Sequential(*layers, nn.Conv2d(16, 1, 3, padding=1)), grid)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = dc.distribute_tensor(torch.randn(2, 4, 160, 160), grid)

    def step() -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    step()  # the first makes plans and buffers
    with dc.timeline(file):
        step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = RankParser(description=__doc__)
    parser.add_argument("file", nargs="?", default="trace.json", help="(default: %(default)s)")
    main(parser.parse_args().file)
