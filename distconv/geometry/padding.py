"""Padding along one dimension, in torch's four modes."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.geometry.index_maps import Interval


@dataclass(frozen=True)
class Pad:
    """Padding by `before` and `after` positions (negative ones crop).

    mode "constant" fills the outside; "reflect" mirrors about the border element, "replicate"
    repeats it, "circular" wraps around the elements that are not cropped. `order` gives the
    position of each output in the buffer.
    """

    before: int
    after: int
    mode: str = "constant"

    def output_size(self, size: int) -> int:
        start, stop = self._source_range(size)
        if (
            self.mode == "circular"
            and size
            and not 0 < stop - start >= max(self.before, self.after)
        ):
            raise RuntimeError(
                f"circular padding by ({self.before}, {self.after}) leaves {max(stop - start, 0)} "
                f"of {size} positions to wrap around; expected as many as it adds on a side"
            )
        return size + self.before + self.after

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        first, last = start - self.before, stop - self.before
        if self.mode == "constant":
            return ((first, last),)
        inputs = self._source_range(size)
        low, high = (min(first, 0), min(last, 0)), (max(first, size), max(last, size))
        inside = (max(first, 0), min(last, size))
        repeated = _mirror(self.mode, inputs, *low), inside, _mirror(self.mode, inputs, *high)
        pieces = tuple(piece for piece in repeated if piece[0] < piece[1])
        # Reflections and the border are near the inputs inside, or among them.
        if self.mode == "circular":
            return pieces
        return ((min(first for first, _ in pieces), max(last for _, last in pieces)),)

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        inside = (start + self.before, stop + self.before)
        if self.mode == "constant":
            return (inside,)
        left, right = (0, self.before), (self.before + size, self.output_size(size))
        repeats = [side for side in (left, right) if side[0] < side[1]]
        return (inside, *(s for s in repeats if self._takes(size, s, (start, stop))))

    def _takes(self, size: int, outputs: Interval, inputs: Interval) -> bool:
        """Return whether any of the outputs needs any of the inputs."""
        needed = self.intervals(size, *outputs)
        return any(max(a, inputs[0]) < min(b, inputs[1]) for a, b in needed)

    def outside(self, size: int, start: int, stop: int) -> tuple[int, int] | None:
        """Return the numbers of outputs in [start, stop) before all inputs and after all inputs.

        Returns None if padding the buffer by these numbers does not give the outputs.
        """
        first, last = start - self.before, stop - self.before
        inside = (max(first, 0), min(last, size))
        if self.mode == "circular" or self.intervals(size, start, stop) != (inside,):
            return None
        return inside[0] - first, last - inside[1]

    def order(self, size: int, start: int, stop: int) -> list[int] | None:
        """Return each output's position in the buffer, for [start, stop); None if in order."""
        if self.mode == "constant":
            return None
        first, last = start - self.before, stop - self.before
        buffer = [i for a, b in self.intervals(size, start, stop) for i in range(a, b)]
        wanted = [_source(self.mode, self._source_range(size), i) for i in range(first, last)]
        where = {position: i for i, position in enumerate(buffer)}
        order = [where[position] for position in wanted]
        return None if order == list(range(len(buffer))) else order

    def _source_range(self, size: int) -> Interval:
        """Return the inputs that padding may repeat: all, or for "circular" all not cropped."""
        if self.mode == "circular":
            return max(-self.before, 0), size + min(self.after, 0)
        return 0, size


def _source(mode: str, inputs: Interval, position: int) -> int:
    """Return the input that the output at `position` repeats, both counted from the first input."""
    start, stop = inputs
    if mode == "circular":
        return start + (position - start) % (stop - start)
    if mode == "replicate":
        return min(max(position, start), stop - 1)
    return -position if position < 0 else min(position, 2 * (stop - 1) - position)


def _mirror(mode: str, inputs: Interval, start: int, stop: int) -> Interval:
    """Return the inputs that padding repeats at [start, stop), before the input or behind it."""
    if start >= stop:
        return (0, 0)
    ends = _source(mode, inputs, start), _source(mode, inputs, stop - 1)
    return min(ends), max(ends) + 1
