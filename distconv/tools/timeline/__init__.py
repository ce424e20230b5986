"""What all ranks do, on one clock: recorded with torch.profiler, for Perfetto and for the eye."""

from distconv.tools.timeline.recording import timeline

__all__ = ["timeline"]
