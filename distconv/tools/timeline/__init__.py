"""Timelines of all ranks on one clock, recorded with torch.profiler, for Perfetto and reports."""

from distconv.tools.timeline.recording import timeline

__all__ = ["timeline"]
