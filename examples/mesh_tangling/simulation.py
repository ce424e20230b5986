"""A shock drives a bubble of gas, and carries along a Lagrangian mesh of S x S zones.

The flow is analytic. A cylindrical shock in air converges towards a focus outside the domain, with
a rarefaction behind it. Where it crosses the interface of a bubble of another gas, pressure and
density gradients are not aligned and circulation is deposited: the Richtmyer-Meshkov instability.
The interface is a vortex sheet from then on, here a ring of vortex blobs, one for each billow that
rolls up. The blobs are carried by the shock and by one another, as the nodes of the mesh are.

Sources: speeds of shock and gas from the Rankine-Hugoniot relations; the strength of the sheet
from the impulsive model of Richtmyer, Comm. Pure Appl. Math. 13 (1960); the blobs from Krasny,
J. Comput. Phys. 65 (1986). Left out: reflection and refraction of the shock at the bubble.

Units are SI. The flow fills a domain of one metre and does not depend on the mesh, so a sample
looks the same at every S. The label does depend on S: a smooth flow tangles no zone that is small
enough, and the fraction that tangles within the horizon falls by a quarter to a third when S
doubles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import quality

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Gas:
    """An ideal gas: density at rest under the ambient pressure, in kg/m^3, and adiabatic index."""

    density: float
    adiabatic_index: float


AIR = Gas(1.204, 1.400)
HELIUM = Gas(0.166, 1.667)
KRYPTON = Gas(3.506, 1.667)
SULPHUR_HEXAFLUORIDE = Gas(6.170, 1.094)
BUBBLE_GASES = (HELIUM, KRYPTON, SULPHUR_HEXAFLUORIDE)

AMBIENT_PRESSURE = 101325.0
"""Pressure of both gases at rest, in Pa."""

HORIZON = 1.25e-3
"""Seconds after the snapshot within which a zone must tangle to be labelled, by default."""

TIME_STEP = 2.5e-5
"""Longest time step, in s: the shock moves by about half its thickness in one."""

LEAST_AREA = 0.1
"""Floor on a zone's area, as a fraction of its initial area, where its mass becomes a density.

