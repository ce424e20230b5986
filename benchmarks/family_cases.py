"""Small networks of the families that scientific programs are made of, in plain PyTorch.

Each is written as its publication's code is, with the same functions, and has few channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    """A network, and the shape of its input."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


class HeadsByEinsum(nn.Module):
    """Attention of the positions of planes, as in the U-Nets of lucidrains."""

    def __init__(self, channels: int, heads: int = 4, last: bool = False) -> None:
        super().__init__()
        self.heads, self.last = heads, last
        self.qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = (
            t.reshape(n, self.heads, -1, h * w).transpose(2, 3)
            if self.last
            else t.reshape(n, self.heads, -1, h * w)
            for t in self.qkv(x).chunk(3, 1)
        )
        q = q * (c // self.heads) ** -0.5
        if self.last:  # x-unet
            weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
            out = torch.einsum("bhij,bhjd->bhid", weights, v).transpose(2, 3)
        else:  # denoising diffusion
            weights = torch.einsum("bhdi,bhdj->bhij", q, k).softmax(-1)
            out = torch.einsum("bhij,bhdj->bhid", weights, v).transpose(2, 3)
        return x + self.out(out.reshape(n, c, h, w))


class LinearAttention(nn.Module):
    """Attention without a softmax over pairs, as in the U-Nets of lucidrains."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = (t.reshape(n, self.heads, -1, h * w) for t in self.qkv(x).chunk(3, 1))
        q, k = q.softmax(-2), k.softmax(-1)
        context = torch.einsum("bhdn,bhen->bhde", k, v)
        out = torch.einsum("bhde,bhdn->bhen", context, q)
        return x + self.out(out.reshape(n, c, h, w))


class UNet(nn.Module):
    """A U-Net of two levels with linear attention above and full attention below."""

    def __init__(self, channels: int = 16, last: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 7, padding=3)
        self.above = nn.Sequential(nn.GroupNorm(4, channels), LinearAttention(channels))
        self.down = nn.Conv2d(channels, 2 * channels, 4, 2, 1)
        self.below = nn.Sequential(
            nn.GroupNorm(4, 2 * channels), HeadsByEinsum(2 * channels, last=last)
        )
        self.up = nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1)
        self.last = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        above = self.above(self.first(x))
        return self.last(torch.cat([above, self.up(self.below(self.down(above)))], 1))


class Attention(nn.Module):
    """A layer of a vision transformer over the positions of planes."""

    def __init__(self, channels: int, heads: int = 8, causal: bool = False, way: str = "all"):
        super().__init__()
        self.heads, self.causal, self.way = heads, causal, way
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norm(x.permute(0, 2, 3, 1)))
        n, h, w, c = y.shape
        if self.way == "all":
            y = y.reshape(n, h * w, c)
        elif self.way == "grid":  # positions 8 apart, as in MaxViT
            y = y.reshape(n, 8, h // 8, 8, w // 8, c).permute(0, 2, 4, 1, 3, 5).flatten(3, 4)
        elif self.way == "height":
            y = y.transpose(1, 2)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in y.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        y = self.out(y.transpose(-3, -2).flatten(-2))
        if self.way == "all":
            y = y.reshape(n, h, w, -1)
        elif self.way == "grid":
            y = y.unflatten(3, (8, 8)).permute(0, 3, 1, 4, 2, 5).reshape(n, h, w, -1)
        elif self.way == "height":
            y = y.transpose(1, 2)
        return x + y.permute(0, 3, 1, 2)


class ViT(nn.Module):
    """A vision transformer of patches."""

    def __init__(self, channels: int = 32, causal: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, channels, 4, 4)
        self.layers = nn.Sequential(*(Attention(channels, causal=causal) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.patches(x))


class Perceiver(nn.Module):
    """Learned queries that attend to all positions."""

    def __init__(self, channels: int = 32, queries: int = 16) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, queries, channels))
        self.first = nn.Conv2d(3, channels, 1)
        self.keys = nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.first(x).flatten(2).transpose(1, 2)
        k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.keys(positions).chunk(2, -1))
        q = self.queries.expand(len(x), -1, -1).unflatten(2, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v)


class Deformable(nn.Module):
    """A convolution that samples its input at learned offsets of up to one pixel."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.offsets = nn.Conv2d(channels, 2 * 9, 3, padding=1)
        self.weight = nn.Conv2d(9 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        points = F.affine_grid(torch.eye(2, 3).expand(n, 2, 3), [n, c, h, w], align_corners=True)
        offsets = self.offsets(x).tanh().unflatten(1, (9, 2))
        taps = []
        for i in range(9):
            moved = offsets[:, i].permute(0, 2, 3, 1) + torch.tensor([i % 3 - 1.0, i // 3 - 1.0])
            moved = points + moved * torch.tensor([2 / (w - 1), 2 / (h - 1)])
            taps.append(F.grid_sample(x, moved, align_corners=True))
        return self.weight(torch.cat(taps, 1))


class LIIF(nn.Module):
    """A local implicit image function: features sampled at twice the resolution."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, channels, 3, padding=1)
        self.decoder = nn.Sequential(nn.Linear(channels, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        size = [len(x), 3, 2 * x.shape[2], 2 * x.shape[3]]
        points = F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), size)
        sampled = F.grid_sample(self.encoder(x), points, "nearest")
        return self.decoder(sampled.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class VoxelMorph(nn.Module):
    """A registration of volumes: a displacement from a convolution, and a warp."""

    def __init__(self, voxels: float) -> None:
        super().__init__()
        self.voxels = voxels
        self.flow = nn.Conv3d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        points = F.affine_grid(torch.eye(3, 4)[None], list(x.shape), align_corners=True)
        moved = self.voxels * self.flow(x).tanh().permute(0, 2, 3, 4, 1)
        units = torch.tensor([2 / (n - 1) for n in reversed(x.shape[2:])])
        return F.grid_sample(x, points + moved * units, align_corners=True)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator; `rank` factors the weights as in a TFNO."""

    def __init__(self, channels: int = 8, kept: int = 12, rank: int = 0) -> None:
        super().__init__()
        self.kept, self.rank = kept, rank
        if rank:
            sizes = channels, channels, kept, kept
            self.factors = nn.ParameterList(
                torch.randn(n, rank, dtype=torch.cfloat) / n for n in sizes
            )
        else:
            shape = channels, channels, kept, kept
            self.weights = nn.ParameterList(
                torch.randn(shape, dtype=torch.cfloat) / channels**2 for _ in range(2)
            )

    def forward(self, x: Tensor) -> Tensor:
        k = self.kept
        modes = torch.fft.rfft2(x)
        out = torch.zeros(modes.shape, dtype=modes.dtype)
        for i, rows in enumerate((slice(0, k), slice(-k, None))):
            if self.rank:
                weight = torch.einsum("ir,or,xr,yr->ioxy", *self.factors)
            else:
                weight = self.weights[i]
            out[:, :, rows, :k] = torch.einsum("bixy,ioxy->boxy", modes[:, :, rows, :k], weight)
        return torch.fft.irfft2(out, s=x.shape[2:])


class FNO(nn.Module):
    """Four spectral layers."""

    def __init__(self, channels: int = 8, rank: int = 0) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 1)
        self.spectral = nn.ModuleList(Spectral(channels, rank=rank) for _ in range(4))
        self.direct = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(4))
        self.last = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for spectral, direct in zip(self.spectral, self.direct, strict=True):
            x = F.gelu(spectral(x) + direct(x))
        return self.last(x)


class AngularSpectrum(nn.Module):
    """A wave that propagates through free space: a transform of all modes, and its inverse."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (torch.fft.fftfreq(n) for n in x.shape[2:])
        phase = (1 - rows[:, None] ** 2 - columns**2).sqrt()
        return torch.fft.ifft2(torch.fft.fft2(x) * torch.exp(20j * phase)).abs()


class MambaLoop(nn.Module):
    """A selective state space whose positions are computed one after the other."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.gates = nn.Conv1d(channels, 2 * channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gates(x).chunk(2, 1)
        a, b = a.sigmoid(), b * x
        h, out = torch.zeros(x.shape[:2]), []
        for i in range(x.shape[2]):
            h = a[:, :, i] * h + b[:, :, i]
            out.append(h)
        return torch.stack(out, 2)


class Scan(nn.Module):
    """A recurrence computed by log2(positions) steps of doubled distance (Hillis and Steele)."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.gates = nn.Conv1d(channels, 2 * channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gates(x).chunk(2, 1)
        a, b, step = a.sigmoid(), b * x, 1
        while step < x.shape[2]:
            b = torch.cat([b[..., :step], b[..., step:] + a[..., step:] * b[..., :-step]], 2)
            a = torch.cat([a[..., :step], a[..., step:] * a[..., :-step]], 2)
            step *= 2
        return b


class MeshGraph(nn.Module):
    """Messages along the edges of a regular mesh, nodes in the order of its rows."""

    receivers: Tensor
    senders: Tensor

    def __init__(self, rows: int, columns: int, channels: int = 16) -> None:
        super().__init__()
        nodes = torch.arange(rows * columns).view(rows, columns)
        pairs = [(nodes[1:], nodes[:-1]), (nodes[:, 1:], nodes[:, :-1])]
        first = torch.cat([a.flatten() for a, _ in pairs])
        second = torch.cat([b.flatten() for _, b in pairs])
        order = torch.cat([first, second]).argsort(stable=True)  # edges beside their receivers
        self.register_buffer("receivers", torch.cat([first, second])[order])
        self.register_buffer("senders", torch.cat([second, first])[order])
        self.first = nn.Conv1d(3, channels, 1)
        self.edges = nn.ModuleList(nn.Linear(2 * channels, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        nodes = self.first(x)[0].t()
        for layer in self.edges:
            pairs = torch.cat([nodes[self.senders], nodes[self.receivers]], 1)
            nodes = nodes + torch.zeros_like(nodes).index_add(
                0, self.receivers, layer(pairs).relu()
            )
        return nodes


class Splatting(nn.Module):
    """Values that are added to the pixels to which a flow of up to one pixel moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        flow = self.flow(x).tanh().round().long()
        rows = (torch.arange(h)[:, None] + flow[:, 0]).clamp(0, h - 1)
        columns = (torch.arange(w) + flow[:, 1]).clamp(0, w - 1)
        to = (rows * w + columns).flatten(1)[:, None].expand(n, c, h * w)
        return torch.zeros(n, c, h * w).scatter_add(2, to, x.flatten(2)).view(n, c, h, w)


class RWKV(nn.Module):
    """A weighted mean over all earlier positions, by running sums in the logarithm."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.gates = nn.Conv1d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        k, r = self.gates(x).chunk(2, 1)
        largest = k.cummax(2).values
        total = torch.logcumsumexp(k, 2)
        return r.sigmoid() * (k - total).exp() * x + (largest - total)


class ReNet(nn.Module):
    """Recurrent networks along the rows, and then along the columns of a plane."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.rows = nn.LSTM(channels, channels // 2, batch_first=True, bidirectional=True)
        self.columns = nn.LSTM(channels, channels // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = self.rows(x.permute(0, 2, 3, 1).reshape(n * h, w, c))[0].reshape(n, h, w, c)
        y = self.columns(y.permute(0, 2, 1, 3).reshape(n * w, h, c))[0].reshape(n, w, h, c)
        return y.permute(0, 3, 2, 1)


class RAFT(nn.Module):
    """A correlation of all pairs of positions, and lookups of it at a flow."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, channels, 7, 4, 3)
        self.update = nn.Conv2d(9 + channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.features(x), self.features(x.flip(1))
        n, c, h, w = left.shape
        pairs = torch.matmul(left.view(n, c, -1).transpose(1, 2), right.view(n, c, -1))
        pairs = pairs.view(n, h, w, 1, h, w).permute(0, 1, 2, 3, 4, 5).reshape(-1, 1, h, w)
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        here = torch.stack([columns, rows], -1).float()[None].repeat(n, 1, 1, 1)
        near = torch.cartesian_prod(torch.arange(-1.0, 2), torch.arange(-1.0, 2)).view(1, 3, 3, 2)
        flow = torch.zeros(n, 2, h, w)
        for _ in range(2):
            centre = (here + flow.permute(0, 2, 3, 1)).reshape(-1, 1, 1, 2)
            points = 2 * (centre + near) / torch.tensor([w - 1.0, h - 1.0]) - 1
            found = F.grid_sample(pairs, points, align_corners=True)
            found = found.view(n, h, w, -1).permute(0, 3, 1, 2)
            flow = flow + self.update(torch.cat([found, left], 1))
        return flow


def _attention(*ways: str) -> Callable[[], nn.Module]:
    """Return the factory of layers of attention that attend in these ways, one after the other."""
    return lambda: nn.Sequential(*(Attention(32, way=way) for way in ways))


def _deformable() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Deformable(16))


def _renet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), ReNet(8))


FAMILIES = (
    Family("x-unet", partial(UNet, last=True), (1, 3, 64, 64)),
    Family("DDPM U-Net", UNet, (1, 3, 64, 64)),
    Family("Perceiver", Perceiver, (1, 3, 128, 128)),
    Family("ViT", ViT, (1, 3, 256, 256)),
    Family("ViT, causal", partial(ViT, causal=True), (1, 3, 256, 256)),
    Family("axial attention", _attention("height", "width"), (1, 32, 128, 128)),
    Family("MaxViT grid", _attention("grid"), (1, 32, 128, 128)),
    Family("RAFT", RAFT, (1, 3, 128, 128)),
    Family("deformable convolution", _deformable, (1, 3, 96, 96)),
    Family("LIIF", LIIF, (1, 3, 96, 96)),
    Family("VoxelMorph, 1 voxel", partial(VoxelMorph, 1.0), (1, 1, 48, 48, 48)),
    Family("VoxelMorph, 12 voxels", partial(VoxelMorph, 12.0), (1, 1, 48, 48, 48)),
    Family("FNO", FNO, (1, 3, 192, 192)),
    Family("TFNO", partial(FNO, rank=4), (1, 3, 192, 192)),
    Family("angular spectrum", AngularSpectrum, (1, 1, 192, 192)),
    Family("Mamba loop", MambaLoop, (1, 8, 128)),
    Family("parallel scan", Scan, (1, 8, 4096)),
    Family("GraphCast-like mesh", partial(MeshGraph, 128, 128), (1, 3, 128 * 128)),
    Family("splatting", Splatting, (1, 3, 512, 512)),
    Family("RWKV", RWKV, (1, 8, 4096)),
    Family("ReNet", _renet, (1, 3, 64, 64)),
)


def input_of(family: Family) -> Tensor:
    """Return the same random input on every rank."""
    generator = torch.Generator().manual_seed(1)
    x: Tensor = torch.randn(prod(family.shape), generator=generator).view(family.shape)
    return x