Zones that are tangled, or nearly, would have a density that is negative or has no bound."""

SUBSAMPLES = 4
"""Points along each side of a zone at which its initial fraction of bubble gas is sampled."""

BLOCK = 1 << 15
"""Points whose velocity is evaluated at once, so that temporaries stay in the cache."""

BAND = 1 << 17
"""Zones whose quality is evaluated at once, so that temporaries stay small at any S."""


@dataclass(frozen=True)
class Shock:
    """A cylindrical shock in air that converges on a focus. Lengths in m, speeds in m/s.

    `radius` is its distance from the focus at time zero, `decay` the length over which the gas
    behind it slows down by a factor of e.
    """

    focus: Array
    radius: float
    speed: float
    gas_speed: float
    thickness: float
    decay: float

    def passed(self, x: Array, y: Array, time: float) -> Array:
        """Return the profile of the shock: 0 well ahead of it, 1 well behind it."""
        return self._profile(self._behind(self._distance(x, y), time))

    def velocity(self, x: Array, y: Array, time: float) -> tuple[Array, Array]:
        """Return the velocity of the gas: towards the focus behind the shock, zero ahead of it."""
        distance = self._distance(x, y)
        speed = self._velocity_towards_focus(self._behind(distance, time)) / distance
        return speed * (self.focus[0] - x), speed * (self.focus[1] - y)

    def compression(self, x: Array, y: Array) -> Array:
        """Return the density at time zero over the density at rest, by conservation of mass."""
        behind = self._behind(self._distance(x, y), 0.0)
        return self.speed / (self.speed - self._velocity_towards_focus(behind))

    def _distance(self, x: Array, y: Array) -> Array:
        return np.sqrt((x - self.focus[0]) ** 2 + (y - self.focus[1]) ** 2)

    def _behind(self, distance: Array, time: float) -> Array:
        return distance - (self.radius - self.speed * time)

    def _profile(self, behind: Array) -> Array:
        return 0.5 + 0.5 * np.tanh(behind / self.thickness)

    def _velocity_towards_focus(self, behind: Array) -> Array:
        rarefaction = np.exp(np.maximum(behind, 0.0) / -self.decay)
        return self.gas_speed * self._profile(behind) * rarefaction


@dataclass(frozen=True)
class Bubble:
    """A bubble of `gas` at rest, with the interface centre + radius (1 + Re sum_k c_k z^k) z.

    z runs over the complex numbers of modulus 1, and `outline` holds the small amplitudes c_0,
    c_1, ... Lengths are in m.
    """

    gas: Gas
    centre: Array
    radius: float
    outline: NDArray[np.complex128]

    def interface(self, direction: NDArray[np.complex128]) -> NDArray[np.complex128]:
        """Return x + iy of the interface, from the centre, in directions of modulus 1."""
        return self._extent(direction) * direction

    def contains(self, x: Array, y: Array) -> NDArray[np.bool_]:
        """Return whether points lie inside the interface."""
        position = (x - self.centre[0]) + 1j * (y - self.centre[1])
        distance = np.abs(position)
        return distance < self._extent(position / np.maximum(distance, 1e-12))

    def _extent(self, direction: NDArray[np.complex128]) -> Array:
        waves = np.polynomial.polynomial.polyval(direction, self.outline)
        return np.asarray(self.radius * (1.0 + waves.real), dtype=np.float64)


@dataclass(frozen=True)
class Flow:
    """A shock, and the vortices that it leaves behind on the interface of a bubble.

    `blobs`, of shape (2, blobs), are the positions of the vortices at time zero, in m;
    `circulations` are their circulations after the shock, in m^2/s; within `core`, in m, they turn
    nearly rigidly.
    """

    bubble: Bubble
    shock: Shock
    blobs: Array
    circulations: Array
    core: float
    snapshot_time: float

    def velocity(self, points: Array, blobs: Array, time: float) -> Array:
        """Return the velocity in m/s at `points`, (2, n), with the vortices at `blobs`."""
        strengths = self.circulations * self.shock.passed(blobs[0], blobs[1], time)
        strengths /= 2.0 * np.pi
        velocity = np.empty_like(points)
        for start in range(0, points.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            x, y = points[:, block]
            u, v = self.shock.velocity(x, y, time)
            for blob_x, blob_y, strength in zip(blobs[0], blobs[1], strengths, strict=True):
                dx, dy = x - blob_x, y - blob_y
                turn = strength / (dx * dx + dy * dy + self.core**2)
                u -= turn * dy
                v += turn * dx
            velocity[:, block] = u, v
        return velocity


@dataclass(frozen=True)
class Carried:
    """Mesh and blobs in the flow: `nodes` (2, S + 1, S + 1) and `blobs` (2, blobs), in m."""

    time: float
    nodes: Array
    blobs: Array

    def step(self, flow: Flow, duration: float) -> Carried:
        """Return mesh and blobs `duration` seconds later, by the midpoint rule (Runge-Kutta 2)."""
        points = np.concatenate([self.nodes.reshape(2, -1), self.blobs], axis=1)
        middle = points + 0.5 * duration * flow.velocity(points, self.blobs, self.time)
        count = self.blobs.shape[1]
        points += duration * flow.velocity(middle, middle[:, -count:], self.time + 0.5 * duration)
        nodes, blobs = points[:, :-count], points[:, -count:]
        return Carried(self.time + duration, nodes.reshape(self.nodes.shape), blobs)

    def steps_until(self, flow: Flow, stop: float) -> Iterator[Carried]:
        """Return mesh and blobs after each of the equal time steps up to the time `stop`."""
        steps = int(np.ceil((stop - self.time) / TIME_STEP))
        carried, duration = self, (stop - self.time) / steps
        for _ in range(steps):
            carried = carried.step(flow, duration)
            yield carried


@dataclass(frozen=True)
class Sample:
    """The `fields` at the snapshot by channel name, and the label, each of shape (S, S).

    `tangled` is true for zones with a corner Jacobian that is not positive, at the snapshot or
    after a time step within the horizon.
    """

    fields: dict[str, Array]
    tangled: NDArray[np.bool_]


def draw_flow(seed: int, index: int) -> Flow:
    """Return the random flow of sample `index`, which does not depend on other draws."""
    random = np.random.default_rng([seed, index])
    bubble = _draw_bubble(random)
    angle = random.uniform(0.0, 2.0 * np.pi)
    heading = np.array([np.cos(angle), np.sin(angle)])
    shock = _draw_shock(random, bubble, heading)

    billow = random.uniform(0.08, 0.12)
    count = round(2.0 * np.pi * bubble.radius / billow)
    jitter = random.uniform(-0.3, 0.3, size=count)
    blobs = bubble.interface(np.exp(2j * np.pi * (np.arange(count) + jitter) / count))
    # A blob stands for the arc of interface around it, where the shock deposits the circulation
    # 2 A u . s: A is the Atwood number, u the velocity of the gas, s the arc from end to end.
    ends = bubble.interface(np.exp(2j * np.pi * (np.arange(count + 1) - 0.5) / count))
    arcs = np.diff(ends)
    along = heading[0] * arcs.real + heading[1] * arcs.imag
    atwood = (bubble.gas.density - AIR.density) / (bubble.gas.density + AIR.density)
    return Flow(
        bubble=bubble,
        shock=shock,
        blobs=bubble.centre[:, None] + np.stack([blobs.real, blobs.imag]),
        circulations=2.0 * atwood * shock.gas_speed * along,
        core=random.uniform(0.022, 0.032),
        snapshot_time=(2.2 * bubble.radius + random.uniform(0.0, 0.25)) / shock.speed,
    )


def _draw_bubble(random: np.random.Generator) -> Bubble:
    modes = np.arange(2, 10)
    amplitudes = random.normal(scale=0.1, size=(2, modes.size)) / modes
    return Bubble(
        gas=BUBBLE_GASES[random.integers(len(BUBBLE_GASES))],
        centre=random.uniform(0.4, 0.6, size=2),
        radius=random.uniform(0.16, 0.27),
        outline=np.concatenate([[0.0, 0.0], amplitudes[0] + 1j * amplitudes[1]]),
    )


def _draw_shock(random: np.random.Generator, bubble: Bubble, heading: Array) -> Shock:
    mach = random.uniform(1.25, 1.6)
    sound = float(np.sqrt(AIR.adiabatic_index * AMBIENT_PRESSURE / AIR.density))
    focal_length = random.uniform(1.8, 4.0)
    return Shock(
        focus=bubble.centre + focal_length * heading,
        # It starts where it is about to touch the bubble: nothing happens before that.
        radius=focal_length + 1.3 * bubble.radius,
        speed=mach * sound,
        gas_speed=2.0 * sound / (AIR.adiabatic_index + 1.0) * (mach - 1.0 / mach),
        thickness=random.uniform(0.025, 0.04),
        decay=random.uniform(0.8, 2.0),
    )


def initial_nodes(size: int) -> Array:
    """Return the nodes of `size` x `size` equal zones in the unit square: (2, size+1, size+1)."""
    ticks = np.linspace(0.0, 1.0, size + 1)
    return np.stack(np.meshgrid(ticks, ticks))


def volume_fraction(bubble: Bubble, size: int) -> Array:
    """Return the volume fraction of bubble gas in the initial zones, of shape (size, size)."""
    fraction = np.zeros((size, size))
    offsets = (np.arange(SUBSAMPLES) + 0.5) / SUBSAMPLES
    for along_x in offsets:
        for along_y in offsets:
            x = (np.arange(size) + along_x) / size
            y = (np.arange(size) + along_y) / size
            fraction += bubble.contains(x[None, :], y[:, None])
    return fraction / SUBSAMPLES**2


def rest_density(gas: Gas, fraction: Array) -> Array:
    """Return the density at rest, in kg/m^3, of air with a volume fraction of `gas`."""
    return fraction * gas.density + (1.0 - fraction) * AIR.density


def zone_masses(flow: Flow, fraction: Array) -> Array:
    """Return the mass of every zone, in kg per metre of depth, of shape (S, S) as `fraction`."""
    size = len(fraction)
    centres = (np.arange(size) + 0.5) / size
    compression = flow.shock.compression(centres[None, :], centres[:, None])
    return rest_density(flow.bubble.gas, fraction) * compression / size**2


def adiabatic_pressure(gas: Gas, fraction: Array, density: Array) -> Array:
    """Return the pressure in Pa at `density`: p_rest (density / rest density)^index.

    `index` is that of the mixture: 1 / (index - 1) of a mixture in pressure equilibrium is the mean
    of the gases' by volume.
    """
    inverse = fraction / (gas.adiabatic_index - 1.0) + (1.0 - fraction) / (
        AIR.adiabatic_index - 1.0
    )
    return AMBIENT_PRESSURE * (density / rest_density(gas, fraction)) ** (1.0 + 1.0 / inverse)


def tangled_zones(nodes: Array) -> NDArray[np.bool_]:
    """Return whether each zone has a corner Jacobian that is not positive, of shape (S, S)."""
    return np.concatenate(
        [
            quality.corner_jacobians(quality.corners_of(nodes[:, rows])).min(axis=0) <= 0.0
            for rows in _node_bands(nodes)
        ]
    )


def zone_metrics(nodes: Array) -> dict[str, Array]:
    """Return the fourteen quality metrics of every zone by name, each of shape (S, S)."""
    size = nodes.shape[-1] - 1
    metrics = {name: np.empty((size, size)) for name in quality.METRICS}
    for rows in _node_bands(nodes):
        zones = quality.Quadrilaterals(quality.corners_of(nodes[:, rows]))
        for name, metric in quality.METRICS.items():
            metrics[name][rows.start : rows.stop - 1] = metric(zones)
    return metrics


def _node_bands(nodes: Array) -> Iterator[slice]:
    """Return rows of nodes that bound up to BAND zones each; neighbours share a row of nodes."""
    size = nodes.shape[-1] - 1
    height = max(1, BAND // size)
    for start in range(0, size, height):
        yield slice(start, min(start + height, size) + 1)


def snapshot(flow: Flow, carried: Carried) -> dict[str, Array]:
    """Return the eighteen fields of the state by channel name, each of shape (S, S)."""
    nodes = carried.nodes
    size = nodes.shape[-1] - 1
    gas = flow.bubble.gas
    metrics = zone_metrics(nodes)
    fraction = volume_fraction(flow.bubble, size)
    density = zone_masses(flow, fraction) / np.maximum(metrics["volume"], LEAST_AREA / size**2)
    return {
        "density": density,
        "pressure": adiabatic_pressure(gas, fraction, density),
        "radial velocity": radial_velocity(flow, carried, fraction),
        "bubble volume fraction": fraction,
        **metrics,
    }


def radial_velocity(flow: Flow, carried: Carried, fraction: Array) -> Array:
    """Return the mean over a zone's nodes of the velocity away from the bubble's centre, in m/s:
    (S, S).

    The centre is that of the bubble's gas at the time of the snapshot.
    """
    nodes = carried.nodes
    centre = (quality.corners_of(nodes).mean(axis=1) * fraction).sum(axis=(1, 2)) / fraction.sum()
    velocity = flow.velocity(nodes.reshape(2, -1), carried.blobs, carried.time)
    away = nodes - centre[:, None, None]
    radial = (away * velocity.reshape(nodes.shape)).sum(axis=0)
    radial /= np.maximum(np.sqrt((away**2).sum(axis=0)), quality.TINY)
    return 0.25 * (radial[:-1, :-1] + radial[:-1, 1:] + radial[1:, :-1] + radial[1:, 1:])


def simulate(flow: Flow, size: int, horizon: float = HORIZON) -> Sample:
    """Move a mesh of `size` x `size` zones to the snapshot, and on to the horizon for the label.

    `horizon` is in seconds after the snapshot.
    """
    start = Carried(0.0, initial_nodes(size), flow.blobs)
    # Only the last step is kept: a mesh of every step would not fit in memory at large S.
    present = deque(start.steps_until(flow, flow.snapshot_time), maxlen=1).pop()
    tangled = tangled_zones(present.nodes)
    for future in present.steps_until(flow, present.time + horizon):
        tangled |= tangled_zones(future.nodes)
    return Sample(snapshot(flow, present), tangled)
